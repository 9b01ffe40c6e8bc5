"""`demo --replay` from start to end, as a process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from support import pyroscope_query
from support.cli_process import WAIT, clean_environ, cli, only_line
from support.fake_pyroscope import FakePyroscope

from gpumem_otel.core import pprof


@pytest.fixture
def server():
    with FakePyroscope() as fake:
        yield fake


def start_demo(tmp_path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "gpumem_otel.cli.main", "demo", "--replay", *arguments],
        env=clean_environ(GPUMEM_OTEL_RUN_DIR=str(tmp_path / "run")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )


def until(process: subprocess.Popen[str], words: str) -> str:
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(f"no line with {words!r}; {process.stderr.read()}")


def test_demo_serves_writes_and_ends(tmp_path, server):
    """GIVEN no GPU WHEN the demo runs THEN it serves, pushes, writes files and ends with 0."""
    with start_demo(
        tmp_path, "--duration", "4", "--port", "0", "--pyroscope", server.url
    ) as process:
        line = until(process, "curl http")
        url = line.split()[-1].removesuffix("/metrics")
        until(process, "allocated")
        with urllib.request.urlopen(f"{url}/metrics", timeout=WAIT) as answer:
            metrics = answer.read().decode()
        with urllib.request.urlopen(f"{url}/debug/pprof/gpumem", timeout=WAIT) as answer:
            pulled = pprof.decode(answer.read())
        assert "\ngpumem_allocated_bytes{" in metrics
        assert pulled.total("inuse_space") > 0
        out, err = process.communicate(timeout=WAIT)
    assert (process.returncode, err) == (0, "")
    assert "go tool pprof -http=: gpumem-demo/live.pb.gz" in out
    written = pprof.decode((tmp_path / "gpumem-demo" / "live.pb.gz").read_bytes())
    assert written.total("inuse_space") > 0
    assert pyroscope_query.total(server.url, "gpumem-demo") > 0
    assert list((tmp_path / "run").iterdir()) == []


def test_demo_interrupted_ends_cleanly(tmp_path):
    with start_demo(tmp_path, "--port", "0") as process:
        until(process, "allocated")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT)
    assert (process.returncode, err.strip()) == (0, "")
    assert "wrote gpumem-demo/live.pb.gz" in out


def test_demo_with_a_taken_port_says_so(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with start_demo(tmp_path, "--port", str(port)) as process:
            _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 1
    assert f"127.0.0.1:{port} is taken; choose another with --port" in only_line(err)


def test_demo_into_a_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    done = cli("demo", "--replay", "--out", "file/demo", cwd=tmp_path)
    assert done.returncode == 1
    assert "file/demo" in only_line(done.stderr)


def test_demo_gpu_without_one(tmp_path):
    if "torch" in sys.modules:
        pytest.skip("this Python has torch")
    done = cli("demo", "--gpu", cwd=tmp_path, env=clean_environ(CUDA_VISIBLE_DEVICES=""))
    assert done.returncode == 1
    assert "torch sees no GPU here" in only_line(done.stderr)
