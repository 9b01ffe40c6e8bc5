"""The exposition: formats, the age of its values, what it leaves alone."""

from __future__ import annotations

import threading
import time

import prometheus_client
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from support import observations as obs
from support.asgi import get

from gpumem_otel.base.counters import Counters
from gpumem_otel.errors import CaptureError
from gpumem_otel.metrics.prometheus import OPENMETRICS, TEXT, Exposition, negotiate
from gpumem_otel.metrics.table import METRICS, Level, rows
from gpumem_otel.serve.auth import Tokens
from gpumem_otel.serve.dependencies import AppDeps
from gpumem_otel.serve.guard import HostNames, RequestGuard
from gpumem_otel.serve.read_api import build_app
from gpumem_otel.serve.threads import RequestThreads
from gpumem_otel.settings.config import Secret

PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


class FakeClock:
    """A clock that moves only when a test moves it; it starts at the time of the observations."""

    def __init__(self):
        self.now = 0.0

    def time_ns(self):
        return obs.full().time_ns + round(self.now * 1e9)

    def monotonic(self):
        return self.now

    def wait(self, event, seconds):
        raise AssertionError("nothing waits here")


class Observer:
    """Gives its observation, and counts how often it is asked."""

    def __init__(self, observation):
        self.observation = observation
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if isinstance(self.observation, Exception):
            raise self.observation
        return self.observation


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def counters():
    return Counters()


def expected(observation, level):
    """The series as the table itself has them."""
    return {
        (
            metric.prometheus,
            frozenset((k.replace(".", "_"), v) for k, v in attributes.items() if v),
        ): float(value)
        for metric, attributes, value in rows(observation, level)
    }


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("observation", [obs.full((0, 1)), obs.bare()], ids=["full", "bare"])
def test_text_holds_the_table(level, observation, clock, counters):
    exposition = Exposition(Observer(observation), level, clock=clock, counters=counters)
    content_type, body = exposition.render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert obs.parsed(body) == expected(observation, level)
    assert counters.get("exporter_errors", stage="scrape") == 0


def test_text_of_one_family_is_exactly_this(clock, counters):
    exposition = Exposition(Observer(obs.full()), "standard", clock=clock, counters=counters)
    lines = exposition.render()[1].decode().splitlines()
    start = lines.index("# TYPE gpumem_ooms_total counter")
    assert lines[start - 1 : start + 2] == [
        "# HELP gpumem_ooms_total Allocations that failed for good, caught by the job or not.",
        "# TYPE gpumem_ooms_total counter",
        'gpumem_ooms_total{device="0",rank="3"} 1.0',
    ]
    assert 'gpumem_allocated_bytes{device="0",rank="3"} 6e+09' in lines


def test_openmetrics_parses_to_the_same_values(clock, counters):
    observation = obs.full((0, 1))
    exposition = Exposition(Observer(observation), "full", clock=clock, counters=counters)
    content_type, body = exposition.render(PROMETHEUS_3)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    samples = {}
    families = list(openmetrics(body.decode()))
    for family in families:
        for sample in family.samples:
            labels = frozenset((k, v) for k, v in sample.labels.items() if v)
            samples[sample.name, labels] = sample.value
    assert samples == expected(observation, Level.FULL)
    assert body.endswith(b"# EOF\n")
    assert b"_created" not in body
    assert {family.unit for family in families} == {"", "bytes", "seconds", "ratio"}


def test_every_family_has_help_and_type_and_all_names_are_the_tables(clock, counters):
    exposition = Exposition(Observer(obs.full()), "full", clock=clock, counters=counters)
    lines = exposition.render()[1].decode().splitlines()
    for word in ("# HELP", "# TYPE"):
        names = [line.split()[2] for line in lines if line.startswith(word)]
        assert names == [metric.prometheus for metric in METRICS]
    assert not any("otel_scope" in line for line in lines)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html", TEXT),
        ("text/plain;version=0.0.4", TEXT),
        (PROMETHEUS_3, OPENMETRICS),
        ("application/openmetrics-text", OPENMETRICS),
        ("Application/OpenMetrics-Text; version=1.0.0", OPENMETRICS),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.9", TEXT),
        ("application/openmetrics-text;q=rubbish", TEXT),
        ("application/openmetrics-text;q=nan", TEXT),
        ("application/openmetrics-text;version=1.0.0\r\nx-evil: 1;escaping=dots", OPENMETRICS),
        (";;;,,,q=1", TEXT),
    ],
)
def test_negotiation(accept, content_type):
    assert negotiate(accept) == content_type


def test_values_are_at_most_a_second_old(clock, counters):
    observer = Observer(obs.full())
    exposition = Exposition(observer, "minimal", clock=clock, counters=counters)
    first = exposition.render()
    clock.now += 0.75
    observer.observation = obs.full(devices=(obs.stats(allocated_bytes=1),))
    assert exposition.render() == first
    assert observer.calls == 1
    assert exposition.render(PROMETHEUS_3)[0] == OPENMETRICS
    assert observer.calls == 1, "the other format is rendered from the same values"
    clock.now += 0.25
    assert exposition.render() != first
    assert observer.calls == 2
    clock.now -= 3600
    exposition.render()
    assert observer.calls == 3, "a clock that was set back does not freeze the values"


def test_nothing_to_export_is_empty_and_valid(clock, counters):
    observer = Observer(obs.full())
    exposition = Exposition(observer, "full", clock=clock, counters=counters)
    exposition.render()
    clock.now += 1
    observer.observation = None
    assert exposition.render() == (TEXT, b"")
    assert exposition.render(PROMETHEUS_3) == (OPENMETRICS, b"# EOF\n")
    assert counters.get("exporter_errors", stage="scrape") == 0


def test_a_failing_observer_is_no_empty_exposition(clock, counters):
    """GIVEN it cannot be read THEN it raises, and tries again with the next scrape."""
    observer = Observer(CaptureError("allocator is gone"))
    exposition = Exposition(observer, "full", clock=clock, counters=counters)
    for accept in ("", PROMETHEUS_3):
        with pytest.raises(CaptureError, match="allocator is gone"):
            exposition.render(accept)
    assert observer.calls == 2
    assert counters.get("exporter_runs", stage="scrape") == 2
    observer.observation = obs.full()
    assert obs.parsed(exposition.render()[1])


def test_old_values_are_not_served_after_a_failure(clock, counters):
    observer = Observer(obs.full())
    exposition = Exposition(observer, "full", clock=clock, counters=counters)
    assert exposition.render()[1]
    clock.now += 5
    observer.observation = RuntimeError("no")
    with pytest.raises(RuntimeError, match="no"):
        exposition.render()
    observer.observation = None
    assert exposition.render() == (TEXT, b"")


def test_a_failure_reaches_the_scraper_as_one_line(clock, counters, caplog):
    """GIVEN the allocator cannot be read WHEN scraped THEN an error is answered, counted once."""
    exposition = Exposition(
        Observer(RuntimeError("CUDA error")), "full", clock=clock, counters=counters
    )
    workers = RequestThreads()
    app = RequestGuard(
        build_app(AppDeps(metrics=exposition.render, profile=None, health=None), workers),
        hosts=HostNames("127.0.0.1", ()),
        tokens=Tokens(Secret(""), ""),
        workers=workers,
        counters=counters,
    )
    for _ in range(2):
        answer = get(app, "/metrics")
        assert answer.status in {500, 503}
        assert answer.headers["content-type"].startswith("text/plain")
        assert len(answer.body.splitlines()) == 1
    workers.stop()
    assert workers.join(time.monotonic() + 10)
    assert counters.get("exporter_errors", stage="scrape") == 2
    assert len([r for r in caplog.records if r.name.startswith("gpumem_otel")]) == 1


def test_scrapes_are_counted(clock, counters):
    def slow():
        clock.now += 0.5
        return obs.full(time_ns=clock.time_ns())

    exposition = Exposition(slow, "full", clock=clock, counters=counters)
    exposition.render()
    exposition.render()
    assert counters.get("exporter_runs", stage="scrape") == 2
    assert counters.get("exporter_seconds", stage="scrape") == 0.5


def test_scrapes_are_serialized(clock, counters):
    """Two at once: the observer is asked by one of them, and both answer the same."""
    inside, go_on = threading.Event(), threading.Event()
    calls = []

    def observer():
        calls.append(threading.current_thread())
        inside.set()
        assert go_on.wait(10)
        return obs.full()

    exposition = Exposition(observer, "full", clock=clock, counters=counters)
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(exposition.render())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert inside.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(calls) == 1
    assert len(answers) == 3
    assert len(set(answers)) == 1


def test_the_jobs_own_registry_is_as_before(clock, counters):
    """Neither has the other's metrics."""
    own = prometheus_client.Counter("job_batches", "Of the job.")
    own.inc(3)
    try:
        before = prometheus_client.generate_latest(prometheus_client.REGISTRY)
        exposition = Exposition(Observer(obs.full()), "full", clock=clock, counters=counters)
        body = exposition.render()[1]
        after = prometheus_client.generate_latest(prometheus_client.REGISTRY)
    finally:
        prometheus_client.REGISTRY.unregister(own)
    assert b"job_batches" not in body
    assert b"python_info" not in body
    names = [
        [line.split()[0] for line in text.splitlines() if not line.startswith(b"#")]
        for text in (before, after)
    ]
    assert names[0] == names[1]
    assert b"job_batches_total 3.0" in after
