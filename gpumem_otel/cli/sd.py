"""`gpumem-otel sd`: Prometheus targets of the jobs that run on this machine."""

from __future__ import annotations

import click

from gpumem_otel.cli.common import environ, write_output

__all__ = ["command"]

_EPILOG = """\b
Examples:
  gpumem-otel sd
  gpumem-otel sd -o /etc/prometheus/targets/gpumem.json --watch 15

In prometheus.yml:
  scrape_configs:
    - job_name: gpumem
      file_sd_configs: [{files: [/etc/prometheus/targets/gpumem.json]}]

Processes that are gone are left out.
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
    from gpumem_otel.options import resolve
    from gpumem_otel.serve.rundir import file_sd

    if watch is not None and output == "-":
        raise click.UsageError("--watch writes a file: give -o FILE")
    options = {} if run_dir is None else {"run_dir": run_dir}
    folder = resolve(environ(), **options).serve.run_dir  # type: ignore[arg-type] # a str
    write_output(output, file_sd(folder).encode())
    if watch is None:
        return
    import time

    while True:
        time.sleep(watch)
        write_output(output, file_sd(folder).encode())
