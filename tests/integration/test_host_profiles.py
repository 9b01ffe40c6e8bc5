"""host_profiles=True: the real pyroscope-io with our own pushes, with the same service and tags."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys

import pytest
from support.fake_pyroscope import FakePyroscope
from support.recordings import make_recording

pytest.importorskip("pyroscope")

SNAPSHOT = "h200-torch2.11-train-python-stacks.pickle.gz"

JOB = """
import os, sys, threading, time
import gpumem_otel
from gpumem_otel.api import lifecycle
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.recording.source import ReplaySource
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.base.clock import SystemClock
from gpumem_otel.settings.options import resolve

recording = load_recording(os.environ["RECORDING"], name="test")
agent = Agent(resolve(os.environ), source=ReplaySource(recording, SystemClock()))
lifecycle.adopt(agent)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    sum(range(1000))
gpumem_otel.uninstall()
import pyroscope
print("stopped", pyroscope.shutdown())
"""


@pytest.fixture
def run(tmp_path):
    recording = tmp_path / "test.gpumem"
    recording.write_bytes(make_recording(SNAPSHOT))

    def start(url, *, seconds=1, **environ):
        return subprocess.run(
            [sys.executable, "-c", JOB, str(seconds)],
            capture_output=True,
            text=True,
            timeout=100,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "RECORDING": str(recording),
                "GPUMEM_OTEL_HOST_PROFILES": "1",
                "PYROSCOPE_SERVER_ADDRESS": url,
                "OTEL_SERVICE_NAME": "train",
                "OTEL_RESOURCE_ATTRIBUTES": "service.namespace=research",
                "GPUMEM_OTEL_RUN_ID": "run-1",
                "GPUMEM_OTEL_TAGS": "team=vision",
                "RANK": "2",
                "WORLD_SIZE": "4",
                **environ,
            },
        )

    return start


def fields(data: bytes):
    """(number, bytes) of the length-delimited fields of a protobuf message."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        value, at = varint(data, at)
        if tag & 7 == 2:
            yield tag >> 3, data[at : at + value]
            at += value


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def series(body: bytes):
    """The label sets of a PushRequest."""
    for _, one in fields(gzip.decompress(body)):
        labels = [dict(fields(pair)) for number, pair in fields(one) if number == 1]
        yield {pair[1].decode(): pair.get(2, b"").decode() for pair in labels}


def test_pushes_with_our_service_and_tags_and_ends_with_us(run):
    """GIVEN host_profiles WHEN the job ends THEN CPU profiles came, labelled as ours are."""
    with FakePyroscope() as server:
        done = run(
            server.url, PYROSCOPE_TENANT_ID="tenant-7", PYROSCOPE_AUTH_TOKEN="a-secret-token"
        )
        requests = list(server.requests)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    host = [r for r in requests if r.headers["user-agent"].startswith("pyroscope-rs")]
    ours = [r for r in requests if r not in host]
    assert host
    assert ours
    for request in requests:
        assert request.headers["authorization"] == "Bearer a-secret-token"
        assert request.headers["x-scope-orgid"] == "tenant-7"
    labels_by_name = {labels["__name__"]: labels for r in host for labels in series(r.body)}
    assert "process_cpu" in labels_by_name
    (mine,) = series(ours[-1].body)
    shared = ("service_name", "namespace", "run_id", "rank", "team")
    assert {name: mine[name] for name in shared} == {
        "service_name": "train", "namespace": "research", "run_id": "run-1", "rank": "2",
        "team": "vision",
    }  # fmt: skip
    for labels in labels_by_name.values():
        assert {name: labels[name] for name in shared} == {name: mine[name] for name in shared}
    # it was running, and uninstall() has stopped it: there is nothing left to stop
    assert done.stdout == "stopped False\n"


def test_a_server_that_is_not_there_holds_up_neither_job_nor_exit(run):
    with FakePyroscope() as server:
        url = server.url
    done = run(url, seconds=0)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "stopped False\n"
