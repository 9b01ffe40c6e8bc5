"""The METRICS table as OpenTelemetry asynchronous instruments.

The instruments are on the API's proxy meter and follow the MeterProvider that the job sets, before
install() or after it; we never set one. Only where none exists when the first export is due, a
provider of our own (metrics/otlp_provider.py) collects the same table and sends it over OTLP. It is
shut down as soon as the job sets one, so nothing is exported twice.

Instruments cannot be unregistered, so there is one set per process. Its callbacks report the values
of the `OtelMetrics` that runs now, or none. A callback never raises, and reports nothing in a
forked child, where OpenTelemetry's periodic reader starts again by itself.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import TYPE_CHECKING

from opentelemetry import metrics as api

from gpumem_otel._version import __version__
from gpumem_otel.base.logs import named_logger
from gpumem_otel.metrics.table import METRICS, Kind, Level, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.base.profile import Identity
    from gpumem_otel.metrics.observation import Observation, Observer
    from gpumem_otel.metrics.otlp_provider import OwnProvider
    from gpumem_otel.metrics.table import Metric

MAX_AGE_SECONDS = 1.0
STOP_SECONDS = 2.0
"""For the last export at the end; a server that hangs is abandoned after that."""

_log = named_logger("gpumem_otel.otel")


class Feed:
    """The values that the callbacks of one run report.

    All instruments of one collection share one observation, so that the rows of different metrics
    add up: a new one is made when an instrument asks again, or after a second. Where that failed,
    the collection holds nothing.
    """

    def __init__(self, observer: Observer, level: Level, counters: Counters) -> None:
        self._observer = observer
        self._level = level
        self._counters = counters
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._served: set[str] = set()
        self._observation: Observation | None = None
        self._observed_at = float("-inf")
        self._logged = False
        self.open = True

    @property
    def active(self) -> bool:
        """Whether it runs, and in this process."""
        return self._pid == os.getpid() and self.open

    def observations(self, metric: Metric) -> list[api.Observation]:
        """The data points of one metric; [] where there are none. Never raises."""
        if not self.active or not self._level.holds(metric.level):
            return []
        try:
            with self._lock:
                now = time.monotonic()
                fresh = now - self._observed_at < MAX_AGE_SECONDS
                if metric.name in self._served or not fresh:
                    # Set before asking: one collection asks a failing observer only once.
                    self._served = {metric.name}
                    self._observation, self._observed_at = None, now
                    self._observation = self._observer()
                self._served.add(metric.name)
                observation = self._observation
            if observation is None:
                return []
            return [
                api.Observation(value, attributes)
                for attributes, value in values_of(metric, observation, self._level)
            ]
        except Exception:
            self._counters.add("exporter_errors", stage="scrape")
            if not self._logged:
                self._logged = True
                _log.warning("a metric could not be read", exc_info=True)
            return []


def register(meter: api.Meter, feed: Callable[[], Feed | None]) -> None:
    """Create one instrument per row of the table on a meter; `feed` is asked at each callback."""
    create = {
        Kind.GAUGE: meter.create_observable_gauge,
        Kind.SUM: meter.create_observable_up_down_counter,
        Kind.COUNTER: meter.create_observable_counter,
    }

    def callback(metric: Metric) -> Callable[[api.CallbackOptions], Iterable[api.Observation]]:
        def read(_: api.CallbackOptions) -> Iterable[api.Observation]:
            current = feed()
            return [] if current is None else current.observations(metric)

        return read

    for metric in METRICS:
        create[metric.kind](
            metric.name, callbacks=[callback(metric)], unit=metric.unit, description=metric.help
        )


class _Instruments:
    """The one set of instruments of this process on the API's meter."""

    def __init__(self) -> None:
        self._registered = False
        self.feed: Feed | None = None

    def use(self, feed: Feed) -> None:
        self.feed = feed
        if not self._registered:
            self._registered = True
            register(api.get_meter("gpumem_otel", __version__), lambda: self.feed)

    def leave(self, feed: Feed) -> None:
        if self.feed is feed:
            self.feed = None


_INSTRUMENTS = _Instruments()


def _job_has_provider() -> bool:
    """Whether the job set a MeterProvider; a no-op one counts too."""
    # The API has no public way to ask; before a provider is set it returns this proxy.
    return type(api.get_meter_provider()).__name__ != "_ProxyMeterProvider"


class OtelMetrics:
    """Metrics over OpenTelemetry, from start() to stop(). One runs at a time in a process.

    Args:
        observer: gives the values.
        level: which part of the table.
        identity: names the resource of our own provider.
        environ: the `OTEL_*` variables with endpoint, protocol, headers and so on of that provider.
        interval_seconds: of its exports, and how soon it gives way to the job's own provider.
        counters: `exporter_errors` of stage `scrape` (a callback) and `push` (an export).
    """

    def __init__(  # noqa: PLR0917 - the composition root's one call
        self,
        observer: Observer,
        level: Level | str,
        identity: Identity,
        environ: Mapping[str, str],
        interval_seconds: float,
        counters: Counters,
    ) -> None:
        self._feed = Feed(observer, Level(level), counters)
        self._identity = identity
        self._environ = environ
        self._interval_seconds = min(interval_seconds, threading.TIMEOUT_MAX)
        self._counters = counters
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._flusher: threading.Thread | None = None
        self._own: OwnProvider | None = None

    def start(self) -> None:
        """Register or take over the instruments; without a provider of the job, start our thread.

        It is a daemon that exports through our own provider until the job sets one.
        """
        _INSTRUMENTS.use(self._feed)
        if _job_has_provider():
            return
        self._thread = threading.Thread(target=self._run, name="gpumem-otlp", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self, timeout_seconds: float = STOP_SECONDS) -> None:
        """Export once more through our own provider, if any, and report nothing from then on.

        Returns within the timeout; idempotent. In a forked child nothing is exported.
        """
        atexit.unregister(self.stop)
        thread, self._thread = self._thread, None
        if thread is not None and self._pid == os.getpid():
            self._stopping.set()
            self._wake.set()
            thread.join(timeout_seconds)
            if thread.is_alive():
                self._counters.add("exporter_errors", stage="push")
                if self._own is not None:
                    self._own.interrupt()
        self._feed.open = False
        _INSTRUMENTS.leave(self._feed)

    def flush(self) -> None:
        """Export soon, whatever the interval; returns at once.

        The job's own provider is flushed too, on a thread of its own, since it may be slow.
        """
        if not self._feed.active:
            return
        if not _job_has_provider():
            self._wake.set()
            return
        force_flush = getattr(api.get_meter_provider(), "force_flush", None)
        busy = self._flusher is not None and self._flusher.is_alive()
        if force_flush is None or busy:
            return
        self._flusher = threading.Thread(
            target=self._flush_job, args=(force_flush,), name="gpumem-otlp-flush", daemon=True
        )
        self._flusher.start()

    def _flush_job(self, force_flush: Callable[..., object]) -> None:
        try:
            force_flush(timeout_millis=STOP_SECONDS * 1e3)
        except Exception:
            self._counters.add("exporter_errors", stage="push")

    def _run(self) -> None:
        try:
            while self._tick():
                pass
        except Exception:
            self._counters.add("exporter_errors", stage="push")
            _log.warning("metrics are no longer exported over OTLP", exc_info=True)
        finally:
            if self._own is not None:
                self._own.shutdown()

    def _tick(self) -> bool:
        """Wait an interval and export; False after the last time."""
        self._wake.wait(self._interval_seconds)
        self._wake.clear()
        last = self._stopping.is_set()
        if _job_has_provider():
            return False
        if self._own is None:
            self._own = self._make_own()
            if self._own is None:
                return False
        self._own.export()
        return not last

    def _make_own(self) -> OwnProvider | None:
        # The SDK and the exporter are heavy, and most jobs that have a provider never need ours.
        from gpumem_otel.metrics.otlp_provider import OwnProvider, exporter  # noqa: PLC0415

        made, advice = exporter(self._environ)
        if advice:
            _log.warning("%s", advice)
        if made is None:
            self._counters.add("exporter_errors", stage="push")
            return None
        own = OwnProvider(made, self._identity, self._environ, self._counters)
        # Checked at each callback: once the job has a provider, ours must not report as well.
        register(own.meter, lambda: None if _job_has_provider() else self._feed)
        return own
