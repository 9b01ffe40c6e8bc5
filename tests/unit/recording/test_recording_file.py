"""The file of a recording: its name, its pauses and counters, its limit, its end."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest
from support.raw_snapshots import block, frame, segment, snapshot

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import Identity, StepStats
from gpumem_otel.recording import format as form
from gpumem_otel.recording.file import FileOfRank, RecordingFile, files_of, rank_path
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import identity_namer

PID = os.getpid()
WAIT = 60
"""Bound of every wait, reached only where a test fails."""


class Pacer:
    """Records its calls; each piece of work took a quarter of a second."""

    def __init__(self):
        self.calls = []

    def begin(self):
        self.calls.append("begin")

    def pause(self):
        self.calls.append("pause")

    def end(self):
        self.calls.append("end")
        return 0.25


@pytest.fixture
def begin(tmp_path):
    """Recording files, closed at the end."""
    files = []

    def start(path="run.gpumem", pacer=None, **identity):
        file = RecordingFile(
            str(tmp_path / path),
            identity=Identity(service_name="job", **identity),
            facts={},
            namer=identity_namer,
            counters=Counters(),
            pacer=Pacer() if pacer is None else pacer,
        )
        files.append(file)
        return file

    yield start
    for file in files:
        file.close()


def reading(seconds=0, blocks=1):
    raw = snapshot([segment([block(512, [frame(str(n))]) for n in range(blocks)])])
    return Reading(snapshot=from_torch(raw), time_ns=10**18 + seconds * 10**9, before=(), after=())


def count(path):
    return len(load_recording(path).readings)


@pytest.mark.parametrize(
    ("identity", "name"),
    [
        ({}, "run.gpumem"),
        ({"restart": 2}, "run-restart2.gpumem"),
        ({"rank": 3, "world_size": 8}, "run-rank3.gpumem"),
        ({"rank": 0, "world_size": 8, "restart": 1}, "run-rank0-restart1.gpumem"),
    ],
)
def test_each_rank_and_restart_has_a_name(identity, name):
    assert rank_path("/x/run.gpumem", Identity(service_name="", **identity)) == Path("/x", name)


def test_files_of_a_recording_are_known_by_their_names(tmp_path):
    known = {
        "run-rank10.gpumem": (10, 0),
        "run-rank2.gpumem": (2, 0),
        "run-rank2-restart1-pid77.gpumem": (2, 1),
        "run.gpumem": (-1, 0),
        "run-pid5-3.gpumem": (-1, 0),
        "run-restart4.gpumem": (-1, 4),
    }
    others = ["run-rank2.txt", "run-ranks.gpumem", "running.gpumem", "run-rank2b.gpumem", "run"]
    for name in (*known, *others):
        (tmp_path / name).touch()
    files = files_of(str(tmp_path / "run.gpumem"))
    assert files == sorted(FileOfRank(*numbers, tmp_path / n) for n, numbers in known.items())
    assert [file.rank for file in files] == [-1, -1, -1, 2, 2, 10]


def test_no_file_is_written_over(begin, tmp_path, caplog):
    """GIVEN a name that is taken WHEN a process records THEN its name has the pid, logged once."""
    (tmp_path / "run.gpumem").write_bytes(b"of another process")
    first, second = begin(), begin()
    for file in (first, second):
        file.add(reading(), StepStats())
    assert first.path == tmp_path / f"run-pid{PID}.gpumem"
    assert second.path == tmp_path / f"run-pid{PID}-2.gpumem"
    assert (count(first.path), count(second.path)) == (1, 1)
    assert (tmp_path / "run.gpumem").read_bytes() == b"of another process"
    assert caplog.messages == [
        f"{tmp_path}/run.gpumem exists already: this process records to {file.path}"
        for file in (first, second)
    ]


def test_a_rank_that_is_there_already_gets_a_pid(begin, tmp_path):
    rank = {"rank": 3, "world_size": 8, "restart": 1}
    assert begin(**rank).path == tmp_path / "run-rank3-restart1.gpumem"
    assert begin(**rank).path == tmp_path / f"run-rank3-restart1-pid{PID}.gpumem"


def test_a_link_stays_a_link_and_a_device_a_device(begin, tmp_path):
    (tmp_path / "run.gpumem").symlink_to(tmp_path / "elsewhere")
    file = begin()
    file.add(reading(), StepStats())
    assert (tmp_path / "run.gpumem").is_symlink()
    assert count(tmp_path / "elsewhere") == 1
    assert begin("/dev/null").path == Path("/dev/null")


def test_a_folder_can_not_be_written(begin, tmp_path):
    (tmp_path / "run.gpumem").mkdir()
    with pytest.raises(IsADirectoryError):
        begin()
    assert [path.name for path in tmp_path.iterdir()] == ["run.gpumem"]


def test_work_is_paced_and_counted(begin):
    pacer = Pacer()
    file = begin(pacer=pacer)
    file.add(reading(blocks=100), StepStats())
    assert pacer.calls[0] == "begin"
    assert pacer.calls[-1] == "end"
    # at least once per stack, and every 32 blocks
    assert pacer.calls.count("pause") > 103
    assert set(pacer.calls[1:-1]) == {"pause"}
    pacer.calls.clear()
    file.add_window(reading(), 2.0)
    assert (pacer.calls[0], pacer.calls[-1]) == ("begin", "end")
    counters = file._counters
    assert counters.get("exporter_stall_seconds") == 0.5
    assert counters.get("exporter_runs", stage="record") == 2
    assert counters.get("exporter_seconds", stage="record") > 0
    assert len(counters.snapshot()) == 3


def test_a_full_recording_says_so_once_and_counts_what_is_lost(begin, monkeypatch, caplog):
    monkeypatch.setattr(form, "MAX_BLOCKS", 2)
    file = begin()
    for seconds in (0, 7, 14, 21):
        file.add(reading(seconds), StepStats())
    file.add_window(reading(28), 2.0)
    assert caplog.messages == [
        f"{file.path} is full: the recording stops at its limit, after 2 readings in 7 s"
    ]
    assert file._counters.get("exporter_dropped", reason="recording_full") == 3
    assert file._counters.get("exporter_runs", stage="record") == 3
    file.close()
    recording = load_recording(file.path)
    assert len(recording.readings) == 2
    assert recording.warnings == ("the recording stopped at its limit after 7 s",)


def test_a_window_of_too_many_events_is_counted(begin, monkeypatch):
    monkeypatch.setattr(form, "MAX_WINDOW_EVENTS", -1)
    file = begin()
    file.add_window(reading(), 2.0)
    file.add(reading(), StepStats())
    assert file._counters.get("exporter_history_overflow") == 1
    assert file._counters.get("exporter_dropped", reason="recording_full") == 0
    assert count(file.path) == 1


def test_a_full_disk_is_raised_once_and_leaves_what_was_there(begin, caplog):
    file = begin()
    file.add(reading(), StepStats())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.path.stat().st_size + 1, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.add(reading(), StepStats())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.add(reading(), StepStats())
    file.close()
    assert file._counters.get("exporter_dropped", reason="recording_failed") == 1
    assert caplog.messages == []
    assert count(file.path) == 1


def test_a_close_ends_the_file(begin):
    file = begin()
    file.add(reading(), StepStats())
    file.close()
    file.close()
    file.add(reading(), StepStats())
    file.add_window(reading(), 2.0)
    recording = load_recording(file.path)
    assert (len(recording.readings), recording.warnings) == (1, ())
    assert file._counters.get("exporter_runs", stage="record") == 1


class Held(Pacer):
    """Stays in its first pause until it is released."""

    def __init__(self):
        super().__init__()
        self.held, self.let_go = threading.Event(), threading.Event()

    def pause(self):
        self.held.set()
        assert self.let_go.wait(WAIT)


@pytest.fixture
def under_way(begin):
    """A file with one reading, and a thread in the middle of adding another."""
    pacer, errors = Held(), []
    pacer.let_go.set()
    file = begin(pacer=pacer)
    file.add(reading(), StepStats())
    pacer.let_go.clear()
    pacer.held.clear()

    def add():
        try:
            file.add(reading(1, blocks=100), StepStats())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    assert pacer.held.wait(WAIT)
    yield file, pacer, thread
    pacer.let_go.set()
    thread.join(WAIT)
    assert errors == []


def test_a_close_gives_up_a_write_that_takes_too_long(under_way):
    """GIVEN a thread that still writes WHEN the bound is over THEN it ends the file itself."""
    file, pacer, thread = under_way
    file.close(timeout=0.0)
    assert count(file.path) == 1  # readable at once
    file.add(reading(2), StepStats())  # returns at once, though the other thread has the lock
    pacer.let_go.set()
    thread.join(WAIT)
    recording = load_recording(file.path)
    assert (len(recording.readings), recording.warnings) == (1, ())
    assert file._file.closed


def test_a_close_waits_for_a_write_under_way(under_way):
    file, pacer, thread = under_way
    closer = threading.Thread(target=file.close, args=(WAIT,))
    closer.start()
    pacer.let_go.set()
    thread.join(WAIT)
    closer.join(WAIT)
    recording = load_recording(file.path)
    assert (len(recording.readings), recording.warnings) == (2, ())
