"""OpenTelemetry instruments over the table, in this process and with providers of the test's own.

What needs the API's one global provider runs in processes of its own: test_otlp_export.py.
"""

from __future__ import annotations

import logging
import os
import sys

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from support import observations as obs

from gpumem_otel.base.counters import Counters
from gpumem_otel.metrics import otlp
from gpumem_otel.metrics.otlp import Feed, register
from gpumem_otel.metrics.otlp_provider import exporter, resource_attributes
from gpumem_otel.metrics.prometheus import Exposition
from gpumem_otel.metrics.table import Level


class Observer:
    """Gives its observation, and counts how often it was asked."""

    def __init__(self, observation):
        self.observation = observation
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if isinstance(self.observation, Exception):
            raise self.observation
        return self.observation


class StillClock:
    def time_ns(self):
        return 0

    def monotonic(self):
        return 0.0

    def wait(self, event, seconds):
        raise AssertionError("nothing waits here")


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def provider():
    """A reader, and a meter of a provider that is not the global one."""
    reader = InMemoryMetricReader()
    made = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    yield reader, made.get_meter("test")
    made.shutdown()


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("observation", [obs.full((0, 1)), obs.bare()], ids=["full", "bare"])
def test_both_expositions_agree_name_by_name_and_value_by_value(
    level, observation, provider, counters
):
    reader, meter = provider
    feed = Feed(lambda: observation, level, counters)
    register(meter, lambda: feed)
    pulled = Exposition(lambda: observation, level, clock=StillClock(), counters=counters)
    assert obs.collected(reader.get_metrics_data()) == obs.parsed(pulled.render()[1])
    assert counters.get("exporter_errors", stage="scrape") == 0


def test_kinds_are_those_of_the_table(provider, counters):
    reader, meter = provider
    feed = Feed(obs.full, Level.FULL, counters)
    register(meter, lambda: feed)
    (resource,) = reader.get_metrics_data().resource_metrics
    kinds = {
        metric.name: (type(metric.data).__name__, getattr(metric.data, "is_monotonic", None))
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert kinds["gpumem.allocated"] == ("Gauge", None)
    assert kinds["gpumem.ooms"] == ("Sum", True)
    assert kinds["hw.gpu.memory.usage"] == ("Sum", False)


def test_one_collection_is_one_observation(provider, counters):
    """So that rows of different metrics belong to one moment; the next collection asks again."""
    reader, meter = provider
    observer = Observer(obs.full())
    feed = Feed(observer, Level.FULL, counters)
    register(meter, lambda: feed)
    for collection in (1, 2, 3):
        reader.get_metrics_data()
        assert observer.calls == collection


def test_a_failing_observer_is_counted_and_never_raised(provider, counters, caplog):
    reader, meter = provider
    observer = Observer(RuntimeError("allocator is gone"))
    feed = Feed(observer, Level.MINIMAL, counters)
    register(meter, lambda: feed)
    with caplog.at_level(logging.DEBUG):
        assert obs.collected(reader.get_metrics_data()) == {}
    assert (observer.calls, counters.get("exporter_errors", stage="scrape")) == (1, 1)
    with caplog.at_level(logging.DEBUG):
        assert obs.collected(reader.get_metrics_data()) == {}
    assert (observer.calls, counters.get("exporter_errors", stage="scrape")) == (2, 2)
    assert [r.message for r in caplog.records] == ["a metric could not be read"]
    observer.observation = obs.full()
    assert obs.collected(reader.get_metrics_data())


@pytest.mark.parametrize("silence", ["closed", "forked", "none", "no observation"])
def test_a_silent_feed_exports_nothing(silence, provider, counters, monkeypatch):
    reader, meter = provider
    observer = Observer(None if silence == "no observation" else obs.full())
    feed = Feed(observer, Level.FULL, counters)
    register(meter, lambda: None if silence == "none" else feed)
    if silence == "closed":
        feed.open = False
    elif silence == "forked":
        pid = os.getpid()
        monkeypatch.setattr(otlp.os, "getpid", lambda: pid + 1)
    assert obs.collected(reader.get_metrics_data()) == {}
    assert observer.calls == (1 if silence == "no observation" else 0)


def test_stopping_takes_series_away_and_a_second_run_does_not_double_them(provider, counters):
    """What was reported once is not repeated for ever by the SDK."""
    reader, meter = provider
    current = [Feed(obs.full, Level.FULL, counters)]
    register(meter, lambda: current[0])
    first = obs.collected(reader.get_metrics_data())
    current[0].open = False
    assert obs.collected(reader.get_metrics_data()) == {}
    current[0] = Feed(obs.full, Level.FULL, counters)
    assert obs.collected(reader.get_metrics_data()) == first


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({}, "http://localhost:4318/v1/metrics"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318/v1/metrics"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/x/"}, "http://c:4318/x/v1/metrics"),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
                "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://p/api/v1/otlp/v1/metrics",
            },
            "http://p/api/v1/otlp/v1/metrics",
        ),
    ],
)
def test_endpoints_follow_the_specification(environ, endpoint):
    made, advice = exporter(environ)
    assert advice == ""
    assert made._endpoint == endpoint
    made.shutdown()


def test_an_unknown_protocol_is_named_and_protobuf_is_sent():
    made, advice = exporter({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
    assert advice == (
        "OTEL_EXPORTER_OTLP_PROTOCOL 'http/json' is not supported: using http/protobuf"
    )
    assert made is not None
    made.shutdown()


def test_a_missing_package_is_named():
    name = "opentelemetry.exporter.otlp.proto.grpc.metric_exporter"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, None)
        made, advice = exporter({"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc"})
    assert made is None
    assert advice == (
        "metrics over OTLP (grpc) need a package that is not installed: "
        "pip install opentelemetry-exporter-otlp-proto-grpc"
    )


@pytest.mark.parametrize("preset", ["", "service.name=x,service.instance.id=pod%2D1,k8s.a=b"])
def test_every_rank_is_an_instance_of_its_own(preset):
    """Also where an instance was preset, which ranks would share."""
    attributes = resource_attributes(
        obs.identity(rank=5, pid=77), {"OTEL_RESOURCE_ATTRIBUTES": preset}
    )
    assert attributes["service.name"] == "train"
    assert attributes["service.instance.id"].endswith("-5-77")
    if preset:
        assert attributes["service.instance.id"] == "pod-1-5-77"
        assert attributes["k8s.a"] == "b"
    assert len(attributes["service.instance.id"]) > len("-5-77")
