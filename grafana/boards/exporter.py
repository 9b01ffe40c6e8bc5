"""GPU memory: exporter. What this tool itself costs and whether it works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from boards import queries as q
from boards.board import Board
from boards.parts import (
    COUNT,
    RATIO,
    SECONDS,
    Query,
    bars,
    lines,
    number,
    ranking,
)
from boards.variables import from_prometheus, several_jobs

if TYPE_CHECKING:
    from boards.parts import Panel
    from boards.variables import Variable

__all__ = ["board"]

WHO = "{{job}} rank {{rank}}"
JOB = "{{job}}"
THIS_JOB = (("This job", q.job_link()),)
ONLY_FULL = " Exported at level full only (GPUMEM_OTEL_METRICS_LEVEL=full)."


def board() -> Board:
    """The dashboard."""
    page = Board(
        uid="gpumem-exporter",
        title="GPU memory: exporter",
        description="Whether the memory exporter inside the jobs works, and what it costs them. "
        "At the default level of metrics only the first row has data.",
        variables=_variables(),
    )
    page.row("Does it work?", _works())
    page.row("What it costs the job (level full)", _costs())
    page.row("Profiles on their way (level full)", _pushes())
    page.row("Is the accounting right? (level full)", _accounting())
    return page


def _variables() -> list[Variable]:
    info = "gpumem_target_info"
    return [
        *several_jobs(info),
        from_prometheus(
            "rank",
            "Ranks that the curves show.",
            f"label_values({info}{{{q.SEVERAL_JOBS}}}, rank)",
            numeric=True,
        ),
        from_prometheus(
            "device",
            "Index of the device in its process. What belongs to a whole process carries its home "
            "device.",
            f'label_values({info}{{{q.SEVERAL_JOBS}, rank=~"$rank"}}, device)',
            numeric=True,
        ),
    ]


def _works() -> list[Panel]:
    scraped = f"{{{q.SEVERAL_JOBS}}}"
    ours = f"and on (job, instance) {q.of_jobs('gpumem_target_info')}"
    dropped = q.of_jobs("gpumem_exporter_dropped_total")
    return [
        number(
            "Processes",
            "Processes with metrics now.",
            Query(f"count({q.of_jobs('gpumem_supported')})"),
            COUNT,
        ),
        number(
            "Without profiles",
            "Of them, those that cannot be profiled; the table below says why. Their metrics "
            "still come, as far as there are any.",
            Query(f"sum(1 - {q.of_jobs('gpumem_supported')})"),
            COUNT,
            steps=((1, "orange"),),
        ),
        number(
            "Profiles lost, in the range",
            "Profiles that did not arrive. A few while the server restarts are harmless: the next "
            "one is as good. Steady: see the reasons below.",
            Query(f"round(sum(increase({dropped}[$__range])))"),
            COUNT,
            steps=((1, "orange"), (100, "red")),
        ),
        number(
            "Slowest scrape",
            "Longest scrape of a process now, as Prometheus saw it. Tens of milliseconds are "
            "normal: the answer waits for the interpreter's lock. No data over OTLP.",
            Query(f"max(scrape_duration_seconds{scraped} {ours})"),
            SECONDS,
            steps=((1, "orange"), (5, "red")),
        ),
        number(
            "Series of one process",
            "Samples in the largest scrape: what one rank costs Prometheus. At most 12 at "
            "level minimal, 25 at standard and 80 at full for each device, and 16 more at full "
            "where the job can yield. No data over OTLP.",
            Query(f"max(scrape_samples_scraped{scraped} {ours})"),
            COUNT,
        ),
        number(
            "Targets down",
            "Targets of the jobs chosen that do not answer. A job that ended and is still listed "
            "counts too. No data over OTLP.",
            Query(f"count(up{scraped} == 0) or vector(0)"),
            COUNT,
            steps=((1, "orange"),),
        ),
        ranking(
            "Why profiles cannot be had",
            "Processes by the label `reason` of `gpumem_supported`; `none` is well. What each "
            "means and what to do says `gpumem-otel doctor` in the job's environment.",
            Query(f"count by (job, reason) ({q.of_jobs('gpumem_supported')})"),
            COUNT,
            value="processes",
        ),
        bars(
            "Profiles lost",
            "Profiles that did not arrive, in the window before each bar. `connect`, `timeout`: "
            "network or server. `rate_limited`: raise the server's limit or lengthen "
            "GPUMEM_OTEL_INTERVAL. `rejected`: the job's log says what the server answered. The "
            "reason is exported at level full only.",
            [
                Query(
                    f"sum by (job, reason) (increase({dropped}[$__rate_interval])) > 0",
                    "{{job}} {{reason}}",
                )
            ],
            COUNT,
            height=9,
            links=THIS_JOB,
        ),
    ]


def _costs() -> list[Panel]:
    seconds, runs = (
        q.of_jobs("gpumem_exporter_seconds_total"),
        q.of_jobs("gpumem_exporter_runs_total"),
    )
    stall = q.of_jobs("gpumem_exporter_stall_seconds_total")
    return [
        lines(
            "Stall: the ranks that feel it most",
            "Share of the time during which our calls held the interpreter lock: what the job may "
            "feel. It is budgeted (GPUMEM_OTEL_MAX_STALL_RATIO, 0.001): the interval of profiles "
            "stretches by itself. Above it for long: choose a longer GPUMEM_OTEL_INTERVAL."
            + ONLY_FULL,
            [Query(q.worst(f"rate({stall}[$__rate_interval])"), WHO)],
            RATIO,
            width=8,
            steps=((0.001, "orange"), (0.01, "red")),
            links=THIS_JOB,
        ),
        lines(
            "Time of our threads, by stage",
            "Seconds per second of one process, on average over those chosen: reading the "
            "allocator, encoding, pushing (mostly waiting for the server), and the rest (metrics)."
            + ONLY_FULL,
            [
                Query(
                    f"sum by (stage) (rate({seconds}[$__rate_interval])) "
                    f"/ scalar(count({q.of_jobs('gpumem_supported')}))",
                    "{{stage}}",
                )
            ],
            RATIO,
            width=8,
        ),
        lines(
            "Time of one run, by stage",
            "How long one read-out, encoding or push takes on average. A read-out that grows: more "
            "live blocks. A push that grows: the server." + ONLY_FULL,
            [
                Query(
                    f"sum by (stage) (rate({seconds}[$__rate_interval])) "
                    f"/ (sum by (stage) (rate({runs}[$__rate_interval])) > 0)",
                    "{{stage}}",
                )
            ],
            SECONDS,
            width=8,
        ),
    ]


def _pushes() -> list[Panel]:
    pushed = q.of_jobs("gpumem_exporter_pushed_bytes_total")
    last = q.of_jobs("gpumem_last_push_timestamp_seconds")
    return [
        lines(
            "Pushed bytes",
            "Bytes of profiles sent per second, by job. Each job has a budget "
            "(GPUMEM_OTEL_JOB_PUSH_BYTES_PER_SECOND, 1 MB/s for all its ranks together)."
            + ONLY_FULL,
            [Query(f"sum by (job) (rate({pushed}[$__rate_interval]))", JOB)],
            "Bps",
            width=8,
            links=THIS_JOB,
        ),
        lines(
            "Age of the last push: the ranks furthest behind",
            "Time since a profile of each kind was stored. A saw as high as the interval is "
            "healthy; a line that climbs pushes nothing: see the losses and the errors. No data: "
            "nothing was ever pushed." + ONLY_FULL,
            [Query(q.worst(f"time() - {last}"), WHO + " {{kind}}")],
            SECONDS,
            width=8,
            steps=((600, "orange"), (1800, "red")),
            links=THIS_JOB,
        ),
        bars(
            "Errors of our own work, by stage",
            "Failures that were caught, logged once and counted, in the window before each bar. "
            "`read`: the allocator could not be read; `push`: a push failed; `listen`: the port is "
            "taken. The job's log has the first of each." + ONLY_FULL,
            [
                Query(
                    "sum by (job, stage) "
                    f"(increase({q.of_jobs('gpumem_exporter_errors_total')}[$__rate_interval]))"
                    " > 0",
                    "{{job}} {{stage}}",
                )
            ],
            COUNT,
            width=8,
            height=9,
            links=THIS_JOB,
        ),
    ]


def _accounting() -> list[Panel]:
    def happened(metric: str) -> list[Query]:
        increase = f"increase({q.of_jobs(metric)}[$__rate_interval])"
        return [Query(f"sum by (job) ({increase}) > 0", JOB)]

    stackless, allocated = (
        q.of_jobs("gpumem_stackless_bytes"),
        q.of_jobs("gpumem_allocated_bytes"),
    )
    return [
        bars(
            "Read-outs raced",
            "Read-outs during which the job allocated or freed, so that their bytes could not be "
            "compared with the allocator's counter. Harmless, and common in busy jobs." + ONLY_FULL,
            happened("gpumem_exporter_readouts_raced_total"),
            COUNT,
            width=8,
        ),
        bars(
            "Read-outs breached",
            "Read-outs whose bytes differed from the allocator's own counter: a defect of this "
            "tool. Any is worth a report, with the version of torch." + ONLY_FULL,
            happened("gpumem_exporter_readouts_breached_total"),
            COUNT,
            width=8,
        ),
        bars(
            "Recorded windows that overflowed",
            "Windows of `allocated` profiles with more events than fit: their stacks are scaled "
            "from what was seen. Steady: raise GPUMEM_OTEL_WINDOW_EVENTS or shorten "
            "GPUMEM_OTEL_ALLOCATED_WINDOW." + ONLY_FULL,
            happened("gpumem_exporter_history_overflow_total"),
            COUNT,
            width=8,
        ),
        lines(
            "Allocated without a recorded stack",
            "Largest part of the allocated bytes that no profile can name. Above a tenth: "
            "`install()` comes too late." + ONLY_FULL,
            [Query(q.worst(f"{stackless} / {allocated}"), WHO)],
            RATIO,
            top=1,
            steps=((0.1, "orange"),),
            links=THIS_JOB,
        ),
        lines(
            "Blocks read at each read-out",
            "Pieces of the segments at the last read-out of the largest processes: what a read-out "
            "has to go through." + ONLY_FULL,
            [Query(q.worst(q.of_jobs("gpumem_blocks")), WHO)],
            COUNT,
        ),
    ]
