"""Writes the recording of a running job to a file."""

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
    """The file of this rank and restart.

    `run.gpumem` of rank 3 is `run-rank3.gpumem`, after its first restart
    `run-rank3-restart1.gpumem`; a job of one process keeps the name as it is.
    """
    rank = f"-rank{identity.rank}" if identity.world_size > 1 else ""
    restart = f"-restart{identity.restart}" if identity.restart else ""
    return _with_suffix(Path(path), rank + restart)


class FileOfRank(NamedTuple):
    """A file whose name is that of a recording.

    Attributes:
        rank: -1 where the name has none.
        restart: 0 where the name has none.
    """

    rank: int
    restart: int
    path: Path


def files_of(path: str) -> list[FileOfRank]:
    """The existing files with a name that a recording to this path may get, by rank.

    Raises:
        OSError: the folder cannot be read.
    """
    plain = Path(path)
    suffix = r"(?:-rank(?P<rank>\d+))?(?:-restart(?P<restart>\d+))?(?:-pid\d+(?:-\d+)?)?"
    pattern = re.compile(re.escape(plain.stem) + suffix + re.escape(plain.suffix))
    return sorted(
        FileOfRank(int(match["rank"] or -1), int(match["restart"] or 0), entry)
        for entry in plain.parent.iterdir()
        if (match := pattern.fullmatch(entry.name)) is not None
    )


class RecordingFile:
    """Adds readings to a file, which can be read at any moment, also after a crash.

    No file is overwritten: where another process of the same rank (or an earlier run) has taken
    the name, the name of this one gets its pid.

    Args:
        path: as requested; see `rank_path`.
        identity: whose memory it is.
        facts: short texts about the surroundings.
        namer: names Python frames.
        counters: takes `exporter_stall_seconds`, `exporter_runs` and `exporter_seconds` of the
            stage `record`, and what is not recorded: `exporter_dropped` with the reasons
            `recording_full` and `recording_failed`, `exporter_history_overflow` for a window of
            too many events. A failure is raised; the caller counts it.
        pacer: releases the interpreter lock between slices; used by this file only.

    Attributes:
        path: of the file that is written.

    Raises:
        OSError: the file cannot be written.
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
        self._lock = threading.Lock()  # for the writer, the pacer and the fields below
        self._closed = False
        self._failed = False
        self._span_ns: tuple[int, int] | None = None
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
            _log.warning("%s exists already: this process records to %s", wanted, self.path)

    def add(self, reading: Reading, steps: StepStats) -> None:
        """Add one reading, unless the file is full or closed; from any thread.

        Raises:
            OSError: it cannot be written; nothing is added after that.
        """

        def write(pause: Pause) -> bool:
            written = self._writer.add(reading, steps, pause)
            if written:
                self._readings += 1
                first = self._span_ns[0] if self._span_ns is not None else reading.time_ns
                self._span_ns = first, reading.time_ns
            return written

        self._write(write)

    def add_window(self, reading: Reading, seconds: float) -> None:
        """Add the events of one recorded window, in the same way as `add`."""
        self._write(partial(self._writer.add_window, reading, seconds))

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """End the recording; further calls do nothing.

        It waits for a reading that another thread is writing. If that takes longer, the other
        thread abandons the reading and ends the file; all readings before can be read.

        Args:
            timeout: seconds to wait.

        Raises:
            OSError: the end cannot be written.
        """
        acquired = self._lock.acquire(timeout=timeout)
        self._closed = True
        # a thread that holds the lock checks `_closed` after it has released it
        if acquired or self._lock.acquire(blocking=False):
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
        except _AbandonedError:
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
            first, last = self._span_ns or (0, 0)
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
            raise _AbandonedError
        self._pacer.pause()


class _AbandonedError(Exception):
    """The file was closed before a reading was ready; nothing of the reading is written."""


class _WholeWrites(io.FileIO):
    """A file without a buffer that writes all of its data.

    A child that is forked while a line is written would write the content of a buffer again.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        rest = memoryview(data)
        while rest:
            rest = rest[super().write(rest) :]
        return len(memoryview(data))


def _create(wanted: Path) -> tuple[_WholeWrites, Path]:
    """A new file of this name, or of one with our pid; a device or pipe is opened as it is."""
    if wanted.exists() and not wanted.is_file():
        return _WholeWrites(wanted, "wb"), wanted
    pid = f"-pid{os.getpid()}"
    for attempt in itertools.count():
        suffix = "" if not attempt else pid if attempt == 1 else f"{pid}-{attempt}"
        path = _with_suffix(wanted, suffix)
        try:
            return _WholeWrites(os.path.realpath(path), "xb"), path  # a link stays a link
        except FileExistsError:
            continue
    raise AssertionError  # the count does not end


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")
