"""`gpumem-otel push IN --url URL`: a file's profile to Pyroscope."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gpumem_otel.base.text import human_bytes
from gpumem_otel.cli.inputs import environ, name_of, namer_for, pick_devices, read_bytes
from gpumem_otel.cli.output import CommandFailed, progress, warn
from gpumem_otel.cli.shared_options import DEVICE
from gpumem_otel.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpumem_otel.base.profile import Identity
    from gpumem_otel.profiles.pprof_reader import DecodedProfile
    from gpumem_otel.push.pyroscope import PyroscopeSink
    from gpumem_otel.push.spool import Spool
    from gpumem_otel.settings.config import Config
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

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

_OLDEST_SECONDS = 3600 - 60
"""Pyroscope's validation.reject-older-than is 1 h; a minute less for the network and for clocks."""
_NEWEST_SECONDS = 600 - 60
"""Its validation.reject-newer-than is 10 min."""
_REFUSED = frozenset({"rejected", "too_large", "server_error"})
"""Reasons of the server against one profile; it may take the next."""

_OPTIONS = {
    "pyroscope_url": "--url",
    "service_name": "--service",
    "basic_auth_user": "--user",
    "tenant_id": "--tenant",
    "timeout_seconds": "--timeout",
    "tags": "--tag",
}


class _Parcel(NamedTuple):
    """One pprof to push; device is None where the file's samples have it as a label."""

    device: int | None
    data: bytes
    total_bytes: int
    samples: int


@click.command("push", epilog=_EPILOG, short_help="Send a file's profile to Pyroscope.")
@click.argument("source", metavar="[IN]", required=False)
@click.option("--url", metavar="URL", help="Server (default PYROSCOPE_SERVER_ADDRESS).")
@click.option("--service", metavar="NAME", help="Service name (default OTEL_SERVICE_NAME).")
@DEVICE
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

    values = (url, service, user, tenant, timeout, _pairs(tags) or None)
    given: dict[str, Any] = {
        name: value for name, value in zip(_OPTIONS, values, strict=True) if value is not None
    }
    try:
        config = resolve(environ(), **given)
    except ConfigError as error:
        raise click.UsageError(_as_typed(str(error))) from error
    for warning in config.warnings:
        if warning.startswith("PYROSCOPE_"):
            warn(warning)
    if not config.pyroscope.url:
        raise click.UsageError("Missing option '--url' (or PYROSCOPE_SERVER_ADDRESS)")
    if source is None:
        of_files = {"--device": device, "--service": service, "--tag": tags or None}
        for option, value in of_files.items():
            if value is not None:
                raise click.UsageError(
                    f"{option} is for a file: spooled profiles have their labels"
                )
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
    """Its files may be pipes, `<(...)` of a shell, which can be read only once."""
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
    """The message with the options of this command in place of keywords."""
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
        namer, depth = namer_for(snapshot), config.profiles.max_depth
        profile = heap.live_profile(snapshot, device, namer=namer, time_ns=time_ns, max_depth=depth)
        profile = heap.apply_budget(profile, max_samples=config.profiles.max_samples)
        data = pprof.encode([profile], max_bytes=config.profiles.max_bytes)
        parcels.append(_Parcel(device, data, profile.total_bytes, len(profile.samples)))
    return parcels


def _last_event_ns(snapshot: TorchSnapshot, devices: Sequence[int]) -> int:
    """The time of the last event in the snapshot, 0 where there is none."""
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
    return _Parcel(None, sendable(data, decoded), total, len(decoded.samples))


def usable_time_ns(time_ns: int) -> int:
    """The profile's own time where the server takes it, else now."""
    now = time.time_ns()
    inside = now - _OLDEST_SECONDS * 10**9 < time_ns < now + _NEWEST_SECONDS * 10**9
    return time_ns if inside else now


def sendable(data: bytes, decoded: DecodedProfile) -> bytes:
    """A pprof file's bytes, uncompressed and with a time that the server takes.

    Args:
        data: the file, gzip or not.
        decoded: the same, which proves that it is whole and within the size limit.
    """
    import gzip

    from gpumem_otel.profiles import protobuf_wire

    raw = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    time_ns = usable_time_ns(decoded.time_ns)
    # protobuf: of a repeated scalar field the last value counts
    return raw if time_ns == decoded.time_ns else raw + protobuf_wire.int_field(9, time_ns)


def _send(source: str, parcels: Sequence[_Parcel], config: Config) -> None:
    from gpumem_otel.errors import PushError
    from gpumem_otel.push.pyroscope import series_labels

    identity = {
        "service_name": config.service_name or _DEFAULT_SERVICE,
        "namespace": config.namespace,
        "run_id": config.run_id,
        "tags": config.tags,
    }
    url = config.pyroscope.url
    with _sink(config, **identity) as (sink, pushed_as), progress(f"pushing {source}") as report:
        for done, parcel in enumerate(parcels):
            labels = series_labels(pushed_as, device=parcel.device or 0)
            name = f"device {parcel.device}"
            if parcel.device is None:
                labels = tuple(pair for pair in labels if pair[0] != "device")
                name = "pprof file"
            try:
                sink.send(parcel.data, labels, config.pyroscope.timeout_seconds)
            except PushError as error:
                raise CommandFailed(f"{url}: {name} not pushed: {error}") from error
            report(done + 1, len(parcels))
            click.echo(
                f"pushed {name}: {human_bytes(parcel.total_bytes)} in {parcel.samples} stacks "
                f"to {url} as {pushed_as.service_name}"
            )


def send_all(config: Config) -> None:
    """Send every profile of the spool, the oldest first, and delete what is stored.

    Raises:
        CommandFailed: one was not sent and stays in the spool; where the server cannot be reached
            or refuses everything, so do those after it.
        SpoolError: the folder is not safe to use.
    """
    from gpumem_otel.push.spool import Spool

    spool = Spool(config.spool_dir)
    names = spool.waiting()
    if not names:
        click.echo(f"nothing waits in {spool.folder}")
        return
    with _sink(config, service_name=config.service_name) as (sink, _):
        refused = [name for name in names if not _send_waiting(spool, name, sink, config)]
    if refused:
        raise CommandFailed(f"{config.pyroscope.url}: {len(refused)} of {len(names)} not pushed")


@contextmanager
def _sink(config: Config, **identity: Any) -> Iterator[tuple[PyroscopeSink, Identity]]:
    """A connection to the server, and the identity that pushes have."""
    from gpumem_otel.push.pyroscope import PyroscopeSink
    from gpumem_otel.push.transport import Transport
    from gpumem_otel.settings.identity import identify

    base = environ()
    pushed_as = identify(base, **identity)
    transport = Transport(config.pyroscope, environ=base)
    try:
        yield PyroscopeSink(transport, config.pyroscope, lambda: pushed_as), pushed_as
    finally:
        transport.close()


def _send_waiting(spool: Spool, name: str, sink: PyroscopeSink, config: Config) -> bool:
    """Send one; False where the server refuses it. A file that is not ours stays where it is."""
    from gpumem_otel.errors import EncodeError, PushError
    from gpumem_otel.profiles import pprof
    from gpumem_otel.push.spool import labels_of

    path, url = f"{spool.folder}/{name}", config.pyroscope.url
    try:
        data = spool.read(name)
        decoded = pprof.decode(data)
        total = decoded.total("inuse_space")
    except FileNotFoundError:
        return True  # another `push` has sent it
    except EncodeError as error:
        warn(f"{path}: not a pprof file, left where it is: {error}")
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
        message = f"{url}: {path} not pushed: {error}"
        if error.reason not in _REFUSED:
            raise CommandFailed(message) from error
        warn(message)  # it stays, and must not block those after it
        return False
    spool.delete(name)
    named = defaultdict(lambda: "?", labels)
    click.echo(
        f"pushed oom_id {named['oom_id']}: {human_bytes(total)} of rank {named['rank']}, "
        f"device {named['device']} to {url} as {named['service_name']}"
    )
    return True
