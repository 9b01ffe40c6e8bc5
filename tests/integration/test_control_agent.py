"""Control within an agent: off until asked for, gone with it, never in the job's way."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.cli_process import clean_environ, cli
from support.controlling import call, no_thread_for_ports
from support.recordings import make_recording
from support.yield_double import YieldDouble

from gpumem_otel.base.clock import SystemClock
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.recording.source import ReplaySource
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.serve.discovery import control_sockets
from gpumem_otel.settings.options import resolve

SNAPSHOT = "h200-torch2.11-train-python-stacks.pickle.gz"
WAIT = 30


@pytest.fixture(scope="module")
def recording():
    return load_recording(io.BytesIO(make_recording(SNAPSHOT)), name="test")


@pytest.fixture
def start(recording, tmp_path):
    agents = []

    def begin(environ=None, **options):
        settings = {"run_dir": str(tmp_path / "run"), "interval_seconds": 3600, **options}
        config = resolve(environ or {}, **settings)
        agent = Agent(config, source=ReplaySource(recording, SystemClock()), environ=environ or {})
        agent.yields = YieldDouble()
        agents.append(agent)
        agent.start()
        return agent

    yield begin
    for agent in agents:
        agent.stop()


def test_it_is_off_until_asked_for(start, tmp_path):
    agent = start(service_name="job")
    assert agent.components.control is None
    assert not (tmp_path / "run").exists()


def test_a_command_reaches_the_engine(start, tmp_path):
    agent = start({"GPUMEM_OTEL_CONTROL": "1"}, service_name="job")
    assert agent.components.control.wait(WAIT)
    (path,) = control_sockets(str(tmp_path / "run"))
    assert agent.components.control.socket_path == path
    state = call(path, "GET", "/v1/state").json
    assert state["process"]["service_name"] == "job"
    assert state["process"]["pid"] == os.getpid()
    shown = cli("ctl", "state", "--run-dir", str(tmp_path / "run"))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[1].startswith("job ")
    done = cli("ctl", "yield", "--run-dir", str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (
        0, f"job rank 0 (pid {os.getpid()}): yield: prepare, 0 B of 12.0 GiB\n",
    )  # fmt: skip
    assert agent.yields.moves == 1
    agent.stop()
    assert not Path(path).exists()


UNSAFE = [
    ({"control_host": "127.0.0.1"}, "needs credentials"),
    ({"control_host": "0.0.0.0", "control_token": "x" * 20}, "needs TLS"),
    ({"control_token_file": "/nowhere"}, "control token file /nowhere: No such file"),
    ({"control_token_file": "{mine}"}, "control token file {mine}: Permission denied"),
    ({"control_token_file": "{empty}"}, "control token file {empty}: holds no token"),
    ({"control_token_file": "{fifo}"}, "control token file {fifo}: is no regular file"),
    ({"control_host": "127.0.0.1", "control_tls_cert_file": "{empty}"}, "TLS certificate and key"),
    ({"control_host": "127.0.0.1", "control_tls_key_file": "/x"}, "without control_tls_cert"),
    ({"control_host": "127.0.0.1", "control_client_roles": ("boss=all",)}, "a role is one of"),
    ({"control_host": "127.0.0.1", "control_token": "short"}, "at least 16 characters"),
]


@pytest.fixture
def unusable(tmp_path, monkeypatch):
    """Paths of files for settings: empty, not to be read by this user, waiting for a writer."""
    (tmp_path / "empty").touch()
    opened = os.open

    def open_(path, *arguments, **named):
        if str(path).endswith("/mine"):  # root may read what has mode 000
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **named)

    (tmp_path / "mine").touch()
    monkeypatch.setattr(os, "open", open_)
    os.mkfifo(tmp_path / "fifo")
    return {name: str(tmp_path / name) for name in ("mine", "empty", "fifo")}


def filled(options, unusable):
    return {
        name: value.format(**unusable) if isinstance(value, str) else value
        for name, value in options.items()
    }


@pytest.mark.parametrize(("options", "reason"), UNSAFE)
def test_a_mistake_in_the_settings_of_the_port_leaves_the_socket(
    start, unusable, options, reason, caplog
):
    with caplog.at_level(logging.WARNING):
        agent = start(control=True, **filled(options, unusable))
    assert agent.reader is not None
    listener = agent.components.control
    assert listener.wait(WAIT)
    assert call(listener.socket_path, "GET", "/v1/state").status == 200
    assert call(listener.socket_path, "POST", "/v1/yield").status == 202
    assert listener.address is None
    (line,) = [one.getMessage() for one in caplog.records if "control failed" in one.getMessage()]
    assert line.startswith("control failed, the job goes on: no TCP port: ")
    assert reason.format(**unusable) in line
    assert line.endswith("; the socket takes commands all the same")
    assert "x" * 20 not in caplog.text
    assert agent.counters.get("exporter_errors", stage="control") == 1


@pytest.mark.parametrize(("options", "reason"), UNSAFE)
def test_what_is_not_safe_is_not_begun_and_the_job_goes_on(
    start, unusable, options, reason, caplog
):
    """Where there is no folder for a socket either."""
    with caplog.at_level(logging.WARNING):
        agent = start(control=True, run_dir="", **filled(options, unusable))
    assert agent.reader is not None
    assert agent.components.control is None
    assert reason.format(**unusable) in caplog.text
    assert "x" * 20 not in caplog.text
    assert agent.counters.get("exporter_errors", stage="control") == 1


def test_a_port_whose_thread_can_not_start_leaves_the_socket(start, tokens, monkeypatch, caplog):
    no_thread_for_ports(monkeypatch)
    options = {"control_host": "127.0.0.1", "control_port": 0, "control_token_file": tokens}
    agent = start(control=True, **options)
    listener = agent.components.control
    assert listener.wait(WAIT)
    assert call(listener.socket_path, "GET", "/v1/state").status == 200
    assert "no TCP port: the control listener cannot be started" in caplog.text
    assert agent.counters.get("exporter_errors", stage="control") == 1


def test_a_forked_child_does_not_listen(start, tmp_path):
    agent = start(control=True)
    assert agent.components.control.wait(WAIT)
    path = agent.components.control.socket_path
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            agent.after_fork_in_child()
            code = int(agent.components is not None)
            agent.stop()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert call(path, "GET", "/v1/state").status == 200


JOB = """
    import io, sys, time
    sys.path.insert(0, {tests!r})
    from support.recordings import make_recording
    from support.yield_double import YieldDouble
    from gpumem_otel.api import lifecycle
    from gpumem_otel.runtime.agent import Agent
    from gpumem_otel.recording.source import ReplaySource
    from gpumem_otel.recording.reader import load_recording
    from gpumem_otel.base.clock import SystemClock
    from gpumem_otel.settings.options import resolve

    recording = load_recording(io.BytesIO(make_recording({snapshot!r})), name="test")
    agent = Agent(resolve({{}}, run_dir={run_dir!r}, control=True, interval_seconds=3600),
                  source=ReplaySource(recording, SystemClock()), environ={{}})
    agent.yields = YieldDouble(by_hand=True)
    lifecycle.adopt(agent)
    assert agent.components.control.wait(30)
    print(agent.components.control.socket_path, agent.yields.wait(-1, 0).version, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def job(tmp_path):
    """A job that ends when a line comes, and never uninstalls."""
    text = textwrap.dedent(JOB).format(
        tests=str(Path(__file__).parents[1]), snapshot=SNAPSHOT, run_dir=str(tmp_path / "run")
    )
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(),
    ) as process:
        try:
            path, version = process.stdout.readline().split()
            yield process, path, version
        finally:
            process.kill()


def test_a_job_ends_while_somebody_watches(job):
    """Long polls and streams are on daemon threads: exit waits for none of them."""
    process, path, version = job
    command = [sys.executable, "-m", "gpumem_otel.cli.main", "ctl", "watch", "--json"]
    with ExitStack() as stack:
        watching = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, "--target", f"unix://{path}"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=clean_environ(),
                )
            )
            for _ in range(3)
        ]
        for watcher in watching:
            stack.callback(watcher.kill)
            assert f'"version": {version}' in watcher.stdout.readline()
        _, stderr = process.communicate("\n", timeout=WAIT)
        assert (process.returncode, stderr) == (0, "")
        assert not Path(path).exists()
        assert [watcher.wait(WAIT) for watcher in watching] == [1, 1, 1]


def test_the_socket_of_a_job_that_was_killed_is_dropped(job, tmp_path):
    process, path, _ = job
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT)
    assert Path(path).exists()
    assert control_sockets(str(tmp_path / "run")) == []
    assert not Path(path).exists()
