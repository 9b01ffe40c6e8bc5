"""While the gate is closed nothing of ours calls torch, and everything is answered all the same.

The stand-in for torch notes every call; on a GPU one of them would stop all Python.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import types
import urllib.error
import urllib.request

import pytest
from support import fake_torch

from gpumem_otel.errors import BusyError
from gpumem_otel.profiles.pprof_reader import decode
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.settings.options import resolve


class Noted:
    """Notes the calls of a module's functions, once told to."""

    def __init__(self, *modules):
        self.on = False
        self.calls = []
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType):
                    setattr(module, name, self.noting(f"{module.__name__}.{name}", value))

    def noting(self, name, function):
        def call(*args, **kwargs):
            if self.on:
                self.calls.append(name)
            return function(*args, **kwargs)

        call.__doc__ = function.__doc__
        return call


@pytest.fixture
def torch(monkeypatch):
    module = fake_torch.make("2.11", devices=1)
    c, cuda = module._C, module.cuda
    texts = ["the job's"]
    c._cuda_getMemoryMetadata = lambda: texts[-1]
    c._cuda_setMemoryMetadata = texts.append
    c._cuda_getDevice = lambda: 0
    cuda.current_device = lambda: 0
    cuda.get_device_name = lambda device: "Fake H200"
    cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="", name="Fake H200")
    module.text = lambda: texts[-1]
    module.noted = Noted(c, cuda)
    monkeypatch.setitem(sys.modules, "torch", module)
    module.allocators[0].alloc(1000)
    return module


@pytest.fixture
def agent(torch, tmp_path):
    options = {
        "interval_seconds": 3600,
        "run_dir": str(tmp_path / "run"),
        "serve": True,
        "port": 0,
        "metrics_level": "full",
    }
    one = Agent(resolve({}, **options), environ={})
    one._await_cuda()
    one._arm()
    assert one.wait_listening(10)
    yield one
    torch.noted.on = False
    one.gate.open()
    one.stop()


def get(agent, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{agent.address[1]}{path}", timeout=20) as got:
        return got.read()


@pytest.fixture
def quiet(agent, torch):
    """The gate is closed after the first values were asked for; nobody may call torch."""
    get(agent, "/metrics")
    get(agent, "/debug/pprof/gpumem")
    torch.allocators[0].alloc(5000)
    assert agent.gate.close(10.0)
    torch.noted.on = True
    yield
    assert torch.noted.calls == []


def value(text, name):
    (line,) = [line for line in text.decode().splitlines() if line.startswith(name + "{")]
    return float(line.rpartition(" ")[2])


def forget(agent):
    """As if the second had passed in which the same values are given again."""
    agent.answers.forget()
    agent.reader._last = (agent.reader._last[0] - 100.0, agent.reader._last[1])


def test_metrics_give_the_last_values_and_say_how_old_they_are(agent, quiet):
    forget(agent)
    before = agent.observe()
    text = get(agent, "/metrics")
    assert value(text, "gpumem_allocated_bytes") == before.devices[0].allocated_bytes == 1024
    agent.step()
    agent.counters.add("exporter_pushed_bytes", 7)
    forget(agent)
    now = agent.observe()
    assert now.devices == before.devices
    assert now.time_ns == before.time_ns < time.time_ns()
    assert now.counters["exporter_pushed_bytes", ()] == 7, "what is ours is of now"
    told = value(get(agent, "/metrics"), "gpumem_values_timestamp_seconds")
    assert told == now.time_ns / 1_000_000_000
    assert agent.counters.get("exporter_errors", stage="read") == 0
    ages = json.loads(get(agent, "/healthz"))["ages_seconds"]
    assert ages["values"] >= round((time.time_ns() - now.time_ns) / 1e9, 3) - 1


def test_a_profile_is_the_last_one_and_says_so(agent, quiet):
    forget(agent)
    profile = decode(get(agent, "/debug/pprof/gpumem"))
    assert profile.total("inuse_space") == 1024
    (told,) = [c for c in profile.comments if c.startswith("read 1")]
    assert told.endswith(
        "s before it was asked for: read: the driver holds this process: nothing is read until it "
        "runs again"
    )


def test_what_was_never_read_is_refused(agent, torch):
    assert agent.gate.close(10.0)
    torch.noted.on = True
    text = get(agent, "/metrics")
    assert b"gpumem_steps_total" in text
    assert b"gpumem_allocated_bytes{" not in text
    for path in ("/debug/pprof/gpumem", "/debug/pprof/gpumem?kind=allocated&seconds=1"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(agent, path)
        assert caught.value.code == 503
        assert b"the driver holds this process" in caught.value.read()
    assert torch.noted.calls == []
    assert agent.counters.get("exporter_errors", stage="read") == 0


def test_pushes_are_left_out_and_are_no_errors(agent, quiet, caplog):
    assert not agent.flush(10.0)
    assert not agent.flush(10.0)
    errors = {key: n for key, n in agent.counters.snapshot().items() if "errors" in key[0] and n}
    assert errors == {}
    assert agent.counters.get("exporter_dropped", reason="shutdown") == 0


def test_the_hooks_on_the_jobs_threads_look_at_nothing(agent, quiet):
    agent.step()
    agent.tensors.stepped(None)
    assert agent.answers.step_stats().steps == 1
    assert agent.source.allocated() == {}
    with pytest.raises(BusyError):
        agent.source.stats()
    with pytest.raises(BusyError):
        agent.source.read()
    with pytest.raises(BusyError):
        agent.source.window(1.0, threading.Event())
    assert agent.source.status().devices == (0,)


def test_a_failed_allocation_is_counted_and_not_looked_at(agent, quiet, torch):
    torch.noted.on = False  # the failure itself is the job's
    torch.noted.calls.clear()
    snapshots = len(torch.snapshots)
    with pytest.raises(torch.OutOfMemoryError):
        torch.fail(1 << 30)
    assert len(torch.snapshots) == snapshots
    assert agent.counters.get("exporter_errors", stage="oom") == 0


def test_a_region_that_ends_meanwhile_is_put_back_later(agent, torch):
    marks = agent.marks
    outer = marks.enter("outer")
    assert torch.text() == "outer"
    assert agent.gate.close(10.0)
    torch.noted.on = True
    assert marks.enter("inner") is None
    marks.exit(outer)
    assert torch.noted.calls == []
    assert torch.text() == "outer"
    agent.gate.open()
    later = marks.enter("later")
    assert torch.text() == "later"
    marks.exit(later)
    assert torch.text() == "the job's"


def test_a_window_ends_early_when_the_gate_closes(agent, torch):
    began, got = threading.Event(), []
    opened = agent.source.recorder.open_window

    def open_window(*args, **kwargs):
        opened(*args, **kwargs)
        began.set()

    agent.source.recorder.open_window = open_window
    thread = threading.Thread(
        target=lambda: got.append(agent.source.window(300.0, threading.Event()))
    )
    thread.start()
    assert began.wait(10)
    assert agent.gate.close(30.0)
    torch.noted.on = True
    thread.join(10)
    assert len(got) == 1
    assert torch.noted.calls == []


def test_it_is_uninstalled_without_a_call_of_torch(agent, quiet, torch):
    agent.stop(2.0)


def test_everything_is_of_now_once_it_is_open_again(agent, torch):
    get(agent, "/metrics")
    assert agent.gate.close(10.0)
    agent.gate.open()
    torch.allocators[0].alloc(5000)
    forget_all = agent.answers.forget
    forget_all()
    assert agent.observe().devices[0].allocated_bytes == torch.allocators[0].held()


def test_a_forked_child_inherits_no_closed_gate(agent):
    agent.gate.close(1.0)
    agent.gate.forget_parent()
    assert agent.gate.enter()
    agent.gate.leave()
