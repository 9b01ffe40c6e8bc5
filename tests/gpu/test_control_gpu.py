"""Commands over the control socket to a job that trains on a GPU: it computes what it would have.

The job knows nothing of them: it steps until a line comes on its standard input.
"""

from __future__ import annotations

import json
import time

import pytest
from support.controlling import call
from support.listening import WAIT, until
from support.yield_gpu import Jobs

from gpumem_otel.cli.main import main
from gpumem_otel.serve.discovery import control_sockets

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MIB = 1 << 20

JOB = """
job = Training(extra=256 << 20)
job.steps(2)
told_to_end = threading.Event()
threading.Thread(target=lambda: (hear(), told_to_end.set()), daemon=True).start()
tell(up=True)
while not told_to_end.is_set():
    job.step()
tell(as_never=job.as_never(), state=state())
"""


@pytest.fixture
def jobs(devices, tmp_path):
    made = Jobs(tmp_path)
    yield made
    made.close()


@pytest.fixture
def job(jobs, tmp_path):
    """A job that trains, and the path of its socket."""
    started = jobs.start(JOB, OPTIONS=json.dumps({"control": True}))
    assert jobs.hear(started) == {"up": True}
    until(lambda: bool(control_sockets(str(tmp_path))))
    (path,) = control_sockets(str(tmp_path))
    return started, path


def end(jobs, started):
    """End the job; it trained on as if nothing had been."""
    started.stdin.write("\n")
    started.stdin.flush()
    reported = jobs.end(started)
    assert reported == {"as_never": True, "state": "running"}


def ended(path, answer):
    """The operation that was begun, once it has ended."""
    assert answer.status == 202, answer.body
    deadline = time.monotonic() + 4 * WAIT
    while time.monotonic() < deadline:
        found = call(path, "GET", answer.headers["location"]).json
        if found["state"] != "running":
            return found
        call(path, "GET", "/v1/state?wait_seconds=0.2&version=-1")
    raise AssertionError("it does not end")


def test_the_command_line_yields_and_restores_a_training_job(jobs, job, tmp_path, capfd):
    started, _ = job
    where = ["--run-dir", str(tmp_path), "--json"]
    for _ in range(2):
        assert main(["ctl", "yield", "--level", "tensors", "--verify", *where]) == 0
        (done,) = json.loads(capfd.readouterr().out)
        assert sum(done["value"]["report"]["moved_bytes"].values()) >= 256 * MIB
        assert main(["ctl", "restore", *where]) == 0
        (done,) = json.loads(capfd.readouterr().out)
        assert done["value"]["report"]["checksums"] == "equal"
    end(jobs, started)


def test_it_answers_while_the_driver_holds_the_process(jobs, job):
    """Nothing of the listener calls torch or CUDA: it is how the process is asked to come back."""
    started, path = job
    done = ended(path, call(path, "POST", "/v1/yield", body={"level": "process"}))
    if done["state"] == "refused":
        end(jobs, started)
        pytest.skip(f"no driver checkpoint here: {done['error']}")
    assert done["state"] == "done", done
    for _ in range(20):
        status = call(path, "GET", "/v1/state").json["status"]
        assert status["state"] == "yielded"
    assert call(path, "GET", "/v1/openapi.json").status == 200
    assert ended(path, call(path, "POST", "/v1/restore"))["state"] == "done"
    end(jobs, started)
