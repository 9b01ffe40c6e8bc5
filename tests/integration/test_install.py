"""install() in real processes: silent without CUDA, harmless at fork, exit and crash."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from support.fake_pyroscope import FakePyroscope
from support.pyroscope_query import total
from support.recordings import make_recording

from gpumem_otel.api import lifecycle

SNAPSHOT = "h200-torch2.11-train-python-stacks.pickle.gz"
ALLOCATED = 121_323_520

REPLAY = """
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
"""


@pytest.fixture
def run(tmp_path):
    """Run a script in a Python of its own; (exit code, stdout, stderr)."""
    (tmp_path / "test.gpumem").write_bytes(make_recording(SNAPSHOT))

    def start(script, *, replay=False, check=True, **environ):
        text = (REPLAY if replay else "") + textwrap.dedent(script)
        settings = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONFAULTHANDLER": "1",
            "RECORDING": str(tmp_path / "test.gpumem"),
            "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
            **environ,
        }
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, env=settings, timeout=60
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done.returncode, done.stdout, done.stderr

    return start


def test_without_torch_it_is_silent_and_undoes_itself(run):
    _, out, err = run(
        """
        import signal, sys, threading
        def state():
            return (
                [signal.getsignal(n) for n in (2, 10, 12, 15)], sys.excepthook,
                threading.excepthook, list(sys.meta_path), threading.active_count(),
            )
        import gpumem_otel
        before = state()
        gpumem_otel.install(serve=True, pyroscope_url="http://127.0.0.1:9")
        installed = state()
        assert installed[:3] == before[:3], "a handler was installed"
        assert installed[4] == 1, "a thread was started"
        assert "torch" not in sys.modules
        gpumem_otel.step()
        gpumem_otel.watch(threading.current_thread(), kv_cache=threading.Event())
        gpumem_otel.participant()
        gpumem_otel.install(serve=True, pyroscope_url="http://127.0.0.1:9")
        gpumem_otel.uninstall()
        gpumem_otel.uninstall()
        assert state() == before
        """
    )
    assert (out, err) == ("", "")


def test_a_bad_keyword_raises_and_a_bad_variable_does_not(run):
    code, _, err = run("import gpumem_otel; gpumem_otel.install(port=-1)", check=False)
    assert code == 1
    assert err.splitlines()[-1] == (
        "gpumem_otel.errors.ConfigError: option 'port' must be between 0 and 65535"
    )
    _, _, err = run("import gpumem_otel; gpumem_otel.install()", GPUMEM_OTEL_PORT="-1")
    assert "GPUMEM_OTEL_PORT must be between 0 and 65535; ignored" in err


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError('the job fails')", 1),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_the_exit_code_is_the_jobs(run, ending, code):
    found, _, _ = run(ending, replay=True, check=False, GPUMEM_OTEL_SERVE="1", GPUMEM_OTEL_PORT="0")
    assert found == code


def test_what_is_alive_at_the_end_is_pushed_on_the_way_out(run):
    with FakePyroscope() as server:
        run("", replay=True, PYROSCOPE_SERVER_ADDRESS=server.url, OTEL_SERVICE_NAME="ends")
        assert total(server.url, "ends") >= ALLOCATED
        assert total(server.url, "ends") % ALLOCATED == 0


def test_a_server_that_never_answers_does_not_hold_the_exit(run):
    with FakePyroscope() as server:
        server.fault = "hang"
        run("", replay=True, PYROSCOPE_SERVER_ADDRESS=server.url)


def test_a_forked_child_is_silent_and_the_parent_goes_on(run):
    with FakePyroscope() as server:
        _, out, err = run(
            """
            assert agent.wait_listening(10)
            port = agent.address[1]
            assert agent.flush(10)
            child = os.fork()
            if child == 0:
                import socket
                sockets = 0
                for fd in os.listdir("/proc/self/fd"):
                    try:
                        sockets += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
                    except OSError:
                        pass
                # two ends of asyncio's own wake-up pair remain, which cannot be seen from outside
                ok = (
                    threading.active_count() == 1 and agent.address is None
                    and agent.observe() is None and sockets <= 2
                )
                gpumem_otel.step()
                gpumem_otel.uninstall()
                os._exit(0 if ok else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            import urllib.request
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
            assert 'gpumem_allocated_bytes{device="0",rank="0"}' in text
            print("parent goes on")
            """,
            replay=True,
            PYROSCOPE_SERVER_ADDRESS=server.url,
            GPUMEM_OTEL_SERVE="1",
            GPUMEM_OTEL_PORT="0",
        )
    assert out == "parent goes on\n", err


def test_eight_forked_workers_of_multiprocessing_are_invisible(run):
    _, out, _ = run(
        """
        import multiprocessing
        def work(n):
            return threading.active_count(), agent.observe() is None
        with multiprocessing.get_context("fork").Pool(8) as pool:
            results = pool.map(work, range(64))
        pool.join()
        # a pool's worker has no thread but its own
        assert set(results) == {(1, True)}, set(results)
        print(len(os.listdir(os.environ["GPUMEM_OTEL_RUN_DIR"])))
        """,
        replay=True,
        GPUMEM_OTEL_SERVE="1",
        GPUMEM_OTEL_PORT="0",
    )
    assert out == "1\n"


def test_spawned_workers_never_arm(run, tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, threading
            import gpumem_otel
            gpumem_otel.install(serve=True)
            def work(n):
                from gpumem_otel.api import lifecycle
                return threading.active_count(), lifecycle.current().observe() is None
            if __name__ == "__main__":
                with multiprocessing.get_context("spawn").Pool(2) as pool:
                    print(set(pool.map(work, range(4))))
                pool.join()
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "none")},
        timeout=60,
    )
    assert done.stdout == "{(1, True)}\n", done.stderr
    assert not (tmp_path / "none").exists()


def test_opentelemetry_instrument_starts_it_without_torch_or_sdk(run, tmp_path):
    pytest.importorskip("opentelemetry.instrumentation")
    script = tmp_path / "job.py"
    script.write_text(
        "import sys\n"
        "from gpumem_otel.api import lifecycle\n"
        "print(lifecycle.current() is not None, 'torch' in sys.modules)\n"
    )
    tool = Path(sys.executable).with_name("opentelemetry-instrument")
    done = subprocess.run(
        [str(tool), "--metrics_exporter", "none", sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={
            "PATH": f"{tool.parent}:{os.environ['PATH']}",
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
        },
        timeout=60,
    )
    assert done.stdout == "True False\n", done.stderr


def test_what_is_watched_is_held_weakly_and_forgotten():
    class Model:
        pass

    models = [Model() for _ in range(100)]
    for model in models:
        lifecycle.watch(cache=model)
    assert [name for name, _ in lifecycle.watched()] == ["cache"] * 100
    del models, model
    gc.collect()
    assert list(lifecycle.watched()) == []
    assert lifecycle._STATE.watched == {}


def test_what_is_watched_again_is_watched_once():
    class Model:
        pass

    model, nested = Model(), []
    nested += [model, nested]  # a list in itself
    for _ in range(3):
        lifecycle.watch(cache=nested)
    assert list(lifecycle.watched()) == [("cache", model)]


def test_participants_end_with_uninstall():
    lifecycle.participant()
    assert threading.current_thread() in lifecycle.participants()
    lifecycle.uninstall()
    assert lifecycle.participants() == frozenset()
