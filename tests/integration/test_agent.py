"""The whole agent over a recording: pushed, pulled and exported numbers are one number."""

from __future__ import annotations

import gzip
import http.client
import io
import threading

import pytest
from support import pprof_proto
from support.fake_pyroscope import FakePyroscope
from support.pyroscope_query import SNAPSHOTS, total
from support.recordings import make_recording

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.profiles.pprof_reader import decode
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.recording.source import ReplaySource
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.settings.options import resolve

SNAPSHOT = "h200-torch2.11-train-python-stacks.pickle.gz"
ALLOCATED = 121_323_520
RESERVED = 180_355_072


@pytest.fixture
def source():
    recording = load_recording(io.BytesIO(make_recording(SNAPSHOT)), name="test")
    return ReplaySource(recording, SystemClock())


@pytest.fixture
def start(source, tmp_path):
    """Start an agent over the recording; every one of them is stopped at the end."""
    agents = []

    def begin(environ=None, **options):
        settings = {"port": 0, "run_dir": str(tmp_path / "run"), "interval_seconds": 1, **options}
        agent = Agent(resolve(environ or {}, **settings), source=source, environ=environ or {})
        agents.append(agent)
        agent.start()
        return agent

    yield begin
    for agent in agents:
        agent.stop()


def get(agent, path, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", agent.address[1], timeout=10)
    try:
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def values(exposition: bytes) -> dict[str, float]:
    lines = [line for line in exposition.decode().splitlines() if line and line[0] != "#"]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_pushed_pulled_and_exported_are_one_number(start):
    with FakePyroscope() as server:
        agent = start(pyroscope_url=server.url, serve=True, service_name="job", tags={"team": "a"})
        assert agent.wait_listening(10)
        assert agent.flush(10)
        pushed = total(server.url, "job", selector=',rank="0",device="0",team="a"')
        snapshots = total(server.url, "job", SNAPSHOTS)
        assert pushed == ALLOCATED * snapshots

        status, body = get(agent, "/debug/pprof/gpumem")
        assert status == 200
        pulled = decode(body)
        assert pulled.total("inuse_space") == ALLOCATED
        assert {dict(sample.labels).get("device") for sample in pulled.samples} == {"0"}
        assert {dict(sample.labels).get("rank") for sample in pulled.samples} == {"0"}

        status, body = get(agent, "/metrics")
        assert status == 200
        metrics = values(body)
        labels = '{device="0",rank="0"}'
        assert metrics["gpumem_allocated_bytes" + labels] == ALLOCATED
        assert metrics["gpumem_reserved_bytes" + labels] == RESERVED
        cached = sum(v for k, v in metrics.items() if k.startswith("gpumem_cached_bytes{"))
        assert cached == RESERVED - ALLOCATED
        assert agent.counters.get("readouts_breached") == 0


def test_pull_of_one_device_and_of_a_wrong_one(start):
    agent = start(serve=True)
    assert agent.wait_listening(10)
    assert get(agent, "/debug/pprof/gpumem?device=0")[0] == 200
    status, body = get(agent, "/debug/pprof/gpumem?device=3")
    assert status == 400
    assert body.decode().strip() == "device 3 is not used by this process; used: 0"
    status, body = get(agent, "/debug/pprof/gpumem?kind=peak")
    assert (status, b"recordings hold no frees" in body) == (503, True)


def test_nothing_listens_or_is_pushed_unless_asked_for(start):
    agent = start()
    assert agent.address is None
    names = {thread.name for thread in threading.enumerate()}
    assert not any("listener" in name or "otlp" in name for name in names)
    assert not agent.flush(0.5) or agent.counters.get("exporter_pushed_bytes") == 0


def test_disabled_starts_nothing(start):
    before = set(threading.enumerate())
    agent = start({"GPUMEM_OTEL_DISABLED": "1"}, serve=True)
    assert set(threading.enumerate()) == before
    assert agent.observe() is None


def test_a_server_that_is_not_there_leaves_the_agent_alive(start):
    agent = start(pyroscope_url="http://127.0.0.1:9", serve=True)
    assert agent.wait_listening(10)
    assert not agent.flush(5)
    assert agent.counters.get("exporter_errors", stage="push") > 0
    assert get(agent, "/metrics")[0] == 200


def test_stop_and_start_again_on_the_same_port(source, tmp_path):
    settings = {"run_dir": str(tmp_path), "serve": True, "interval_seconds": 1}
    first = Agent(resolve({}, port=0, **settings), source=source, environ={})
    first.start()
    assert first.wait_listening(10)
    port = first.address[1]
    first.stop()
    second = Agent(resolve({}, port=port, **settings), source=source, environ={})
    second.start()
    assert second.wait_listening(10)
    assert second.address[1] == port
    second.stop()
    second.stop()


def test_a_recording_of_a_replay_is_the_recording(start, tmp_path):
    agent = start(record_path=str(tmp_path / "again.gpumem"))
    agent.flush(5)
    assert agent.reader is not None
    agent.reader.live()
    agent.stop()
    again = load_recording(tmp_path / "again.gpumem", name="again")
    assert again.readings
    assert again.readings[0].snapshot.totals(0).allocated_bytes == ALLOCATED


def test_ranks_of_one_job_differ_by_rank_and_port(start):
    environ = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "r"}
    with FakePyroscope() as server:
        agent = start(environ, pyroscope_url=server.url, service_name="ranked")
        assert agent.queries.identity().rank == 3
        assert agent.flush(10)
        assert total(server.url, "ranked", selector=',rank="3",run_id="r"') >= ALLOCATED


def test_pprof_is_valid_for_the_protobuf_library(start):
    agent = start(serve=True)
    assert agent.wait_listening(10)
    _, body = get(agent, "/debug/pprof/gpumem")
    message = pprof_proto.parse(gzip.decompress(body))
    types = [message.string_table[kind.type] for kind in message.sample_type]
    assert types == ["inuse_objects", "inuse_space", "snapshots"]
