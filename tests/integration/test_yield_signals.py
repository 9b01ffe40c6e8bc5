"""Processes that are interrupted, stopped or ended while their memory is away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

HEAD = """
import json, os, signal, sys, threading, time
from support.yield_parts import World
from gpumem_otel.yielding.values import RestoreRequest, YieldLevel, YieldRequest, YieldState
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.base.clock import SystemClock

TENSORS = YieldRequest(level=YieldLevel.TENSORS)
world = World()
engine = world.engine

def say(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())

def loop(turns=10**9):
    "The job, on the main thread."
    for turn in range(turns):
        world.safe_points.reached()
        time.sleep(0.001)

def command(request=TENSORS):
    "Yield from outside, and say so."
    def run():
        engine.yield_(request)
        say(state=engine.status.state.value)
    threading.Thread(target=run, daemon=True).start()

def facts(**more):
    say(state=engine.status.state.value, back=world.all_on_device, **more)
"""


class Job:
    """One such process; lines of JSON are what it says."""

    def __init__(self, script: str) -> None:
        path = f"{TESTS}:{TESTS.parent}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", HEAD + textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()[-3000:]
        return json.loads(line)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def stopped(self) -> bool:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def start():
    jobs = []

    def make(script: str) -> Job:
        jobs.append(Job(script))
        return jobs[-1]

    yield make
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
        job.process.communicate()


def test_an_interrupt_while_yielded_restores_first_and_then_is_raised(start):
    job = start("""
        world.safe_points.reached()
        command()
        try:
            loop()
        except KeyboardInterrupt:
            facts(raised=True)
        """)
    assert job.hear() == {"state": "yielded"}
    job.send(signal.SIGINT)
    assert job.hear() == {"state": "running", "back": True, "raised": True}
    assert job.end()[0] == 0


def test_a_second_interrupt_gets_through_where_the_device_is_taken(start):
    job = start("""
        world.safe_points.reached()
        world.offload.room = False
        world.callbacks.add(None, None, lambda why: say(evicted=why), 5.0)
        command()
        try:
            loop()
        except KeyboardInterrupt:
            facts()
        """)
    assert job.hear() == {"state": "yielded"}
    job.send(signal.SIGINT)
    assert "missing" in job.hear()["evicted"]
    job.send(signal.SIGINT)
    assert job.hear() == {"state": "yielded", "back": False}
    job.process.kill()
    assert "WITHOUT its memory" in job.end()[1]


def test_a_handler_of_the_jobs_own_for_sigterm_finds_its_memory_back(start):
    job = start("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        world.safe_points.reached()
        command()
        try:
            loop()
        finally:
            facts()
        """)
    assert job.hear() == {"state": "yielded"}
    job.send(signal.SIGTERM)
    assert job.hear() == {"state": "running", "back": True}
    assert job.end()[0] == 7


def test_sigterm_without_a_handler_ends_the_process_at_once(start):
    job = start("""
        world.safe_points.reached()
        command()
        loop()
        """)
    assert job.hear() == {"state": "yielded"}
    job.send(signal.SIGTERM)
    assert job.end() == (-signal.SIGTERM, "")


def test_an_exit_while_yielded_by_oneself_does_not_hang(start):
    job = start("""
        import atexit
        atexit.register(lambda: facts(driver=world.checkpoint.state))
        atexit.register(engine.close, 5.0)
        engine.yield_(YieldRequest(lease_seconds=3600.0))
        say(state=engine.status.state.value, driver=world.checkpoint.state)
        """)
    assert job.hear() == {"state": "yielded", "driver": "checkpointed"}
    assert job.hear() == {"state": "running", "back": True, "driver": "running"}
    assert job.end() == (0, "")


def test_an_exit_while_tensors_are_away_leaves_them(start):
    job = start("""
        import atexit
        atexit.register(engine.close, 5.0)
        engine.yield_(TENSORS)
        facts()
        """)
    assert job.hear() == {"state": "yielded", "back": False}
    assert job.end() == (0, "")


STOPPING = """
    from gpumem_otel.yielding.signals import StopSignals

    def stop():
        try:
            engine.yield_(YieldRequest(level=YieldLevel.TENSORS, wait_seconds=GRACE), "SIGTSTP")
        finally:
            facts()

    def go_on():
        if engine.status.state is YieldState.YIELDED:
            engine.restore(who="SIGCONT")
        facts()

    HANDLER
    signals = StopSignals(stop, go_on)
    signals.start()
    world.safe_points.reached()
    say(ready=True)
    """


def stopping(*, grace: float = 1.8, handler: str = "", job: str) -> str:
    head = textwrap.dedent(STOPPING).replace("GRACE", str(grace)).replace("HANDLER", handler)
    return head + textwrap.dedent(job)


def wait_stopped(job: Job) -> None:
    deadline = time.monotonic() + 30
    while not job.stopped():
        assert time.monotonic() < deadline, "it was not stopped"
        time.sleep(0.01)


def test_a_stop_signal_yields_within_the_grace_and_the_process_stops(start):
    job = start(stopping(job="loop()"))
    assert job.hear() == {"ready": True}
    job.send(signal.SIGTSTP)
    assert job.hear() == {"state": "yielded", "back": False}
    wait_stopped(job)
    job.send(signal.SIGCONT)
    assert job.hear() == {"state": "running", "back": True}


def test_without_a_safe_point_in_the_grace_nothing_is_moved_and_it_stops_all_the_same(start):
    job = start(stopping(grace=0.2, job="time.sleep(3600)"))
    assert job.hear() == {"ready": True}
    job.send(signal.SIGTSTP)
    assert job.hear() == {"state": "running", "back": True}
    wait_stopped(job)
    job.send(signal.SIGCONT)
    assert job.hear() == {"state": "running", "back": True}
    job.process.kill()
    assert "safe point: none in 0.2 s" in job.end()[1]


def test_handlers_that_were_there_are_called_and_put_back(start):
    handler = "signal.signal(signal.SIGTSTP, lambda *_: say(theirs=True))"
    job = start(
        stopping(
            handler=handler,
            job="""
            before = signal.getsignal(signal.SIGTSTP)
            while engine.status.state is not YieldState.YIELDED:
                world.safe_points.reached()
            """,
        )
    )
    assert job.hear() == {"ready": True}
    job.send(signal.SIGTSTP)
    assert job.hear() == {"theirs": True}
    assert job.hear() == {"state": "yielded", "back": False}
    assert not job.stopped()
    job.send(signal.SIGCONT)
    assert job.hear() == {"state": "running", "back": True}


def test_what_was_there_is_put_back(start):
    job = start("""
        from gpumem_otel.yielding.signals import StopSignals
        before = [signal.getsignal(n) for n in (signal.SIGTSTP, signal.SIGCONT)]
        signals = StopSignals(lambda: None, lambda: None)
        signals.start()
        changed = [signal.getsignal(n) for n in (signal.SIGTSTP, signal.SIGCONT)] != before
        signals.stop()
        after = [signal.getsignal(n) for n in (signal.SIGTSTP, signal.SIGCONT)]
        say(changed=changed, same=after == before)
        """)
    assert job.hear() == {"changed": True, "same": True}
    assert job.end() == (0, "")
