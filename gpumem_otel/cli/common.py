"""What several verbs share: options, reading input, printing, writing output, progress."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from gpumem_otel.base.profile import ProfileKind, Stack
    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.profiles.of_file import OpenedFile
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

_F = TypeVar("_F", bound="Callable[..., object]")

STDIN_NAME = "<stdin>"

ROWS = click.IntRange(1, 2**31)
"""How many rows to show; a number above the range of C integers is a typing error."""

SOURCE = click.argument("source", metavar="IN")
OUTPUT = click.option(
    "-o", "--output", required=True, metavar="OUT", help='File, or "-" for stdout.'
)
DEVICE = click.option("--device", type=int, metavar="N", help="Only this device.")


def options(*decorators: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several options as one decorator; the help lists them in this order."""

    def decorate(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def json_option(text: str) -> Callable[[_F], _F]:
    """The option that prints JSON instead of text."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def kind_option(text: str, *kinds: str) -> Callable[[_F], _F]:
    """The option that chooses the kind of profile."""
    choice = click.Choice(kinds)
    return click.option("--kind", type=choice, default="live", show_default=True, help=text)


_PPROF_BYTES = 64 << 20
_PPROF_TEXT_BYTES = 32 << 20


class CommandFailed(click.ClickException):
    """What was asked for failed: exit code 1."""

    exit_code = 1


def environ() -> Mapping[str, str]:
    """The environment of the command line."""
    from gpumem_otel.settings.config import process_environ

    return process_environ()


def warn(message: str) -> None:
    """One line on stderr about something that does not stop the work."""
    _echo_line("warning", message)


def error_line(message: str) -> None:
    """One line on stderr about what failed."""
    _echo_line("error", message)


def _echo_line(level: str, message: str) -> None:
    from gpumem_otel.base.text import printable

    click.echo(f"gpumem-otel: {level}: {printable(' '.join(message.split()))}", err=True)


def forget_stdout() -> None:
    """Point a broken stdout at /dev/null, or the interpreter reports it at exit."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def keep_inputs(output: str, *inputs: str | None) -> None:
    """Refuse to overwrite an input, which may be the only copy.

    Raises:
        click.BadParameter: the output is one of the inputs, by this name or another.
    """
    for path in inputs:
        if path is None or "-" in {path, output}:
            continue
        with suppress(OSError):
            if Path(output).samefile(path):
                raise click.BadParameter(
                    f"{output} is the input; give another name", param_hint="'--output'"
                )


def read_bytes(path: str) -> bytes:
    """The whole input, which may be a snapshot, a recording or pprof; `-` is standard input.

    Raises:
        SnapshotError: it cannot be read, or is none of these.
    """
    from gpumem_otel.errors import SnapshotError
    from gpumem_otel.snapshot.load import read_all

    if path != "-":
        return read_all(path, path, pprof=True)[0]
    if sys.stdin is None:
        raise SnapshotError(STDIN_NAME, "standard input is closed")
    return read_all(sys.stdin.buffer, STDIN_NAME, pprof=True)[0]


def name_of(path: str) -> str:
    """The name of an input in messages."""
    return STDIN_NAME if path == "-" else path


def load(path: str) -> TorchSnapshot:
    """Read a snapshot, or the last one of a recording; `-` is standard input.

    Raises:
        SnapshotError: it cannot be read.
    """
    return open_source(path).snapshot


def open_source(path: str) -> OpenedFile:
    """Read a snapshot or recording; `-` is standard input.

    Raises:
        SnapshotError: it cannot be read.
    """
    from gpumem_otel.profiles.of_file import open_bytes

    _collect_no_garbage()
    with progress(f"reading {path}"):
        data = read_bytes(path)
        with _pprof_named(data):
            return open_bytes(data, name_of(path))


def warn_of(source: str, warnings: Iterable[str]) -> None:
    """A line for each warning about an input."""
    for warning in warnings:
        warn(f"{source}: {warning}")


def warn_about(opened: OpenedFile, kind: ProfileKind) -> None:
    """Warn of what a reader of profiles of this kind should know."""
    warn_of(opened.snapshot.source, opened.warnings_of(kind))


def _collect_no_garbage() -> None:
    """Until the verb ends: a snapshot is millions of objects, and none of them is garbage."""
    context = click.get_current_context(silent=True)
    if context is not None and gc.isenabled():
        gc.disable()
        context.call_on_close(gc.enable)


@contextmanager
def _pprof_named(data: bytes) -> Iterator[None]:
    """Where the input is a pprof profile (which `convert` writes), the error says so."""
    from gpumem_otel.errors import EncodeError, SnapshotError

    try:
        yield
    except SnapshotError as error:
        from gpumem_otel.profiles import pprof

        if len(data) > _PPROF_BYTES:
            raise
        try:
            types = pprof.decode(data, max_bytes=_PPROF_TEXT_BYTES).sample_types
        except (EncodeError, MemoryError):
            types = ()
        if not types:
            raise
        reason = "a pprof profile, not a snapshot: go tool pprof reads it"
        raise SnapshotError(error.source, reason) from None


def namer_for(snapshot: TorchSnapshot) -> FrameNamer:
    """Recordings hold final names; the names of plain files become `file.py:function`."""
    from gpumem_otel.snapshot import stacks

    return stacks.identity_namer if snapshot.resolved else stacks.file_function_namer


def pick_devices(snapshot: TorchSnapshot, device: int | None) -> tuple[int, ...]:
    """All devices of the snapshot, or the one asked for.

    Raises:
        click.BadParameter: the snapshot has no such device.
    """
    devices = snapshot.devices()
    if device is None:
        return devices
    if device not in devices:
        raise no_such_device(device, f"not in {snapshot.source}", devices)
    return (device,)


def no_such_device(device: int, where: str, devices: Iterable[int]) -> click.BadParameter:
    """The error about a device that no input has."""
    known = ", ".join(map(str, devices)) or "none"
    message = f"device {device} is {where} (devices: {known})"
    return click.BadParameter(message, param_hint="'--device'")


def fields_of(value: object, *names: str) -> dict[str, Any]:
    """The named attributes of a value, for JSON, in this order."""
    return {name: getattr(value, name) for name in names}


def frames_of(stack: Stack) -> list[dict[str, Any]]:
    """The frames of a stack for JSON."""
    return [fields_of(frame, "name", "filename", "line") for frame in stack]


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for work that lasts over a second, on a terminal only.

    Yields:
        A function (done, total) that shows how far the work is; if it is never called, the bar
        only shows that the work goes on.
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
            TextColumn("{task.description}", markup=False),
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
    """Write a file whole or not at all (a temporary file, then a rename); `-` is stdout.

    A device, pipe or socket cannot be replaced and is written to directly.

    Raises:
        CommandFailed: it cannot be written; an existing file is unchanged.
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
    """The existing file's mode, or that of a plain open(); mkstemp's is 0600."""
    try:
        return target.stat().st_mode & 0o777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
