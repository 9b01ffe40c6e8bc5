"""What several verbs share: reading input, writing output whole or not at all, progress."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gpumem_otel.core.model import HeapProfile, ProfileKind
    from gpumem_otel.core.ports import FrameNamer
    from gpumem_otel.core.record_values import RecordedWindow
    from gpumem_otel.core.snapshot import Snapshot

__all__ = [
    "STDIN_NAME",
    "CommandFailed",
    "environ",
    "load",
    "load_with_window",
    "namer_for",
    "pick_devices",
    "print_json",
    "profiles_of",
    "progress",
    "read_bytes",
    "warn",
    "window_profiles",
    "write_output",
]

STDIN_NAME = "<stdin>"

_PPROF_BYTES = 64 << 20


class CommandFailed(click.ClickException):
    """The asked thing failed: exit code 1."""

    exit_code = 1


def environ() -> Mapping[str, str]:
    """The environment of the command line."""
    from gpumem_otel.config import process_environ

    return process_environ()


def warn(message: str) -> None:
    """One line on stderr about something that does not stop the work."""
    click.echo(f"gpumem-otel: warning: {' '.join(message.split())}", err=True)


def read_bytes(path: str) -> bytes:
    """The whole input; `-` is standard input.

    Raises:
        SnapshotError: it can not be read.
    """
    from gpumem_otel.errors import SnapshotError

    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SnapshotError(path, error.strerror or type(error).__name__) from error


def load(path: str) -> Snapshot:
    """Read a snapshot or recording; `-` is standard input.

    Raises:
        SnapshotError: it can not be read.
    """
    from gpumem_otel.core.snapshot import load_snapshot

    with progress(f"reading {path}"):
        if path == "-":
            data = sys.stdin.buffer.read()
            with _pprof_said(lambda: data):
                return load_snapshot(BytesIO(data), name=STDIN_NAME)
        with _pprof_said(lambda: _small(path)):
            return load_snapshot(path)


def load_with_window(path: str) -> tuple[Snapshot, RecordedWindow | None]:
    """Read a snapshot or recording, and the last window of events that a recording holds.

    Raises:
        SnapshotError: it can not be read.
        CommandFailed: it is a recording without windows.
    """
    from gpumem_otel.core.fileform import Recording, decode
    from gpumem_otel.core.recording import load_recording
    from gpumem_otel.core.snapshot import parse_snapshot

    name = STDIN_NAME if path == "-" else path
    with progress(f"reading {path}"):
        data = read_bytes(path)
        with _pprof_said(lambda: data):
            if not isinstance(decode(data, name)[0], Recording):
                return parse_snapshot(data, name), None
        recording = load_recording(data, name=name)
    if not recording.windows:
        raise CommandFailed(
            f"{name}: holds no windows of allocation events; record with "
            "--profiles live,allocated to see what was allocated"
        )
    window = recording.windows[-1]
    return window.reading().snapshot, window


@contextmanager
def _pprof_said(data: Callable[[], bytes]) -> Iterator[None]:
    """What is no snapshot may be what `convert` made of one: then the error says that."""
    from gpumem_otel.errors import EncodeError, SnapshotError

    try:
        yield
    except SnapshotError as error:
        from gpumem_otel.core import pprof

        try:
            types = pprof.decode(data()).sample_types
        except (EncodeError, OSError):
            types = ()
        if not types:
            raise
        reason = "a pprof profile, not a snapshot: go tool pprof reads it"
        raise SnapshotError(error.source, reason) from None


def _small(path: str) -> bytes:
    """The bytes of a file that may be a profile; none where it is too large or no file."""
    file = Path(path)
    return file.read_bytes() if file.is_file() and file.stat().st_size <= _PPROF_BYTES else b""


def namer_for(snapshot: Snapshot) -> FrameNamer:
    """Recordings carry final names; plain files give `file.py:function`."""
    from gpumem_otel.core import frames

    return frames.identity_namer if snapshot.resolved else frames.file_function_namer


def pick_devices(snapshot: Snapshot, device: int | None) -> tuple[int, ...]:
    """All devices of the snapshot, or the one asked for.

    Raises:
        click.BadParameter: the snapshot has no such device.
    """
    devices = snapshot.devices()
    if device is None:
        return devices
    if device not in devices:
        there = ", ".join(map(str, devices)) or "none"
        raise click.BadParameter(
            f"device {device} is not in {snapshot.source} (devices: {there})",
            param_hint="'--device'",
        )
    return (device,)


def profiles_of(
    snapshot: Snapshot, kind: ProfileKind, devices: tuple[int, ...], *, time_ns: int = 0
) -> tuple[HeapProfile, ...]:
    """One profile of this kind per device.

    Raises:
        CommandFailed: the snapshot holds no events, and the kind needs them.
    """
    from gpumem_otel.core import heap
    from gpumem_otel.core.model import ProfileKind

    namer = namer_for(snapshot)
    if kind is ProfileKind.LIVE:
        return tuple(
            heap.live_profile(snapshot, device, namer=namer, time_ns=time_ns) for device in devices
        )
    with_events = [
        device
        for device in devices
        if any(event.action == "alloc" for event in snapshot.events(device))
    ]
    if not with_events:
        raise CommandFailed(
            f"{snapshot.source}: holds no allocation events; record history "
            "(torch.cuda.memory._record_memory_history()) to see what was allocated"
        )
    return tuple(
        heap.allocated_profile(snapshot, device, namer=namer, time_ns=time_ns, duration_ns=0)
        for device in with_events
    )


def window_profiles(
    snapshot: Snapshot, window: RecordedWindow, devices: tuple[int, ...]
) -> tuple[HeapProfile, ...]:
    """What was allocated in a recorded window, scaled to the allocator's counters."""
    from gpumem_otel.core import heap

    first = {stats.device: stats for stats in window.before}
    last = {stats.device: stats for stats in window.after}

    def grown(device: int, field: str) -> int | None:
        if device not in first or device not in last:
            return None
        # the job may have reset its counters
        increase: int = getattr(last[device], field) - getattr(first[device], field)
        return max(increase, 0)

    return tuple(
        heap.allocated_profile(
            snapshot,
            device,
            namer=namer_for(snapshot),
            requested_total_bytes=grown(device, "requested_allocation_bytes"),
            objects_total=grown(device, "allocations"),
            time_ns=window.time_ns,
            duration_ns=round(window.seconds * 1e9),
        )
        for device in devices
    )


def print_json(value: object) -> None:
    """Compact enough to read, stable enough to compare."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for work that lasts over a second, on a terminal only.

    Yields:
        A function (done, total) that may be called to show how far the work is; without, the bar
        only shows that it goes on.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    bar = _LateBar(what)
    timer = threading.Timer(1.0, bar.show)
    timer.daemon = True
    timer.start()
    try:
        yield bar.update
    finally:
        timer.cancel()
        timer.join()
        bar.hide()


class _LateBar:
    """A rich progress bar that is imported and drawn only once it is shown."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._done: tuple[int, int | None] = (0, None)
        self._stop: Callable[[], None] | None = None
        self._redraw: Callable[[], None] | None = None

    def show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        task = bar.add_task(self._what, total=None)

        def redraw() -> None:
            done, total = self._done
            bar.update(task, completed=done, total=total)

        redraw()
        bar.start()
        self._stop, self._redraw = bar.stop, redraw

    def update(self, done: int, total: int) -> None:
        self._done = (done, total)
        if self._redraw is not None:
            self._redraw()

    def hide(self) -> None:
        if self._stop is not None:
            self._stop()


def write_output(path: str, data: bytes) -> None:
    """Write a file whole or not at all (a new file beside it, then a rename); `-` is stdout.

    A device, pipe or socket can not be replaced and is written to directly.

    Raises:
        CommandFailed: it can not be written; a file that was there is as it was.
    """
    if path == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    temporary = ""
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(data)
            return
        if target.is_dir():
            raise CommandFailed(f"{path}: is a directory")
        target = Path(os.path.realpath(target))  # a link stays a link
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(_mode_for(target))
        Path(temporary).replace(target)
        temporary = ""
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror or type(error).__name__}") from error
    finally:
        if temporary:
            with suppress(OSError):
                Path(temporary).unlink()


def _mode_for(target: Path) -> int:
    """What the file had, or what a plain open() would give it; mkstemp's 0600 surprises."""
    try:
        return target.stat().st_mode & 0o777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
