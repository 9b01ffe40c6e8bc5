"""`gpumem-otel sd`: Prometheus targets of the jobs that run on this machine."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.inputs import environ
from gpumem_otel.cli.output import warn, write_output
from gpumem_otel.errors import ServeError

if TYPE_CHECKING:
    from collections.abc import Mapping

_EPILOG = """\b
Examples:
  gpumem-otel sd
  gpumem-otel sd -o /etc/prometheus/targets/gpumem.json --watch 15

\b
In prometheus.yml:
  scrape_configs:
    - job_name: gpumem
      file_sd_configs: [{files: [/etc/prometheus/targets/gpumem.json]}]

Processes that are gone are left out. Without a folder given, all are read where a job of this user
registers: $XDG_RUNTIME_DIR/gpumem-otel in a login session, /tmp/gpumem-otel-UID without one.
"""


@click.command("sd", epilog=_EPILOG, short_help="Print Prometheus targets (file_sd).")
@click.option("--run-dir", metavar="DIR", help="Where jobs register (GPUMEM_OTEL_RUN_DIR).")
@click.option("-o", "--output", default="-", metavar="FILE", help="File, written whole.")
@click.option(
    "--watch",
    type=click.FloatRange(1, 3600),
    metavar="SECONDS",
    help="Write the file again every so often until interrupted.",
)
def command(run_dir: str | None, output: str, watch: float | None) -> None:
    """Print the jobs that serve metrics on this machine as Prometheus file_sd JSON."""
    if not output:
        raise click.BadParameter("the name of the file is empty", param_hint="'-o'")
    if watch is not None and output == "-":
        raise click.UsageError("--watch writes a file: give -o FILE")
    folders = run_dirs(run_dir, environ())
    warned: dict[str, str] = {}
    write_output(output, _file_sd(folders, warned))
    while watch is not None:
        time.sleep(watch)
        try:
            write_output(output, _file_sd(folders, warned))
        except (ServeError, click.ClickException, OSError) as error:
            _warn_once(warned, "", str(error))
        else:
            warned.pop("", None)


def run_dirs(run_dir: str | None, given: Mapping[str, str]) -> tuple[str, ...]:
    """The folder that was set, or all that jobs of this user may use by default."""
    from gpumem_otel.settings.options import resolve

    if run_dir is not None:
        return (resolve(given, run_dir=run_dir).serve.run_dir,)
    # a job of a batch system or a service has no login session, and the caller may have none
    rest = {name: value for name, value in given.items() if name != "XDG_RUNTIME_DIR"}
    session = {**rest, "XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}
    return tuple(dict.fromkeys(resolve(e).serve.run_dir for e in (given, session, rest)))


def _file_sd(folders: tuple[str, ...], warned: dict[str, str]) -> bytes:
    """The targets of all folders that can be read.

    Raises:
        ServeError: none of them can be read.
    """
    from gpumem_otel.serve.discovery import as_file_sd, targets

    entries = []
    failures: dict[str, ServeError] = {}
    for folder in folders:
        try:
            entries += targets(folder)
        except ServeError as error:  # noqa: PERF203 - a few folders
            failures[folder] = error
    if len(failures) == len(folders):
        raise failures[folders[0]]
    for folder in folders:
        if folder in failures:
            _warn_once(warned, folder, str(failures[folder]))
        else:
            warned.pop(folder, None)
    entries.sort(key=lambda e: (e.service_name, e.namespace, e.run_id, e.rank, e.pid))
    return as_file_sd(entries).encode()


def _warn_once(warned: dict[str, str], key: str, message: str) -> None:
    """Warn unless this was the last message about the key."""
    if warned.get(key) != message:
        warned[key] = message
        warn(message)
