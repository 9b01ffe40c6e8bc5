"""Where the sockets of jobs on this machine are: of this user's, and of everybody's for root."""

from __future__ import annotations

import glob
import os
import pwd
import stat
from typing import TYPE_CHECKING, Final

import click

from gpumem_otel.cli.common import CommandFailed, warn
from gpumem_otel.cli.sd import run_dirs
from gpumem_otel.errors import ServeError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["job_sockets"]

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
    from gpumem_otel.serve.rundir import control_sockets

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
