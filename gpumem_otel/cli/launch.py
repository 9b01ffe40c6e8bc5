"""What `run` and `record` share: the options, the child's environment, finding the command."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpumem_otel.settings.config import Config

_F = TypeVar("_F", bound="Callable[..., object]")

PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these, and a job would inherit that: a shell's pipelines would end otherwise."""

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
"""Option of the command line -> the variable that carries it to the job."""


def _did_you_mean(command: str) -> str:
    return f"; did you mean: python {command}" if command.endswith(".py") else ""


class CommandNotFound(click.ClickException):
    """There is no such command: 127, as shells say."""

    exit_code = 127

    def __init__(self, command: str) -> None:
        super().__init__(f"{command}: command not found{_did_you_mean(command)}")


class CommandNotExecutable(click.ClickException):
    """The command is there and can not be executed: 126."""

    exit_code = 126

    def __init__(self, command: str) -> None:
        super().__init__(f"{command}: not executable{_did_you_mean(command)}")


def not_started(command: str, error: OSError) -> click.ClickException:
    """What the system's refusal to start a command means; not found is its #! interpreter."""
    if isinstance(error, FileNotFoundError):
        return CommandNotFound(command)
    return CommandNotExecutable(command)


def job_options(function: _F) -> _F:
    """The options that set a job up; each stands for one environment variable."""
    for decorate in reversed(
        (
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
    ):
        function = decorate(function)
    return function


def site_hook_folder() -> str:
    """The folder whose sitecustomize.py arms a Python process."""
    return str(Path(__file__).resolve().parent / "site_hook")


def child_environ(base: Mapping[str, str], options: Mapping[str, object]) -> dict[str, str]:
    """The job's environment: what is there, our folder first on PYTHONPATH, our variables.

    Options that were not given (None, or no values) leave their variable as it is.
    """
    environ = dict(base)
    rest = environ.get("PYTHONPATH", "")
    hook = site_hook_folder()
    environ["PYTHONPATH"] = f"{hook}{os.pathsep}{rest}" if rest else hook
    for option, value in options.items():
        if value is None or value == ():
            continue
        if isinstance(value, bool):
            text = "1" if value else "0"
        elif isinstance(value, tuple):
            text = ",".join(str(item) for item in value)
        elif isinstance(value, float):
            text = f"{value:g}"
        else:
            text = str(value)
        environ[_VARIABLES[option]] = text
    return environ


def check_settings(base: Mapping[str, str], environ: Mapping[str, str]) -> Config:
    """Refuse options that the job would only warn about; what the job will make of the others.

    Raises:
        click.UsageError: the option of a variable that we set can not be used.
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
        CommandNotExecutable: it can not be executed.
    """
    program = command[0]
    found = shutil.which(program, path=environ.get("PATH", os.defpath))
    if found is None:
        there = os.sep in program and Path(program).exists()
        raise CommandNotExecutable(program) if there else CommandNotFound(program)
    return found
