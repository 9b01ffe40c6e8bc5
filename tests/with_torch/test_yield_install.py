"""The public calls beside a real torch that believes in a GPU: with install(), and without.

There are no tensors of a GPU here, so nothing is moved: what is shown is that the safe points of an
installed job are there and stop it, that the calls find their engine, and that nothing is left.
"""

from __future__ import annotations

import textwrap

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.version.cuda or torch.cuda.is_available(), reason="a CUDA build without a GPU"
    ),
]

HEAD = """
import json, os, sys, threading
import gpumem_otel
from gpumem_otel.api import lifecycle
import torch
from support.pretend_cuda import pretend
allocator = pretend(torch)
from gpumem_otel.yielding import wiring
from gpumem_otel.yielding.copy.devices import CpuDevices
wiring.CudaDevices = CpuDevices  # the runtime's functions need a driver
torch.cuda.is_current_stream_capturing = lambda: False

def say(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())

def refused(call, **options):
    try:
        call(**options)
    except gpumem_otel.YieldRefusedError as error:
        return str(error)
"""


@pytest.fixture
def run(child):
    def start(script: str, **more: str) -> list[dict]:
        environ = {"PYTHONFAULTHANDLER": "1", "GPUMEM_OTEL_PORT": "0", **more}
        return child(HEAD + textwrap.dedent(script), "-W", "error::UserWarning", **environ)

    return start


TRAIN = """
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """


def test_an_installed_job_stops_at_its_optimizers_step(run):
    said = run(
        "gpumem_otel.install()\ntorch.cuda._lazy_init()\n"
        + textwrap.dedent(TRAIN)
        + textwrap.dedent("""
        from gpumem_otel.api.yields import engine_of
        agent = lifecycle.current()
        assert agent.yields is None, "nobody has asked for it yet"
        step()
        assert agent.safe_points.owner is threading.main_thread()
        engine = engine_of(agent)
        assert engine is engine_of(agent)
        turns = []

        def command():
            report = gpumem_otel.yield_memory(level="tensors", wait_seconds=60.0)
            before = len(turns)
            say(state=engine.status.state.value, thread=engine.phases.parked.thread.name)
            restored = gpumem_otel.restore()
            say(state=restored.state.value, went_on=len(turns) - before)
            turns.append(None)

        thread = threading.Thread(target=command, name="operator")
        thread.start()
        while None not in turns:
            step()
            turns.append(1)
        thread.join()
        gpumem_otel.uninstall()
        say(posts=len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks))
        """)
    )
    assert said == [
        {"state": "yielded", "thread": "MainThread"},
        {"state": "running", "went_on": 0},
        {"posts": 0},
    ]


def test_the_calls_of_the_job_itself_with_and_without_install(run):
    said = run("""
        say(early=refused(gpumem_otel.yield_memory, level="tensors"))
        torch.cuda._lazy_init()
        with gpumem_otel.yielded(level="tensors") as report:
            say(bare=report.state.value, notes=len(report.notes))
        with gpumem_otel.Courtesy() as courtesy:
            pass
        try:
            gpumem_otel.yield_memory(level="everything")
        except gpumem_otel.ConfigError as error:
            say(level=str(error))
        gpumem_otel.install()
        with gpumem_otel.yielded(level="tensors") as report:
            say(installed=report.state.value, notes=len(report.notes))
        gpumem_otel.uninstall()
        """)
    assert said == [
        {"early": "yield: this process uses no GPU yet; nothing to give back"},
        {"bare": "yielded", "notes": 1},
        {
            "level": "yield: 'everything' is not a valid YieldLevel; levels are tensors, process, "
            "auto"
        },
        {"installed": "yielded", "notes": 0},
    ]


def test_without_install_a_call_of_another_thread_stops_the_job_at_step(run):
    said = run("""
        torch.cuda._lazy_init()
        done = threading.Event()

        def command():
            report = gpumem_otel.yield_memory(level="tensors", wait_seconds=60.0)
            engine = gpumem_otel.api.yields._STATE.engine
            say(state=report.state.value, thread=engine.phases.parked.thread.name)
            say(back=gpumem_otel.restore().state.value)
            done.set()

        thread = threading.Thread(target=command, name="operator")
        thread.start()
        while not done.is_set():
            gpumem_otel.step()
        thread.join()
        """)
    assert said == [{"state": "yielded", "thread": "MainThread"}, {"back": "running"}]


def test_more_than_one_rank_is_refused(run):
    said = run(
        """
        gpumem_otel.install()
        torch.cuda._lazy_init()
        say(said=refused(gpumem_otel.yield_memory, level="tensors"))
        """,
        RANK="0",
        WORLD_SIZE="2",
    )
    assert "2 ranks" in said[0]["said"]


def test_a_forked_child_forgets_what_was_yielded(run):
    said = run("""
        import os, warnings
        warnings.simplefilter("ignore")
        torch.cuda._lazy_init()
        gpumem_otel.yield_memory(level="tensors")
        child = os.fork()
        if not child:
            from gpumem_otel.api import yields
            import gc
            gc.collect()  # of what it forgot
            gpumem_otel.step()
            say(child=yields._STATE.engine is None)
            os._exit(0)
        os.waitpid(child, 0)
        say(parent=gpumem_otel.restore().state.value)
        """)
    assert said == [{"child": True}, {"parent": "running"}]


def test_a_forked_child_is_told_that_the_memory_is_its_parents(run):
    """By the calls and by the engine, with install() and without, whether or not it was used."""
    said = run("""
        import warnings
        warnings.simplefilter("ignore")
        torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent  # as the driver's own torch
        parent = os.getpid()

        def in_a_child(name):
            if not (child := os.fork()):
                say(**{name: refused(gpumem_otel.yield_memory, level="tensors")})
                agent = lifecycle.current()
                if agent is not None:
                    say(engine=refused(lambda: engine_of(agent)))
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

        from gpumem_otel.api.yields import engine_of
        torch.cuda._lazy_init()
        in_a_child("bare")
        gpumem_otel.install()
        in_a_child("installed")
        with gpumem_otel.yielded(level="tensors"):
            in_a_child("yielded")
        gpumem_otel.uninstall()
        """)
    forked = "yield: a forked child holds nothing of its parent's memory"
    assert said == [
        {"bare": forked},
        {"installed": forked}, {"engine": forked},
        {"yielded": forked}, {"engine": forked},
    ]  # fmt: skip


@pytest.mark.parametrize("installed", [True, False])
def test_host_memory_has_the_limit_that_was_set(run, installed):
    said = run(
        f"""
        from gpumem_otel.api.yields import _engine, engine_of
        torch.cuda._lazy_init()
        if {installed}:
            gpumem_otel.install(yield_host_limit_bytes=3000)
        engine, _ = _engine()
        offload = engine._parts.offload
        assert offload._host.reserve(3000) == 3000
        say(refused=refused(offload._host.reserve, size_bytes=1))
        offload._host.keep(0)
        offload._pool.grow_to(5 << 20, 0)
        offload.abandon()
        say(kept=offload.host_bytes)
        gpumem_otel.uninstall()
        """,
        GPUMEM_OTEL_YIELD_HOST_LIMIT_BYTES="5000" if installed else "3000",
        GPUMEM_OTEL_YIELD_KEEP_BYTES="0",
    )
    assert "the limit that was set" in said[0]["refused"]
    assert said[1] == {"kept": 0}
