"""`gpumem-otel doctor`: what works here, and what to do about what does not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.inputs import environ
from gpumem_otel.cli.output import print_json, progress
from gpumem_otel.cli.shared_options import json_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.cli.checks import Check

_EPILOG = """\b
Examples:
  gpumem-otel doctor
  gpumem-otel doctor --require-gpu && gpumem-otel run -- python train.py

Each line is ok, missing (works without it) or problem (asked for, and does not work).
Exit code 1 where there is a problem.
"""


@click.command("doctor", epilog=_EPILOG, short_help="Say what works here.")
@json_option("The checks as JSON, for programs.")
@click.option("--require-gpu", is_flag=True, help="Without a GPU to record it is a problem.")
@click.option(
    "--timeout",
    type=click.FloatRange(1, 600),
    default=60.0,
    show_default=True,
    help="Seconds that importing torch may take.",
)
def command(*, as_json: bool, require_gpu: bool, timeout: float) -> int:
    """Say what works here, and what to do about what does not."""
    from gpumem_otel.cli import checks

    with progress("checking"):
        results = checks.run_all(environ(), torch_timeout_seconds=timeout, require_gpu=require_gpu)
    works = all(check.status != checks.PROBLEM for check in results)
    if as_json:
        print_json({"ok": works, "checks": [check._asdict() for check in results]})
    else:
        _print(results)
    return 0 if works else 1


def _print(results: Sequence[Check]) -> None:
    colours = {"ok": "green", "missing": "yellow", "problem": "red"}
    width = max(len(check.name) for check in results)
    on_terminal = sys.stdout.isatty()
    for check in results:
        status = f"{check.status:<8}"
        if on_terminal:
            status = click.style(status, fg=colours[check.status])
        click.echo(f"{status} {check.name:<{width}}  {check.detail}")
        if check.advice:
            click.echo(f"{'':8} {'':<{width}}  -> {check.advice}")
