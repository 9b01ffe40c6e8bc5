"""The panels of the job's dashboard about yield and restore; empty where the job cannot yield."""

from __future__ import annotations

from typing import TYPE_CHECKING

from boards import queries as q
from boards.job_full import RANK
from boards.parts import BYTES, SECONDS, Query, bars, lines, timeline

if TYPE_CHECKING:
    from boards.parts import Panel

__all__ = ["panels", "states"]

_STATES = (
    ("running", "green"),
    ("yielding", "light-blue"),
    ("restoring", "blue"),
    ("yielded", "purple"),
    ("overdue", "orange"),
    ("failed", "red"),
)
"""States from best to worst: of two that a rank has at once, as over OTLP for five minutes after a
change, the worse is drawn."""


def states() -> Panel:
    """The state of each rank over time, at every level."""
    found = [q.of_job("gpumem_yield_state", f'state="{state}"') for state, _ in _STATES]
    numbers = " or ".join(f"{place} * {one}" for place, one in enumerate(found))
    return timeline(
        "Yields: the state of each rank",
        "Whether a rank has its memory, of the ten furthest from running in the range. Yielded: "
        "its memory is on the host, it is stopped, and the curves above may stay where they "
        "were; `gpumem-otel ctl restore` brings it back. Overdue: it should be back and the device "
        "is taken, see `nvidia-smi`. Failed: memory is lost, start the job from its last "
        "checkpoint.",
        [Query(q.worst(f"max by (rank) ({numbers})"), "rank {{rank}}")],
        _STATES,
        nothing="No rank takes commands to yield (GPUMEM_OTEL_CONTROL)",
    )


def panels() -> list[Panel]:
    """What yields move, leave and take; metrics level full."""
    only = " Exported at level full only (GPUMEM_OTEL_METRICS_LEVEL=full)."
    phases = f"increase({q.of_job('gpumem_yield_seconds_total')}[$__rate_interval])"
    return [
        lines(
            "Yields: away from the devices",
            "In host memory or on disk now. It counts against the memory limit of the pod as long "
            "as the rank is yielded; 0 after the restore." + only,
            [Query(q.worst(q.of_job("gpumem_yield_moved_bytes")), RANK)],
            BYTES,
        ),
        lines(
            "Yields: left on the devices, by cause",
            "What the last yields could not give back; summed over the ranks chosen, nothing while "
            "none is yielded. Context, communicator, graphs: level `process` takes them. Foreign, "
            "kept: said to stay. Other process: somebody else's, which is what a restore waits "
            "for." + only,
            [Query(f"sum by (cause) ({q.of_job('gpumem_yield_residual_bytes')})", "{{cause}}")],
            BYTES,
        ),
        bars(
            "Yields: time by phase",
            "Seconds spent in yields and restores in the window before each bar, summed over the "
            "ranks chosen. Long prepare: no safe point, or slow callbacks. Long release or reload: "
            "the link, or host memory that is pinned for the first time. Long restore: it waited "
            "for the device." + only,
            [Query(f"sum by (phase) ({phases}) > 0", "{{phase}}")],
            SECONDS,
        ),
        lines(
            "Yields: until the lease ends",
            "Then the memory comes back by itself, if the device has room; of the ten ranks whose "
            "lease ends first. Below 0: it is over, and the rank is not back." + only,
            [
                Query(
                    q.worst(
                        f"{q.of_job('gpumem_yield_lease_expiry_timestamp_seconds')} - time()",
                        lowest=True,
                    ),
                    RANK,
                )
            ],
            SECONDS,
            height=8,
            lowest=None,
        ),
    ]
