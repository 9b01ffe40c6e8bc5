"""OpenTelemetry's global provider, our own one, forks and exits: each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.otlp_receiver import OtlpReceiver

TESTS = Path(__file__).parents[1]

PRELUDE = """
import json, os, sys, threading, time
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from support import observations as obs
from gpumem_otel.base.counters import Counters
from gpumem_otel.metrics.otlp import OtelMetrics

counters = Counters()

def ours(interval=3600.0, observer=obs.full, level="standard", identity=None):
    identity = identity or obs.identity(pid=os.getpid())
    environ = {k: v for k, v in os.environ.items() if k.startswith("OTEL_")}
    return OtelMetrics(observer, level, identity, environ, interval, counters)

def names(reader):
    return sorted({name for name, _ in obs.collected(reader.get_metrics_data())})

def threads():
    return sorted(t.name for t in threading.enumerate() if t is not threading.main_thread())

def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
"""

STANDARD = 16
"""Names at level standard; one of them has four causes."""


def python(script: str, timeout: float = 60.0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it after the prelude; what it prints must be one JSON value."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(script)],
        env={**clean, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def result(done: subprocess.CompletedProcess[str]):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("order", ["provider first", "provider later"])
def test_instruments_follow_the_jobs_provider(order):
    """Set before or after start(): the job's reader gets ours, and no thread of ours remains."""
    done = python(
        f"""
        reader = InMemoryMetricReader()
        provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
        metrics = ours(interval=0.05)
        if {order == "provider first"}:
            api.set_meter_provider(provider)
            metrics.start()
            assert threads() == []
        else:
            metrics = ours(interval=0.5)
            metrics.start()
            api.set_meter_provider(provider)
        until(lambda: "gpumem-otlp" not in threads())
        first = names(reader)
        metrics.stop()
        print(json.dumps([first, names(reader), counters.get("exporter_errors", stage="push")]))
        """
    )
    first, after, errors = result(done)
    assert len(first) == STANDARD
    assert "gpumem_allocated_bytes" in first
    assert after == []
    assert errors == 0
    assert done.stderr == ""


def test_the_jobs_own_metrics_are_exported_as_before():
    """With our metrics started and stopped: the same data points, and ours in one scope."""
    done = python(
        """
        reader = InMemoryMetricReader()
        api.set_meter_provider(MeterProvider(metric_readers=[reader], shutdown_on_exit=False))
        counter = api.get_meter("job").create_counter("job.batches", unit="{batch}")
        counter.add(3, {"split": "train"})

        def jobs():
            (resource,) = reader.get_metrics_data().resource_metrics
            return [
                (scope.scope.name, m.name, m.unit, [(dict(p.attributes), p.value)
                                                    for p in m.data.data_points])
                for scope in resource.scope_metrics for m in scope.metrics
                if scope.scope.name != "gpumem_otel"
            ]

        before = jobs()
        metrics = ours()
        metrics.start()
        during = jobs()
        metrics.stop()
        print(json.dumps([before, during, jobs()]))
        """
    )
    before, during, after = result(done)
    assert before == [["job", "job.batches", "{batch}", [[{"split": "train"}, 3]]]]
    assert before == during == after


def test_a_second_install_does_not_double_or_warn():
    done = python(
        """
        reader = InMemoryMetricReader()
        api.set_meter_provider(MeterProvider(metric_readers=[reader], shutdown_on_exit=False))
        first = ours()
        first.start()
        one = obs.collected(reader.get_metrics_data())
        first.stop()
        second = ours()
        second.start()
        first.stop()
        two = obs.collected(reader.get_metrics_data())
        second.stop()
        print(json.dumps([len(one), one == two, obs.collected(reader.get_metrics_data()) == {}]))
        """
    )
    assert result(done) == [25, True, True]
    assert done.stderr == ""


def test_without_a_provider_our_own_exports_and_gives_way():
    """Ours sends at its interval; after the job sets its provider nothing more comes from us."""
    with OtlpReceiver() as receiver:
        done = python(
            """
            assert type(api.get_meter_provider()).__name__ == "_ProxyMeterProvider"
            metrics = ours(interval=0.1)
            metrics.start()
            until(lambda: len(calls) >= 2)
            assert type(api.get_meter_provider()).__name__ == "_ProxyMeterProvider"
            reader = InMemoryMetricReader()
            api.set_meter_provider(MeterProvider(metric_readers=[reader], shutdown_on_exit=False))
            until(lambda: "gpumem-otlp" not in threads())
            first = names(reader)
            metrics.stop()
            print(json.dumps([len(first), os.getpid()]))
            """.replace("metrics = ours(interval=0.1)", OBSERVED),
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
            OTEL_EXPORTER_OTLP_HEADERS="x-key=a%20b",
            OTEL_RESOURCE_ATTRIBUTES="service.instance.id=pod-1,deployment.environment=lab",
        )
        names, pid = result(done)
        requests = receiver.wait(1)
    assert names == STANDARD
    assert done.stderr == ""
    assert {request.path for request in requests} == {"/v1/metrics"}
    for request in requests:
        assert len(request.names()) in {0, STANDARD}, "all of ours, or after the set nothing"
        assert {k.lower(): v for k, v in request.headers.items()}["x-key"] == "a b"
        resource = request.resource()
        assert resource["service.name"] == "train"
        assert resource["service.instance.id"] == f"pod-1-3-{pid}"
        assert resource["deployment.environment"] == "lab"


OBSERVED = """calls = []

            def observer():
                calls.append(1)
                return obs.full()

            metrics = ours(interval=0.1, observer=observer)"""


def test_a_short_job_exports_once_at_its_end():
    """It ends before the first interval and never calls stop()."""
    with OtlpReceiver() as receiver:
        done = python(
            "ours().start()\nprint(os.getpid())", OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=receiver.url
        )
        pid = result(done)
        (request,) = receiver.wait(1)
    assert done.stderr == ""
    assert request.path == "/"
    assert len(request.names()) == STANDARD
    assert request.resource()["service.instance.id"].endswith(f"-3-{pid}")


@pytest.mark.parametrize("where", ["hangs", "refuses", "answers 500", "answers 503"])
def test_a_bad_server_neither_delays_the_end_nor_reaches_the_job(where):
    """The process ends long before an exporter's own patience (10 s and more) is at its end."""
    status = int(where.rpartition(" ")[2]) if where.startswith("answers") else 200
    with OtlpReceiver(hang=where == "hangs", status=status) as receiver:
        url = "http://127.0.0.1:1" if where == "refuses" else receiver.url
        done = python(
            """
            import atexit
            begin = []
            atexit.register(lambda: print(json.dumps(time.monotonic() - begin[0])))
            exporting = threading.Event()

            def observer():
                exporting.set()
                return obs.full()

            ours(interval=0.05, observer=observer).start()
            assert exporting.wait(30)
            begin.append(time.monotonic())
            """,
            timeout=30,
            OTEL_EXPORTER_OTLP_ENDPOINT=url,
        )
    assert result(done) < 5
    assert "Traceback" not in done.stderr


def test_failed_exports_are_counted():
    with OtlpReceiver(status=400) as receiver:
        done = python(
            """
            metrics = ours(interval=0.02)
            metrics.start()
            until(lambda: counters.get("exporter_errors", stage="push") >= 3)
            metrics.stop()
            print(json.dumps(threads()))
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
        )
    assert result(done) == []


def test_a_missing_exporter_package_is_logged_once_and_counted():
    done = python(
        """
        import logging
        logging.basicConfig(format="%(name)s: %(message)s")
        sys.modules["opentelemetry.exporter.otlp.proto.http.metric_exporter"] = None
        metrics = ours(interval=0.01)
        metrics.start()
        until(lambda: threads() == [])
        metrics.stop()
        print(json.dumps(counters.get("exporter_errors", stage="push")))
        """
    )
    assert result(done) == 1
    assert done.stderr == (
        "gpumem_otel.otel: metrics over OTLP (http/protobuf) need a package that is not installed: "
        "pip install opentelemetry-exporter-otlp-proto-http\n"
    )


def test_forked_workers_export_nothing_of_ours():
    """The job's own periodic reader starts again in each of 8 forked workers; only the job's own
    counter comes out of them, and our observer is never asked."""
    with OtlpReceiver() as receiver:
        done = python(
            """
            import warnings
            warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: the point here
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            asked, exported = [], threading.Event()

            def observer():
                asked.append(os.getpid())
                return obs.full()

            class Exporter(OTLPMetricExporter):
                def export(self, *args, **kwargs):
                    done = super().export(*args, **kwargs)
                    exported.set()
                    return done

            # A fork in the middle of a collection inherits the SDK's locks, with or without us:
            # the forks come right after one.
            reader = PeriodicExportingMetricReader(Exporter(), 1000)
            api.set_meter_provider(MeterProvider(metric_readers=[reader], shutdown_on_exit=False))
            counter = api.get_meter("job").create_counter("job.batches")
            metrics = ours(observer=observer)
            metrics.start()
            counter.add(1)
            assert exported.wait(30)
            assert asked
            children = []
            for worker in range(8):
                pid = os.fork()
                if pid == 0:
                    del asked[:]
                    exported.clear()
                    counter.add(100 + worker)
                    late = not exported.wait(30)
                    metrics.stop()
                    os._exit(2 if late else bool(asked))
                children.append(pid)
            codes = [os.waitpid(pid, 0)[1] for pid in children]
            metrics.stop()
            reader.shutdown()
            print(json.dumps([codes, len(asked) > 0]))
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
        )
        codes, asked = result(done)
        received = receiver.wait(9)
    assert codes == [0] * 8
    assert asked

    def batches(request) -> int:
        (value,) = (
            point.as_int
            for resource in request.message.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "job.batches"
            for point in metric.sum.data_points
        )
        return value

    workers = [request for request in received if batches(request) > 1]
    assert {batches(request) for request in workers} == {101 + worker for worker in range(8)}
    assert all(request.names() == {"job.batches"} for request in workers)
    parents = [request for request in received if batches(request) == 1]
    assert any(len(request.names()) == STANDARD + 1 for request in parents)


def test_a_forked_worker_that_owns_a_device_exports_as_itself():
    """It starts its own with its own identity; the parent's instruments serve it."""
    with OtlpReceiver() as receiver:
        done = python(
            """
            import warnings
            warnings.simplefilter("ignore", DeprecationWarning)
            metrics = ours()
            metrics.start()
            pid = os.fork()
            if pid == 0:
                metrics.stop()
                own = ours(identity=obs.identity(rank=6, pid=os.getpid()),
                           observer=lambda: obs.full(identity=obs.identity(rank=6)))
                own.start()
                own.stop()
                os._exit(len(threads()))
            code = os.waitpid(pid, 0)[1]
            print(json.dumps([code, pid]))
            sys.stdout.flush()
            os._exit(0)
            """,
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
        )
        code, pid = result(done)
        (request,) = receiver.wait(1)
    assert code == 0
    assert request.resource()["service.instance.id"].endswith(f"-6-{pid}")
    assert len(request.names()) == STANDARD
