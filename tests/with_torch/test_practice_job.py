"""The page's practice job, as it is, and each command of the page against it."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support.cli_process import WAIT, clean_environ  # noqa: E402
from support.controlling import call  # noqa: E402
from support.listening import until  # noqa: E402

from gpumem_otel.yielding.driver.driver_api import NO_DRIVER, NOT_INSTALLED  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its samples are of no driver"),
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "yield.md"
JOB = ROOT / "docs" / "practice_job.py"
SAMPLE = re.compile(r"^    \$ gpumem-otel (ctl [^\n]+)\n((?:    [^$\n][^\n]*\n)+)", re.MULTILINE)
ANSWER = r'^    (\{"(?:id|process)".*?\})$(?=\n\n)'
SAMPLES = [
    (command, re.sub("^    ", "", shown, flags=re.MULTILINE))
    for command, shown in SAMPLE.findall(PAGE.read_text())
    if "--target" not in command  # of another machine
]

HAS_BINDINGS = bool(importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"))


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    folder = tmp_path_factory.mktemp("practice")
    return clean_environ(
        GPUMEM_OTEL_RUN_DIR=str(folder / "run"), PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"
    )


@pytest.fixture(scope="module")
def job(environ):
    """The running job; its first line says where commands are taken."""
    with subprocess.Popen(
        [sys.executable, str(JOB)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
    ) as process:  # fmt: skip
        try:
            process.address = process.stdout.readline().rpartition("unix://")[2].strip()
            yield process
        finally:
            process.kill()


def shape(text, pid):
    """A sample without what differs from run to run: times, speeds, the pid, the socket's path."""
    text = re.sub(r"unix://\S+\.sock", "SOCKET", text)
    text = re.sub(rf"\b{pid}\b", "PID", text)
    text = re.sub(r"\d+\.\d+ GiB/s", "SPEED", text)
    text = re.sub(r"\b\d+(\.\d+)? s\b", "TIME", text)
    return [re.sub(" +", " ", line) for line in text.splitlines()]


def run(environ, *arguments):
    command = [sys.executable, "-m", "gpumem_otel.cli.main", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WAIT)


def test_the_page_has_samples_of_each_verb():
    verbs = [command.split()[1] for command, _ in SAMPLES]
    assert verbs == ["state", "yield", "yield", "state", "restore", "restore", "yield"]


def test_each_command_of_the_page_prints_what_the_page_shows(job, environ):
    expected = rf"train rank 0 \(pid {job.pid}\): (yield|restore)( has begun| waits|: [a-z]+.*)"
    for command, shown in SAMPLES:
        done = run(environ, *command.split())
        progress = [line for line in done.stderr.splitlines() if re.fullmatch(expected, line)]
        errors = [line for line in done.stderr.splitlines() if line not in progress]
        output = "\n".join([*done.stdout.splitlines(), *errors])
        assert done.returncode == len(errors), done.stderr
        if command.split()[1] == "state":
            assert progress == []
        wanted = shown if HAS_BINDINGS else shown.replace(NO_DRIVER, NOT_INSTALLED)
        assert shape(output, job.pid) == shape(wanted, 4100), command


def keys(value):
    """Of objects, in order, at every depth; a report's classes are those of the job."""
    if isinstance(value, dict):
        return [(name, keys(inner)) for name, inner in value.items()]
    return [keys(one) for one in value] if isinstance(value, list) else None


def finished(ask, answer):
    """The operation that an answer began, once it is done."""
    operation = answer.headers["location"]
    until(lambda: ask("GET", operation).json["state"] == "done")
    return ask("GET", operation).json


def test_each_answer_of_the_page_has_the_fields_that_the_page_shows(job):
    text = PAGE.read_text()
    begun, ended, state = (
        json.loads(found.replace("{...}", "{}"))
        for found in re.findall(ANSWER, text, re.MULTILINE | re.DOTALL)
    )
    ask = partial(call, job.address)
    answer = ask("POST", "/v1/yield", body={"level": "tensors", "lease_seconds": 60})
    assert (answer.status, keys(answer.json)) == (202, keys(begun))
    done = finished(ask, answer)
    assert keys(done) == keys(ended)
    now = ask("GET", "/v1/state").json
    assert list(now["status"]) == list(state["status"])
    assert keys(now["process"]) == keys(state["process"])
    answer = ask("POST", "/v1/restore")
    assert answer.status == 202
    finished(ask, answer)  # the job is the next test's too


def test_ctrl_c_ends_it_also_while_its_memory_is_away(job, environ):
    assert run(environ, "ctl", "yield", "--level", "tensors").returncode == 0
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=WAIT)
    assert (job.returncode, "Traceback" in err) == (0, False), out + err
    assert not Path(job.address).exists()
