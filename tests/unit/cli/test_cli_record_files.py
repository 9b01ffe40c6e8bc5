"""Files of `record`: which older ones are set aside, which new ones are reported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from support.raw_snapshots import block, frame, segment, snapshot

from gpumem_otel.base.profile import StepStats
from gpumem_otel.cli import record_files
from gpumem_otel.recording.writer import RecordingWriter
from gpumem_otel.settings.identity import identify
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import identity_namer

ALL = [
    "run-rank0.gpumem",
    "run-rank1-pid77.gpumem",
    "run-rank1-restart1.gpumem",
    "run-rank1.gpumem",
    "run.gpumem",
]


def make(path, *, close=True, readings=1, **identity):
    raw = snapshot([segment([block(512, [frame("f")])])])
    reading = Reading(snapshot=from_torch(raw), time_ns=5, before=(), after=())
    with path.open("wb") as file:
        writer = RecordingWriter(
            file,
            identity=replace(identify({}), **identity),
            created_ns=1,
            facts={},
            namer=identity_namer,
        )
        for _ in range(readings):
            writer.add(reading, StepStats())
        if close:
            writer.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def ended_pid():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


@pytest.mark.parametrize(
    ("environ", "stay"),
    [
        ({}, []),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["run-rank0.gpumem", "run.gpumem"]),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"},
            [name for name in ALL if name != "run-rank1-restart1.gpumem"],
        ),
    ],
)
def test_finished_recordings_make_room(tmp_path, environ, stay):
    for name in ALL:
        make(tmp_path / name)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    moved = record_files.set_aside(tmp_path / "run.gpumem", environ)
    assert names(tmp_path) == sorted(stay)
    record_files.settle(moved, environ, replaced=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_removed_is_said(tmp_path):
    make(tmp_path / "run.gpumem")
    make(tmp_path / "run-rank1.gpumem")
    moved = record_files.set_aside(tmp_path / "run.gpumem", {})
    assert record_files.settle(moved, {}, replaced=True) == [
        "gpumem-otel: removed older recordings: run.gpumem, run-rank1.gpumem"
    ]
    assert list(tmp_path.iterdir()) == []
    assert record_files.set_aside(tmp_path / "run.gpumem", {}) == []
    assert record_files.settle([], {}, replaced=True) == []


@pytest.mark.parametrize("left", ["nothing", "empty", "unread", "notes"])
def test_a_job_that_recorded_nothing_gives_the_older_one_back(tmp_path, left):
    path = tmp_path / "run.gpumem"
    make(path)
    older = path.read_bytes()
    moved = record_files.set_aside(path, {})
    if left == "empty":
        path.touch()
    elif left == "unread":
        make(path, readings=0)
    elif left == "notes":
        path.write_bytes(b"of the job itself")
    lines = record_files.settle(moved, {}, replaced=False)
    place = tmp_path / ("run.gpumem.old" if left == "notes" else "run.gpumem")
    assert place.read_bytes() == older
    assert lines == [f"gpumem-otel: kept older recordings: {place.name}"]
    assert len(list(tmp_path.iterdir())) == (2 if left == "notes" else 1)


def test_a_file_that_can_not_be_put_back_is_told(tmp_path):
    kept = tmp_path / ".run.gpumem.1.old"
    moved = [record_files.RecordedFiles(tmp_path / "run.gpumem", kept)]
    assert record_files.settle(moved, {}, replaced=False) == [
        f"gpumem-otel: {kept}: No such file or directory"
    ]


@pytest.mark.parametrize("content", [b"", b"notes", b"\x1f\x8b but no gzip"])
def test_what_is_no_recording_is_refused(tmp_path, content):
    path = tmp_path / "run.gpumem"
    path.write_bytes(content)
    with pytest.raises(click.UsageError, match="run exists"):
        record_files.check_target("run", path)
    assert path.read_bytes() == content


def test_recordings_new_names_and_devices_are_taken(tmp_path):
    make(tmp_path / "run.gpumem")
    make(tmp_path / "open.gpumem", close=False)
    for path in (tmp_path / "run.gpumem", tmp_path / "open.gpumem", tmp_path / "new"):
        record_files.check_target(path.name, path)
    record_files.check_target("/dev/null", Path("/dev/null"))


def test_files_of_another_kind_are_not_touched(tmp_path, capsys):
    (tmp_path / "run.gpumem").write_bytes(b"notes")
    (tmp_path / "run-rank1.gpumem").write_bytes(b"\x1f\x8b but no gzip")
    (tmp_path / "run-rank2.gpumem").symlink_to(tmp_path / "nowhere")
    (tmp_path / "run-rank3.gpumem").mkdir()
    make(tmp_path / "other.gpumem")
    before = names(tmp_path)
    assert record_files.set_aside(tmp_path / "run.gpumem", {}) == []
    assert names(tmp_path) == before
    assert capsys.readouterr().err == ""


def test_an_empty_file_stays_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "run-rank1.gpumem").touch()
    make(tmp_path / "real")
    (tmp_path / "run.gpumem").symlink_to(tmp_path / "real")
    moved = record_files.set_aside(tmp_path / "run.gpumem", {})
    assert names(tmp_path) == ["run-rank1.gpumem", "run.gpumem"]
    assert (tmp_path / "run.gpumem").is_symlink()
    record_files.settle(moved, {}, replaced=False)
    assert names(tmp_path) == ["real", "run-rank1.gpumem", "run.gpumem"]


def test_a_recording_that_may_still_be_written_stays(tmp_path):
    """GIVEN one command line per node on a shared folder THEN none takes a file of another."""
    make(tmp_path / "run.gpumem", close=False, pid=os.getpid())
    make(tmp_path / "run-rank1.gpumem", close=False, pid=ended_pid(), node="another")
    make(tmp_path / "run-rank2.gpumem", close=False, pid=ended_pid())  # killed
    record_files.set_aside(tmp_path / "run.gpumem", {})
    assert names(tmp_path) == ["run-rank1.gpumem", "run.gpumem"]


def test_a_folder_that_can_not_be_read_is_no_failure(tmp_path):
    target = tmp_path / "gone" / "run.gpumem"
    assert record_files.stamps(target) == {}
    assert record_files.set_aside(target, {}) == []


def test_entries_that_can_not_be_looked_at_are_passed_over(tmp_path):
    make(tmp_path / "run.gpumem")
    (tmp_path / "run-rank1.gpumem").symlink_to(tmp_path / "run-rank1.gpumem")
    assert list(record_files.stamps(tmp_path / "run.gpumem")) == [tmp_path / "run.gpumem"]


def test_a_recording_that_can_not_be_read_is_told(tmp_path):
    (tmp_path / "run.gpumem").write_bytes(b"notes")
    found = [record_files.report(tmp_path / name) for name in ("run.gpumem", "gone")]
    assert [readings for readings, _ in found] == [0, 0]
    (first,), (second,) = (lines for _, lines in found)
    assert first.startswith(f"gpumem-otel: {tmp_path}/run.gpumem: ")
    assert second == f"gpumem-otel: {tmp_path}/gone: No such file or directory"
