"""A report of a yield as text."""

from __future__ import annotations

from gpumem_otel.yielding.values import (
    Phase,
    PhaseTime,
    YieldLevel,
    YieldReport,
    YieldState,
    report_lines,
)

GIB = 1 << 30


def test_a_yield_says_what_moved_what_is_left_and_how_fast():
    report = YieldReport(
        state=YieldState.YIELDED,
        level=YieldLevel.TENSORS,
        phases=(PhaseTime(Phase.PREPARE, 0.0125), PhaseTime(Phase.RELEASE, 0.4, 20 * GIB)),
        moved_bytes={"gradient": 4 * GIB, "parameter": 16 * GIB},
        residual_bytes={"context": 612 << 20},
        host_bytes=20 * GIB,
        dangers=("Slurm: the job's time limit goes on",),
        notes=("tensors alone",),
    )
    assert report_lines(report) == [
        "state yielded, level tensors",
        "moved: 20.0 GiB (parameter 16.0 GiB, gradient 4.0 GiB)",
        "left on the devices: 612.0 MiB (context 612.0 MiB)",
        "prepare: 0.013 s",
        "release: 0.400 s, 20.0 GiB at 50.0 GiB/s",
        "held in host memory: 20.0 GiB",
        "danger: Slurm: the job's time limit goes on",
        "note: tensors alone",
    ]


def test_a_dry_run_says_how_long():
    report = YieldReport(
        discarded_bytes={"optimizer_state": GIB}, disk_bytes=GIB, expected_seconds=2.04
    )
    assert report_lines(report) == [
        "state running, level auto",
        "discarded: 1.0 GiB (optimizer_state 1.0 GiB)",
        "needed in host memory: 0 B, 1.0 GiB on disk",
        "the copy will take about 2.0 s",
    ]


def test_a_restore_says_whether_it_is_equal():
    assert str(YieldReport(checksums="equal")).splitlines()[-1] == "checksums: equal"
