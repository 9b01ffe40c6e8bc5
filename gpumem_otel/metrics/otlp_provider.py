"""Our own MeterProvider, only for a job that has none; never set globally.

Imported when the first export is due, since the SDK and the exporter are heavy. The reader's own
thread is not used (its shutdown joins for up to 30 s, and it starts again in a forked child): the
thread of metrics/otlp.py calls `export()`.
"""

from __future__ import annotations

import importlib
import math
import platform
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.version import __version__ as sdk_version

from gpumem_otel._version import __version__
from gpumem_otel.base.logs import named_logger
from gpumem_otel.settings.parsers import parse_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import Identity

EXPORT_SECONDS = 30.0
"""For one collection and export; the exporter's own time-out is 10 s."""

_DEFAULT_ENDPOINT = "http://localhost:4318"
_PACKAGE = "opentelemetry-exporter-otlp-proto-"
_log = named_logger("gpumem_otel.otel")


def _setting(environ: Mapping[str, str], name: str) -> str:
    """`OTEL_EXPORTER_OTLP_METRICS_<name>`, else `OTEL_EXPORTER_OTLP_<name>`."""
    return (
        environ.get(f"OTEL_EXPORTER_OTLP_METRICS_{name}")
        or environ.get(f"OTEL_EXPORTER_OTLP_{name}")
        or ""
    ).strip()


def _endpoint(environ: Mapping[str, str]) -> str:
    """Full URL for OTLP over HTTP: the general variable is a base, the other the URL itself.

    https://opentelemetry.io/docs/specs/otel/protocol/exporter/#endpoint-urls-for-otlphttp
    """
    full = environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "").strip()
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip() or _DEFAULT_ENDPOINT
    return full or f"{base.rstrip('/')}/v1/metrics"


def exporter(environ: Mapping[str, str]) -> tuple[MetricExporter | None, str]:
    """An OTLP exporter for these variables, and a sentence about what of them cannot be followed.

    Protocol, endpoint and (over HTTP) headers come from the mapping; the exporter itself reads
    certificates, compression, time-out and temporality from the process's environment.
    """
    protocol = _setting(environ, "PROTOCOL") or "http/protobuf"
    advice = ""
    if protocol not in {"http/protobuf", "grpc"}:
        advice = f"OTEL_EXPORTER_OTLP_PROTOCOL {protocol!r} is not supported: using http/protobuf"
        protocol = "http/protobuf"
    short = "grpc" if protocol == "grpc" else "http"
    try:
        module: Any = importlib.import_module(
            f"opentelemetry.exporter.otlp.proto.{short}.metric_exporter"
        )
    except ImportError:
        return None, (
            f"metrics over OTLP ({protocol}) need a package that is not installed: "
            f"pip install {_PACKAGE}{short}"
        )
    if short == "grpc":
        endpoint = _setting(environ, "ENDPOINT") or None
        made: MetricExporter = module.OTLPMetricExporter(endpoint=endpoint)
    else:
        headers = parse_pairs(_setting(environ, "HEADERS")) or None
        made = module.OTLPMetricExporter(endpoint=_endpoint(environ), headers=headers)
    return made, advice


def resource_attributes(identity: Identity, environ: Mapping[str, str]) -> dict[str, str]:
    """Attributes of this process: those of the environment, and an instance id of its own.

    Two processes with the same instance id are one series to a server, which takes the first and
    refuses the others. So `service.instance.id` ends in `-<rank>-<pid>`, also where one was set.
    """
    preset = parse_pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    instance = preset.get("service.instance.id") or platform.node() or "localhost"
    return {
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": sdk_version,
        **preset,
        "service.name": identity.service_name or preset.get("service.name") or "unknown_service",
        "service.instance.id": f"{instance}-{identity.rank}-{identity.pid}",
    }


class _Counted(MetricExporter):
    """An exporter whose failures are counted, logged once and never raised."""

    def __init__(self, inner: MetricExporter, counters: Counters) -> None:
        # The reader takes these from its exporter; there is no public name for them.
        super().__init__(
            preferred_temporality=inner._preferred_temporality,  # noqa: SLF001
            preferred_aggregation=inner._preferred_aggregation,  # noqa: SLF001
        )
        self._inner = inner
        self._counters = counters
        self._logged = False
        self._closed = False

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        try:
            result = self._inner.export(metrics_data, timeout_millis=timeout_millis, **kwargs)
        except Exception as error:
            result = MetricExportResult.FAILURE
            if not self._logged:
                self._logged = True
                _log.warning("metrics over OTLP failed, trying again: %s", error)
        if result is not MetricExportResult.SUCCESS:
            self._counters.add("exporter_errors", stage="push")
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._inner.force_flush(timeout_millis=timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        del kwargs  # the reader of every SDK so far passes `timeout`, which exporters do not take
        if not self._closed:
            self._closed = True
            self._inner.shutdown(timeout_millis=timeout_millis)


class OwnProvider:
    """A MeterProvider, its reader and its exporter, with no thread and no exit handler.

    Attributes:
        meter: where the instruments are created.
    """

    def __init__(
        self,
        inner: MetricExporter,
        identity: Identity,
        environ: Mapping[str, str],
        counters: Counters,
    ) -> None:
        self._exporter = _Counted(inner, counters)
        self._reader = PeriodicExportingMetricReader(
            self._exporter,
            export_interval_millis=math.inf,
            export_timeout_millis=EXPORT_SECONDS * 1e3,
        )
        self._provider = MeterProvider(
            metric_readers=[self._reader],
            # Not Resource.create: its detectors need a thread pool, which an ending process lacks
            resource=Resource(dict(resource_attributes(identity, environ))),
            shutdown_on_exit=False,
        )
        self.meter = self._provider.get_meter("gpumem_otel", __version__)

    def export(self) -> None:
        """Collect and send, on the calling thread."""
        self._reader.collect(timeout_millis=EXPORT_SECONDS * 1e3)

    def interrupt(self) -> None:
        """Make an export that runs on another thread stop retrying."""
        self._exporter.shutdown()

    def shutdown(self) -> None:
        """Close the exporter."""
        self._provider.shutdown(timeout_millis=1_000)
