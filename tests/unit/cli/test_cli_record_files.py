"""Files of `record`: which older ones make room, which new ones are told."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from support.raw_snapshots import block, frame, segment, snapshot

from gpumem_otel.cli import record_files
from gpumem_otel.core.frames import identity_namer
from gpumem_otel.core.model import StepStats
from gpumem_otel.core.ports import Reading
from gpumem_otel.core.recording import RecordingWriter
from gpumem_otel.core.snapshot import from_torch
from gpumem_otel.ranks import identify

ALL = [
    "run-rank0.gpumem",
    "run-rank1-pid77.gpumem",
    "run-rank1-restart1.gpumem",
    "run-rank1.gpumem",
    "run.gpumem",
]


def make(path, *, close=True, **identity):
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
        writer.add(reading, StepStats())
        if close:
            writer.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


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
    record_files.remove_older(tmp_path / "run.gpumem", environ)
    assert names(tmp_path) == sorted(stay)


def test_what_is_removed_is_said(tmp_path, capsys):
    make(tmp_path / "run.gpumem")
    make(tmp_path / "run-rank1.gpumem")
    record_files.remove_older(tmp_path / "run.gpumem", {})
    assert capsys.readouterr().err == (
        "gpumem-otel: removed older recordings: run.gpumem, run-rank1.gpumem\n"
    )
    record_files.remove_older(tmp_path / "run.gpumem", {})
    assert capsys.readouterr().err == ""


def test_files_of_another_kind_are_not_touched(tmp_path, capsys):
    (tmp_path / "run.gpumem").write_bytes(b"notes")
    (tmp_path / "run-rank1.gpumem").write_bytes(b"\x1f\x8b but no gzip")
    (tmp_path / "run-rank2.gpumem").symlink_to(tmp_path / "nowhere")
    (tmp_path / "run-rank3.gpumem").mkdir()
    make(tmp_path / "other.gpumem")
    before = names(tmp_path)
    record_files.remove_older(tmp_path / "run.gpumem", {})
    assert names(tmp_path) == before
    assert capsys.readouterr().err == ""


def test_an_empty_file_makes_room_and_a_link_stays_a_link(tmp_path):
    (tmp_path / "run-rank1.gpumem").touch()
    make(tmp_path / "real")
    (tmp_path / "run.gpumem").symlink_to(tmp_path / "real")
    record_files.remove_older(tmp_path / "run.gpumem", {})
    assert names(tmp_path) == ["run.gpumem"]
    assert (tmp_path / "run.gpumem").is_symlink()


def test_a_recording_that_may_still_be_written_stays(tmp_path):
    """GIVEN the command line once per node on a shared folder THEN none takes another's file."""
    make(tmp_path / "run.gpumem", close=False, pid=os.getpid())
    make(tmp_path / "run-rank1.gpumem", close=False, pid=ended_pid(), node="another")
    make(tmp_path / "run-rank2.gpumem", close=False, pid=ended_pid())  # killed
    record_files.remove_older(tmp_path / "run.gpumem", {})
    assert names(tmp_path) == ["run-rank1.gpumem", "run.gpumem"]


def test_a_folder_that_can_not_be_read_is_no_failure(tmp_path):
    target = tmp_path / "gone" / "run.gpumem"
    assert record_files.stamps(target) == {}
    record_files.remove_older(target, {})


def test_entries_that_can_not_be_looked_at_are_passed_over(tmp_path):
    make(tmp_path / "run.gpumem")
    (tmp_path / "run-rank1.gpumem").symlink_to(tmp_path / "run-rank1.gpumem")
    assert list(record_files.stamps(tmp_path / "run.gpumem")) == [tmp_path / "run.gpumem"]


def test_a_recording_that_can_not_be_read_is_told(tmp_path, capsys):
    (tmp_path / "run.gpumem").write_bytes(b"notes")
    for name in ("run.gpumem", "gone"):
        assert record_files.report(tmp_path / name) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"gpumem-otel: {tmp_path}/run.gpumem: ")
    assert second == f"gpumem-otel: {tmp_path}/gone: No such file or directory"
