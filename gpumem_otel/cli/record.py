"""`gpumem-otel record OUT -- python train.py`: the job's memory over time, in one file."""

from __future__ import annotations

import re
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli import launch, record_files
from gpumem_otel.cli.inputs import environ
from gpumem_otel.cli.output import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

_EPILOG = """\b
Examples:
  gpumem-otel record run.gpumem -- python train.py
  gpumem-otel record run.gpumem --interval 0.5 -- python train.py && gpumem-otel top run.gpumem

The "--" is needed where COMMAND has options of its own. The exit code is the job's.

Several ranks, and several processes of a rank, each write a file of their own beside OUT
(OUT-rank3, OUT-rank3-pid1234); all are listed at the end. Recordings that an earlier run left
under these names are replaced, once there are new ones; other files are never touched.
"""

_STALL_RATIO = 0.02
"""The default, a tenth of a percent of the job's time, would lengthen the interval asked for."""

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
@click.option("--profiles", metavar="KINDS", help="Of live, allocated, peak, growth, pinned.")
@click.argument("job", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(out: str, job: tuple[str, ...], **options: object) -> int:
    """Run COMMAND and record the GPU memory of its Python process to OUT."""
    _check_out(out, job)
    target = Path.cwd() / out  # the job may change its folder
    record_files.check_target(out, target)
    base = environ()
    options["record"] = str(target)
    if not base.get("GPUMEM_OTEL_MAX_STALL_RATIO"):
        options["stall_ratio"] = _STALL_RATIO
    ours = launch.child_environ(base, options)
    launch.check_settings(base, ours)
    program = launch.find_command(job, ours)
    moved = record_files.set_aside(target, base)
    readings, lines = 0, list[str]()
    try:
        before = record_files.stamps(target)
        code = _run(program, job, ours)
        after = record_files.stamps(target)
        written = [path for path, stamp in after.items() if before.get(path) != stamp]
        for path in written:
            count, about = record_files.report(path)
            readings += count
            lines += about
    finally:
        settled = record_files.settle(moved, base, replaced=readings > 0)
    try:
        return _report(out, settled + lines if readings else lines + settled, readings, code)
    except BrokenPipeError:  # stderr is closed: the exit code is still the job's
        return code


def _report(out: str, lines: Sequence[str], readings: int, code: int) -> int:
    """Print what was recorded; returns the job's exit code.

    Raises:
        CommandFailed: the job succeeded, and nothing was recorded.
    """
    for line in lines:
        click.echo(line, err=True)
    if readings:
        return code
    if code == 0:
        raise CommandFailed(
            f"{out}: nothing was recorded: no process of the command used a GPU through torch "
            "(gpumem-otel doctor says what works here)"
        )
    click.echo("gpumem-otel: nothing was recorded", err=True)
    return code


def _check_out(out: str, job: Sequence[str]) -> None:
    """Without OUT, the name of the interpreter is taken for it."""
    name = Path(out).name
    if re.fullmatch(r"python[\d.]*|torchrun|accelerate|deepspeed", name) and job[0].endswith(".py"):
        raise click.UsageError(
            f"OUT is missing: gpumem-otel record run.gpumem -- {out} {' '.join(job)}"
        )


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
    """While the job runs, it gets our signals: it ends, and we report."""

    def forward(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """Do nothing: a terminal sends SIGINT to the job too. SIG_IGN would be inherited."""

    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, ignore)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
