"""`gpumem-otel run -- python train.py`: the job as it is, with GPU memory export in it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli import launch, record_files
from gpumem_otel.cli.inputs import environ
from gpumem_otel.cli.output import warn

if TYPE_CHECKING:
    from gpumem_otel.settings.config import Config

_EPILOG = """\b
Examples:
  gpumem-otel run --serve -- python train.py
  gpumem-otel run --pyroscope http://localhost:4040 --interval 30 -- torchrun train.py
  gpumem-otel run --serve --supervise -- python train.py

Options win over environment variables. The command takes this process over: signals and the
exit code are its own. With --supervise it is a child instead: signals are passed on, the exit code
is the child's, and where the job failed or ran out of memory its last /metrics are served for two
scrape intervals more, so that the last counts are seen. Python started with -I, -E or -S does not
see it.
"""


@click.command(
    "run",
    epilog=_EPILOG,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    short_help="Run a training command with GPU memory export, no code change.",
)
@launch.job_options
@click.option("--interval", type=float, metavar="SECONDS", help="Between profiles (default 60).")
@click.option("--profiles", metavar="KINDS", help="Of live, allocated, peak, growth, pinned.")
@click.option("--serve/--no-serve", default=None, help="Serve /metrics and /debug/pprof/gpumem.")
@click.option("--host", metavar="ADDRESS", help="Address to serve on (default 127.0.0.1).")
@click.option("--port", type=int, metavar="N", help="Base port, plus local rank (default 9464).")
@click.option("--metrics-level", type=click.Choice(["minimal", "standard", "full"]))
@click.option("--record", metavar="FILE", help="Record to this file as well.")
@click.option("--supervise", is_flag=True, help="Serve the last /metrics of a job that died.")
@click.option(
    "--linger",
    type=click.FloatRange(0, 3600),
    metavar="SECONDS",
    help="How long --supervise does so: two scrape intervals (default 30).",
)
@click.argument("job", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    job: tuple[str, ...],
    *,
    record: str | None,
    supervise: bool,
    linger: float | None,
    **options: object,
) -> int:
    """Run COMMAND with GPU memory export in every Python process of it, no code change."""
    base = environ()
    if record is not None:
        target = Path.cwd() / record  # the job may change its folder
        record_files.check_target(record, target)
        options["record"] = str(target)
    if options.get("serve") is None and (options.get("port") or options.get("host")):
        options["serve"] = True
    ours = launch.child_environ(base, options)
    config = launch.check_settings(base, ours)
    program = launch.find_command(job, ours)
    if config.enabled and not _goes_somewhere(config):
        warn("nothing is exported: give --serve, --pyroscope or --record, or set OTEL_* variables")
    if linger is not None and not supervise:
        raise click.UsageError("--linger is for --supervise")
    if supervise:
        from gpumem_otel.cli import supervise as supervisor

        seconds = supervisor.LINGER_SECONDS if linger is None else linger
        return supervisor.supervise(program, job, ours, config, seconds)
    sys.stdout.flush()
    sys.stderr.flush()
    ignored = {number: signal.signal(number, signal.SIG_DFL) for number in launch.PYTHON_IGNORES}
    try:
        os.execve(program, job, ours)  # noqa: S606 - running the user's command is the verb
    except OSError as error:
        raise launch.not_started(job[0], error) from error
    finally:  # only where it was not started
        for number, handler in ignored.items():
            signal.signal(number, handler)


def _goes_somewhere(config: Config) -> bool:
    return bool(
        config.serve.enabled
        or config.pyroscope.url
        or config.metrics.otlp
        or config.record_path
        or config.host_profiles
        or config.control.enabled
    )
