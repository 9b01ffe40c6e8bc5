"""Whom `gpumem-otel ctl` asks, and what it says of each target as JSON."""

from __future__ import annotations

from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gpumem_otel.cli.common import environ, print_json
from gpumem_otel.errors import ConfigError, GpumemError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpumem_otel.cli.ctl_client import Client, Credentials, Target
    from gpumem_otel.cli.ctl_jobs import Outcome

__all__ = ["Reach", "answered", "as_entry", "clients_of"]


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
    from gpumem_otel.cli.ctl_client import Client, credentials

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
    from gpumem_otel.cli.ctl_find import job_sockets

    found = reach.targets or (f"unix://{path}" for path in job_sockets(reach.run_dir, environ()))
    return tuple(dict.fromkeys(found))


def _target(url: str, shown: Credentials, *, insecure: bool) -> Target:
    from gpumem_otel.cli.ctl_client import parse_target

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
            from gpumem_otel.cli.ctl_jobs import Outcome

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
