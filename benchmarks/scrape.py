"""CPU time of one scrape and of one OpenTelemetry collection, by level.

    python benchmarks/scrape.py [repeats]

Every row of the table is there, for one device; the observation itself (11 us of counters on a
GPU) is not counted. Prints the median and the highest of all repeats.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from support import observations as obs

from gpumem_otel.base.counters import Counters
from gpumem_otel.metrics.otlp import Feed, register
from gpumem_otel.metrics.prometheus import OPENMETRICS, TEXT, Exposition
from gpumem_otel.metrics.table import Level, rows

if TYPE_CHECKING:
    from collections.abc import Callable


class Ticking:
    """A clock by which every scrape is a minute after the last: nothing is served twice."""

    now = 0.0

    def time_ns(self) -> int:
        """Long before the observation: its values count as stale."""
        return 0

    def monotonic(self) -> float:
        """A minute later each time."""
        self.now += 60
        return self.now

    def wait(self, *_: object) -> bool:
        """Not asked for."""
        return False


def measured(call: Callable[[], object], repeats: int) -> str:
    """Median and maximum of thread CPU time."""
    for _ in range(20):
        call()
    times = []
    for _ in range(repeats):
        begin = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - begin)
    return f"median {statistics.median(times) / 1e6:.3f} ms, max {max(times) / 1e6:.3f} ms"


def main() -> None:
    """Print one line per way and level."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    observation = obs.full()
    for level in Level:
        counters = Counters()
        exposition = Exposition(
            lambda: replace(observation), level, clock=Ticking(), counters=counters
        )
        count = len(list(rows(observation, level)))
        for kind in (TEXT, OPENMETRICS):
            accept = kind.partition(";")[0]
            size = len(exposition.render(accept)[1])
            cost = measured(lambda a=accept, e=exposition: e.render(a), repeats)
            print(f"{level.value:9}{count:3} series  {accept:29}{size:6} B  {cost}")
        reader = InMemoryMetricReader()
        provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
        feed = Feed(lambda: observation, level, counters)
        register(provider.get_meter("benchmark"), lambda f=feed: f)
        cost = measured(reader.get_metrics_data, repeats)
        print(f"{level.value:9}{count:3} series  {'OpenTelemetry collection':29}          {cost}")
        provider.shutdown()


if __name__ == "__main__":
    main()
