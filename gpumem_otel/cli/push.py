"""`gpumem-otel push IN --url URL`: a file's profile to Pyroscope."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click

from gpumem_otel.cli.common import (
    CommandFailed,
    environ,
    name_of,
    namer_for,
    pick_devices,
    progress,
    read_bytes,
    warn,
)
from gpumem_otel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.profiles.pprof_reader import DecodedProfile
    from gpumem_otel.push.pyroscope import PyroscopeSink
    from gpumem_otel.push.spool import Spool
    from gpumem_otel.settings.config import Config
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

# Sending pprof files as they are, and all those that wait in the spool.

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

    from gpumem_otel.profiles import protobuf_wire

    raw = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    time_ns = usable_time_ns(decoded.time_ns)
    # of a field that comes twice the last one counts
    return raw if time_ns == decoded.time_ns else raw + protobuf_wire.int_field(9, time_ns)


def send_all(config: Config) -> None:
    """Send every profile of the spool, the oldest first, and delete what is stored.

    Raises:
        CommandFailed: one could not be sent: it is still there, and where the server can not be
            reached or refuses all, so are those after it.
        SpoolError: the folder is not safe to use.
    """
    from gpumem_otel.push.pyroscope import PyroscopeSink
    from gpumem_otel.push.spool import Spool
    from gpumem_otel.push.transport import Transport
    from gpumem_otel.settings.identity import identify

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
            refused += not _send_waiting(spool, name, sink, config)
    finally:
        transport.close()
    if refused:
        raise CommandFailed(f"{config.pyroscope.url}: {refused} of {len(names)} not pushed")


def _send_waiting(spool: Spool, name: str, sink: PyroscopeSink, config: Config) -> bool:
    """Send one; False where the server does not take this one."""
    from gpumem_otel.base.text import human_bytes
    from gpumem_otel.errors import EncodeError, PushError
    from gpumem_otel.profiles import pprof
    from gpumem_otel.push.spool import labels_of

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


_EPILOG = """\b
Examples:
  gpumem-otel push snapshot.pickle --url http://localhost:4040 --service my-job
  PYROSCOPE_AUTH_TOKEN_FILE=token gpumem-otel push live.pb.gz --url https://profiles.example
  gpumem-otel push --url http://localhost:4040

IN is a snapshot, a recording (its last snapshot) or a pprof file. Without it the profiles are sent
that jobs of this machine could not send when they ran out of memory, and deleted once they are
stored (GPUMEM_OTEL_SPOOL_DIR, by default under the run directory). Credentials, certificates and
the tenant come from the PYROSCOPE_* variables. Profiles of another time than the last hour are
sent with the time of now, since the server refuses them otherwise.
"""

_DEFAULT_SERVICE = "gpumem-otel"

_OPTIONS = {
    "pyroscope_url": "--url",
    "service_name": "--service",
    "basic_auth_user": "--user",
    "tenant_id": "--tenant",
    "timeout_seconds": "--timeout",
    "tags": "--tag",
}


class _Parcel(NamedTuple):
    """One pprof to push; device None where the file's samples carry it themselves."""

    device: int | None
    data: bytes
    total_bytes: int
    samples: int


@click.command("push", epilog=_EPILOG, short_help="Send a file's profile to Pyroscope.")
@click.argument("source", metavar="[IN]", required=False)
@click.option("--url", metavar="URL", help="Server (default PYROSCOPE_SERVER_ADDRESS).")
@click.option("--service", metavar="NAME", help="Service name (default OTEL_SERVICE_NAME).")
@click.option("--device", type=int, metavar="N", help="Only this device.")
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="One more label.")
@click.option("--user", metavar="NAME", help="Basic auth (default PYROSCOPE_BASIC_AUTH_USER).")
@click.option("--tenant", metavar="ID", help="X-Scope-OrgID (default PYROSCOPE_TENANT_ID).")
@click.option("--timeout", type=float, metavar="SECONDS", help="Of one push (default 10).")
def command(
    source: str | None,
    *,
    url: str | None,
    service: str | None,
    device: int | None,
    tags: tuple[str, ...],
    user: str | None,
    tenant: str | None,
    timeout: float | None,
) -> None:
    """Send the live profile of IN to Pyroscope, one push per device; or what waits in the spool."""
    from gpumem_otel.settings.options import resolve

    options: dict[str, object] = {
        "pyroscope_url": url,
        "service_name": service,
        "basic_auth_user": user,
        "tenant_id": tenant,
        "timeout_seconds": timeout,
        "tags": _pairs(tags) or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    try:
        config = resolve(environ(), **given)  # type: ignore[arg-type] # resolve checks each
    except ConfigError as error:
        raise click.UsageError(_as_typed(str(error))) from error
    for warning in config.warnings:
        if warning.startswith("PYROSCOPE_"):
            warn(warning)
    if not config.pyroscope.url:
        raise click.UsageError("Missing option '--url' (or PYROSCOPE_SERVER_ADDRESS)")
    if source is None:
        for option, value in (
            ("--device", device),
            ("--service", service),
            ("--tag", tags or None),
        ):
            if value is not None:
                raise click.UsageError(f"{option} is for a file: what was spooled has its labels")
    with ExitStack() as kept:
        try:
            config = _read_once(config, kept)
        except ConfigError as error:
            raise CommandFailed(str(error)) from error
        if source is None:
            send_all(config)
        else:
            _send(source, _parcels(source, device, config), config)


def _read_once(config: Config, kept: ExitStack) -> Config:
    """Its files may be pipes, `<(...)` of a shell, and are asked for more than once."""
    from gpumem_otel.settings.files import read_once

    given = config.pyroscope
    pyroscope = replace(
        given,
        bearer_token_file=read_once(given.bearer_token_file, kept),
        ca_file=read_once(given.ca_file, kept),
        client_cert_file=read_once(given.client_cert_file, kept),
        client_key_file=read_once(given.client_key_file, kept),
    )
    return replace(config, pyroscope=pyroscope)


def _as_typed(message: str) -> str:
    """The option of this command instead of the keyword that it stands for."""
    for keyword, option in _OPTIONS.items():
        message = message.replace(f"option {keyword!r}", option)
    return message


def _pairs(tags: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for tag in tags:
        name, equals, value = tag.partition("=")
        if not equals or not name.strip():
            raise click.BadParameter(f"{tag!r} is not NAME=VALUE", param_hint="'--tag'")
        pairs[name.strip()] = value
    return pairs


def _parcels(source: str, device: int | None, config: Config) -> list[_Parcel]:
    data = read_bytes(source)
    name = name_of(source)
    with progress(f"reading {name}"):
        parcel = _pprof_parcel(data)
        if parcel is not None:
            if device is not None:
                raise click.BadParameter(
                    f"{name} is a pprof file; it is sent as it is", param_hint="'--device'"
                )
            return [parcel]
        from gpumem_otel.profiles.of_file import parse_snapshot

        snapshot = parse_snapshot(data, name)
        return _snapshot_parcels(snapshot, pick_devices(snapshot, device), config)


def _snapshot_parcels(
    snapshot: TorchSnapshot, devices: Sequence[int], config: Config
) -> list[_Parcel]:
    from gpumem_otel.profiles import heap, pprof

    time_ns = usable_time_ns(_last_event_ns(snapshot, devices))
    parcels = []
    for device in devices:
        profile = heap.live_profile(
            snapshot,
            device,
            namer=namer_for(snapshot),
            time_ns=time_ns,
            max_depth=config.profiles.max_depth,
        )
        profile = heap.apply_budget(profile, max_samples=config.profiles.max_samples)
        data = pprof.encode([profile], max_bytes=config.profiles.max_bytes)
        parcels.append(_Parcel(device, data, profile.total_bytes, len(profile.samples)))
    return parcels


def _last_event_ns(snapshot: TorchSnapshot, devices: Sequence[int]) -> int:
    """Moment of the snapshot as far as its own trace tells, 0 where it does not."""
    times = [event.time_us or 0 for device in devices for event in snapshot.events(device)]
    return max(times, default=0) * 1000


def _pprof_parcel(data: bytes) -> _Parcel | None:
    """The parcel of a pprof file, None where the data is something else."""
    from gpumem_otel.errors import EncodeError
    from gpumem_otel.profiles import pprof

    try:
        decoded = pprof.decode(data)
    except EncodeError:
        return None
    types = [name for name, unit in decoded.sample_types if unit == "bytes"]
    total = decoded.total(types[-1]) if types else 0
    raw = sendable(data, decoded)
    return _Parcel(None, raw, total, len(decoded.samples))


def _send(source: str, parcels: Sequence[_Parcel], config: Config) -> None:
    from gpumem_otel.base.text import human_bytes
    from gpumem_otel.errors import PushError
    from gpumem_otel.push.pyroscope import PyroscopeSink, series_labels
    from gpumem_otel.push.transport import Transport
    from gpumem_otel.settings.identity import identify

    base = environ()
    who = identify(
        base,
        service_name=config.service_name or _DEFAULT_SERVICE,
        namespace=config.namespace,
        run_id=config.run_id,
        tags=config.tags,
    )
    transport = Transport(config.pyroscope, environ=base)
    sink = PyroscopeSink(transport, config.pyroscope, lambda: who)
    try:
        with progress(f"pushing {source}") as report:
            for done, parcel in enumerate(parcels):
                labels = series_labels(who, device=parcel.device or 0)
                if parcel.device is None:
                    labels = tuple(pair for pair in labels if pair[0] != "device")
                try:
                    sink.send(parcel.data, labels, config.pyroscope.timeout_seconds)
                except PushError as error:
                    raise CommandFailed(
                        f"{config.pyroscope.url}: {_what(parcel)} not pushed: {error}"
                    ) from error
                report(done + 1, len(parcels))
                click.echo(
                    f"pushed {_what(parcel)}: {human_bytes(parcel.total_bytes)} in "
                    f"{parcel.samples} stacks to {config.pyroscope.url} as {who.service_name}"
                )
    finally:
        transport.close()


def _what(parcel: _Parcel) -> str:
    return "pprof file" if parcel.device is None else f"device {parcel.device}"
