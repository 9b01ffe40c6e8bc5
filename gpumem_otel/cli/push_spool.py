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
        CommandFailed: one could not be sent; it and those after it are still there.
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
    try:
        for name in names:
            _send(spool, name, sink, config)
    finally:
        transport.close()


def _send(spool: Spool, name: str, sink: PyroscopeSink, config: Config) -> None:
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
        return  # another `push` has sent it
    except (EncodeError, KeyError) as error:
        warn(f"{path}: not one of ours, left where it is: {error}")
        return
    labels = labels_of(decoded.comments)
    try:
        sink.send(sendable(data, decoded), labels, config.pyroscope.timeout_seconds)
    except PushError as error:
        raise CommandFailed(f"{config.pyroscope.url}: {path} not pushed: {error}") from error
    spool.delete(name)
    known = dict(labels)
    click.echo(
        f"pushed oom_id {known.get('oom_id', '?')}: {human_bytes(total)} of rank "
        f"{known.get('rank', '?')}, device {known.get('device', '?')} to {config.pyroscope.url} "
        f"as {known.get('service_name', '?')}"
    )
