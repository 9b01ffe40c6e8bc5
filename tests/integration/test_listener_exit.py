"""The end of a job, and its forked children: nothing waits, nothing is held."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import os, socket, sys, threading, time
sys.path.insert(0, sys.argv[1])
from support.listening import WAIT, ask, connected, listening, some_deps
from gpumem_otel.settings.config import ServeConfig
from gpumem_otel.serve.listener import Listener

def started(deps=None, **config):
    listener = Listener(deps or some_deps(), ServeConfig(**{"port": 0, **config}))
    listener.start()
    assert listener.bound.wait(WAIT)
    return listener
"""

EXIT_SECONDS = 5
"""The bound is one second; the rest is for a machine that is busy with other tests."""


def job(script: str) -> subprocess.Popen[str]:
    """A job in a process of its own, with all warnings on."""
    support = str(Path(__file__).parents[1])
    # Forking while threads run is deprecated from Python 3.12 on; jobs do it all the same.
    warnings = ["-X", "dev", "-W", "error", "-W", "ignore::DeprecationWarning"]
    command = [sys.executable, *warnings, "-c", PRELUDE + script, support]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], seconds: float = 60) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    return out, err


@pytest.mark.parametrize(
    ("path", "handler"),
    [
        ("/debug/pprof/gpumem?seconds=60", "lambda *_: (entered.set(), time.sleep(60))"),
        ("/debug/pprof/gpumem?seconds=60", "lambda k, d, s, stop: (entered.set(), stop.wait(60))"),
        ("/metrics", "lambda *_: (entered.set(), time.sleep(60))"),
        ("/healthz", "lambda *_: (entered.set(), time.sleep(60))"),
    ],
    ids=["deaf window", "window", "metrics", "health"],
)
def test_a_job_that_never_stops_the_listener_ends_at_once(path, handler):
    process = job(f"""
entered = threading.Event()
slow = {handler}
listener = started(some_deps(profile=slow, metrics=slow, health=slow))
client = socket.create_connection(listener.address)
client.sendall(b"GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
assert entered.wait(WAIT)
client.detach()
print("ends", flush=True)
""")
    assert process.stdout.readline() == "ends\n"
    assert finish(process, EXIT_SECONDS) == ("", "")


def test_a_job_that_stops_the_listener_at_exit_ends_at_once():
    process = job("""
import atexit
entered = threading.Event()
def slow(*_):
    entered.set()
    time.sleep(60)
listener = started(some_deps(profile=slow))
atexit.register(listener.stop, timeout=0.5)
client = socket.create_connection(listener.address)
client.sendall(b"GET /debug/pprof/gpumem?seconds=60 HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
assert entered.wait(WAIT)
client.detach()
print("ends", flush=True)
""")
    assert process.stdout.readline() == "ends\n"
    assert finish(process, EXIT_SECONDS) == ("", "")


def test_nothing_is_imported_in_the_background():
    """An import on our thread holds module locks, which a child forked meanwhile inherits."""
    process = job("""
import gzip, encodings.idna  # the client's
listener = started(some_deps(metrics=lambda _: ("text/plain", b"x" * 5000)))
with connected(listener.address) as client:
    client.request("/nope"); client.answer()
before = set(sys.modules)
for path in ("/", "/metrics", "/debug/pprof/gpumem", "/debug/pprof/gpumem?seconds=x", "/healthz"):
    for extra in ("Accept-Encoding: gzip", "Content-Length: 99999"):
        ask(listener.address, path, extra)
ask(listener.address, "/metrics", host="evil.example")
ask(listener.address, "/metrics", method="POST")
listener.stop(timeout=WAIT)
print(sorted(set(sys.modules) - before))
print([name for name in ("concurrent.futures.thread", "uvloop", "torch") if name in sys.modules])
""")
    assert finish(process) == ("[]\n[]\n", "")


def test_starlette_and_uvicorn_are_imported_by_start_alone():
    process = job("""
listener = Listener(some_deps(), ServeConfig(port=0))
print([name for name in ("starlette", "uvicorn", "h11", "anyio") if name in sys.modules])
""")
    assert finish(process) == ("[]\n", "")


def test_a_process_that_cannot_start_it_gets_an_error():
    process = job("""
from gpumem_otel.errors import ServeError
sys.modules["uvicorn"] = None
listener = Listener(some_deps(), ServeConfig(port=0))
try:
    listener.start()
except ServeError as exc:
    print(exc)
listener.stop()
print(threading.active_count())
""")
    out, err = finish(process)
    assert out.startswith("the listener cannot be started: No module named 'uvicorn")
    assert out.endswith("\n1\n")
    assert err == ""


FORK = """
def inodes():
    sockets = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    return sockets

def tcp():
    # States of the sockets of this process, proc(5): 0A listens, 01 is connected.
    mine = inodes()
    with open("/proc/self/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sorted(row[3] for row in rows if row[9] in mine)
"""


def test_a_forked_child_holds_nothing_and_the_parent_goes_on():
    process = job(
        FORK
        + """
listener = started()
address = listener.address
kept = connected(address)
client = kept.__enter__()
client.request("/metrics"); client.answer()
assert tcp() == ["01", "01", "0A"]
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    client.sock.close()
    listener.close_in_child()
    assert tcp() == [], tcp()
    assert listener.address is None and not listener.bound.is_set()
    listener.stop()
    listener.start()  # the child owns a GPU by now
    assert listener.bound.wait(WAIT) and listener.address != address
    assert ask(listener.address, "/metrics")[0] == 200
    listener.stop(timeout=WAIT)
    os.write(ready[1], b"x")
    os.read(go[0], 1)
    os._exit(0)
assert os.read(ready[0], 1) == b"x"
client.request("/metrics")
assert client.answer()[0] == 200
assert ask(address, "/metrics")[0] == 200
kept.__exit__(None, None, None)
listener.stop(timeout=WAIT)
again = started(port=address[1])  # although the child still lives
assert again.address == address
again.stop(timeout=WAIT)
os.write(go[1], b"x")
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert finish(process) == ("0\n", "")


def test_a_child_forked_under_the_lock_of_its_parent_is_free():
    process = job("""
listener = started()
with listener._lock:
    child = os.fork()
    if child == 0:
        listener.close_in_child()
        listener.start()
        listener.stop(timeout=WAIT)
        os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
listener.stop(timeout=WAIT)
""")
    assert finish(process) == ("0\n", "")


def test_a_child_that_ends_normally_is_silent():
    """No warning about loops or sockets that belong to the parent."""
    process = job("""
listener = started()
with connected(listener.address) as client:
    client.request("/metrics"); client.answer()
    child = os.fork()
    if child == 0:
        client.sock.close()
        listener.close_in_child()
        del listener
        import gc; gc.collect()
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    client.request("/metrics")
    assert client.answer()[0] == 200
listener.stop(timeout=WAIT)
""")
    assert finish(process) == ("0\n", "")


def test_a_killed_process_frees_its_port_and_is_dropped_from_the_run_directory(tmp_path):
    process = job(f"""
from gpumem_otel.base.profile import Identity
listener = Listener(
    some_deps(), ServeConfig(port=0, run_dir={str(tmp_path)!r}),
    identity=lambda: Identity(service_name="trainer"),
)
listener.start()
assert listener.bound.wait(WAIT)
print(listener.address[1], flush=True)
sys.stdin.read()
""")
    tmp_path.chmod(0o700)
    port = int(process.stdout.readline())
    process.kill()
    process.communicate()
    assert len(list(tmp_path.iterdir())) == 1
    second = job(f"""
from gpumem_otel.serve.discovery import targets
assert targets({str(tmp_path)!r}) == []
listener = started(port={port})
print(listener.address[1])
listener.stop(timeout=WAIT)
""")
    assert finish(second) == (f"{port}\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_used_up_its_descriptors_is_served_later():
    process = job("""
import resource
listener = started()
with socket.create_connection(listener.address) as early:
    early.sendall(b"GET /nope HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
    while early.recv(65536):
        pass  # up to its end: the listener has closed its side, and no descriptor comes free later
late = socket.socket()
taken = [os.dup(0)]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
late.connect(listener.address)
late.sendall(b"GET /nope HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
late.settimeout(0.3)
try:
    print(late.recv(12))
except TimeoutError:
    print("not yet")
os.close(taken[0])
late.settimeout(WAIT)
print(late.recv(12).decode())
late.close()
listener.stop(timeout=WAIT)
""")
    assert finish(process) == ("not yet\nHTTP/1.1 404\n", "")
