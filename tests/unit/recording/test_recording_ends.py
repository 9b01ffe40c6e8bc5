"""The end of a recording: at a limit, on a full disk, with its writer; readings stay whole."""

from __future__ import annotations

import gzip
import io

import pytest
from support.raw_snapshots import block, frame, segment, snapshot
from support.recording_parts import (
    STEPS,
    lines_of,
    reading_of,
    stackful,
    windowed,
    writer_for,
    written,
)

from gpumem_otel.errors import SnapshotError
from gpumem_otel.recording import format as form
from gpumem_otel.recording.reader import load_recording


def test_a_window_with_too_many_events_is_left_out(monkeypatch):
    monkeypatch.setattr(form, "MAX_WINDOW_EVENTS", 3)
    file = io.BytesIO()
    writer = writer_for(file)
    assert writer.add_window(windowed(), 1.0) is False
    assert not writer.full
    assert writer.add(reading_of(stackful()), STEPS) is True
    writer.close()
    assert len(load_recording(file.getvalue()).readings) == 1


def test_a_killed_writer_leaves_every_reading_it_added():
    file = io.BytesIO()
    writer = writer_for(file)
    sizes = []
    for turn in range(3):
        blocks = [block(number * 7919 % 4096, state="inactive") for number in range(400)]
        raw = stackful() if turn < 2 else snapshot([segment(blocks)])
        writer.add(reading_of(raw), STEPS)
        sizes.append(len(file.getvalue()))
    data = file.getvalue()
    for count, size in enumerate(sizes, 1):
        recording = load_recording(data[:size])
        assert len(recording.readings) == count
        assert recording.warnings == ("the recording was not closed: its writer was stopped",)
    cut = load_recording(data[: sizes[2] - 99])
    assert len(cut.readings) == 2
    assert "the recording is cut: its last line is left out" in cut.warnings
    writer.close()
    writer.close()
    assert load_recording(file.getvalue()).warnings == ()
    assert writer.add(reading_of(stackful()), STEPS) is False
    assert not file.closed


def test_the_writer_stops_at_its_limit_and_what_it_wrote_is_whole():
    file = io.BytesIO()
    writer = writer_for(file, max_bytes=3000)
    count = 0
    while writer.add(reading_of(stackful()), STEPS):
        count += 1
    assert writer.full
    assert writer.add(reading_of({"segments": []}), STEPS) is False
    assert writer.add_window(windowed(), 1.0) is False
    writer.close()
    assert count > 2
    assert len(gzip.decompress(file.getvalue())) <= 3000
    assert lines_of(file.getvalue())[-1] == {"end": {"why": "full"}}
    recording = load_recording(file.getvalue())
    assert len(recording.readings) == count
    assert recording.warnings == ("the recording stopped at its limit after 0 s",)


def test_a_recording_that_was_full_at_once_says_so():
    file = io.BytesIO()
    writer = writer_for(file, max_bytes=100)
    assert writer.add(reading_of(stackful()), STEPS) is False
    writer.close()
    assert load_recording(file.getvalue()).warnings == (
        "the recording stopped at its limit after 0 s",
    )


def test_a_limit_of_blocks_holds_for_writer_and_reader(monkeypatch):
    data = written(reading_of(stackful()), reading_of(stackful()))
    monkeypatch.setattr(form, "MAX_BLOCKS", 7)
    with pytest.raises(SnapshotError, match="more than 3 blocks"):
        load_recording(data)
    file = io.BytesIO()
    writer = writer_for(file)
    assert writer.add(reading_of(stackful()), STEPS) is True
    assert writer.add(reading_of(stackful()), STEPS) is False
    writer.close()
    assert len(load_recording(file.getvalue()).readings) == 1


class _FullDisk(io.BytesIO):
    room = 10**9

    def write(self, data):
        if self.tell() + len(data) > self.room:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_a_full_disk_ends_the_recording_and_keeps_what_it_has():
    file = _FullDisk()
    writer = writer_for(file)
    writer.add(reading_of(stackful()), STEPS)
    file.room = file.tell() + 1
    with pytest.raises(OSError, match="No space left"):
        writer.add(reading_of(stackful(2048)), STEPS)
    assert writer.full
    file.room = 10**9
    assert writer.add(reading_of(stackful()), STEPS) is False
    writer.close()
    assert len(load_recording(file.getvalue()).readings) == 1


def test_a_pause_may_end_it_at_any_moment():
    """GIVEN a pause that raises WHEN it does so at each of its calls THEN no reading is lost."""

    class StoppedError(Exception):
        pass

    def pause():
        nonlocal left
        left -= 1
        if not left:
            raise StoppedError

    raw = snapshot([segment([block(512, [frame(str(n))]) for n in range(300)])])
    readings = []
    for calls in range(1, 10**6):
        file, left = io.BytesIO(), calls
        writer = writer_for(file)
        assert writer.add(reading_of(stackful()), STEPS) is True
        try:
            writer.add(reading_of(raw), STEPS, pause)
        except StoppedError:
            added = writer.add(reading_of(raw), STEPS)
            writer.close()
            readings.append(len(load_recording(file.getvalue()).readings))
            assert readings[-1] == 1 + added
        else:
            break
    # it may continue until it begins to write a line
    assert sorted(set(readings), reverse=True) == [2, 1]
    assert readings == sorted(readings, reverse=True)
    assert calls > 300


def test_pause_is_called_and_changes_nothing():
    blocks = [block(512, [frame(str(n))]) for n in range(3000)]
    calls = []
    file = io.BytesIO()
    writer = writer_for(file)
    writer.add(reading_of(snapshot([segment(blocks)])), STEPS, lambda: calls.append(1))
    writer.close()
    assert file.getvalue() == written(reading_of(snapshot([segment(blocks)])))
    assert len(calls) > 3000
