"""The agent's order of life under threads: nothing of ours blocks, and nothing is left."""

from __future__ import annotations

import http.client
import multiprocessing
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from support import fake_torch

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.runtime.components import Components
from gpumem_otel.settings.options import resolve


@pytest.fixture
def torch(monkeypatch):
    module = fake_torch.make("2.11", devices=1)
    module.contexts = {0}
    monkeypatch.setitem(sys.modules, "torch", module)
    module.allocators[0].alloc(1000)
    return module


@pytest.fixture
def agent(torch, tmp_path):
    """An agent over the stand-in for torch, armed by `arm()`."""
    made = []

    def build(**options):
        settings = {"interval_seconds": 3600, "run_dir": str(tmp_path / "run"), **options}
        agent = Agent(resolve({}, **settings), environ={})
        made.append(agent)
        return agent

    yield build
    for one in made:
        one.stop()


def arm(agent, torch):
    """What torch's initialisation does to an agent that waits for it."""
    agent._await_cuda()
    agent._arm()


def ours():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("gpumem"))


def test_a_question_from_within_arming_is_answered(agent, torch, monkeypatch):
    """An SDK's reader holds its lock and asks us, while arming waits for that lock."""
    one = agent(serve=False)
    agent_asked, answered = threading.Event(), threading.Event()
    start = Components.start_metrics

    def metrics(components):
        thread = threading.Thread(target=lambda: (one.observe(), answered.set()))
        thread.start()
        agent_asked.set()
        assert answered.wait(10), "arming holds a lock that a question needs"
        thread.join()
        start(components)

    monkeypatch.setattr(Components, "start_metrics", metrics)
    arm(one, torch)
    assert agent_asked.is_set()
    assert one.counters.get("exporter_errors", stage="push") == 0
    assert one.observe() is not None


def test_stop_does_not_wait_for_a_driver_that_hangs(agent, torch):
    one = agent(serve=True, port=0)
    arm(one, torch)
    assert one.wait_listening(10)
    hung, driver = threading.Event(), threading.Event()

    def stuck(device):
        hung.set()
        driver.wait(60)
        return (1, 2)

    torch.cuda.mem_get_info = stuck
    address = one.address

    def scrape():
        connection = http.client.HTTPConnection(*address, timeout=60)
        try:
            connection.request("GET", "/metrics")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()

    client = threading.Thread(target=scrape)
    client.start()
    assert hung.wait(10)
    stopper = threading.Thread(target=one.stop, args=(2.0,))
    stopper.start()
    stopper.join(20)
    ended = not stopper.is_alive()
    driver.set()
    client.join()
    assert ended, "stop() waits for a scrape that waits for the driver"


def test_cuda_that_comes_up_while_we_are_uninstalled_leaves_nothing(agent, torch):
    one = agent(serve=True, port=0)
    one._await_cuda()
    swapped, armed = threading.Event(), threading.Event()

    def slow_undo(_):
        swapped.set()
        assert armed.wait(10)

    one.defer("arm", slow_undo)
    stopper = threading.Thread(target=one.stop)
    stopper.start()
    assert swapped.wait(10)
    one._arm()
    armed.set()
    stopper.join()
    assert ours() == []
    assert not one.teardown.end()
    assert one.observe() is None


def test_a_stop_in_the_middle_of_arming_undoes_what_comes_after(agent, torch, monkeypatch):
    one = agent(serve=True, port=0)
    start = Components.start_steps

    def steps(components):
        one.stop()
        start(components)

    monkeypatch.setattr(Components, "start_steps", steps)
    arm(one, torch)
    assert ours() == []
    assert not one.teardown.end()


def test_a_component_that_fails_half_way_is_undone_and_the_others_go_on(agent, torch, monkeypatch):
    one = agent(serve=True, port=0)
    undone = []

    def fail():
        raise RuntimeError("no")

    monkeypatch.setattr(
        Components, "start_steps", lambda _: one.teardown.begin("steps", fail, undone.append)
    )
    arm(one, torch)
    assert len(undone) == 1
    assert one.counters.get("exporter_errors", stage="steps") == 1
    assert one.wait_listening(10)


def test_a_sink_that_cannot_be_made_leaves_the_read_outs(agent, torch, monkeypatch):
    seen = threading.Event()
    one = agent(pyroscope_url="http://127.0.0.1:9")
    one.on_profiles = (lambda kind, profiles: seen.set(),)

    def no_sink(_):
        raise ValueError("no sink")

    monkeypatch.setattr(Components, "_make_sink", no_sink)
    arm(one, torch)
    one.flush(10)
    assert seen.is_set()
    assert one.counters.get("exporter_errors", stage="push") == 1


def test_health_is_judged_by_the_newest_push_of_any_kind(agent, torch):
    one = agent(pyroscope_url="http://127.0.0.1:9", profiles=["live", "allocated"])
    arm(one, torch)
    queries = one.queries
    assert queries.health().ok
    one.counters.set("last_push_timestamp_seconds", 1.0, kind="live")
    late = queries.health()
    assert not late.ok
    assert late.reasons[0].startswith("the last push was ")
    one.counters.set("last_push_timestamp_seconds", time.time(), kind="allocated")
    assert queries.health().ok


def test_a_wrong_device_is_refused_before_its_window(agent, torch):
    one = agent(serve=False)
    arm(one, torch)
    never = threading.Event()
    with pytest.raises(ValueError, match="device 7 is not used by this process; used: 0"):
        one.queries.profile(ProfileKind.ALLOCATED, 7, 300.0, never)


def test_a_worker_of_multiprocessing_ends_in_order(agent, torch, tmp_path):
    """Its process leaves without exit handlers: the run file would stay, the last push be lost."""
    one = agent(serve=True, port=0)
    one._await_cuda()

    def work():
        one.after_fork_in_child()
        one._arm()
        assert one.wait_listening(10)
        assert len(list((tmp_path / "run").iterdir())) == 1

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert list((tmp_path / "run").iterdir()) == []


def test_a_driver_that_fails_is_said_and_not_counted_as_zero(agent, torch):
    one = agent(serve=False)
    arm(one, torch)

    def broken(*_):
        raise RuntimeError("driver shut down")

    torch._C._cuda_memoryStats = broken
    torch._C._cuda_getDeviceCount = broken
    found = one.observe()
    assert (found.status.reason, found.devices) == ("error", ())


def test_a_notebook_takes_any_free_port_unless_one_is_chosen(agent, torch, monkeypatch):
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    one = agent(serve=True)
    arm(one, torch)
    assert one.wait_listening(10)
    assert one.address[1] != 9464
