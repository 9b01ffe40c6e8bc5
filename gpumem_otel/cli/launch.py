"""What `run` and `record` share: options, the child's environment, finding the command."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.shared_options import options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpumem_otel.settings.config import Config

PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these. A job would inherit that, and pipelines of its shells would not end."""

_VARIABLES: dict[str, str] = {
    "service": "OTEL_SERVICE_NAME",
    "interval": "GPUMEM_OTEL_INTERVAL",
    "profiles": "GPUMEM_OTEL_PROFILES",
    "pyroscope": "PYROSCOPE_SERVER_ADDRESS",
    "stacks": "GPUMEM_OTEL_STACKS",
    "serve": "GPUMEM_OTEL_SERVE",
    "host": "GPUMEM_OTEL_HOST",
    "port": "GPUMEM_OTEL_PORT",
    "metrics_level": "GPUMEM_OTEL_METRICS_LEVEL",
    "tags": "GPUMEM_OTEL_TAGS",
    "record": "GPUMEM_OTEL_RECORD",
    "stall_ratio": "GPUMEM_OTEL_MAX_STALL_RATIO",
}
"""Option of the command line -> the variable that passes it to the job."""


def _did_you_mean(command: str) -> str:
    return f"; did you mean: python {command}" if command.endswith(".py") else ""


class CommandNotFound(click.ClickException):
    """There is no such command: 127, as of shells."""

    exit_code = 127

    def __init__(self, command: str) -> None:
        super().__init__(f"{command}: command not found{_did_you_mean(command)}")


class CommandNotExecutable(click.ClickException):
    """The command exists and cannot be executed: 126, as of shells."""

    exit_code = 126

    def __init__(self, command: str) -> None:
        super().__init__(f"{command}: not executable{_did_you_mean(command)}")


def not_started(command: str, error: OSError) -> click.ClickException:
    """The error of a command that did not start; "not found" means its #! interpreter."""
    missing = isinstance(error, FileNotFoundError)
    return CommandNotFound(command) if missing else CommandNotExecutable(command)


job_options = options(
    click.option("--service", metavar="NAME", help="Service name on all series."),
    click.option("--pyroscope", metavar="URL", help="Push profiles to this server."),
    click.option("--stacks", type=click.Choice(["python", "all"]), help="all: C++ too."),
    click.option(
        "--tag",
        "tags",
        multiple=True,
        metavar="NAME=VALUE",
        help="A label of your own on every profile; may be repeated.",
    ),
)
"""The options that set a job up; each stands for one environment variable."""


def site_hook_folder() -> str:
    """The folder whose sitecustomize.py arms a Python process."""
    return str(Path(__file__).resolve().parent / "site_hook")


def child_environ(base: Mapping[str, str], options: Mapping[str, object]) -> dict[str, str]:
    """The job's environment: this one, with our folder first on PYTHONPATH and our variables.

    Options that were not given (None, or no values) leave their variable unchanged.
    """
    environ = dict(base)
    rest = environ.get("PYTHONPATH", "")
    hook = site_hook_folder()
    environ["PYTHONPATH"] = f"{hook}{os.pathsep}{rest}" if rest else hook
    for option, value in options.items():
        if value is not None and value != ():
            environ[_VARIABLES[option]] = _as_text(value)
    return environ


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_settings(base: Mapping[str, str], environ: Mapping[str, str]) -> Config:
    """Refuse options that the job would only warn about; the settings that the job will have.

    Raises:
        click.UsageError: an option cannot be used.
    """
    from gpumem_otel.settings.options import resolve

    options = {variable: option for option, variable in _VARIABLES.items()}
    config = resolve(environ)
    for warning in config.warnings:
        variable, _, reason = warning.partition(" ")
        if variable in options and environ.get(variable) != base.get(variable):
            option = options[variable].rstrip("s" if variable.endswith("TAGS") else "")
            raise click.UsageError(
                f"--{option.replace('_', '-')} {reason.removesuffix('; ignored')}"
            )
    return config


def find_command(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Path of the program.

    Raises:
        CommandNotFound: there is none.
        CommandNotExecutable: it cannot be executed.
    """
    program = command[0]
    path = shutil.which(program, path=environ.get("PATH", os.defpath))
    if path is None:
        exists = os.sep in program and Path(program).exists()
        raise CommandNotExecutable(program) if exists else CommandNotFound(program)
    return path
