"""GPU memory: job. What holds the memory of one job, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from boards import job_full, job_profiles, job_yields
from boards import queries as q
from boards.board import Board
from boards.job_full import LINKS, RANK
from boards.parts import (
    BYTES,
    COUNT,
    RATIO,
    SECONDS,
    Query,
    bars,
    lines,
    number,
    stack,
)
from boards.variables import (
    JOB,
    annotation,
    data_sources,
    fixed,
    from_prometheus,
    from_pyroscope,
    where,
)

if TYPE_CHECKING:
    from boards.parts import Panel
    from boards.variables import Variable

__all__ = ["board"]


def board() -> Board:
    """The dashboard."""
    page = Board(
        uid=q.JOB_UID,
        title="GPU memory: job",
        description="Where the GPU memory of one job is, whether it grows, and which code holds "
        "it. Choose the job above; choose ranks to look closer.",
        variables=_variables(),
        annotations=_annotations(),
    )
    page.row("Is all well?", _health())
    page.row("Where the memory is", _memory())
    page.row("Why it may fail although memory is free", _allocator())
    page.row("Steps: does it leak, does it move?", _steps())
    page.row(
        "Which code holds it: flame graphs of rank $profile_rank", job_profiles.live_and_allocated()
    )
    page.row("When it ran out: profiles of $oom_id", job_profiles.ooms(), folded=True)
    page.row(
        "More, where the job exports metrics at level full",
        [*job_full.panels(), *job_yields.panels()],
        folded=True,
    )
    return page


def _variables() -> list[Variable]:
    info = "gpumem_target_info"
    chosen = q.WHERE + ', job="$job"'
    return [
        *data_sources(),
        *where(info),
        from_prometheus(
            "job",
            JOB,
            f"label_values({info}{{{q.WHERE}}}, job)",
            multi=False,
        ),
        from_prometheus(
            "rank",
            "Ranks that the curves show.",
            f"label_values({info}{{{chosen}}}, rank)",
            numeric=True,
        ),
        from_prometheus(
            "device",
            "Index of the device in its process; 0 for each rank that has one GPU.",
            f'label_values({info}{{{chosen}, rank=~"$rank"}}, device)',
            numeric=True,
        ),
        from_pyroscope(
            "service",
            "service of the profiles",
            "Label `service_name` of the profiles. It is OTEL_SERVICE_NAME of the job, which may "
            "differ from the label `job` of the metrics.",
            q.LIVE_SPACE,
            "service_name",
        ),
        from_pyroscope(
            "profile_rank",
            "rank of the flame graphs",
            "One rank, since a flame graph adds up all it is given; type `.*` for the sum of all.",
            q.LIVE_SPACE,
            "rank",
            numeric=True,
        ),
        fixed(
            "push_interval",
            "profiles are taken every",
            "GPUMEM_OTEL_INTERVAL of the job: the range of the live flame graph. Choose more where "
            "the budget stretches the interval and the graph is empty.",
            ("1m", "2m", "5m", "10m", "30m"),
        ),
        from_pyroscope(
            "oom_id",
            "OOM",
            "Which failed allocation the OOM flame graph shows; those of the range.",
            q.OOM_SPACE,
            "oom_id",
        ),
    ]


def _annotations() -> list[dict[str, Any]]:
    return [
        annotation(
            "Out of memory",
            f"sum by (rank, device) (increase({q.of_job('gpumem_ooms_total')}[$__rate_interval]))"
            " > 0",
            "red",
            "Out of memory",
            "rank {{rank}}, device {{device}}",
        ),
        annotation(
            "Allocator retry",
            "sum by (rank, device) "
            f"(increase({q.of_job('gpumem_alloc_retries_total')}[$__rate_interval])) > 0",
            "orange",
            "Allocator retry",
            "rank {{rank}}, device {{device}}",
        ),
    ]


def _health() -> list[Panel]:
    allocated, limit = q.of_job("gpumem_allocated_bytes"), q.of_job("gpumem_limit_bytes")
    return [
        number(
            "Ranks that report",
            "Ranks of the job with metrics now. Fewer than the world size: a rank has not used its "
            "GPU yet, ended, or its port is not scraped (`gpumem-otel doctor` on its node).",
            Query(f"count(count by (rank) ({q.of_job('gpumem_target_info')}))"),
            COUNT,
        ),
        number(
            "Fullest device: allocated",
            "Live tensors over what the job may use, on the fullest device now. It is one moment "
            "of the step; the peak beside it is what must fit.",
            Query(f"max({allocated} / {limit})"),
            RATIO,
            steps=((0.9, "orange"), (0.97, "red")),
            highest=1,
        ),
        number(
            "Fullest device: peak",
            "Highest allocated since the start of the job, over what it may use. Above 95 % the "
            "next longer batch may fail: lower the batch size, checkpoint activations or shard "
            "more. Below 60 % there is room for more work.",
            Query(f"max({q.of_job('gpumem_allocated_peak_bytes')} / {limit})"),
            RATIO,
            steps=((0.95, "orange"), (0.99, "red")),
            highest=1,
        ),
        number(
            "Out of memory, in the range",
            "Allocations that failed for good, caught by the job or not. Look at the red marks and "
            "at the OOM flame graph below.",
            Query(f"round(sum(increase({q.of_job('gpumem_ooms_total')}[$__range])))"),
            COUNT,
            steps=((1, "red"),),
        ),
        number(
            "Slowest rank: last step",
            "Time since the last step of the rank that is furthest behind. Many step times: that "
            "rank hangs or is idle with its memory held. No data: no optimizer step was seen; "
            "servers and loops without optimizer call `gpumem_otel.step()`.",
            Query(f"max(time() - {q.of_job('gpumem_last_step_timestamp_seconds')})"),
            SECONDS,
            steps=((600, "orange"), (1800, "red")),
        ),
        number(
            "Ranks without profiles",
            "Ranks that cannot be profiled. The label `reason` of `gpumem_supported` says why, "
            "the exporter's dashboard lists them.",
            Query(f"sum(1 - {q.of_job('gpumem_supported')})"),
            COUNT,
            steps=((1, "orange"),),
        ),
    ]


def _by_class() -> str:
    """Allocated now, divided as the classes were at the last read-out; whole if there are none.

    The classes alone are as old as that read-out, and the stack would not add up with them.
    """
    allocated, classes = q.of_job("gpumem_allocated_bytes"), q.of_job("gpumem_class_bytes")
    parts = f"sum by (tensor_class) ({classes})"
    whole = f'label_replace(sum({allocated}), "tensor_class", "allocated", "", "")'
    return f"{parts} * on () group_left () (sum({allocated}) / sum({classes})) or on () {whole}"


def _memory() -> list[Panel]:
    limit = q.of_job("gpumem_limit_bytes")
    return [
        stack(
            "Used against limit: everything that adds up",
            "Sum over the ranks and devices chosen; choose one rank to see one GPU. The classes of "
            "tensors add up to allocated (its parts as they were at the last read-out), with the "
            "causes of cached to reserved, and with outside to what the devices say is used. A "
            "class grows: your tensors, see its tower in the flame graphs. Cached grows: see the "
            "causes below. Outside grows: contexts, libraries (NCCL, cuBLAS) or another process; "
            "where ranks share a GPU it holds the other ranks' memory too. Peak is the sum of each "
            "device's own highest moment.",
            [
                Query(_by_class(), "{{tensor_class}}"),
                Query(f"sum by (cause) ({q.of_job('gpumem_cached_bytes')})", "cached: {{cause}}"),
                Query(f"sum by (cause) ({q.of_job('gpumem_outside_bytes')})", "outside: {{cause}}"),
                Query(f"sum({limit})", "limit", line="red"),
                Query(
                    f"sum({q.of_job('gpumem_allocated_peak_bytes')})",
                    "peak of allocated",
                    line="purple",
                ),
            ],
            BYTES,
            width=24,
            height=12,
        ),
        lines(
            "Allocated over limit: the fullest devices",
            "Live tensors over what the job may use; the ten that reach highest in the range. One "
            "device far above the others: uneven sharding or batches. Click a line for its flame "
            "graph.",
            [Query(q.worst(f"{q.of_job('gpumem_allocated_bytes')} / {limit}"), RANK)],
            RATIO,
            top=1,
            steps=((0.9, "orange"), (0.97, "red")),
            links=LINKS,
        ),
        lines(
            "Peak of allocated over limit: the highest devices",
            "Highest allocated since the start, or since the job reset it, over what it may use. A "
            "step up that stays is the moment that decides the batch size; click it for the flame "
            "graph of that time.",
            [Query(q.worst(f"{q.of_job('gpumem_allocated_peak_bytes')} / {limit}"), RANK)],
            RATIO,
            top=1,
            steps=((0.95, "orange"), (0.99, "red")),
            links=LINKS,
        ),
        lines(
            "Reserved over limit: the fullest devices",
            "What the allocator took from the device. Near 1 is normal and no alarm by itself: the "
            "cache is given back when it is needed. Near 1 with retries below is trouble.",
            [Query(q.worst(f"{q.of_job('gpumem_reserved_bytes')} / {limit}"), RANK)],
            RATIO,
            top=1,
            links=LINKS,
        ),
        lines(
            "Reserved but not allocated: the most wasteful devices",
            "Cached by the allocator for later. Large and steady: the peak of an earlier phase; "
            "`torch.cuda.empty_cache()` between phases gives it back. Large while retries happen: "
            "fragmentation, see the next row.",
            [
                Query(
                    q.worst(
                        f"{q.of_job('gpumem_reserved_bytes')} - "
                        f"{q.of_job('gpumem_allocated_bytes')}"
                    ),
                    RANK,
                )
            ],
            BYTES,
            links=LINKS,
        ),
    ]


def _allocator() -> list[Panel]:
    split = q.of_job("gpumem_cached_bytes", 'cause="split_remainders"')
    retries, ooms = q.of_job("gpumem_alloc_retries_total"), q.of_job("gpumem_ooms_total")
    return [
        lines(
            "Fragmentation: split remainders over reserved",
            "Free pieces beside live ones, which cannot be given back. Above 0.2 with retries: "
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF in newer "
            "torch), or allocate what lives long before what comes and goes.",
            [
                Query(
                    q.worst(f"{split} / ignoring (cause) {q.of_job('gpumem_reserved_bytes')}"),
                    RANK,
                )
            ],
            RATIO,
            width=8,
            top=1,
            steps=((0.2, "orange"), (0.4, "red")),
            links=LINKS,
        ),
        bars(
            "Allocator retries",
            "Times the allocator emptied its cache to find room, in the window before each bar. "
            "Each one stalls the step and is the last thing before an OOM: fragmentation if much "
            "is cached, else the job is too large for the device.",
            [Query(f"increase({retries}[$__rate_interval]) > 0", RANK)],
            COUNT,
            width=8,
            height=9,
            links=LINKS,
        ),
        bars(
            "Out of memory",
            "Allocations that failed for good, in the window before each bar. A bar without an end "
            "of the job: it caught the error and went on. The OOM flame graph below says what held "
            "the memory.",
            [Query(f"increase({ooms}[$__rate_interval]) > 0", RANK)],
            COUNT,
            width=8,
            height=9,
            links=LINKS,
        ),
    ]


def _steps() -> list[Panel]:
    floor = q.of_job("gpumem_step_floor_bytes")
    return [
        lines(
            "Step rate: the slowest ranks",
            "Optimizer steps, or calls of `gpumem_otel.step()`, per second. Ranks of one job step "
            "together: one that falls behind holds up all.",
            [
                Query(
                    q.worst(
                        f"rate({q.of_job('gpumem_steps_total')}[$__rate_interval])", lowest=True
                    ),
                    RANK,
                )
            ],
            "suffix: steps/s",
        ),
        lines(
            "Time since the last step: the ranks furthest behind",
            "A saw of the step time is healthy. A line that climbs: the rank waits, hangs or "
            "evaluates. All lines climb together: a collective, a checkpoint or the data.",
            [Query(q.worst(f"time() - {q.of_job('gpumem_last_step_timestamp_seconds')}"), RANK)],
            SECONDS,
            steps=((600, "orange"), (1800, "red")),
            links=LINKS,
        ),
        lines(
            "Step floor",
            "Lowest allocated at recent step boundaries: what stays from step to step. It is flat "
            "after the first steps. A steady climb is a leak, at any batch size: compare two equal "
            "ranges of the live flame graph with Diff in Explore.",
            [Query(q.worst(floor), RANK)],
            BYTES,
            links=LINKS,
        ),
        lines(
            "Growth of the step floor",
            "Slope of the floor over the last half hour. Steady above 0 is a leak: the room left "
            "above, divided by it, is the time to the OOM. Spikes at the start, or when a phase "
            "begins, are none.",
            [Query(q.worst(f"deriv({floor}[30m])"), RANK)],
            "binBps",
            lowest=None,
            links=LINKS,
        ),
        job_yields.states(),
    ]
