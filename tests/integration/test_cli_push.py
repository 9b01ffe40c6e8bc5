"""`push`: the server then has the totals of the file."""

from __future__ import annotations

import gzip
import os
import subprocess
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support import pyroscope_query
from support.cli_process import only_line
from support.fake_pyroscope import FakePyroscope
from support.recordings import DATA, make_recording

from gpumem_otel.cli.main import main
from gpumem_otel.profiles import heap, pprof, protobuf_wire
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.snapshot import stacks

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = DATA / "h200-torch2.11-train-python-stacks.pickle.gz"
FILES = sorted(DATA.glob("*.pickle.gz"))


@pytest.fixture
def server():
    with FakePyroscope() as fake:
        yield fake


@pytest.fixture
def no_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("GPUMEM_OTEL_", "OTEL_", "PYROSCOPE_")):
            monkeypatch.delenv(name)


def push_totals(server, tmp_path, path: Path, service: str) -> None:
    """The server has the file's totals, pushed as a snapshot and as a pprof file."""
    snapshot = load_snapshot(path)
    expected = {device: snapshot.totals(device).allocated_bytes for device in snapshot.devices()}
    assert main(["push", str(path), "--url", server.url, "--service", service]) == 0
    converted = tmp_path / "live.pb.gz"
    assert main(["convert", str(path), "-o", str(converted)]) == 0
    again = f"{service}-pprof"
    assert main(["push", str(converted), "--url", server.url, "--service", again]) == 0
    for name in (service, again):
        assert pyroscope_query.total(server.url, name) == sum(expected.values())
        for device, size in expected.items():
            selector = f', device="{device}"'
            found = pyroscope_query.total(server.url, name, selector=selector)
            assert found == size, (name, device)


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_push_of_each_file(server, tmp_path, path):
    push_totals(server, tmp_path, path, "job")


@pytest.mark.usefixtures("no_settings")
def test_push_of_every_recording(server, tmp_path, recordings):
    for number, path in enumerate(recordings):
        push_totals(server, tmp_path, path, f"job-{number}")


@pytest.mark.usefixtures("no_settings")
def test_push_says_what_went_where(capsys, server):
    assert main(["push", str(PYTHON), "--url", server.url, "--tag", "team=a"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("pushed device 0: 115.7 MiB in ")
    assert out.endswith(f"to {server.url} as gpumem-otel\n")
    found = pyroscope_query.total(server.url, "gpumem-otel", selector=', team="a", device="0"')
    assert found == 121_323_520


@pytest.mark.usefixtures("no_settings")
def test_push_of_a_recording_sends_its_last_reading(server, tmp_path):
    path = tmp_path / "run.gpumem"
    path.write_bytes(make_recording("h200-torch2.11-oom.pickle.gz", PYTHON.name))
    assert main(["push", str(path), "--url", server.url, "--service", "run"]) == 0
    assert pyroscope_query.total(server.url, "run") == 121_323_520


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize("age_seconds", [0, 1800, 90_000, -3600])
def test_push_of_a_pprof_keeps_its_time_where_the_server_takes_it(server, tmp_path, age_seconds):
    time_ns = time.time_ns() - age_seconds * 10**9
    profile = heap.live_profile(load_snapshot(PYTHON), 0, namer=stacks.file_function_namer)
    data = pprof.encode([replace(profile, time_ns=time_ns)], device_labels={})
    path = tmp_path / "live.pb"
    path.write_bytes(data)
    assert main(["push", str(path), "--url", server.url, "--service", "s"]) == 0
    assert pyroscope_query.total(server.url, "s") == 121_323_520
    (request,) = server.requests
    series = dict(protobuf_wire.read_fields(gzip.decompress(request.body)))[1]
    raw = dict(protobuf_wire.read_fields(dict(protobuf_wire.read_fields(series))[2]))[1]
    kept = pprof.decode(raw).time_ns == time_ns
    assert kept == (age_seconds in (0, 1800))
    assert raw.startswith(data)


@pytest.mark.usefixtures("no_settings")
def test_push_takes_the_variables(capsys, monkeypatch, server):
    server.authorization = "Bearer secret-token"
    assert main(["push", str(PYTHON), "--url", server.url]) == 1
    assert "401" in only_line(capsys.readouterr().err)
    monkeypatch.setenv("PYROSCOPE_SERVER_ADDRESS", server.url)
    monkeypatch.setenv("PYROSCOPE_AUTH_TOKEN", "secret-token")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-variable")
    assert main(["push", str(PYTHON)]) == 0
    assert pyroscope_query.total(server.url, "from-variable") == 121_323_520


@pytest.mark.usefixtures("no_settings")
def test_push_takes_a_token_out_of_a_pipe(capsys, monkeypatch, server):
    """`PYROSCOPE_AUTH_TOKEN_FILE=<(vault read ...)`; once, for all devices."""
    server.authorization = "Bearer secret-token"
    with subprocess.Popen(["echo", "secret-token"], stdout=subprocess.PIPE) as writer:
        name = f"/proc/self/fd/{writer.stdout.fileno()}"
        monkeypatch.setenv("PYROSCOPE_AUTH_TOKEN_FILE", name)
        assert main(["push", str(PYTHON), "--url", server.url, "--service", "piped"]) == 0
    assert pyroscope_query.total(server.url, "piped") == 121_323_520
    monkeypatch.setenv("PYROSCOPE_AUTH_TOKEN_FILE", "/nowhere")
    capsys.readouterr()
    assert main(["push", str(PYTHON), "--url", server.url]) == 1
    line = only_line(capsys.readouterr().err)
    assert "device 0 not pushed: token file /nowhere: No such file or directory" in line


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize("fault", ["400", "401", "404", "429", "500", "503", "cut", "redirect"])
def test_push_that_fails_is_one_line_and_1(capsys, server, fault):
    server.fault = fault
    assert main(["push", str(PYTHON), "--url", server.url, "--timeout", "5"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "device 0 not pushed" in only_line(err)


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--url"),
        (["--url", "ftp://x"], "http"),
        (["--url", "http://127.0.0.1:1", "--device", "7"], "device 7"),
        (["--url", "http://127.0.0.1:1", "--tag", "nonsense"], "NAME=VALUE"),
        (["--url", "http://127.0.0.1:1", "--timeout", "0"], "timeout"),
    ],
)
def test_push_bad_usage(capsys, arguments, words):
    assert main(["push", str(PYTHON), *arguments]) == 2
    assert words in only_line(capsys.readouterr().err)


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize(
    ("option", "value"),
    [("--url", "localhost:4040"), ("--url", "http://a:b@c"), ("--timeout", "0")],
)
def test_errors_name_the_option_that_was_typed(capsys, option, value):
    arguments = ["push", str(PYTHON), option, value]
    assert main(arguments) == 2
    line = only_line(capsys.readouterr().err)
    assert line.startswith(f"gpumem-otel: error: {option} must ")
