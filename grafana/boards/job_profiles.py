"""The flame graphs of the job's dashboard, and what says how to read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from boards import queries as q
from boards.parts import BYTES, COUNT, Query, flame_graph, number, pushed_number, words

if TYPE_CHECKING:
    from boards.parts import Panel

__all__ = ["live_and_allocated", "ooms"]

ONE_RANK = (
    '{service_name="${service}", namespace=~"${namespace:regex}", rank=~"${profile_rank}", '
    'device=~"${device:regex}"}'
)

WINDOW = "$push_interval"
"""The live flame graph's range: the interval before the last, since a rank sends what it has read
at a moment of its own within the next one."""

SUMS = """\
**A flame graph is the sum of all profiles in its range.** Pyroscope has no averages: where ten \
profiles of a job that holds 40 GiB lie in the range, the graph says 400 GiB. Shares are always \
right; bytes are right after dividing by the number of profiles.

* **Live, latest interval** covers one interval, so one profile for each device: its bytes are \
those of that moment. Beside it is the number of `snapshots` in it: divide by that where it is not \
1, with several devices, a shorter interval than chosen above, or an absolute time range (Grafana \
then ignores the panel's own range and takes the dashboard's).
* `bytes in the graph / snapshots` is what `gpumem_allocated_bytes` said at that moment, which \
stands below it.
* **Allocated, whole range** needs no divisor: each profile says what was allocated in its own \
interval, and those add up.
* Two ranges compare (Diff in Explore) only if they are of equal length.
* Curves of bytes over time are on this page from Prometheus; Pyroscope's own curve of a live type \
adds up the profiles of each step and grows as you zoom out.
"""


def live_and_allocated() -> list[Panel | tuple[Panel, ...]]:
    """Live beside its number of snapshots, the words on sums, and allocated over the range."""
    live = flame_graph(
        "Live, latest interval: sum of the profiles in it",
        "What is allocated, by the code that allocated it: the widest towers are what to shrink. "
        "Bytes are the sum of the profiles in the range of this panel; divide by the snapshots "
        "beside it. `[allocated before install]` is what was there before recording began. Empty: "
        "the interval chosen above is shorter than the job's, or nothing is pushed (exporter's "
        "dashboard).",
        q.LIVE_SPACE,
        ONE_RANK,
        width=20,
        height=18,
        window=WINDOW,
    )
    in_it = pushed_number(
        "Snapshots in it",
        "Number of profiles that the flame graph adds up: divide its bytes by this. 1 for one "
        "device and one interval.",
        q.LIVE_SNAPSHOTS,
        ONE_RANK,
        COUNT,
        height=6,
    )
    held = number(
        "Allocated then",
        "What `gpumem_allocated_bytes` of the same rank said at the end of that interval. The "
        "flame graph's bytes divided by its snapshots are the same, but for what changed in "
        "between; with several devices multiply by their number.",
        Query(f"sum({_of_profile_rank('gpumem_allocated_bytes')})"),
        BYTES,
        height=6,
    )
    in_the_range = pushed_number(
        "Snapshots in the whole range",
        "Number of live profiles of the rank in the range of the dashboard. None, while the "
        "metrics have data: the job does not push (PYROSCOPE_SERVER_ADDRESS), or another service "
        "is chosen above.",
        q.LIVE_SNAPSHOTS,
        ONE_RANK,
        COUNT,
        height=6,
    )
    return [
        live,
        (
            in_it.time_from(WINDOW).time_shift(WINDOW),
            held.time_from(WINDOW).time_shift(WINDOW),
            in_the_range,
        ),
        words("How to read the sums", "What the flame graphs add up.", SUMS, width=24, height=9),
        flame_graph(
            "Allocated, whole range: bytes that were requested",
            "Which code allocates most, freed since or not: look here for churn and for what makes "
            "fragments. Each profile is a true delta of its interval, so the sum is right. Only "
            "where the job is asked for it: GPUMEM_OTEL_PROFILES=live,allocated; empty otherwise.",
            q.ALLOCATED_SPACE,
            ONE_RANK,
        ),
    ]


def _of_profile_rank(metric: str) -> str:
    return q.of_job(metric).replace('rank=~"$rank"', 'rank=~"$profile_rank"')


def ooms() -> list[Panel]:
    """The profile of one failed allocation."""
    return [
        flame_graph(
            "What held the memory when it ran out",
            "One profile, taken when an allocation failed: bytes are those of that moment. The "
            "widest tower is what to shrink; what could not be allocated is not in it. Empty: no "
            "OOM in the range, or its profile could not be sent and waits on the node for "
            "`gpumem-otel push`.",
            q.OOM_SPACE,
            '{service_name="${service}", oom_id="${oom_id}"}',
        )
    ]
