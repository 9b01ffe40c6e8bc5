"""Whom `gpumem-otel ctl` asks, and what it says of each target as JSON."""

from __future__ import annotations

import glob
import os
import pwd
import stat
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from gpumem_otel.cli.common import CommandFailed, environ, print_json, warn
from gpumem_otel.cli.sd import run_dirs
from gpumem_otel.errors import ConfigError, GpumemError, ServeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpumem_otel.cli.ctl.client import Client, Credentials, Target
    from gpumem_otel.cli.ctl.jobs import Outcome

# Where the sockets of jobs on this machine are: of this user's, and of everybody's for root.

_PLACES: Final = ("/run/user/*/gpumem-otel", "/tmp/gpumem-otel-*")  # noqa: S108  only looked at
"""Where jobs of any user register unless they were told otherwise, see `options`."""

_MAX_FOLDERS: Final = 1024


def job_sockets(run_dir: str | None, given: Mapping[str, str]) -> list[str]:
    """Paths of the sockets that take commands.

    Args:
        run_dir: folder to look into instead of where jobs register; None for those.
        given: the environment.

    Raises:
        UsageError: `run_dir` is empty.
        ServeError: a folder that was named can not be used.
        CommandFailed: nobody takes commands.
    """
    from gpumem_otel.serve.discovery import control_sockets

    if run_dir is not None and not run_dir:
        raise click.UsageError("--run-dir is empty: it is a folder")
    ours = run_dirs(run_dir, given)
    named = run_dir is not None or bool(given.get("GPUMEM_OTEL_RUN_DIR"))
    others = [] if named else [folder for folder in _others() if folder not in ours]
    is_root = os.geteuid() == 0
    looked: list[str] = []
    found: list[str] = []
    for folder in (*ours, *(others if is_root else ())):
        try:
            found += control_sockets(folder)
            looked.append(folder)
        except ServeError as error:  # noqa: PERF203 - a few folders
            line = f"{error}{_who_may(folder)}"
            if named:
                raise ServeError(line) from error
            warn(line)
    if found:
        return found
    where = f"none has a socket in {' or '.join(looked)}; " if looked else ""
    said = (
        f"no job takes commands here: {where}GPUMEM_OTEL_CONTROL=1 makes one once a job uses CUDA"
    )
    if others and not is_root:
        shown = ", ".join(f"{folder}{_who_may(folder)}" for folder in others)
        said += f"; folders of other users were not looked into: {shown}"
    raise CommandFailed(said)


def _others() -> list[str]:
    """Folders of other users, each where its owner has it: no link, and no other user's."""
    found = []
    for place in _PLACES:
        for folder in glob.glob(place):  # noqa: PTH207
            owner = _owner(folder)
            if owner is not None and str(owner) in {*folder.split("/"), folder.split("-")[-1]}:
                found.append(folder)
    return sorted(found)[:_MAX_FOLDERS]


def _who_may(folder: str) -> str:
    """What to do about a folder of another user; "" about any other."""
    owner = _owner(folder)
    if owner is None or os.geteuid() in {0, owner}:
        return ""
    return f" (sudo -u {_name(owner)} gpumem-otel ctl)"


def _owner(folder: str) -> int | None:
    """Who has this folder, None where there is none."""
    try:
        status = os.lstat(folder)
    except OSError:
        return None
    return status.st_uid if stat.S_ISDIR(status.st_mode) else None


def _name(uid: int) -> str:
    """As sudo takes it: who has no name is #UID."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"'#{uid}'"


class Reach(NamedTuple):
    """Whom to ask, and with what."""

    targets: tuple[str, ...]
    run_dir: str | None
    token_file: str
    ca_file: str
    cert_file: str
    key_file: str
    insecure: bool


def clients_of(reach: Reach, *, as_json: bool = False) -> list[Client]:
    """One for each target, or for each socket of this user's jobs; none where one is unusable.

    Raises:
        ConfigError: a target or file that can not be used.
        UsageError: a target that would see the token in the clear.
        CommandFailed: there is nobody to ask.
    """
    from gpumem_otel.cli.ctl.client import Client, credentials

    with answered(reach.targets, as_json=as_json):
        shown = credentials(reach.token_file, reach.ca_file, reach.cert_file, reach.key_file)
        urls = _urls(reach)
    usable, wrong = [], {}
    for url in urls:
        try:
            usable.append(_target(url, shown, insecure=reach.insecure))
        except (ConfigError, click.UsageError) as error:  # noqa: PERF203 - a few targets
            wrong[url] = error
    with answered(urls, as_json=as_json, own=wrong):
        for first in wrong.values():
            raise first
    return [Client(target, shown) for target in usable]


def _urls(reach: Reach) -> tuple[str, ...]:

    found = reach.targets or (f"unix://{path}" for path in job_sockets(reach.run_dir, environ()))
    return tuple(dict.fromkeys(found))


def _target(url: str, shown: Credentials, *, insecure: bool) -> Target:
    from gpumem_otel.cli.ctl.client import parse_target

    target = parse_target(url)
    if target.in_the_clear and shown.token and not insecure:
        raise click.UsageError(
            f"{url} would see the token in the clear, and so would others: take https, or "
            "--insecure where something else encrypts it"
        )
    return target


@contextmanager
def answered(
    urls: Sequence[str], *, as_json: bool, own: Mapping[str, Exception] = MappingProxyType({})
) -> Iterator[None]:
    """With --json each target has its entry also where an error comes before any is asked.

    Args:
        urls: the targets; without any an empty list is printed, so that what reads it need not
            tell nothing from no JSON.
        as_json: whether that was asked for.
        own: what is wrong with some of them; without, the error within is that of all.
    """
    try:
        yield
    except (click.ClickException, GpumemError) as error:
        if as_json:
            from gpumem_otel.cli.ctl.jobs import Outcome

            rest = "not asked: another target can not be used" if own else _line(error)
            lines = {url: _line(own[url]) if url in own else rest for url in urls}
            print_json([as_entry(Outcome(_shown(url), error=said)) for url, said in lines.items()])
        raise


def as_entry(outcome: Outcome) -> dict[str, Any]:
    """As JSON."""
    return {
        "target": outcome.url,
        "process": outcome.process,
        "value": outcome.value,
        "error": outcome.error,
    }


def _line(error: Exception) -> str:
    said = error.format_message() if isinstance(error, click.ClickException) else str(error)
    return " ".join(said.split())


def _shown(url: str) -> str:
    """A target without what may be a password."""
    return url if url.startswith("unix:") or "@" not in url else f"...@{url.rpartition('@')[2]}"
