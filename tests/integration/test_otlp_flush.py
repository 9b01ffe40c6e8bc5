"""Metrics that are exported at once over OTLP, through our own provider or the job's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from support.otlp_receiver import OtlpReceiver

TESTS = Path(__file__).parents[1]
PRELUDE = """
import json, os, threading
from opentelemetry import metrics as api
from support import observations as obs
from gpumem_otel.base.counters import Counters
from gpumem_otel.metrics.otlp import OtelMetrics

counters = Counters()
environ = {k: v for k, v in os.environ.items() if k.startswith("OTEL_")}
metrics = OtelMetrics(
    obs.full, "standard", obs.identity(pid=os.getpid()), environ, 3600.0, counters
)
"""


def python(script, **environ):
    """What it prints, one JSON value."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        env={**clean, "PYTHONPATH": str(TESTS), **environ},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_our_own_provider_exports_long_before_its_interval():
    """A process that is killed right afterwards has exported nonetheless."""
    with OtlpReceiver() as receiver:
        script = """
            import sys
            metrics.start()
            metrics.flush()
            sys.stdin.read()  # until it has arrived
            os.write(1, b"0")
            os._exit(0)
            """
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("OTEL_")},
                "PYTHONPATH": str(TESTS),
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with receiver.arrived:
            assert receiver.arrived.wait_for(lambda: receiver.received, 60)
        process.communicate(timeout=60)
        assert "gpumem.ooms" in receiver.received[0].names()


def test_the_jobs_provider_is_asked_off_its_threads_and_one_at_a_time():
    reported = python(
        """
        from opentelemetry.sdk.metrics import MeterProvider
        asked, go_on = threading.Event(), threading.Event()
        calls = []

        class Provider(MeterProvider):
            def force_flush(self, timeout_millis=10_000):
                calls.append((threading.current_thread().name, timeout_millis))
                asked.set()
                go_on.wait(30)
                raise RuntimeError("no")

        api.set_meter_provider(Provider(shutdown_on_exit=False))
        metrics.start()
        metrics.flush()
        assert asked.wait(30)
        metrics.flush()
        metrics.flush()
        go_on.set()
        metrics._flusher.join(30)
        metrics.stop()
        metrics.flush()
        print(json.dumps([calls, counters.get("exporter_errors", stage="push")]))
        """
    )
    assert reported == [[["gpumem-otlp-flush", 2000.0]], 1.0]
