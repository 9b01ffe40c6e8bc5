"""Files that version 0.1.0 wrote stay readable, and say what they said then."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from support import pyroscope_query
from support.cli_process import clean_environ, cli
from support.fake_pyroscope import FakePyroscope
from support.recordings import DATA

import gpumem_otel

FILES = DATA / "formats-0.1.0"
RECORDING = FILES / "small.gpumem"
OOM = pyroscope_query.INUSE_SPACE.replace("gpu_memory", "gpu_memory_oom")


def test_a_recording():
    snapshot = gpumem_otel.load_snapshot(RECORDING)
    assert snapshot.devices == (1,)
    assert snapshot.profile("live").total_bytes == 2048 + 128
    assert snapshot.profile("peak").total_bytes == 2048 + 128
    assert snapshot.profile("allocated").total_bytes == 100 + 51 + 7
    row = snapshot.profile("live").top(1)[0]
    frames = [(frame.name, frame.filename, frame.line) for frame in row.stack]
    assert frames == [("leaf", "/x/a.py", 2), ("main", "/x/a.py", 9)]


@pytest.mark.parametrize(
    ("job", "peak_bytes"),
    [
        ("healthy", 470_908_928),
        ("leak", 8_772_946_432),
        ("oom", 2_685_502_464),
        ("server", 134_591_053_824),
    ],
)
def test_recordings_of_real_jobs(job, peak_bytes):
    snapshot = gpumem_otel.load_snapshot(DATA / "jobs" / f"{job}.gpumem")
    assert snapshot.profile("peak").total_bytes == peak_bytes


@pytest.mark.parametrize("written", ["live.folded", "live.speedscope.json"])
def test_what_programs_read_is_written_as_it_was(written, tmp_path):
    out = tmp_path / written
    done = cli("convert", str(RECORDING), "-o", str(out), "--format", written.split(".")[1])
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == (FILES / written).read_bytes()


def test_a_snapshot_that_dump_wrote():
    done = cli("convert", str(FILES / "small.pickle"), "-o", "-", "--format", "folded")
    assert done.stdout == "a.py:main;a.py:leaf 2048\n[allocated before install] 128\n"


@pytest.mark.parametrize("verb", ["stats", "top"])
def test_json_keeps_its_fields(verb):
    assert json.loads(cli(verb, "--json", str(RECORDING)).stdout) == json.loads(
        (FILES / f"{verb}.json").read_text()
    )


@pytest.mark.parametrize("waiting", [False, True])
def test_a_profile_and_one_that_waits_in_the_spool_are_pushed(waiting, tmp_path):
    with FakePyroscope() as server:
        environ = clean_environ(PYROSCOPE_SERVER_ADDRESS=server.url)
        if waiting:
            spool = tmp_path / "spool"
            spool.mkdir(mode=0o700)
            shutil.copy(FILES / "waiting-oom.pb.gz", spool / "1-2-3.pb.gz")
            environ["GPUMEM_OTEL_SPOOL_DIR"] = str(spool)
            done = cli("push", env=environ)
        else:
            done = cli("push", str(FILES / "live.pb.gz"), "--service", "job", env=environ)
        assert done.returncode == 0, done.stderr
        kind = {"profile_type": OOM} if waiting else {}
        total = 512 + 128 if waiting else 2048 + 128
        assert pyroscope_query.total(server.url, "job", **kind) == total


def test_a_registered_job_is_found(tmp_path):
    tmp_path.chmod(0o700)
    shutil.copy(FILES / "4242-99-33858c38.json", tmp_path)
    (target,) = json.loads(cli("sd", "--run-dir", os.fspath(tmp_path)).stdout)
    assert target["targets"] == ["m1:9464"]
    assert target["labels"]["__meta_gpumem_run_id"] == "r1"


def _paths(document, path=()):
    """Every place of a JSON document, with what stands there."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _paths(value, (*path, key))
    else:
        yield path, document


def test_control_keeps_its_paths_fields_and_codes():
    """Clients of 0.1.0 ask newer jobs; only prose may differ."""
    from gpumem_otel.yielding.control.openapi import document  # noqa: PLC0415

    prose = ("description", "summary", "title", "version")
    now = dict(_paths(document()))
    then = json.loads((FILES / "control-openapi.json").read_text())
    for path, value in _paths(then):
        if path[-1] not in prose:
            assert now.get(path) == value, path
