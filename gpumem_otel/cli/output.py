"""What verbs write: warnings, errors, JSON, progress, and files whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gpumem_otel.base.profile import ProfileKind, Stack
    from gpumem_otel.profiles.of_file import OpenedFile


class CommandFailed(click.ClickException):
    """What was asked for failed: exit code 1."""

    exit_code = 1


def warn(message: str) -> None:
    """One line on stderr about something that does not stop the work."""
    _echo_line("warning", message)


def warn_of(source: str, warnings: Iterable[str]) -> None:
    """A line for each warning about an input."""
    for warning in warnings:
        warn(f"{source}: {warning}")


def warn_about(opened: OpenedFile, kind: ProfileKind) -> None:
    """Warn of what a reader of profiles of this kind should know."""
    warn_of(opened.snapshot.source, opened.warnings_of(kind))


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


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def fields_of(value: object, *names: str) -> dict[str, Any]:
    """The named attributes of a value, for JSON, in this order."""
    return {name: getattr(value, name) for name in names}


def frames_of(stack: Stack) -> list[dict[str, Any]]:
    """The frames of a stack for JSON."""
    return [{"name": f.name, "filename": f.filename, "line": f.line} for f in stack]


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for work that lasts over a second, on a terminal only.

    Yields:
        A function (done, total) that shows how far the work is; if it is never called, the bar
        only shows that the work goes on.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    bar = _LateBar(title)
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

    def __init__(self, title: str) -> None:
        self._title = title
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
        task = bar.add_task(self._title, total=None)

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
