"""The targets of `gpumem-otel ctl`: sockets of this machine, URLs, credentials, JSON entries."""

from __future__ import annotations

import glob
import os
import pwd
import stat
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from gpumem_otel.cli.inputs import environ
from gpumem_otel.cli.output import CommandFailed, fields_of, print_json, warn
from gpumem_otel.cli.sd import run_dirs
from gpumem_otel.errors import ConfigError, GpumemError, ServeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpumem_otel.cli.ctl.client import Client
    from gpumem_otel.cli.ctl.jobs import Outcome
    from gpumem_otel.cli.ctl.targets import Credentials, Target

_PLACES: Final = ("/run/user/*/gpumem-otel", "/tmp/gpumem-otel-*")  # noqa: S108  only looked at
"""Where jobs of any user register by default, see `settings.options`."""

_MAX_FOLDERS: Final = 1024


def job_sockets(run_dir: str | None, given: Mapping[str, str]) -> list[str]:
    """Paths of the sockets that take commands.

    Args:
        run_dir: folder to look into instead of where jobs register; None for those.
        given: the environment.

    Raises:
        UsageError: `run_dir` is empty.
        ServeError: the folder that was given cannot be used.
        CommandFailed: no job takes commands.
    """
    from gpumem_otel.serve.discovery import control_sockets

    if run_dir is not None and not run_dir:
        raise click.UsageError("--run-dir must name a folder")
    ours = run_dirs(run_dir, given)
    is_given = run_dir is not None or bool(given.get("GPUMEM_OTEL_RUN_DIR"))
    others = [] if is_given else [folder for folder in _others() if folder not in ours]
    is_root = os.geteuid() == 0
    searched: list[str] = []
    sockets: list[str] = []
    for folder in (*ours, *(others if is_root else ())):
        try:
            sockets += control_sockets(folder)
            searched.append(folder)
        except ServeError as error:  # noqa: PERF203 - a few folders
            line = f"{error}{_sudo(folder)}"
            if is_given:
                raise ServeError(line) from error
            warn(line)
    if sockets:
        return sockets
    where = f"there is no socket in {' or '.join(searched)}; " if searched else ""
    message = (
        f"no job takes commands here: {where}with GPUMEM_OTEL_CONTROL=1 a job makes one when it "
        "uses CUDA"
    )
    if others and not is_root:
        shown = ", ".join(f"{folder}{_sudo(folder)}" for folder in others)
        message += f"; folders of other users were not searched: {shown}"
    raise CommandFailed(message)


def _others() -> list[str]:
    """Folders of other users whose path names their owner: no links, nothing made by others."""
    folders = []
    for place in _PLACES:
        for folder in glob.glob(place):  # noqa: PTH207
            owner = _owner(folder)
            if owner is not None and str(owner) in {*folder.split("/"), folder.split("-")[-1]}:
                folders.append(folder)
    return sorted(folders)[:_MAX_FOLDERS]


def _sudo(folder: str) -> str:
    """How to use a folder of another user; "" for any other folder."""
    owner = _owner(folder)
    if owner is None or os.geteuid() in {0, owner}:
        return ""
    return f" (sudo -u {_name(owner)} gpumem-otel ctl)"


def _owner(folder: str) -> int | None:
    """The user who owns this folder, None where it is not a folder."""
    try:
        status = os.lstat(folder)
    except OSError:
        return None
    return status.st_uid if stat.S_ISDIR(status.st_mode) else None


def _name(uid: int) -> str:
    """A user as sudo accepts it: #UID where there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"'#{uid}'"


class Reach(NamedTuple):
    """The options of all verbs: targets and credentials."""

    targets: tuple[str, ...]
    run_dir: str | None
    token_file: str
    ca_file: str
    cert_file: str
    key_file: str
    insecure: bool


def clients_of(reach: Reach, *, as_json: bool = False) -> list[Client]:
    """A client for each target, or for each socket of this user's jobs.

    Raises:
        ConfigError: a target or file cannot be used.
        UsageError: the token would be sent to a target unencrypted.
        CommandFailed: there is no target.
    """
    from gpumem_otel.cli.ctl.client import Client
    from gpumem_otel.cli.ctl.targets import credentials

    with json_on_error(reach.targets, as_json=as_json):
        shown = credentials(reach.token_file, reach.ca_file, reach.cert_file, reach.key_file)
        urls = _urls(reach)
    usable, errors = [], {}
    for url in urls:
        try:
            usable.append(_target(url, shown, insecure=reach.insecure))
        except (ConfigError, click.UsageError) as error:  # noqa: PERF203 - a few targets
            errors[url] = error
    with json_on_error(urls, as_json=as_json, own=errors):
        for first in errors.values():
            raise first
    return [Client(target, shown) for target in usable]


def _urls(reach: Reach) -> tuple[str, ...]:
    urls = reach.targets or (f"unix://{path}" for path in job_sockets(reach.run_dir, environ()))
    return tuple(dict.fromkeys(urls))


def _target(url: str, shown: Credentials, *, insecure: bool) -> Target:
    from gpumem_otel.cli.ctl.targets import parse_target

    target = parse_target(url)
    if target.in_the_clear and shown.token and not insecure:
        raise click.UsageError(
            f"{url} is not encrypted, so that others can read the token: use https, or "
            "--insecure where something else encrypts it"
        )
    return target


@contextmanager
def json_on_error(
    urls: Sequence[str], *, as_json: bool, own: Mapping[str, Exception] = MappingProxyType({})
) -> Iterator[None]:
    """With --json print an entry for each target also where an error comes before any is asked.

    Args:
        urls: the targets; without any an empty list is printed, which is JSON too.
        as_json: whether --json was given.
        own: errors of some targets; without these, the error within is that of all.
    """
    try:
        yield
    except (click.ClickException, GpumemError) as error:
        if as_json:
            from gpumem_otel.cli.ctl.jobs import Outcome

            rest = "not asked: another target cannot be used" if own else _line(error)
            lines = {url: _line(own[url]) if url in own else rest for url in urls}
            print_json([as_entry(Outcome(_shown(url), error=text)) for url, text in lines.items()])
        raise


def as_entry(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON."""
    return {"target": outcome.url, **fields_of(outcome, "process", "value", "error")}


def _line(error: Exception) -> str:
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    return " ".join(text.split())


def _shown(url: str) -> str:
    """A target without what may be a password."""
    return url if url.startswith("unix:") or "@" not in url else f"...@{url.rpartition('@')[2]}"
