"""Requests for a window while another one is open: over a real listener, with a whole agent."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import fake_torch
from support.listening import WAIT, ask, connected, until

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.profiles.pprof_reader import decode
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.settings.options import resolve

PATH = "/debug/pprof/gpumem"
FRAME = {"name": "forward", "filename": "/job/model.py", "line": 5}


class Bench:
    """An agent of a fake torch that pushes nothing by itself, and windows that a test opens."""

    def __init__(self, torch, run_dir) -> None:
        settings = {
            "serve": True, "port": 0, "run_dir": run_dir, "class_as": "off", "oom": False,
            "steps": False, "profiles": ("live",), "interval_seconds": 3600,
            "allocated_window_seconds": 200,
        }  # fmt: skip
        self.torch = torch
        self.agent = Agent(resolve({}, **settings), environ={})
        self.agent._await_cuda()
        self.agent._arm()
        assert self.agent.wait_listening(WAIT)
        self.address = self.agent.address
        self.windows = self.agent.reader.windows
        self.pool = ThreadPoolExecutor(16)
        self.enough = threading.Event()
        self.opened = threading.Semaphore(0)
        open_window = self.agent.source.recorder.open_window

        def opening(*args, **kwargs):
            open_window(*args, **kwargs)
            self.opened.release()

        self.agent.source.recorder.open_window = opening

    def open_own(self):
        """A window as the pusher opens it; it ends with `enough`."""
        kinds = {ProfileKind.ALLOCATED}
        made = self.pool.submit(self.windows.pushed, kinds, 400.0, self.enough)
        assert self.opened.acquire(timeout=WAIT)
        return made

    def pull(self, query="?seconds=0.1"):
        return self.pool.submit(ask, self.address, PATH + query)

    def await_waiting(self, number: int) -> None:
        until(lambda: self.windows.turns.waiting == number)

    def close(self) -> None:
        self.enough.set()
        self.agent.stop()
        self.pool.shutdown()


@pytest.fixture
def bench(monkeypatch, tmp_path):
    module = fake_torch.make("2.15")
    monkeypatch.setitem(sys.modules, "torch", module)
    module.allocators[0].alloc(1000, (FRAME,))
    made = Bench(module, str(tmp_path / "run"))
    yield made
    made.close()


def requests() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "gpumem-otel-request"]


def test_a_request_waits_for_a_window_of_ours_and_has_its_own(bench):
    """GIVEN a window of ours WHEN others ask THEN each gets all that comes in its own."""
    own = bench.open_own()
    bench.torch.allocators[0].alloc(7, (FRAME,))
    pulls = [bench.pull("?seconds=0.1"), bench.pull("?kind=peak&seconds=0.1")]
    bench.await_waiting(2)
    assert not any(pull.done() for pull in pulls)
    bench.enough.set()
    allocated, peak = (pull.result(WAIT) for pull in pulls)
    assert (allocated[0], peak[0]) == (200, 200)
    assert decode(allocated[2]).total("alloc_space") == 0  # what came before is not in it
    assert decode(peak[2]).total("peak_space") == 1007
    (profile,) = own.result(WAIT)[ProfileKind.ALLOCATED]
    assert profile.total_bytes == 7


def test_requests_that_wait_leave_the_listener_to_the_others(bench):
    bench.open_own()
    pulls = [bench.pull() for _ in range(4)]
    bench.await_waiting(4)
    status, headers, body = ask(bench.address, PATH + "?seconds=0.1")
    assert (status, headers["retry-after"]) == (503, "5")
    assert body == b"other profiles are being made\n"
    scrapes = [bench.pool.submit(ask, bench.address, "/metrics") for _ in range(8)]
    assert [scrape.result(WAIT)[0] for scrape in scrapes] == [200] * 8
    assert ask(bench.address, "/healthz")[0] in {200, 503}
    assert decode(ask(bench.address, PATH)[2]).total("inuse_objects") == 1
    bench.enough.set()
    assert [pull.result(WAIT)[0] for pull in pulls] == [200] * 4


def test_a_request_that_would_wait_too_long_gets_a_retry_after(bench):
    with connected(bench.address) as client:
        client.request(PATH + "?seconds=300")
        assert bench.opened.acquire(timeout=WAIT)
        status, headers, body = ask(bench.address, PATH + "?seconds=1")
        assert status == 503
        assert 1 <= int(headers["retry-after"]) <= 300
        assert body.startswith(b"window: others come first, for ")
    until(lambda: not requests())
    assert ask(bench.address, PATH + "?seconds=0.1")[0] == 200  # its client has hung up


def test_a_client_that_hangs_up_while_it_waits_leaves_nothing(bench):
    own = bench.open_own()
    with connected(bench.address) as client:
        client.request(PATH + "?seconds=30")
        bench.await_waiting(1)
    bench.await_waiting(0)
    until(lambda: not requests())
    assert not own.done()
    assert not bench.opened.acquire(blocking=False)
    bench.enough.set()
    own.result(WAIT)
    assert ask(bench.address, PATH + "?seconds=0.1")[0] == 200


def test_the_end_of_the_agent_ends_a_wait(bench):
    own = bench.open_own()
    with connected(bench.address) as client:
        client.request(PATH + "?seconds=30")
        bench.await_waiting(1)
        bench.agent.stop()
        assert client.closed()
    assert requests() == []
    assert bench.windows.turns.waiting == 0
    assert not own.done()  # the window of the test, which is still open


def test_a_wait_is_over_while_nothing_of_ours_may_call_torch(bench):
    """GIVEN a window and one that waits WHEN the gate closes THEN both end, without a call."""
    own = bench.open_own()
    pull = bench.pull("?seconds=30")
    bench.await_waiting(1)
    assert bench.agent.gate.close(WAIT)
    try:
        assert pull.result(WAIT)[0] == 503
        own.result(WAIT)
        assert not bench.opened.acquire(blocking=False)
    finally:
        bench.agent.gate.open()
    assert ask(bench.address, PATH + "?seconds=0.1")[0] == 200


def test_a_window_of_ours_goes_before_requests_that_wait(bench):
    """GIVEN requests without a pause THEN ours comes next."""
    with connected(bench.address) as client:
        client.request(PATH + "?seconds=20")
        assert bench.opened.acquire(timeout=WAIT)
        pull = bench.pull("?seconds=0.1")
        bench.await_waiting(1)
        own = bench.pool.submit(bench.windows.pushed, {ProfileKind.ALLOCATED}, 400.0, bench.enough)
        bench.await_waiting(2)
    assert bench.opened.acquire(timeout=WAIT)
    bench.await_waiting(1)  # the request still waits, so it is ours that is open
    assert not pull.done()
    bench.enough.set()
    assert own.result(WAIT)[ProfileKind.ALLOCATED]
    assert pull.result(WAIT)[0] == 200
