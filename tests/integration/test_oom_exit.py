"""How a job ends by an out-of-memory: as it would without us, and its profile is not lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.fake_pyroscope import FakePyroscope
from support.pyroscope_query import total

from gpumem_otel.profiles.pprof_reader import decode

TESTS = Path(__file__).parents[1]
OOM = "gpu_memory_oom:inuse_space:bytes:space:bytes"
HELD = 3 * 512
WAIT = 60
"""Bound of every wait: reached only where a test fails."""

UNCAUGHT = """
def train():
    torch.fail(1 << 30)

train()
"""
IN_A_THREAD = """
import threading
thread = threading.Thread(target=torch.fail, args=(1 << 30,), name="loader")
thread.start()
thread.join()
say("the job goes on")
sys.exit(5)
"""
SURVIVED = """
try:
    torch.fail(1 << 30)
except torch.OutOfMemoryError:
    say("survived")
sys.exit(7)
"""
CAUSED = """
try:
    torch.fail(1 << 30)
except torch.OutOfMemoryError as error:
    raise ValueError("batch too large") from error
"""
OWN_HOOK = """
def own(kind, value, traceback):
    say(f"own hook: {kind.__name__}: {value}")

sys.excepthook = own
torch.fail(1 << 30)
"""
HOOK_SET_AFTERWARDS = """
try:
    torch.fail(1)
except torch.OutOfMemoryError:
    pass
sys.excepthook = lambda *error: say(f"own hook: {error[0].__name__}")
torch.fail(1 << 30)
"""
SIGNAL = """
import os, signal
try:
    torch.fail(1 << 30)
except torch.OutOfMemoryError:
    pass
assert agent is None or agent.ooms.wait(30)
os.kill(os.getpid(), signal.SIGTERM)
"""
JOBS = {
    "uncaught": UNCAUGHT,
    "in a thread": IN_A_THREAD,
    "survived": SURVIVED,
    "caused": CAUSED,
    "own hook": OWN_HOOK,
    "hook set afterwards": HOOK_SET_AFTERWARDS,
    "signal": SIGNAL,
}


@pytest.fixture
def run(tmp_path):
    """Run a job with us or without; what became of it."""

    def call(body, *, with_us=True, head="", **environ):
        path = tmp_path / "job.py"
        arm = "agent = arm()" if with_us else "agent = None"
        path.write_text(
            f"import sys\nfrom support.oom_job import arm, say, torch\n{arm}\n"
            + textwrap.dedent(head)
            + textwrap.dedent(body)
        )
        prefixes = ("GPUMEM_OTEL_", "OTEL_", "PYROSCOPE_")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
        return subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=WAIT,
            env={
                **clean,
                "PYTHONPATH": str(TESTS),
                "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
                "OTEL_SERVICE_NAME": "job",
                **environ,
            },
        )

    return call


def theirs(text):
    """Without what we say: our log block, our lines of JSON."""
    kept, ours = [], False
    for line in text.splitlines():
        ours = line.startswith(("gpumem_otel:", "{")) or (ours and line.startswith("  "))
        if line.startswith("Traceback"):
            ours = False
        if not ours:
            kept.append(line)
    return kept


def spooled(tmp_path):
    folder = tmp_path / "run" / "spool"
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_job_ends_as_without_us_and_the_profile_is_there(run, tmp_path, job):
    plain = run(job, with_us=False)
    with FakePyroscope() as server:
        done = run(job, PYROSCOPE_SERVER_ADDRESS=server.url)
        assert total(server.url, "job", OOM) >= HELD
    assert done.returncode == plain.returncode
    assert done.stdout == plain.stdout
    assert theirs(done.stderr) == theirs(plain.stderr)
    assert '"event":"gpumem_oom"' in done.stderr
    assert spooled(tmp_path) == []


@pytest.mark.parametrize("fault", ["hang", "silent", "trickle"])
@pytest.mark.parametrize("job", ["uncaught", "survived", "in a thread"])
def test_a_server_that_hangs_delays_the_end_by_a_bound_and_the_profile_waits(
    run, tmp_path, job, fault
):
    plain = run(JOBS[job], with_us=False)
    with FakePyroscope() as server:
        server.fault = fault
        done = run(JOBS[job], PYROSCOPE_SERVER_ADDRESS=server.url, PYROSCOPE_TIMEOUT="60")
    assert done.returncode == plain.returncode
    assert done.stdout == plain.stdout
    assert theirs(done.stderr) == theirs(plain.stderr)
    (path,) = spooled(tmp_path)
    assert not path.name.startswith("sending-")
    assert decode(path.read_bytes()).total("inuse_space") == HELD


def test_a_regular_push_that_hangs_holds_up_no_profile(run, tmp_path):
    """The background thread is inside it; the server recovers just before the failure."""
    with FakePyroscope() as server:
        server.fault = "hang"
        done = run(
            f"""
            import threading, urllib.request
            threading.Thread(target=agent.flush, args=(60,), daemon=True).start()
            urllib.request.urlopen("http://127.0.0.1:{_relay(server)}/").read()
            torch.fail(1 << 30)
            """,
            PYROSCOPE_SERVER_ADDRESS=server.url,
            PYROSCOPE_TIMEOUT="60",
        )
        assert done.returncode == 1
        assert total(server.url, "job", OOM) == HELD
    assert spooled(tmp_path) == []


def _relay(server):
    """A port that answers once the first push hangs, and mends the server for the next."""
    import threading  # noqa: PLC0415
    from http.server import BaseHTTPRequestHandler, HTTPServer  # noqa: PLC0415

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.wait_for_pushes(1)
            server.fault = ""
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    relay = HTTPServer(("127.0.0.1", 0), Handler)

    def once():
        with relay:
            relay.handle_request()

    threading.Thread(target=once, daemon=True).start()
    return relay.server_address[1]


def test_a_raising_observer_body_does_not_take_the_place_of_the_error(run):
    done = run(
        UNCAUGHT,
        head="""
        def broken(*_):
            raise RuntimeError("defect of ours")
        agent.ooms._watch._look = broken
        """,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("torch.OutOfMemoryError: CUDA out of memory")
    assert "Traceback" in done.stderr
    assert "During handling" not in done.stderr


def test_uninstall_leaves_an_observer_that_does_nothing(run):
    done = run(UNCAUGHT, head="import gpumem_otel; gpumem_otel.uninstall()\n")
    plain = run(UNCAUGHT, with_us=False)
    assert (done.returncode, done.stderr.count("gpumem_oom")) == (1, 0)
    assert done.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]
