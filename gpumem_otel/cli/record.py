"""`gpumem-otel record OUT -- python train.py`: the job's memory over time, in one file."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli import launch
from gpumem_otel.cli.common import CommandFailed, environ

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["command"]

_EPILOG = """\b
Examples:
  gpumem-otel record run.gpumem -- python train.py
  gpumem-otel record run.gpumem --interval 0.5 -- python train.py && gpumem-otel top run.gpumem

The "--" is needed where COMMAND has options of its own. The exit code is the job's.
 A job of several ranks writes one file per rank beside OUT.
"""

_STALL_RATIO = 0.02
"""The usual limit, a tenth of a percent of the job's time, would stretch the interval asked for;
who records looks at memory, not at speed."""

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Sent to us alone. SIGINT and SIGQUIT of a terminal reach the job by themselves."""


@click.command(
    "record",
    epilog=_EPILOG,
    short_help="Run a training command and record its GPU memory to a file.",
)
@click.argument("out", metavar="OUT")
@launch.job_options
@click.option(
    "--interval", type=float, default=1.0, show_default=True, help="Seconds between readings."
)
@click.option("--profiles", metavar="KINDS", help="live, or live,allocated.")
@click.argument("job", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(out: str, job: tuple[str, ...], **options: object) -> int:
    """Run COMMAND and record the GPU memory of its Python process to OUT."""
    target = Path.cwd() / out  # the job may change its folder
    _check_target(out, target)
    base = environ()
    options["record"] = str(target)
    if not base.get("GPUMEM_OTEL_MAX_STALL_RATIO"):
        options["stall_ratio"] = _STALL_RATIO
    ours = launch.child_environ(base, options)
    launch.check_settings(base, ours)
    program = launch.find_command(job, ours)
    before = _stamps(target)
    code = _run(program, job, ours)
    written = [path for path, stamp in _stamps(target).items() if before.get(path) != stamp]
    readings = sum(_report(path) for path in sorted(written))
    if not readings and code == 0:
        raise CommandFailed(
            f"{out}: nothing was recorded: no process of the command used a GPU through torch "
            "(gpumem-otel doctor says what works here)"
        )
    if not readings:
        click.echo("gpumem-otel: nothing was recorded", err=True)
    return code


def _check_target(out: str, target: Path) -> None:
    """Better now than after hours of training."""
    if target.is_dir():
        raise CommandFailed(f"{out}: is a directory")
    if not target.parent.is_dir():
        raise CommandFailed(f"{target.parent}: no such directory")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise CommandFailed(f"{out}: can not be written")


def _stamps(target: Path) -> dict[Path, tuple[int, int, int]]:
    """OUT and the files of further ranks beside it, with what tells a new version."""
    stamps = {}
    for path in target.parent.iterdir():
        if path.name == target.name or path.name.startswith(target.stem + "-rank"):
            status = path.stat()
            stamps[path] = (status.st_ino, status.st_mtime_ns, status.st_size)
    return stamps


def _report(path: Path) -> int:
    """Say what is in a recording; number of its readings, 0 where it can not be read."""
    from gpumem_otel.core.recording import load_recording
    from gpumem_otel.core.text import human_bytes
    from gpumem_otel.errors import SnapshotError

    try:
        with path.open("rb") as file:
            readings = len(load_recording(file, name=str(path)).readings)
    except (SnapshotError, OSError) as error:
        click.echo(f"gpumem-otel: {error}", err=True)
        return 0
    if readings:
        size = human_bytes(path.stat().st_size)
        click.echo(f"gpumem-otel: {path}: {readings} readings, {size}", err=True)
    return readings


def _run(program: str, job: tuple[str, ...], ours: dict[str, str]) -> int:
    """Run the job to its end; its exit code, 128 + n where signal n ended it."""
    try:
        child = subprocess.Popen(job, executable=program, env=ours)  # noqa: S603 - the verb
    except OSError as error:
        raise launch.not_started(job[0], error) from error
    with _forwarding(child):
        code = child.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """While the job runs, signals are its own business: it ends, we report."""

    def forward(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """The terminal sends SIGINT to the job too; a handler, since SIG_IGN is inherited."""

    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, ignore)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
