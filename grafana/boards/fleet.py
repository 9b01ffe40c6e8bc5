"""GPU memory: fleet. Which jobs hold, waste and grow; only of the recording rules, one per job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from boards import queries as q
from boards.board import Board
from boards.parts import (
    BYTES,
    COUNT,
    RATIO,
    SECONDS,
    Query,
    bars,
    lines,
    number,
    ranking,
    stack,
)
from boards.variables import several_jobs

if TYPE_CHECKING:
    from boards.parts import Panel

__all__ = ["board"]

JOB = "{{job}}"
FROM_LINE = (("This job", q.job_link()),)
FROM_TABLE = (("This job", q.job_link(in_a_table=True)),)
MOST = 20


def board() -> Board:
    """The dashboard."""
    page = Board(
        uid="gpumem-fleet",
        title="GPU memory: fleet",
        description="Which jobs hold GPU memory, waste it, grow or sit on it idle. Reads one "
        "series per job, made by the recording rules of deploy/prometheus/rules; without them it "
        "is empty.",
        variables=several_jobs("job:gpumem_target_info:count"),
        since="now-24h",
        refresh="5m",
    )
    page.row("The fleet now", _now())
    page.row("Held: who has the memory", _held())
    page.row("Waste: reserved, and nothing in it", _waste())
    page.row("Growth: who will run out", _growth())
    page.row("Ranks that differ, and holders that do nothing", _skew_and_idle())
    page.row("Given back: yields", _yields())
    page.row("Out of memory", _events())
    page.row("Blind spots", _blind())
    return page


def _top(rule: str) -> Query:
    return Query(f"topk({MOST}, sum by (cluster, namespace, job) ({q.recorded(rule)}) > 0)")


def _now() -> list[Panel]:
    reserved = f"sum({q.recorded('job:gpumem_reserved_bytes:sum')})"
    limit = f"sum({q.recorded('job:gpumem_limit_bytes:sum')})"
    return [
        number(
            "Jobs",
            "Jobs with metrics now, among those chosen above. None: the recording rules are not "
            "loaded, or nothing is scraped.",
            Query(f"count({q.recorded('job:gpumem_target_info:count')})"),
            COUNT,
        ),
        number(
            "Devices",
            "Pairs of rank and device; a GPU that several ranks share counts for each.",
            Query(f"sum({q.recorded('job:gpumem_target_info:count')})"),
            COUNT,
        ),
        number(
            "Held over limit",
            "Reserved by the allocators over what the jobs may use. Low over days: jobs have more "
            "or larger GPUs than they need; see the peaks below before taking some away.",
            Query(f"{reserved} / {limit}"),
            RATIO,
            highest=1,
        ),
        number(
            "Cached over held",
            "Of what is held, the part without a live tensor in it. See Waste.",
            Query(f"sum({q.recorded('job:gpumem_cached_bytes:sum')}) / {reserved}"),
            RATIO,
            steps=((0.3, "orange"), (0.5, "red")),
            highest=1,
        ),
        number(
            "Held by idle ranks",
            "Reserved by ranks that for an hour neither stepped nor allocated, nor were yielded. "
            "Ask their owners.",
            Query(f"sum({q.recorded('job:gpumem_reserved_bytes:idle1h_sum')})"),
            BYTES,
            steps=((1, "orange"),),
        ),
        number(
            "Out of memory, last hour",
            "Allocations that failed for good in the last hour, in all jobs chosen.",
            Query(f"round(sum({q.recorded('job:gpumem_ooms:increase1h')}))"),
            COUNT,
            steps=((1, "red"),),
        ),
    ]


def _held() -> list[Panel]:
    return [
        ranking(
            "Jobs by held memory",
            "Reserved by all ranks of the job, now. Click a job for its own dashboard.",
            _top("job:gpumem_reserved_bytes:sum"),
            BYTES,
            value="held",
            links=FROM_TABLE,
        ),
        lines(
            "Held over time",
            "The ten jobs that held most within the range. A step down at the end is a job that "
            "ended; one that never ends and never moves is worth a question.",
            [Query(q.worst(q.recorded("job:gpumem_reserved_bytes:sum")), JOB)],
            BYTES,
            links=FROM_LINE,
        ),
        ranking(
            "Jobs by their fullest device",
            "Highest allocated since the start over the limit, of the fullest device. Above 95 %: "
            "the next longer batch may fail. Below 50 % for a whole run: a smaller GPU would do.",
            _top("job:gpumem_allocated_peak_per_limit:ratio_max"),
            RATIO,
            value="peak / limit",
            steps=((0.95, "orange"), (0.99, "red")),
            links=FROM_TABLE,
        ),
        stack(
            "All that adds up",
            "Of all jobs chosen: live tensors, cached by the allocators, and what lies outside "
            "them (contexts, libraries, other processes), against the sum of the limits.",
            [
                Query(f"sum({q.recorded('job:gpumem_allocated_bytes:sum')})", "allocated"),
                Query(f"sum({q.recorded('job:gpumem_cached_bytes:sum')})", "cached"),
                Query(f"sum({q.recorded('job:gpumem_outside_bytes:sum')})", "outside"),
                Query(f"sum({q.recorded('job:gpumem_limit_bytes:sum')})", "limit", line="red"),
            ],
            BYTES,
            width=12,
            height=9,
        ),
    ]


def _waste() -> list[Panel]:
    return [
        ranking(
            "Jobs by waste",
            "Reserved minus allocated, over all ranks, now. Some is needed for the next step: look "
            "at the share beside it and at how long it lasts.",
            _top("job:gpumem_cached_bytes:sum"),
            BYTES,
            value="cached",
            width=8,
            links=FROM_TABLE,
        ),
        lines(
            "Cached over held, by job",
            "The ten jobs with the largest share within the range. Above a half for hours: the "
            "peak of an early phase was never given back (`torch.cuda.empty_cache()` once after "
            "it), or fragments.",
            [Query(q.worst(q.recorded("job:gpumem_cached_per_reserved:ratio")), JOB)],
            RATIO,
            width=8,
            top=1,
            steps=((0.5, "orange"),),
            links=FROM_LINE,
        ),
        stack(
            "Cached, by cause",
            "Of all jobs chosen. Free segments can be given back at any time; split remainders are "
            "fragments; private pools belong to CUDA graphs; the rest waits for another stream.",
            [
                Query(
                    f"sum by (cause) ({q.recorded('job_cause:gpumem_cached_bytes:sum')})",
                    "{{cause}}",
                )
            ],
            BYTES,
            width=8,
            height=9,
        ),
    ]


def _growth() -> list[Panel]:
    return [
        ranking(
            "Jobs by growth of the step floor",
            "Bytes per second by which what stays between steps grew in the last hour, on the rank "
            "where it grew most. Small numbers of young jobs are their start; a job that stays in "
            "this table for hours leaks.",
            _top("job:gpumem_step_floor_bytes:deriv1h_max"),
            "binBps",
            value="growth",
            links=FROM_TABLE,
        ),
        lines(
            "Step floor of the highest rank",
            "What stays allocated between steps, of the ten jobs that hold most so. Flat is "
            "healthy at any height; a line that climbs without end is a leak.",
            [Query(q.worst(q.recorded("job:gpumem_step_floor_bytes:max")), JOB)],
            BYTES,
            links=FROM_LINE,
        ),
    ]


def _skew_and_idle() -> list[Panel]:
    return [
        ranking(
            "Jobs by rank skew",
            "Step floor of the highest rank less that of the lowest, within a pipeline stage. The "
            "fullest rank sets the batch size for all: balance the shards or the stages.",
            _top("job:gpumem_step_floor_bytes:skew"),
            BYTES,
            value="skew",
            width=8,
            links=FROM_TABLE,
        ),
        ranking(
            "Jobs by memory held idle",
            "Reserved by ranks that for an hour neither stepped nor moved what is allocated, were "
            "not yielded, and hold over a tenth of their limit: hanging, waiting or forgotten.",
            _top("job:gpumem_reserved_bytes:idle1h_sum"),
            BYTES,
            value="held idle",
            width=8,
            links=FROM_TABLE,
        ),
        lines(
            "Held idle over time",
            "The same, of the ten jobs with most of it. Long plateaus are notebooks and servers "
            "nothing calls; talk to their owners.",
            [Query(q.worst(q.recorded("job:gpumem_reserved_bytes:idle1h_sum")), JOB)],
            BYTES,
            width=8,
            links=FROM_LINE,
        ),
    ]


def _yields() -> list[Panel]:
    by_state = "job_state:gpumem_yield_state:count"
    away = q.recorded(by_state, 'state!="running"')
    return [
        ranking(
            "Jobs by yield state",
            "Processes that do not run, now. Yielded: they gave their GPUs to somebody else and "
            "are stopped. Overdue: they should be back and the device has no room; ask its user "
            "to go. Failed: memory is lost, start the job again. Empty: all run, or none can "
            "yield.",
            Query(f"topk({MOST}, sum by (cluster, namespace, job, state) ({away}) > 0)"),
            COUNT,
            value="processes",
            width=8,
            links=FROM_TABLE,
            by=("state",),
        ),
        ranking(
            "Jobs by memory moved to the host",
            "GPU memory that lies in host memory, or on disk, until the restore. It fills nodes: "
            "what is there for days belongs to a job that is not wanted back. Exported at level "
            "full only.",
            _top("job:gpumem_yield_moved_bytes:sum"),
            BYTES,
            value="moved",
            width=8,
            links=FROM_TABLE,
        ),
        stack(
            "Processes by yield state",
            "Of all jobs chosen that take commands to yield. Overdue that stays, and any failed, "
            "need a person; see the alerts.",
            [Query(f"sum by (state) ({q.recorded(by_state)})", "{{state}}")],
            COUNT,
            width=8,
            height=9,
        ),
    ]


def _events() -> list[Panel]:
    return [
        bars(
            "Out of memory, by job",
            "Allocations that failed for good in the hour before each bar. The job's dashboard has "
            "the moment, and the flame graph of what held the memory.",
            [Query(f"{q.recorded('job:gpumem_ooms:increase1h')} > 0", JOB)],
            COUNT,
            links=FROM_LINE,
        ),
        bars(
            "Allocator retries, by job",
            "Times an allocator emptied its cache to find room, in the hour before each bar. These "
            "jobs are near their OOM and lose time at each one.",
            [Query(f"{q.recorded('job:gpumem_alloc_retries:increase1h')} > 0", JOB)],
            COUNT,
            links=FROM_LINE,
        ),
    ]


def _blind() -> list[Panel]:
    return [
        ranking(
            "Devices that fell silent",
            "Scraped within six hours and not now: the process hangs, is gone, or its port is "
            "closed. Only for what is scraped; over OTLP this is not noticed.",
            _top("job:gpumem_target_info:silent_count"),
            COUNT,
            value="devices",
            width=8,
            links=FROM_TABLE,
        ),
        ranking(
            "Processes without profiles",
            "Where profiles cannot be had, for instance with another allocator; the exporter's "
            "dashboard lists the reasons.",
            _top("job:gpumem_unsupported:count"),
            COUNT,
            value="processes",
            width=8,
            links=FROM_TABLE,
        ),
        ranking(
            "Age of the last profile",
            "Time since the rank that pushed longest ago had a profile stored. Longer than the "
            "interval of the job: see drops and errors on the exporter's dashboard; a rank that is "
            "yielded may push nothing. Exported at level full only.",
            Query(
                f"topk({MOST}, sum by (cluster, namespace, job) "
                f"(time() - {q.recorded('job:gpumem_last_push_timestamp_seconds:min')}))"
            ),
            SECONDS,
            value="age",
            width=8,
            steps=((600, "orange"), (1800, "red")),
            links=FROM_TABLE,
        ),
    ]
