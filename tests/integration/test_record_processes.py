"""Recordings of several processes: each writes its own file and no other."""

from __future__ import annotations

import subprocess
import sys

from support.cli_process import WAIT, clean_environ

from gpumem_otel.recording.reader import load_recording

RECORDING = """
import os, sys
from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import Identity, StepStats
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.recording.file import RecordingFile
from gpumem_otel.capture.gil_pacing import Pacer

def begin():
    return RecordingFile(
        sys.argv[1], identity=Identity(service_name="job"), facts={}, namer=lambda n, f, l: n,
        counters=Counters(), pacer=Pacer(),
    )

def reading():
    raw = {"segments": [], "device_traces": []}
    return Reading(snapshot=from_torch(raw), time_ns=1, before=(), after=())
"""

EACH_ITS_OWN = """
recording = begin()
recording.add(reading(), StepStats())
print(recording.path, flush=True)
sys.stdin.read()
recording.close()
"""

FORKS_WHILE_WRITING = """
recording = begin()
recording.add(reading(), StepStats())
recording._file.write(b"the parent's")
if not os.fork():
    sys.exit()
os.wait()
"""


def test_processes_of_one_rank_each_have_a_file(tmp_path):
    """GIVEN two processes with the same path WHEN both record THEN neither loses anything."""
    command = [sys.executable, "-c", RECORDING + EACH_ITS_OWN, str(tmp_path / "run.gpumem")]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environ = clean_environ()
    with (
        subprocess.Popen(command, env=environ, text=True, **streams) as first,
        subprocess.Popen(command, env=environ, text=True, **streams) as second,
    ):
        paths = {process: process.stdout.readline().strip() for process in (first, second)}
        errors = {process: process.communicate(timeout=WAIT)[1] for process in (first, second)}
    first, other = sorted(paths, key=lambda process: len(paths[process]))
    assert paths[first] == str(tmp_path / "run.gpumem")
    assert paths[other] == str(tmp_path / f"run-pid{other.pid}.gpumem")
    assert errors[first] == ""
    assert errors[other] == (
        f"gpumem_otel: {paths[first]} exists already: this process records to {paths[other]}\n"
    )
    for path in paths.values():
        recording = load_recording(path)
        assert (len(recording.readings), recording.warnings) == (1, ())


def test_a_forked_child_writes_nothing(tmp_path):
    """GIVEN a line half written WHEN the job forks THEN the child does not write it again."""
    path = tmp_path / "run.gpumem"
    done = subprocess.run(
        [sys.executable, "-c", RECORDING + FORKS_WHILE_WRITING, str(path)],
        env=clean_environ(), capture_output=True, text=True, timeout=WAIT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes().count(b"the parent's") == 1
