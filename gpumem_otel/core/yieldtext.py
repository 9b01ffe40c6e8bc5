"""A report of a yield or restore for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.core.text import by_size, human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumem_otel.core.yields import PhaseTime, YieldReport

__all__ = ["report_lines"]


def report_lines(report: YieldReport) -> list[str]:
    """What moved, what is left and why, and how long each phase took; a line each."""
    lines = [f"state {report.state.value}, level {report.level.value}"]
    lines += _sums("moved", report.moved_bytes)
    lines += _sums("discarded", report.discarded_bytes)
    lines += _sums("left on the devices", report.residual_bytes)
    lines += [_phase(one) for one in report.phases]
    if report.host_bytes or report.disk_bytes:
        disk = f", {human_bytes(report.disk_bytes)} on disk" if report.disk_bytes else ""
        dry = report.state.value == "running" and not report.operation
        verb = "needed" if dry else "held"
        lines.append(f"{verb} in host memory: {human_bytes(report.host_bytes)}{disk}")
    if report.expected_seconds is not None:
        lines.append(f"the copy will take about {report.expected_seconds:.1f} s")
    if report.checksums:
        lines.append(f"checksums: {report.checksums}")
    lines += [f"danger: {line}" for line in report.dangers]
    lines += [f"note: {line}" for line in report.notes]
    return lines


def _sums(what: str, sizes: Mapping[str, int]) -> list[str]:
    if not sizes:
        return []
    return [f"{what}: {human_bytes(sum(sizes.values()))} ({by_size(sizes)})"]


def _phase(one: PhaseTime) -> str:
    speed = ""
    if one.bytes_per_second:
        per_second = human_bytes(round(one.bytes_per_second))
        speed = f", {human_bytes(one.size_bytes)} at {per_second}/s"
    return f"{one.phase.value}: {one.seconds:.3f} s{speed}"
