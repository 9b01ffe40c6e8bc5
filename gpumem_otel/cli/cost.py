"""`gpumem-otel cost`: what the metrics and profiles of a job amount to, before it runs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from gpumem_otel.base.profile import DeviceStats, DeviceTotals, Identity, SourceStatus, StepStats
from gpumem_otel.cli.inputs import environ
from gpumem_otel.cli.output import fields_of, print_json, warn
from gpumem_otel.cli.shared_options import json_option
from gpumem_otel.metrics.observation import Observation
from gpumem_otel.metrics.table import rows
from gpumem_otel.metrics.values import DEFAULT_POOL, PRIVATE_POOLS_SHOWN
from gpumem_otel.snapshot.tensor_classes import TensorClass
from gpumem_otel.yielding.values import RESIDUAL_CAUSES, YieldStatus

if TYPE_CHECKING:
    from gpumem_otel.metrics.table import Level
    from gpumem_otel.settings.config import Config

_T = TypeVar("_T")


def series_of_a_rank(
    level: Level, devices: int, kinds: tuple[str, ...], *, can_yield: bool = False
) -> int:
    """Series that one process exports at most, with every other feature on: rows of METRICS.

    Args:
        level: how many metrics there are.
        devices: that the process uses.
        kinds: of the profiles that it pushes.
        can_yield: whether it takes commands to yield.
    """
    return sum(1 for _ in rows(_everything(devices, kinds, can_yield=can_yield), level))


def _everything(count: int, kinds: tuple[str, ...], *, can_yield: bool) -> Observation:
    """One process of a larger job that has a value for every row of the table."""
    devices = tuple(range(count))
    # the default pool, the private pools shown by name, and one for `other`
    pools = {DEFAULT_POOL: 1} | {(0, n + 1): 1 for n in range(PRIVATE_POOLS_SHOWN + 1)}
    classes = dict.fromkeys((item.value for item in TensorClass), 1)
    uuids = {device: f"GPU-{device}" for device in devices}
    return Observation(
        identity=Identity(service_name="", world_size=2, device_uuids=uuids),
        status=SourceStatus(armed=True, supported=True, devices=devices),
        time_ns=0,
        devices=tuple(_filled(DeviceStats, device=device) for device in devices),
        totals={
            device: _filled(DeviceTotals, device=device, pool_reserved_bytes=pools)
            for device in devices
        },
        classes=dict.fromkeys(devices, classes),
        steps=_filled(StepStats, floor_bytes=dict.fromkeys(devices, 1)),
        counters={("last_push_timestamp_seconds", (("kind", kind),)): 1.0 for kind in kinds},
        yields=YieldStatus(lease_expiry_ns=1, residual_bytes=dict.fromkeys(RESIDUAL_CAUSES, 1))
        if can_yield
        else None,
    )


def _filled(kind: type[_T], **given: object) -> _T:
    """A value whose other fields, all numbers, are 1."""
    names = (field.name for field in fields(kind))  # type: ignore[arg-type] # a dataclass
    return kind(**{name: given.get(name, 1) for name in names})


BYTES_PER_SAMPLE = 2
"""On the disk of Prometheus, whose documentation says 1 to 2.
https://prometheus.io/docs/prometheus/latest/storage/#operational-aspects"""

SCRAPE_SERIES = 5
"""What Prometheus writes about each target itself: `up` and four `scrape_*`.
https://prometheus.io/docs/concepts/jobs_instances/"""

PROFILE_BYTES = 3_845
"""One pushed profile of 200 stacks: `gzip_bytes` of benchmarks/results/overhead-h200.json."""

_SAMPLE_TYPES = 3
"""Of every profile: objects, space and snapshots, each a profile type of its own in Pyroscope."""

_MONTH_SECONDS = 30 * 86_400

_EPILOG = """\b
Examples:
  gpumem-otel cost --ranks 4000
  gpumem-otel cost --ranks 512 --metrics-level full --scrape-interval 30
  GPUMEM_OTEL_PROFILES=live,allocated gpumem-otel cost --ranks 64 --json

What is not said here is taken from the environment variables, as a job would take it.
"""


class CostQuestion(NamedTuple):
    """The options of the command line; None: as the settings say."""

    ranks: int
    devices_per_rank: int = 1
    metrics_level: str | None = None
    scrape_interval: float | None = None
    profile_interval: float | None = None
    profile_bytes: int = PROFILE_BYTES


class CostRow(NamedTuple):
    """One line of the answer; `per_second` is the number of samples, or of profiles."""

    series: int
    interval_seconds: float
    per_second: float
    bytes_per_second: float

    @property
    def gb_per_month(self) -> float:
        """Billions of bytes in 30 days."""
        return self.bytes_per_second * _MONTH_SECONDS / 1e9


@click.command("cost", epilog=_EPILOG, short_help="Print series and bytes of a job of this size.")
@click.option("--ranks", type=click.IntRange(1, 10_000_000), required=True, help="Processes.")
@click.option(
    "--devices-per-rank",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="GPUs that each process uses.",
)
@click.option(
    "--metrics-level",
    type=click.Choice(["minimal", "standard", "full"]),
    help="How many metrics (GPUMEM_OTEL_METRICS_LEVEL).",
)
@click.option(
    "--scrape-interval",
    type=click.FloatRange(0.1, 86_400),
    metavar="SECONDS",
    help="Between scrapes; 15, or where metrics go over OTLP only, OTEL_METRIC_EXPORT_INTERVAL.",
)
@click.option(
    "--profile-interval",
    type=click.FloatRange(0.1, 86_400),
    metavar="SECONDS",
    help="Between profiles (GPUMEM_OTEL_INTERVAL).",
)
@click.option(
    "--profile-bytes",
    type=click.IntRange(1, 100_000_000),
    metavar="N",
    default=PROFILE_BYTES,
    show_default=True,
    help="Of one pushed profile, gzipped.",
)
@json_option("The same as JSON, for programs.")
def command(*, as_json: bool, **question: Any) -> None:
    """Print how many series and bytes the metrics and profiles of a job come to."""
    from gpumem_otel.settings.options import resolve

    config = resolve(environ())
    wanted = CostQuestion(**question)
    metrics, profiles, assumptions = estimate(config, wanted)
    if as_json:
        print_json(
            {
                **fields_of(wanted, "ranks", "devices_per_rank"),
                "metrics": _form(metrics, "samples_per_second"),
                "profiles": _form(profiles, "profiles_per_second"),
                "assumptions": assumptions,
                "warnings": list(config.warnings),
            }
        )
        return
    for warning in config.warnings:
        warn(warning)
    _print(wanted, metrics, profiles, assumptions)


def estimate(config: Config, wanted: CostQuestion) -> tuple[CostRow, CostRow, list[str]]:
    """Metrics, profiles, and what was assumed of them, a sentence each."""
    metrics, about_metrics = _metrics(config, wanted)
    profiles, about_profiles = _profiles(config, wanted)
    assumptions = [
        *(f"metrics: {sentence}" for sentence in about_metrics),
        *(f"profiles: {sentence}" for sentence in about_profiles),
    ]
    if not config.enabled:
        assumptions.append("GPUMEM_OTEL_DISABLED is set here: a job would export nothing")
    assumptions.append("a month has 30 days, a GB 1,000,000,000 bytes")
    return metrics, profiles, assumptions


def _metrics(config: Config, wanted: CostQuestion) -> tuple[CostRow, list[str]]:
    from gpumem_otel.metrics.table import Level

    kinds = config.profiles.kinds
    level = Level(wanted.metrics_level or config.metrics.level)
    without = series_of_a_rank(level, wanted.devices_per_rank, kinds)
    can_yield = config.control.enabled
    own = series_of_a_rank(level, wanted.devices_per_rank, kinds, can_yield=can_yield)
    only_otlp = config.metrics.otlp and not config.serve.enabled and not wanted.scrape_interval
    of_scrape = 0 if only_otlp else SCRAPE_SERIES
    interval = config.metrics.otlp_interval_seconds if only_otlp else wanted.scrape_interval or 15.0
    series = wanted.ranks * (own + of_scrape)
    way = "sent over OTLP" if only_otlp else f"scraped, and {SCRAPE_SERIES} about each scrape"
    assumed = [
        f"level {level.value}, at most {own} series a rank, {way}",
        f"{BYTES_PER_SAMPLE} bytes a sample on Prometheus' disk; it says 1 to 2 itself",
    ]
    if can_yield:
        assumed.append(f"{own - without} of them about yield and restore (GPUMEM_OTEL_CONTROL)")
    if config.metrics.otlp and not only_otlp:
        assumed.append("OTLP is on besides, and comes on top where it is stored too")
    return CostRow(
        series, interval, series / interval, series / interval * BYTES_PER_SAMPLE
    ), assumed


def _profiles(config: Config, wanted: CostQuestion) -> tuple[CostRow, list[str]]:
    from gpumem_otel.push.schedule import stretch

    kinds = config.profiles.kinds
    asked = wanted.profile_interval or config.profiles.interval_seconds
    a_round = wanted.ranks * wanted.devices_per_rank * len(kinds)
    budget = config.profiles.job_push_bytes_per_second
    interval = stretch(asked, a_round * wanted.profile_bytes / budget)
    sent = a_round / interval
    measured = " (measured: 200 stacks)" if wanted.profile_bytes == PROFILE_BYTES else ""
    assumed = [
        f"{', '.join(kinds)}, of each device, {wanted.profile_bytes:,} bytes a push{measured}",
        "bytes are those sent, gzipped, not what a server makes of them",
    ]
    if interval > asked:
        assumed.append(
            f"every {interval:g} s instead of {asked:g} s, to stay within the job's "
            f"budget of {budget:,.0f} bytes a second (GPUMEM_OTEL_JOB_PUSH_BYTES_PER_SECOND)"
        )
    if not config.pyroscope.url:
        assumed.append("as if PYROSCOPE_SERVER_ADDRESS were set, which it is not here")
    return CostRow(a_round * _SAMPLE_TYPES, interval, sent, sent * wanted.profile_bytes), assumed


def _form(row: CostRow, per_second: str) -> dict[str, float]:
    return {
        "series": row.series,
        "interval_seconds": row.interval_seconds,
        per_second: round(row.per_second, 3),
        "bytes_per_second": round(row.bytes_per_second, 3),
        "gb_per_month": round(row.gb_per_month, 3),
    }


def _print(
    wanted: CostQuestion, metrics: CostRow, profiles: CostRow, assumptions: list[str]
) -> None:
    devices = f"{wanted.devices_per_rank} device" + "s" * (wanted.devices_per_rank > 1)
    ranks = f"{wanted.ranks:,} rank" + "s" * (wanted.ranks > 1)
    click.echo(f"{ranks}, {devices} each")
    click.echo(
        f"{'':<10}{'series':>14}{'every':>10}{'per second':>22}{'bytes/s':>16}{'GB/month':>12}"
    )
    for name, row, things in (
        ("metrics", metrics, "samples"),
        ("profiles", profiles, "profiles"),
    ):
        click.echo(
            f"{name:<10}{row.series:>14,}{f'{row.interval_seconds:g} s':>10}"
            f"{f'{row.per_second:,.1f} {things}':>22}{row.bytes_per_second:>16,.0f}"
            f"{row.gb_per_month:>12,.1f}"
        )
    click.echo("assumed:")
    for sentence in assumptions:
        click.echo(f"  {sentence}")
