"""What tools/record_jobs.py adds to a recording, and that it changes nothing else."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from gpumem_otel.cli.demo.command import RECORDING
from gpumem_otel.recording.reader import load_recording

ROOT = Path(__file__).parents[2]


def test_the_device_is_added_to_every_reading_and_all_else_stays(tmp_path):
    spec = importlib.util.spec_from_file_location("record_jobs", ROOT / "tools" / "record_jobs.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    path = tmp_path / "job.gpumem"
    shutil.copy(RECORDING, path)
    before = load_recording(path)

    tool.with_device(path, {"limit_bytes": 5_000, "device_total_bytes": 6_000})

    after = load_recording(path)
    assert (after.identity, after.header) == (before.identity, before.header)
    assert len(after.readings) == len(before.readings)
    told = 0
    for old, new in zip(before.readings, after.readings, strict=True):
        assert (new.time_ns, new.steps) == (old.time_ns, old.steps)
        assert new.snapshot.devices() == old.snapshot.devices()
        for stats, known in zip(new.after, old.after, strict=True):
            told += 1
            assert (stats.limit_bytes, stats.device_total_bytes) == (5_000, 6_000)
            assert stats.allocations == known.allocations
            totals = [one.snapshot.totals(stats.device) for one in (old, new)]
            assert totals[0] == totals[1]
            groups = [
                sorted(repr(group) for group in one.snapshot.live_groups(stats.device))
                for one in (old, new)
            ]
            assert groups[0] == groups[1]
    assert told > 10


def test_there_is_a_recording_of_each_job():
    folder = ROOT / "tests" / "data" / "jobs"
    assert {path.stem for path in folder.iterdir()} == {"healthy", "leak", "oom", "server"}
