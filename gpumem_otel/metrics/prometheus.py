"""The METRICS table as a Prometheus exposition, from a registry of our own.

The job's default registry is neither read nor written, so /metrics does not affect what the job
exports. One scrape at level standard costs 0.3 to 0.7 ms of CPU, at full 0.9 to 2 ms (medians of
benchmarks/scrape.py on a busy 2-core machine); within a second the same bytes are served again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from gpumem_otel.metrics.table import Kind, Level, shown, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.protocols import Clock
    from gpumem_otel.metrics.observation import Observation, Observer

MAX_AGE_SECONDS = 1.0
"""Of the values in an answer: for so long the observer is not asked again."""

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_ENCODERS: dict[str, Callable[[CollectorRegistry], bytes]] = {
    TEXT: generate_latest,
    OPENMETRICS: generate_openmetrics,
}
_UNITS = {"By": "bytes", "s": "seconds", "1": "ratio"}


def negotiate(accept: str) -> str:
    """The content type for an Accept header: OpenMetrics where it is preferred, else text 0.0.4.

    Version and escaping of the header are ignored: the names need no escaping, and both formats
    are served in the one version that every Prometheus reads.
    """
    best = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        try:
            weight = float(quality)
        except ValueError:
            continue
        if media in best:
            best[media] = max(best[media], weight)
    openmetrics, text = best.values()
    return OPENMETRICS if openmetrics > 0 and openmetrics >= text else TEXT


def families(observation: Observation, level: Level) -> Iterator[Metric]:
    """The metric families of one observation; those without a row are left out."""
    for metric in shown(level):
        is_counter = metric.kind is Kind.COUNTER
        family = Metric(
            metric.prometheus.removesuffix("_total") if is_counter else metric.prometheus,
            metric.help,
            "counter" if is_counter else "gauge",
            _UNITS.get(metric.unit, ""),
        )
        for attributes, value in values_of(metric, observation, level):
            labels = {key.replace(".", "_"): text for key, text in attributes.items()}
            family.add_sample(metric.prometheus, labels, value)
        if family.samples:
            yield family


class _Collector:
    """Gives prometheus_client the families of the present observation."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self.observation: Observation | None = None

    def describe(self) -> list[Metric]:
        """Nothing, since registration must not read anything."""
        return []

    def collect(self) -> Iterator[Metric]:
        if self.observation is not None:
            yield from families(self.observation, self._level)


class Exposition:
    """Renders /metrics; safe to call from any thread, one rendering at a time.

    Args:
        observer: gives the values; None gives an empty exposition.
        level: which part of the table.
        clock: for the age of the values.
        counters: `exporter_runs` and `exporter_seconds` of stage `scrape`; the listener counts
            failures.
    """

    def __init__(
        self, observer: Observer, level: Level | str, *, clock: Clock, counters: Counters
    ) -> None:
        self._observer = observer
        self._clock = clock
        self._counters = counters
        self._collector = _Collector(Level(level))
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)
        self._lock = threading.Lock()
        self._rendered: dict[str, bytes] = {}

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """(content type, body) for an Accept header.

        Raises:
            Exception: whatever the observer raised. An empty answer instead would end all series,
                those of alerts too.
        """
        content_type = negotiate(accept)
        with self._lock:
            started = self._clock.monotonic()
            try:
                self._observe()
                body = self._rendered.get(content_type)
                if body is None:
                    body = _ENCODERS[content_type](self._registry)
                    self._rendered[content_type] = body
            finally:
                self._counters.add("exporter_runs", stage="scrape")
                self._counters.add(
                    "exporter_seconds", self._clock.monotonic() - started, stage="scrape"
                )
        return content_type, body

    def _observe(self) -> None:
        """Get new values, and forget what was rendered, where the present values are too old."""
        present = self._collector.observation
        if present is not None:
            age_ns = self._clock.time_ns() - present.time_ns
            if 0 <= age_ns < MAX_AGE_SECONDS * 1e9:
                return
        # First, so that after a failure nothing old is served.
        self._collector.observation = None
        self._rendered.clear()
        self._collector.observation = self._observer()
