"""A recording that grows in a file while the job runs."""

from __future__ import annotations

import io
import itertools
import os
import re
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from gpumem_otel.base.logs import named_logger
from gpumem_otel.recording.writer import RecordingWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from _typeshed import ReadableBuffer

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import Identity, StepStats
    from gpumem_otel.base.protocols import FrameNamer, Pacing, Pause
    from gpumem_otel.snapshot.reading import Reading

_log = named_logger("gpumem_otel.export")

CLOSE_SECONDS: Final = 1.0
"""How long a close waits for a reading that is being written."""


def rank_path(path: str, identity: Identity) -> Path:
    """One file per rank and restart, beside one another.

    `run.gpumem` of rank 3 is `run-rank3.gpumem`, after its first restart
    `run-rank3-restart1.gpumem`; a job of one process keeps the name as it is.
    """
    rank = f"-rank{identity.rank}" if identity.world_size > 1 else ""
    restart = f"-restart{identity.restart}" if identity.restart else ""
    return _with_more(Path(path), rank + restart)


class FileOfRank(NamedTuple):
    """A file whose name says that it belongs to a recording.

    Attributes:
        rank: -1 where the name says none.
        restart: 0 where the name says none.
    """

    rank: int
    restart: int
    path: Path


def files_of(path: str) -> list[FileOfRank]:
    """All that is there under the names that a recording to this path may get, by rank.

    Raises:
        OSError: the folder can not be read.
    """
    plain = Path(path)
    parts = r"(?:-rank(?P<rank>\d+))?(?:-restart(?P<restart>\d+))?(?:-pid\d+(?:-\d+)?)?"
    pattern = re.compile(re.escape(plain.stem) + parts + re.escape(plain.suffix))
    found = []
    for entry in plain.parent.iterdir():
        match = pattern.fullmatch(entry.name)
        if match is not None:
            found.append(FileOfRank(int(match["rank"] or -1), int(match["restart"] or 0), entry))
    return sorted(found)


class RecordingFile:
    """Adds readings to a file; what is there can be read at any moment, also after a crash.

    No file is written over: where another process of the same rank (or an earlier run) has taken
    the name, this one puts its pid into its own.

    Args:
        path: as it was asked for; see `rank_path`.
        identity: whose memory it is.
        facts: short texts about the surroundings.
        namer: names Python frames.
        counters: takes `exporter_stall_seconds`, `exporter_runs` and `exporter_seconds` of the
            stage `record`, and what is not recorded: `exporter_dropped` with the reasons
            `recording_full` and `recording_failed`, `exporter_history_overflow` for a window of
            too many events. A failure is raised and counted by the caller.
        pacer: gives up the interpreter lock between slices; of this file alone.

    Attributes:
        path: of the file that is written.

    Raises:
        OSError: the file can not be written.
    """

    def __init__(
        self,
        path: str,
        *,
        identity: Identity,
        facts: Mapping[str, str],
        namer: FrameNamer,
        counters: Counters,
        pacer: Pacing,
    ) -> None:
        wanted = rank_path(path, identity)
        self._counters = counters
        self._pacer = pacer
        self._lock = threading.Lock()  # of the writer, the pacer and what is counted here
        self._closed = False
        self._failed = False
        self._moments: tuple[int, int] | None = None
        self._readings = 0
        self._file, self.path = _create(wanted)
        try:
            self._writer = RecordingWriter(
                self._file, identity=identity, created_ns=time.time_ns(), facts=facts, namer=namer
            )
        except BaseException:
            self._file.close()
            raise
        if self.path != wanted:
            _log.warning("%s is there already: this process records to %s", wanted, self.path)

    def add(self, reading: Reading, steps: StepStats) -> None:
        """Add one reading; nothing once it is full or closed. From any thread.

        Raises:
            OSError: it can not be written; nothing is added after that.
        """

        def write(pause: Pause) -> bool:
            written = self._writer.add(reading, steps, pause)
            if written:
                self._readings += 1
                first = self._moments[0] if self._moments is not None else reading.time_ns
                self._moments = first, reading.time_ns
            return written

        self._write(write)

    def add_window(self, reading: Reading, seconds: float) -> None:
        """Add the events of one recorded window, like `add`."""
        self._write(partial(self._writer.add_window, reading, seconds))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End the recording; once is enough.

        A reading that another thread is writing is waited for. One that takes longer is given up
        by its thread, which then ends the file: all that was added before can be read at any time.

        Args:
            timeout: seconds to wait.

        Raises:
            OSError: the end can not be written.
        """
        free = self._lock.acquire(timeout=timeout)
        self._closed = True
        # who holds the lock looks at `_closed` after letting it go
        if free or self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def _end(self) -> None:
        if not self._file.closed:
            try:
                self._writer.close()
            finally:
                self._file.close()

    def _write(self, write: Callable[[Pause], bool]) -> None:
        if self._closed:
            return
        try:
            with self._lock:
                if not self._closed:
                    self._write_paced(write)
        finally:
            if self._closed:
                self.close(timeout=0.0)

    def _write_paced(self, write: Callable[[Pause], bool]) -> None:
        if self._writer.full:
            reason = "recording_failed" if self._failed else "recording_full"
            self._counters.add("exporter_dropped", reason=reason)
            return
        started = time.monotonic()
        self._pacer.begin()
        try:
            written = write(self._pause)
        except _GivenUpError:
            return
        except OSError:
            self._failed = True
            raise
        finally:
            self._counters.add("exporter_stall_seconds", self._pacer.end())
            self._counters.add("exporter_runs", stage="record")
            self._counters.add("exporter_seconds", time.monotonic() - started, stage="record")
        if self._writer.full:
            self._counters.add("exporter_dropped", reason="recording_full")
            first, last = self._moments or (0, 0)
            _log.warning(
                "%s is full: the recording stops at its limit, after %d readings in %.0f s",
                self.path,
                self._readings,
                (last - first) / 1e9,
            )
        elif not written:
            self._counters.add("exporter_history_overflow")

    def _pause(self) -> None:
        if self._closed:
            raise _GivenUpError
        self._pacer.pause()


class _GivenUpError(Exception):
    """The file was closed while a reading was being made ready; nothing of it is written."""


class _WholeWrites(io.FileIO):
    """A file without a buffer, each write done to its end.

    A child that is forked while a line is written would write what is in a buffer once more.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        rest = memoryview(data)
        while rest:
            rest = rest[super().write(rest) :]
        return len(memoryview(data))


def _create(wanted: Path) -> tuple[_WholeWrites, Path]:
    """A new file of this name, or of one with our pid in it; a device or pipe as it is."""
    if wanted.exists() and not wanted.is_file():
        return _WholeWrites(wanted, "wb"), wanted
    pid = f"-pid{os.getpid()}"
    for attempt in itertools.count():
        more = "" if not attempt else pid if attempt == 1 else f"{pid}-{attempt}"
        path = _with_more(wanted, more)
        try:
            return _WholeWrites(os.path.realpath(path), "xb"), path  # a link stays a link
        except FileExistsError:
            continue
    raise AssertionError  # the count has no end


def _with_more(path: Path, more: str) -> Path:
    return path.with_name(f"{path.stem}{more}{path.suffix}")
