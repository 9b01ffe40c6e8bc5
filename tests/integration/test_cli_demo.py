"""`demo --replay` from start to end, as a process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support import pyroscope_query
from support.cli_process import WAIT, clean_environ, cli, only_line
from support.fake_pyroscope import FakePyroscope

from gpumem_otel.base.text import human_bytes
from gpumem_otel.profiles import pprof

TOTALS = re.compile(r"device 0: allocated ([\d.]+ \w+), reserved [\d.]+ \w+(, step \d+)?")
ROW = re.compile(r" +([\d.]+ \w+) +([\d.]+%|-)  \S.*")


@pytest.fixture
def server():
    with FakePyroscope() as fake:
        yield fake


def start_demo(tmp_path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "gpumem_otel.cli.main", "demo", "--replay", *arguments],
        env=clean_environ(GPUMEM_OTEL_RUN_DIR=str(tmp_path / "run"), **environ),
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


def held(folder: Path, name: str) -> int:
    data = (folder / "gpumem-demo" / f"{name}.pb.gz").read_bytes()
    return pprof.decode(data).total("inuse_space")


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
    assert "go tool pprof -http=: gpumem-demo/fullest.pb.gz" in out
    live, fullest = (held(tmp_path, name) for name in ("live", "fullest"))
    assert 0 < live <= fullest
    wrote = [line for line in out.splitlines() if line.startswith("wrote ")]
    most = f"(the moment at which most was held: {human_bytes(fullest)})"
    assert wrote[0] == f"wrote gpumem-demo/fullest.pb.gz {most}"
    assert wrote[1] == "wrote gpumem-demo/live.pb.gz (the last moment)"
    assert pyroscope_query.total(server.url, "gpumem-demo") > 0
    assert list((tmp_path / "run").iterdir()) == []


def test_demo_interrupted_ends_cleanly(tmp_path):
    with start_demo(tmp_path, "--port", "0") as process:
        until(process, "allocated")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT)
    assert (process.returncode, err.strip()) == (0, "")
    assert "wrote gpumem-demo/live.pb.gz" in out
    assert TOTALS.search(out)[1] == human_bytes(held(tmp_path, "live"))


def test_a_short_demo_shows_a_table_that_is_its_file(tmp_path):
    """GIVEN 2 s WHEN it ends THEN the last table is of what live.pb.gz holds, under its header."""
    with start_demo(tmp_path, "--duration", "2", "--port", "0") as process:
        out, err = process.communicate(timeout=WAIT)
    assert (process.returncode, err) == (0, "")
    shown = [line for line in out.splitlines() if TOTALS.fullmatch(line) or ROW.fullmatch(line)]
    assert TOTALS.fullmatch(shown[0])
    last = max(at for at, line in enumerate(shown) if TOTALS.fullmatch(line))
    assert TOTALS.fullmatch(shown[last])[1] == human_bytes(held(tmp_path, "live"))
    shares = [float(ROW.fullmatch(line)[2].rstrip("%")) for line in shown[last + 1 :]]
    assert shares
    assert sum(shares) <= 100.1


def test_demo_whose_output_is_closed_ends_well(tmp_path):
    with start_demo(tmp_path, "--duration", "300", "--port", "0") as process:
        assert process.stdout.readline().startswith("gpumem-otel demo: ")
        process.stdout.close()
        assert process.wait(WAIT) == 0
        assert process.stderr.read() == ""


def test_the_line_for_prometheus_is_its_config(tmp_path):
    with start_demo(tmp_path, "--port", "0") as process:
        url = until(process, "curl http").split()[-1].removesuffix("/metrics")
        line = until(process, "scrape_configs:")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT)
    target = url.removeprefix("http://")
    job = f"{{job_name: gpumem, static_configs: [{{targets: ['{target}']}}]}}"
    assert line.strip() == f"scrape_configs: [{job}]  # in prometheus.yml"
    promtool = Path(os.environ.get("GPUMEM_SERVERS_BIN", "")) / "promtool"
    if promtool.is_file():
        (tmp_path / "prometheus.yml").write_text(line)
        command = [promtool, "check", "config", "prometheus.yml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_users_window_is_no_warning(tmp_path):
    """GIVEN an open window of a user WHEN the demo's would begin THEN that is not an error."""
    level = {"GPUMEM_OTEL_METRICS_LEVEL": "full"}
    with start_demo(tmp_path, "--duration", "300", "--port", "0", **level) as process:
        url = until(process, "curl http").split()[-1].removesuffix("/metrics")
        window = f"{url}/debug/pprof/gpumem?seconds=5"
        assert get(window)
        metrics = get(f"{url}/metrics").decode()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT)
    left_out = re.search(r'gpumem_exporter_errors_total{.*stage="other".*} (.*)', metrics)
    assert float(left_out[1]) == 0
    assert (process.returncode, err.strip()) == (0, "")


def get(url: str) -> bytes:
    """The body of the answer, empty on an error."""
    try:
        with urllib.request.urlopen(url, timeout=WAIT) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        error.close()
        return b""


def test_demo_on_the_host_of_the_environment_and_of_the_option(tmp_path):
    for arguments in ([], ["--host", "127.0.0.3"]):
        with start_demo(
            tmp_path, "--port", "0", *arguments, GPUMEM_OTEL_HOST="127.0.0.2"
        ) as process:
            line = until(process, "curl http")
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=WAIT)
        host = arguments[-1] if arguments else "127.0.0.2"
        assert f"curl http://{host}:" in line


def test_demo_that_is_switched_off_says_so(tmp_path):
    env = clean_environ(GPUMEM_OTEL_DISABLED="1")
    done = cli("demo", "--replay", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert "GPUMEM_OTEL_DISABLED is set" in only_line(done.stderr)


def test_demo_says_why_it_cannot_listen(tmp_path):
    """GIVEN missing TLS files, or another machine's address THEN each has its own reason."""
    files = {
        "GPUMEM_OTEL_TLS_CERT_FILE": str(tmp_path / "none.pem"),
        "GPUMEM_OTEL_TLS_KEY_FILE": str(tmp_path / "none.key"),
    }
    with start_demo(tmp_path, "--port", "0", **files) as process:
        _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 1
    assert "none.pem" in only_line(err)
    assert "taken" not in err
    with start_demo(tmp_path, "--port", "0", "--host", "192.0.2.1") as process:
        _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 1
    assert "cannot listen on 192.0.2.1:0: " in only_line(err)


def test_demo_with_a_taken_port_says_so(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with start_demo(tmp_path, "--port", str(port)) as process:
            _, err = process.communicate(timeout=WAIT)
    assert process.returncode == 1
    assert f"127.0.0.1:{port} is taken; choose another with --port" in only_line(err)


def test_demo_into_a_folder_that_cannot_be_created(tmp_path):
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


def test_a_recording_of_the_user_is_replayed(tmp_path):
    """The one in which a job ran out of memory."""
    recording = Path(__file__).parents[1] / "data" / "jobs" / "oom.gpumem"
    arguments = ("--recording", str(recording), "--port", "0", "--duration", "300")
    with start_demo(tmp_path, *arguments) as process:
        first = process.stdout.readline()
        assert first.startswith(f"gpumem-otel demo: replaying {recording} (")
        until(process, ", step ")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT)
    assert (process.returncode, err.strip()) == (0, "")


def test_a_recording_that_is_none(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("print()\n")
    done = cli("demo", "--recording", str(file), cwd=tmp_path)
    assert done.returncode == 2
    assert str(file) in only_line(done.stderr)
    both = cli("demo", "--gpu", "--recording", str(file), cwd=tmp_path)
    assert both.returncode == 2
    assert "--recording replays, --gpu trains" in both.stderr
