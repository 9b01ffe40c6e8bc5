"""What goes wrong around a yield on a GPU: the job trains on, or its state can still be restored.

Every scenario is a process of its own (or several), whose losses are compared bit for bit with
those of a twin that never yields.
"""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.yield_gpu import Jobs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
GIB = 1 << 30

LARGE = """
# more than a guest leaves (for whatever else runs on the device), and thrown away: that takes
# neither host memory nor time
job = Training()
job.steps(2)
large = [torch.zeros(GIB, dtype=torch.uint8, device="cuda") for _ in range(40)]
gpumem_otel.watch(kv_cache=large)
job.steps(2)
"""


LOCKER = '''
LOCKER = """
import sys
from cuda.bindings import driver as d
pid = int(sys.argv[1])
def do(name):
    args = getattr(d, f"CUcheckpoint{name}Args")()
    print(name, int(getattr(d, f"cuCheckpointProcess{name}")(pid, args)[0]), flush=True)
d.cuInit(0)
do("Lock")
sys.stdin.read()
do("Unlock")
"""
'''


@pytest.fixture
def jobs(devices, tmp_path):
    made = Jobs(tmp_path)
    yield made
    made.close()


@pytest.fixture
def alone(tmp_path_factory):
    """Of the tests that fill the device, one at a time, in whichever process."""
    shared = tmp_path_factory.getbasetemp().parent / "whole-device.lock"
    with shared.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def status_of(pid):
    """As proc(5) has it: T stopped, Z ended and not waited for; "" where there is no such."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_there(pid):
    return status_of(pid) not in {"", "Z"}


def until(what, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.05)
    return False


def on_device(pid):
    """Whether `nvidia-smi` lists the process; pids of another namespace it does not."""
    ask = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True)
    return str(pid) in done.stdout.split()


# memory that is not there


@pytest.mark.parametrize("how", ["call", "command"])
def test_host_memory_is_short(jobs, how):
    """Another yield of this machine holds what there is: nothing is moved, and later it goes."""
    reported = jobs.run(f"""
        how = {how!r}
        job = Training(extra=512 << 20)
        job.steps(2)
        holder = hold_all_host_memory()
        before = torch.cuda.memory_allocated()
        if how == "call":
            said = refused(gpumem_otel.yield_memory, level="tensors")
        else:
            done = beside(job.step, lambda: command(YieldRequest(level=TENSORS)))
            assert done.state is REFUSED, done
            said = done.error
        kept = torch.cuda.memory_allocated() >= before
        first = state()
        holder.close()
        report = gpumem_otel.yield_memory(level="tensors")
        second = state()
        gpumem_otel.restore()
        tell(said=said, kept=kept, states=[first, second, state()], host=report.host_bytes,
             as_never=job.as_never())
    """)
    assert "host memory: 5" in reported["said"]
    assert (
        "MiB are needed and 0 B can be taken (the machine, other yields: 1.0 PiB)"
        in reported["said"]
    )
    assert reported["kept"]
    assert reported["states"] == ["running", "yielded", "running"]
    assert reported["host"] >= 512 * MIB
    assert reported["as_never"]


def test_the_device_is_taken_when_the_memory_is_to_come_back(jobs, alone):
    reported = jobs.run(
        LARGE
        + """
guest = Guest(20 * GIB)
gpumem_otel.yield_memory(level="tensors", discard=("kv_cache",))
guest.come()
said = refused(gpumem_otel.restore, wait_seconds=0.5)
first = state(), torch.cuda.memory_allocated() < GIB
done = command(RestoreRequest(wait_seconds=0.2))
again = done.state.value, done.error
guest.leave()
gpumem_otel.restore()
zero = all(not one.any() for one in large)
del large
tell(said=said, first=first, again=again, state=state(), zero=zero, as_never=job.as_never())
"""
    )
    assert "missing" in reported["said"]
    assert reported["first"] == ["yielded", True]
    assert reported["again"][0] == "refused"
    assert "missing" in reported["again"][1]
    assert reported["state"] == "running"
    assert reported["zero"]
    assert reported["as_never"]


def test_the_guest_is_still_there_when_the_lease_ends(jobs, alone):
    """It stays away, says why, tells the job, and comes back by itself once there is room."""
    reported = jobs.run(
        LARGE
        + """
evicted = threading.Event()
gpumem_otel.yield_callbacks(on_evict=lambda reason: evicted.set())
from gpumem_otel.yielding.engine import engine as engine_module
engine_module.LEASE_WAIT_SECONDS = 0.5
guest = Guest(20 * GIB)
gpumem_otel.yield_memory(level="tensors", discard=("kv_cache",), lease_seconds=8.0)
guest.come()
expiry = engine().status.lease_expiry_ns
assert evicted.wait(60)
first = state()
reason = engine().status.reason
guest.leave()
while state() != "running":
    engine().wait(engine().status.version, 60)
del large
tell(first=first, reason=reason, expiry=expiry > 0, status=engine().status.reason,
     as_never=job.as_never())
"""
    )
    assert reported["expiry"]
    assert reported["first"] in {"yielded", "restoring"}
    assert "missing" in reported["reason"]
    assert reported["status"] == ""
    assert reported["as_never"]


def test_a_yield_while_an_out_of_memory_is_handled(jobs):
    reported = jobs.run("""
        job = Training(extra=256 << 20)
        job.steps(2)
        free, total = torch.cuda.mem_get_info()
        def eat():
            torch.cuda.set_per_process_memory_fraction(2 * GIB / total)
            held = []
            while True:
                held.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
        yielded = 0
        for turn in range(3):
            try:
                eat()
            except torch.cuda.OutOfMemoryError:
                report = None
                while report is None:
                    try:
                        report = gpumem_otel.yield_memory(level="tensors")
                    except YieldRefusedError as error:
                        assert "out-of-memory" in str(error), error
                        time.sleep(0.05)  # its profile is being made
                yielded += sum(report.moved_bytes.values()) >= 256 << 20
                gpumem_otel.restore()
        # and a command that comes in the middle of it
        def survive():
            try:
                eat()
            except torch.cuda.OutOfMemoryError:
                pass
            job.step()
        def there_and_back():
            done = command(YieldRequest(level=TENSORS))
            if done.state is DONE:
                assert command(RestoreRequest()).state is DONE
            return done
        outcomes = []
        for _ in range(3):
            done = beside(survive, there_and_back)
            outcomes.append(done.state.value)
        torch.cuda.set_per_process_memory_fraction(1.0)
        tell(yielded=yielded, outcomes=outcomes, state=state(), as_never=job.as_never())
    """)
    assert reported["yielded"] == 3
    assert set(reported["outcomes"]) <= {"done", "refused"}
    assert reported["state"] == "running"
    assert reported["as_never"]


def test_eight_processes_yield_at_once_within_one_limit(jobs):
    """Each finds the same memory free; together they never hold more than the limit, and each
    has its turn."""
    script = """
        job = Training(extra=256 << 20)
        job.steps(2)
        tell(ready=True)
        hear()
        most = turns = tries = 0
        end = time.monotonic() + 60
        while turns < 3 and time.monotonic() < end:
            tries += 1
            try:
                gpumem_otel.yield_memory(level="tensors", release_host=True)
            except YieldRefusedError as error:
                assert "host memory" in str(error), error
                job.step()
                continue
            most = max(most, held_by_all())
            turns += 1
            gpumem_otel.restore()
            job.step()
        tell(turns=turns, tries=tries, most=most, state=state(), as_never=job.as_never())
    """
    limit = 1200 * MIB
    options = {"yield_host_limit_bytes": limit}
    eight = [jobs.start(script, OPTIONS=json.dumps(options)) for _ in range(8)]
    for job in eight:
        assert jobs.hear(job) == {"ready": True}
    for job in eight:
        job.stdin.write("go\n")
        job.stdin.flush()
    reported = [jobs.end(job) for job in eight]
    assert [one["turns"] for one in reported] == [3] * 8, reported
    assert max(one["most"] for one in reported) <= limit
    assert all(one["as_never"] and one["state"] == "running" for one in reported)


# commands


def test_a_flood_of_commands(jobs):
    """Each is taken, repeats one that runs, or is refused; the job computes what it would have."""
    reported = jobs.run("""
        job = Training()
        job.steps(2)
        taken, refusals, wrong = set(), [], []
        def flood(number):
            for turn in range(50):
                level = (TENSORS, AUTO)[number % 2]
                request = RestoreRequest() if turn % 2 else YieldRequest(level=level)
                try:
                    taken.add(engine().submit(request, f"client {number}").id)
                except YieldRefusedError as error:
                    refusals.append(str(error))
                except Exception as error:
                    wrong.append(repr(error))
        def last():
            clients = [threading.Thread(target=flood, args=(n,), name="client") for n in range(8)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            while True:
                status = engine().status
                if status.state is YieldState.RUNNING and (
                    status.operation.state is not OperationState.RUNNING):
                    return
                if status.state is YieldState.YIELDED:
                    command(RestoreRequest())
                engine().wait(status.version, 5.0)
        beside(job.step, last)
        tell(taken=len(taken), refusals=len(refusals), wrong=wrong[:3], state=state(),
             as_never=job.as_never())
    """)
    assert reported["wrong"] == []
    assert reported["taken"] >= 1
    assert reported["refusals"] >= 1
    assert reported["state"] == "running"
    assert reported["as_never"]


def test_the_client_is_gone(jobs):
    """Commands over the control socket whose senders hang up at once are done all the same."""
    reported = jobs.run(
        """
        import json, socket
        from gpumem_otel.serve.discovery import control_sockets
        job = Training(extra=64 << 20)
        job.steps(2)
        folder = os.open(RUN_DIR, os.O_RDONLY)
        def sends(path, body=None):
            name = os.path.basename(control_sockets(RUN_DIR)[0])
            text = "" if body is None else json.dumps(body)
            with socket.socket(socket.AF_UNIX) as client:
                # an address has 108 bytes, the path may have more
                client.connect(f"/proc/self/fd/{folder}/{name}")
                client.sendall((
                    f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\\r\\n"
                    "Host: localhost\\r\\nContent-Type: application/json\\r\\n"
                    f"Content-Length: {len(text)}\\r\\n\\r\\n{text}").encode())
        def until(wanted):
            while (status := engine().status).state is not wanted:
                engine().wait(status.version, 30.0)
            return status.version
        def client():
            while not control_sockets(RUN_DIR):
                time.sleep(0.05)
            sends("/v1/yield", {"level": "tensors"})
            version = until(YieldState.YIELDED)
            for _ in range(3):
                sends(f"/v1/state?version={version}&wait_seconds=60")
            held = engine().status.moved_bytes
            sends("/v1/restore", {})
            until(YieldState.RUNNING)
            return held
        held = beside(job.step, client)
        tell(held=held, state=state(), as_never=job.as_never())
        """,
        OPTIONS=json.dumps({"control": True}),
    )
    assert reported["held"] >= 64 * MIB
    assert reported["state"] == "running"
    assert reported["as_never"]


# ends and signals


@pytest.mark.parametrize("level", ["tensors", "auto"])
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "exit"])
def test_a_process_that_ends_while_it_is_yielded(jobs, level, how):
    """It ends at once, as it would have; the device and the reservations forget it."""
    job = jobs.start(f"""
        level, how = {level!r}, {how!r}
        job = Training(extra=256 << 20)
        job.steps(2)
        gpumem_otel.yield_memory(level=level)
        tell(children=children())
        if how == "exit":
            sys.exit(7)
        time.sleep(300)
    """)
    children = jobs.hear(job)["children"]
    if how != "exit":
        job.send_signal(getattr(signal, how))
    job.communicate(timeout=60)
    assert job.returncode == (7 if how == "exit" else -getattr(signal, how))
    assert until(lambda: not any(is_there(pid) for pid in children)), "a helper is left"
    assert until(lambda: not on_device(job.pid))
    reported = jobs.run("tell(held=held_by_all())")
    assert reported["held"] == 0


def test_a_signal_handler_that_raises_while_the_job_stands_still(jobs):
    """The memory comes back first: what unwinds can still write its last checkpoint."""
    job = jobs.start("""
        def leave(number, frame):
            raise SystemExit(9)
        signal.signal(signal.SIGTERM, leave)
        job = Training(extra=256 << 20)
        job.steps(2)
        def ask():
            done = command(YieldRequest(level=TENSORS))
            tell(outcome=done.state.value)
        threading.Thread(target=ask, daemon=True).start()
        try:
            while True:
                job.step()
        finally:
            right = torch.equal(job.extra, torch.arange(job.extra.numel(), device="cuda"))
            whole = all(p.isfinite().all().item() for p in job.model.parameters())
            tell(state=state(), right=right, whole=whole, steps=len(job.losses))
    """)
    assert jobs.hear(job) == {"outcome": "done"}
    job.send_signal(signal.SIGTERM)
    out, errors = job.communicate(timeout=60)
    assert job.returncode == 9, errors[-3000:]
    reported = json.loads(out.splitlines()[-1])
    assert (reported["state"], reported["right"], reported["whole"]) == ("running", True, True)


@pytest.mark.parametrize(("level", "spread_seconds"), [("tensors", 0.25), ("auto", 1.5)])
def test_signals_at_any_moment_of_the_jobs_own_calls(jobs, level, spread_seconds):
    """What a handler raises ends the call, and every byte is where it was."""
    reported = jobs.run(f"""
        import random
        class Alarm(Exception):
            pass
        armed, hits = [], {{"yield_memory": 0, "restore": 0}}
        def handler(number, frame):
            if armed:
                armed.clear()
                raise Alarm
        signal.signal(signal.SIGALRM, handler)
        chance = random.Random(5)
        job = Training(extra=2 << 30)
        job.steps(2)
        for turn in range(8):
            asked = [(gpumem_otel.yield_memory, dict(level={level!r}, release_host=turn % 2 == 0)),
                     (gpumem_otel.restore, {{}})]
            for call, options in asked:
                try:
                    armed.append(turn)
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, {spread_seconds}))
                    call(**options)
                    armed.clear()
                except Alarm:
                    hits[call.__name__] += 1
                signal.setitimer(signal.ITIMER_REAL, 0)  # while Python ends it would kill
            if state() == "yielded":
                gpumem_otel.restore()
            assert state() == "running", state()
            job.step()
        tell(hits=hits, as_never=job.as_never())
    """)
    assert reported["as_never"]
    assert reported["hits"]["yield_memory"] > 0


@pytest.mark.parametrize("pause", [0.0, 5.0])
def test_stopped_and_continued_as_slurm_does(jobs, tmp_path, pause):
    """Inside the grace the memory goes first; where no safe point fits into it nothing is moved."""
    job = jobs.start(f"""
        gpumem_otel.yield_on_stop_signal(level="tensors")
        job = Training(extra=256 << 20)
        job.steps(3)
        tell(ready=True)
        time.sleep({pause})
        while not os.path.exists(os.path.join(RUN_DIR, "enough")):
            job.step()
            time.sleep({pause})
        while state() != "running":
            engine().wait(engine().status.version, 30)
        spent = {{k: v for k, v in engine().status.phase_seconds.items() if v > 0}}
        tell(spent=sorted(spent), state=state(), as_never=job.as_never())
    """)
    assert jobs.hear(job) == {"ready": True}
    job.send_signal(signal.SIGTSTP)
    assert until(lambda: status_of(job.pid) == "T"), "it was not stopped"
    (tmp_path / "enough").touch()
    job.send_signal(signal.SIGCONT)
    reported = jobs.end(job)
    assert ("release" in reported["spent"]) == (pause == 0.0)
    assert ("reload" in reported["spent"]) == (pause == 0.0)
    assert reported["state"] == "running"
    assert reported["as_never"]


# the driver


def test_a_process_that_another_tool_has_locked(jobs):
    """The driver refuses our lock: the tensors come back, and the job goes on once it may."""
    pytest.importorskip("cuda.bindings.driver")
    reported = jobs.run(
        LOCKER
        + """
job = Training()
job.steps(2)
other = subprocess.Popen([sys.executable, "-c", LOCKER, str(os.getpid())],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
locked = other.stdout.readline().split()
done = []
thread = threading.Thread(
    target=lambda: done.append(command(YieldRequest(level=PROCESS, deadline_seconds=5.0))))
thread.start()
thread.join(60)
during = state()
other.stdin.close()
other.wait(30)
tell(locked=locked, outcome=[d.state.value for d in done], error=[d.error for d in done],
     during=during, state=state(), as_never=job.as_never())
"""
    )
    assert reported["locked"] == ["Lock", "0"], reported
    assert reported["outcome"] in (["refused"], ["failed"]), reported
    assert reported["state"] == "running"
    assert reported["as_never"]


def test_the_helper_of_the_driver_is_killed_while_it_keeps_us(jobs):
    reported = jobs.run("""
        job = Training(extra=256 << 20)
        job.steps(2)
        gpumem_otel.yield_memory(level="auto")
        first = state()
        helpers = children("gpumem_otel.yielding.driver.helper")
        for pid in helpers:
            os.kill(pid, signal.SIGKILL)
        gpumem_otel.restore()
        tell(first=first, helpers=len(helpers), state=state(), as_never=job.as_never())
    """)
    assert reported["helpers"] == 1
    assert (reported["first"], reported["state"]) == ("yielded", "running")
    assert reported["as_never"]


def test_a_helper_that_can_not_be_started(jobs):
    """Known before anything goes: refused at level process; with auto the tensors go alone."""
    reported = jobs.run("""
        job = Training()
        job.steps(2)
        import dataclasses
        checkpoint = engine()._parts.checkpoint
        checkpoint._settings = dataclasses.replace(checkpoint._settings, python="/nonexistent")
        said = [refused(gpumem_otel.yield_memory, level="process")]
        report = gpumem_otel.yield_memory(level="auto")
        said += report.notes
        gpumem_otel.restore()
        tell(said=said, level=report.level.value, state=state(), as_never=job.as_never())
    """)
    assert len(reported["said"]) == 2
    assert all("helper" in line for line in reported["said"]), reported
    assert reported["level"] == "tensors"
    assert reported["state"] == "running"
    assert reported["as_never"]
