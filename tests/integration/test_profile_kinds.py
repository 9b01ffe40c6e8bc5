"""Every kind of profile through the whole agent, to a server and by pulls."""

from __future__ import annotations

import http.client
import sys
import threading

import pytest
from support import fake_torch
from support.fake_pyroscope import FakePyroscope
from support.pyroscope_query import total

from gpumem_otel.api import lifecycle, regions
from gpumem_otel.profiles.pprof_reader import decode
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.settings.options import resolve

FRAME = {"name": "forward", "filename": "/job/model.py", "line": 5}
KINDS = ("live", "peak", "allocated", "growth", "pinned")
WAIT = 60
"""Bound of every wait: reached only where a test fails."""
PUSHES = 600
"""So many of one kind after the other are not pushed on the busiest machine."""
EVENTS = {"max_window_events": 1000}
"""A window ends when the job has made so many, not after a time."""


def kind_of(kind: str) -> str:
    return f"gpu_memory:{kind}_space:bytes:space:bytes"


@pytest.fixture
def torch(monkeypatch):
    module = fake_torch.make("2.15")
    c = module._C
    c._cuda_getMemoryMetadata = lambda: module.allocators[0].metadata
    c._cuda_setMemoryMetadata = lambda text: setattr(module.allocators[0], "metadata", text)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def job(torch):
    """A thread that allocates 3000 bytes and frees them, again and again; weights of 1000."""
    over = threading.Event()
    torch.allocators[0].alloc(1000, (FRAME,))

    def work():
        while not over.wait(0.001):
            torch.allocators[0].free(torch.allocators[0].alloc(3000, (FRAME,)))

    thread = threading.Thread(target=work)
    yield thread
    over.set()
    if thread.ident is not None:
        thread.join()


@pytest.fixture
def start(torch, tmp_path):
    agents = []

    def begin(**options):
        settings = {
            "interval_seconds": 0.4, "run_dir": str(tmp_path / "run"), "service_name": "job",
            "class_as": "off", "oom": False, "growth_pushes": 1, "steps": False,
            "max_stall_ratio": 1, **options,
        }  # fmt: skip
        agent = Agent(resolve({}, **settings), environ={})
        agents.append(agent)
        agent._await_cuda()
        agent._arm()
        return agent

    yield begin
    for agent in agents:
        agent.stop()


def get(agent, query):
    connection = http.client.HTTPConnection("127.0.0.1", agent.address[1], timeout=WAIT)
    try:
        connection.request("GET", f"/debug/pprof/gpumem?{query}")
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def peaks(server):
    """Bytes of each peak that is stored."""
    return [row.total for row in list(server.store.rows) if row.profile_type == kind_of("peak")]


def test_all_kinds_reach_a_server(torch, job, start):
    """Whatever the machine does meanwhile: pushes are waited for, and a leak that goes on."""
    torch.host_segments.append(
        {"address": 1, "size": 4096, "allocated": True, "active": True, "frames": [FRAME]}
    )
    with FakePyroscope() as server:
        start(pyroscope_url=server.url, profiles=KINDS, allocated_window_seconds=0.05)
        job.start()
        wanted = {"inuse", "peak", "alloc", "pinned"}
        seen = set()
        for _ in range(PUSHES):
            assert server.pushed.acquire(timeout=WAIT)
            seen |= {kind for kind in wanted if total(server.url, "job", kind_of(kind))}
            # a window in which the job's thread did not get the processor holds the weights alone
            if seen == wanted and 4000 in peaks(server):
                break
        assert seen == wanted
        assert set(peaks(server)) <= {1000, 4000}  # weights, or weights and one batch
        assert 4000 in peaks(server)
        for _ in range(PUSHES):
            torch.allocators[0].alloc(50_000, (FRAME,))  # a leak: each growth from now on shows it
            assert server.pushed.acquire(timeout=WAIT)
            if total(server.url, "job", kind_of("growth")) >= 49_664:
                break
        else:
            pytest.fail("the leak never was in a growth profile")


def test_all_kinds_can_be_pulled(torch, job, start):
    agent = start(serve=True, port=0, profiles=("live", "growth"), **EVENTS)
    assert agent.wait_listening(WAIT)
    job.start()
    status, body = get(agent, "kind=peak&seconds=300")
    assert status == 200
    peak = decode(body)
    assert peak.total("peak_space") == 4000
    assert any(c.startswith("highest moment of the window: 4000") for c in peak.comments)
    status, body = get(agent, "seconds=300")
    assert status == 200
    allocated = decode(body)
    assert allocated.total("alloc_objects") >= 800
    assert allocated.total("alloc_space") == 3000 * allocated.total("alloc_objects")
    status, body = get(agent, "kind=pinned")
    assert (status, b"does not report pinned" in body) == (503, True)
    torch._C._cuda_hostMemoryStats = lambda: {"allocated_bytes": {"all": {"current": 77}}}
    status, body = get(agent, "kind=pinned&device=0")
    assert (status, decode(body).total("pinned_space")) == (200, 77)
    for _ in range(100):
        status, body = get(agent, "kind=growth")
        if status == 200:
            break
        agent.flush(WAIT)
    assert status == 200
    assert get(agent, "kind=pinned&seconds=2")[0] == 400


def test_regions_label_what_is_pulled(torch, start, monkeypatch):
    agent = start(serve=True, port=0, **EVENTS)
    monkeypatch.setattr(lifecycle._STATE, "agent", agent)
    assert agent.wait_listening(WAIT)
    over = threading.Event()

    def work():
        while not over.wait(0.001):
            with regions.region("loss"):
                torch.allocators[0].free(torch.allocators[0].alloc(100, (FRAME,)))
            torch.allocators[0].free(torch.allocators[0].alloc(100, (FRAME,)))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        _, body = get(agent, "seconds=300")
    finally:
        over.set()
        thread.join()
    labels = [dict(sample.labels) for sample in decode(body).samples]
    assert {label.get("region", "") for label in labels} == {"loss", ""}
    assert torch.allocators[0].metadata == ""
    agent.stop()
    assert agent.marks is None


def test_kinds_that_are_off_set_nothing(torch, start, monkeypatch):
    agent = start()
    monkeypatch.setattr(lifecycle._STATE, "agent", agent)
    with regions.region("loss"):
        assert torch.allocators[0].metadata == ""
    assert agent.marks is None
    assert {call[0] for call in torch.allocators[0].calls} == {"state"}
