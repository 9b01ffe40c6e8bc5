"""`gpumem-otel run --supervise`: the job's own end, and its last /metrics after it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cli_process import WAIT, clean_environ, cli
from support.servers import free_port, until

TESTS = Path(__file__).parents[1]
OOMS = 'gpumem_ooms_total{device="0",rank="0"}'
FAIL = """
import os, signal
from support.oom_job import arm, say, torch
agent = arm()
assert agent.wait_listening(30)
say("listening")
input()
"""
SURVIVE = """
try:
    torch.fail(1 << 30)
except torch.OutOfMemoryError:
    pass
assert agent.ooms.wait(30)
"""


@pytest.fixture
def port():
    return free_port()


@contextmanager
def supervised(tmp_path, port, script, *options, **more):
    """The command with a job that listens, and goes on after a line of input."""
    path = tmp_path / "job.py"
    path.write_text(FAIL + script)
    settings = {
        "PYTHONPATH": str(TESTS),
        "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run"),
        "TMPDIR": str(tmp_path),
        **more,
    }
    command = [
        sys.executable, "-m", "gpumem_otel.cli.main", "run", "--supervise", "--serve",
        "--port", str(port), *options, "--", sys.executable, str(path),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env=clean_environ(**settings), text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "listening\n", process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


def scrape(port, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return str(error.code)
    except OSError:
        return ""


def value(port):
    for line in scrape(port).splitlines():
        if line.startswith(OOMS):
            return float(line.rpartition(" ")[2])
    return None


def job_of(process):
    """Pid of the supervised job."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (child,) = map(int, children)
    return child


def left_in(tmp_path):
    return [path.name for path in tmp_path.iterdir() if path.name.startswith("gpumem-otel-")]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os._exit(3)", 3),
        ("raise SystemExit(0)", 0),
        ("torch.fail(1 << 30)", 1),
    ],
)
def test_the_last_count_of_a_job_that_is_gone_is_still_served(tmp_path, port, end, code):
    with supervised(tmp_path, port, f"{SURVIVE}\n{end}\n", "--linger", "600") as process:
        assert value(port) == 2
        job = job_of(process)
        go_on(process)
        until(lambda: not Path(f"/proc/{job}").exists(), "the job to be gone", WAIT)
        until(lambda: (value(port) or 0) >= 3, "its last count", WAIT)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == code
    assert left_in(tmp_path) == []


def test_it_ends_by_itself_after_the_two_intervals(tmp_path, port):
    end = f"{SURVIVE}\nos._exit(4)\n"
    with supervised(tmp_path, port, end, "--linger", "0.5") as process:
        go_on(process)
        assert process.wait(WAIT) == 4
    assert scrape(port) == ""


def test_a_job_that_went_well_is_not_lingered_for(tmp_path, port):
    script = "torch.allocators[0].ooms = 0\n"
    with supervised(tmp_path, port, script, "--linger", "600") as process:
        go_on(process)
        assert process.wait(WAIT) == 0


def test_a_job_that_failed_otherwise_is_served_too(tmp_path, port):
    with supervised(tmp_path, port, "raise ValueError('x')\n", "--linger", "600") as process:
        go_on(process)
        until(lambda: process.stderr.readline().startswith("ValueError: x"), "the error", WAIT)
        job = until(lambda: value(port), "its last count", WAIT)
        assert job == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 1


def test_a_token_guards_the_final_metrics_too(tmp_path, port):
    with supervised(
        tmp_path, port, f"{SURVIVE}\nos._exit(1)\n", "--linger", "600", GPUMEM_OTEL_TOKEN="t0ken"
    ) as process:
        job = job_of(process)
        go_on(process)
        until(lambda: not Path(f"/proc/{job}").exists(), "the job to be gone", WAIT)
        with_token = {"Authorization": "Bearer t0ken"}
        until(lambda: f"{OOMS} 3.0" in scrape(port, **with_token), "its last count", WAIT)
        assert scrape(port) == "401"


def test_a_token_that_only_the_job_knew_is_not_left_out(tmp_path, port):
    """Nothing is served then, and a warning says so."""
    path = tmp_path / "job.py"
    path.write_text(
        "from support.oom_job import arm, torch\nimport gpumem_otel\ngpumem_otel.uninstall()\n"
        f"agent = arm(token='t0ken', serve=True, port={port})\n"
        f"assert agent.wait_listening(30)\n{SURVIVE}\n"
    )
    done = cli(
        "run", "--supervise", "--linger", "600", "--serve", "--", sys.executable, str(path),
        env=clean_environ(
            PYTHONPATH=str(TESTS), GPUMEM_OTEL_RUN_DIR=str(tmp_path / "run"), TMPDIR=str(tmp_path)
        ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "token is not known here" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_signals_are_passed_on(number):
    code = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda n, _: sys.exit(n + 40))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    process = _run("-c", code)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(WAIT) == number + 40
    finally:
        process.kill()
        process.communicate()


def _run(*arguments):
    command = [sys.executable, "-m", "gpumem_otel.cli.main", "run", "--supervise", "--serve"]
    return subprocess.Popen(
        [*command, "--", sys.executable, *arguments], text=True, env=clean_environ(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "returned"),
    [
        ("raise SystemExit(77)", 77),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("import os; os.abort()", -6),
    ],
)
def test_it_ends_as_the_job_did(code, returned):
    process = _run("-c", code)
    process.communicate(timeout=WAIT)
    assert process.returncode == returned


def test_ctrl_c_in_a_terminal_reaches_the_job_once(tmp_path):
    code = (
        "import signal\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('ready', flush=True)\n"
        "while not seen:\n"
        "    signal.sigtimedwait({signal.SIGUSR1}, 0.1)\n"
        "signal.sigtimedwait({signal.SIGUSR1}, 0.5)\n"  # for a second one
        "print('seen', len(seen), flush=True)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        command = ["-m", "gpumem_otel.cli.main", "run", "--supervise", "--serve", "--"]
        os.execve(
            sys.executable, [sys.executable, *command, sys.executable, "-c", code], clean_environ()
        )
    try:
        text = _until_text(terminal, "ready")
        os.write(terminal, b"\x03")
        text += _until_text(terminal, "seen")
        assert "seen 1" in text
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(terminal)


def _until_text(terminal, mark):
    text = ""
    while mark not in text or not text.endswith("\n"):
        text += os.read(terminal, 4096).decode()
    return text


def test_the_signal_mask_and_ignored_signals_are_the_jobs_own():
    code = (
        "import signal\n"
        "fields = dict(l.split(':\\t') for l in open('/proc/self/status') if l[:3] == 'Sig')\n"
        "ignored = int(fields['SigIgn'], 16)\n"  # without two of glibc, which have no name
        "print(fields['SigBlk'].strip(), [s for s in signal.Signals if ignored >> s - 1 & 1])\n"
    )
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    process = _run("-c", code)
    out, _ = process.communicate(timeout=WAIT)
    assert out == plain.stdout


def test_a_command_that_is_not_there():
    done = cli("run", "--supervise", "--serve", "--", "no-such-command-here")
    assert done.returncode == 127
    assert done.stderr == "gpumem-otel: error: no-such-command-here: command not found\n"


def test_linger_is_for_supervise():
    done = cli("run", "--linger", "5", "--serve", "--", "true")
    assert done.returncode == 2
    assert "--linger is for --supervise" in done.stderr


def test_a_signal_that_came_too_late_does_not_change_the_end():
    """It was for the job, which had already ended."""
    code = (
        "import os, signal\n"
        "from gpumem_otel.cli import supervise\n"
        "with supervise._signals_waited_for():\n"
        "    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):\n"
        "        os.kill(os.getpid(), number)\n"
        "raise SystemExit(supervise._end_like_job(3))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
