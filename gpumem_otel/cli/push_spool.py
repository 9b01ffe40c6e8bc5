"""Sending pprof files as they are, and all those that wait in the spool."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.common import CommandFailed, environ, warn

if TYPE_CHECKING:
    from gpumem_otel.config import Config
    from gpumem_otel.core.pprof_read import DecodedProfile
    from gpumem_otel.export.pyroscope import PyroscopeSink
    from gpumem_otel.export.spool import Spool

__all__ = ["send_all", "sendable", "usable_time_ns"]

_OLDEST_SECONDS = 3600 - 60
"""validation.reject-older-than is 1 h; a minute for the way and for clocks."""
_NEWEST_SECONDS = 600 - 60
"""validation.reject-newer-than is 10 min."""
_REFUSED = frozenset({"rejected", "too_large", "server_error"})
"""The server's word on one profile, whatever it says of the next."""


def usable_time_ns(time_ns: int) -> int:
    """The profile's own time where the server takes it, else now."""
    now = time.time_ns()
    inside = now - _OLDEST_SECONDS * 10**9 < time_ns < now + _NEWEST_SECONDS * 10**9
    return time_ns if inside else now


def sendable(data: bytes, decoded: DecodedProfile) -> bytes:
    """A pprof file's bytes, uncompressed and with a time that the server takes.

    Args:
        data: the file, gzip or not.
        decoded: the same; so it is known to be whole and of bearable size.
    """
    import gzip

    from gpumem_otel.core import wire

    raw = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    time_ns = usable_time_ns(decoded.time_ns)
    # of a field that comes twice the last one counts
    return raw if time_ns == decoded.time_ns else raw + wire.int_field(9, time_ns)


def send_all(config: Config) -> None:
    """Send every profile of the spool, the oldest first, and delete what is stored.

    Raises:
        CommandFailed: one could not be sent: it is still there, and where the server can not be
            reached or refuses all, so are those after it.
        SpoolError: the folder is not safe to use.
    """
    from gpumem_otel.export.pyroscope import PyroscopeSink
    from gpumem_otel.export.spool import Spool
    from gpumem_otel.export.transport import Transport
    from gpumem_otel.ranks import identify

    spool = Spool(config.spool_dir)
    names = spool.waiting()
    if not names:
        click.echo(f"nothing waits in {spool.folder}")
        return
    base = environ()
    who = identify(base, service_name=config.service_name)
    transport = Transport(config.pyroscope, environ=base)
    sink = PyroscopeSink(transport, config.pyroscope, lambda: who)
    refused = 0
    try:
        for name in names:
            refused += not _send(spool, name, sink, config)
    finally:
        transport.close()
    if refused:
        raise CommandFailed(f"{config.pyroscope.url}: {refused} of {len(names)} not pushed")


def _send(spool: Spool, name: str, sink: PyroscopeSink, config: Config) -> bool:
    """Send one; False where the server does not take this one."""
    from gpumem_otel.core import pprof
    from gpumem_otel.core.text import human_bytes
    from gpumem_otel.errors import EncodeError, PushError
    from gpumem_otel.export.spool import labels_of

    path = f"{spool.folder}/{name}"
    try:
        data = spool.read(name)
        decoded = pprof.decode(data)
        total = decoded.total("inuse_space")
    except FileNotFoundError:
        return True  # another `push` has sent it
    except EncodeError as error:
        warn(f"{path}: no pprof, left where it is: {error}")
        return True
    except KeyError:
        warn(f"{path}: not one of ours, left where it is: it holds no inuse_space")
        return True
    labels = labels_of(decoded.comments)
    if not labels:
        warn(f"{path}: not one of ours, left where it is: its comments name no rank")
        return True
    try:
        sink.send(sendable(data, decoded), labels, config.pyroscope.timeout_seconds)
    except PushError as error:
        said = f"{config.pyroscope.url}: {path} not pushed: {error}"
        if error.reason not in _REFUSED:
            raise CommandFailed(said) from error
        warn(said)  # left where it is: it must not hold up those after it
        return False
    spool.delete(name)
    known = dict(labels)
    click.echo(
        f"pushed oom_id {known.get('oom_id', '?')}: {human_bytes(total)} of rank "
        f"{known.get('rank', '?')}, device {known.get('device', '?')} to {config.pyroscope.url} "
        f"as {known.get('service_name', '?')}"
    )
    return True
