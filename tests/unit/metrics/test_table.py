"""The METRICS table: names, levels, identity, totals that add up."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import observations as obs

from gpumem_otel.base.profile import SourceStatus, StepStats
from gpumem_otel.metrics.table import METRICS, Kind, Level, rows, shown
from gpumem_otel.yielding.values import YieldState, YieldStatus

NAMES = tuple(
    re.findall(
        r"\S+",
        """
gpumem_target_info
gpumem_allocated_bytes gpumem_requested_bytes gpumem_active_bytes gpumem_reserved_bytes
gpumem_limit_bytes gpumem_allocated_peak_bytes gpumem_reserved_peak_bytes
gpumem_class_bytes gpumem_cached_bytes
gpumem_pool_reserved_bytes gpumem_outside_bytes gpumem_fragmentation_ratio gpumem_segments
gpumem_blocks gpumem_stackless_bytes gpumem_host_pinned_bytes
hw_gpu_memory_limit_bytes hw_gpu_memory_usage_bytes
gpumem_ooms_total gpumem_alloc_retries_total gpumem_allocations_total
gpumem_allocation_bytes_total
gpumem_steps_total gpumem_last_step_timestamp_seconds gpumem_step_floor_bytes
gpumem_yield_state gpumem_yield_moved_bytes gpumem_yield_residual_bytes
gpumem_yield_seconds_total gpumem_yield_lease_expiry_timestamp_seconds
gpumem_supported gpumem_values_timestamp_seconds
gpumem_exporter_seconds_total gpumem_exporter_runs_total
gpumem_exporter_stall_seconds_total gpumem_exporter_pushed_bytes_total
gpumem_last_push_timestamp_seconds gpumem_exporter_dropped_total gpumem_exporter_errors_total
gpumem_exporter_history_overflow_total
gpumem_exporter_readouts_raced_total gpumem_exporter_readouts_breached_total
""",
    )
)

OF_THE_SCRAPER = {
    "job", "instance", "pod", "namespace", "container", "service", "endpoint",
}  # fmt: skip

LIMITS = {Level.MINIMAL: 12, Level.STANDARD: 25, Level.FULL: 80}
OF_YIELDS = 16
"""More at level full, where the job can be asked to yield."""


OF_THE_PROCESS = tuple(
    name for name in NAMES
    if name.startswith("gpumem_exporter_") or name in {"gpumem_steps_total", "gpumem_supported"}
)  # fmt: skip
OF_THE_ALLOCATOR = (
    "gpumem_ooms_total", "gpumem_alloc_retries_total", "gpumem_allocations_total",
    "gpumem_allocation_bytes_total",
)  # fmt: skip


def series(observation, level=Level.FULL) -> dict[str, dict[tuple, float]]:
    """name -> (sorted attributes) -> value."""
    rows_by_name: dict[str, dict[tuple, float]] = {}
    for metric, attributes, value in rows(observation, level):
        key = tuple(sorted(attributes.items()))
        assert key not in rows_by_name.setdefault(metric.prometheus, {})
        rows_by_name[metric.prometheus][key] = value
    return rows_by_name


def by(observation, name: str, attribute: str, level=Level.FULL) -> dict[str, float]:
    return {dict(key)[attribute]: v for key, v in series(observation, level)[name].items()}


def only(observation, name: str, level=Level.FULL) -> float:
    (value,) = series(observation, level)[name].values()
    return value


def test_names_are_those_of_the_design():
    assert tuple(metric.prometheus for metric in METRICS) == NAMES


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.prometheus)
def test_every_translator_makes_the_same_name(metric):
    assert metric.prometheus == obs.translated(
        metric.name,
        metric.unit,
        monotonic=metric.kind is Kind.COUNTER,
        gauge=metric.kind is Kind.GAUGE,
    )


@pytest.mark.parametrize("level", Level)
def test_a_level_holds_at_most_its_series(level):
    """Series of one rank, for the home device."""

    def counted(observation):
        return Counter(
            (attributes["rank"], attributes["device"])
            for _, attributes, _ in rows(observation, level)
        )

    count = counted(obs.full((0, 1)))
    assert max(counted(obs.full((0, 1), yields=None)).values()) <= LIMITS[level]
    assert max(count.values()) <= LIMITS[level] + OF_YIELDS * (level is Level.FULL)
    assert (
        count
        == {
            Level.MINIMAL: {("3", "0"): 12, ("3", "1"): 7},
            Level.STANDARD: {("3", "0"): 25, ("3", "1"): 20},
            Level.FULL: {("3", "0"): 91, ("3", "1"): 40},
        }[level]
    )


def test_levels_nest():
    assert set(shown(Level.MINIMAL)) < set(shown(Level.STANDARD)) < set(shown(Level.FULL))
    assert shown(Level.FULL) == METRICS


@pytest.mark.parametrize("level", Level)
def test_every_row_carries_rank_and_device_and_its_own_attributes_alone(level):
    for metric, attributes, _ in rows(obs.full((0, 1)), level):
        own = metric.attributes if level.holds(metric.detail) or metric.kept else ()
        assert set(attributes) == {"rank", "device", *own}, metric.prometheus
        assert not OF_THE_SCRAPER & set(attributes)
        assert all(isinstance(value, str) for value in attributes.values())


def test_target_info_holds_the_identity():
    assert series(obs.full((0,)))["gpumem_target_info"] == {
        (
            ("device", "0"),
            ("gpu_uuid", obs.UUID[:-1] + "0"),
            ("local_rank", "0"),
            ("node", "node-a"),
            ("rank", "3"),
            ("restart", "2"),
            ("run_id", "run-7"),
            ("world_size", "8"),
        ): 1
    }


def test_rows_of_the_process_carry_the_lowest_armed_device():
    observation = obs.full((2, 5), status=SourceStatus(armed=True, supported=True, devices=(2, 5)))
    for name in ("gpumem_steps_total", "gpumem_supported", "gpumem_host_pinned_bytes"):
        assert {dict(key)["device"] for key in series(observation)[name]} == {"2"}


def test_the_home_device_is_the_one_that_was_set():
    """GIVEN a lower device is used later THEN no row of the process moves to it."""
    for on in ((), (1,), (0, 1)):
        shown = series(obs.full(on, home_device=1, counters={}))
        for name in OF_THE_PROCESS:
            assert {dict(key)["device"] for key in shown[name]} == {"1"}, (name, on)
        assert {dict(key)["device"] for key in shown["gpumem_target_info"]} == {
            "1", *map(str, on)
        }  # fmt: skip


@pytest.mark.parametrize("home", [None, 3])
@pytest.mark.parametrize("reason", ["", "allocator_backend", "no_caching", "error"])
def test_an_armed_process_is_visible_before_its_first_allocation(home, reason):
    """GIVEN nothing was allocated WHEN armed THEN all of the process is there, events as 0."""
    status = SourceStatus(armed=True, supported=not reason, reason=reason)
    shown = series(obs.bare(status=status, devices=(), home_device=home))
    device = {str(home or 0)}
    for name in (*OF_THE_PROCESS, "gpumem_target_info"):
        assert {dict(key)["device"] for key in shown[name]} == device, name
    assert by(obs.bare(status=status, devices=()), "gpumem_supported", "reason") == {
        reason or "none": int(not reason)
    }
    # what the allocator did is known only where it can be read: there it did nothing yet
    for name in OF_THE_ALLOCATOR:
        values = shown.get(name, {})
        assert [(dict(key)["device"], value) for key, value in values.items()] == (
            [] if reason else [(*device, 0)]
        ), name


def test_a_counter_of_the_home_device_does_not_end_when_another_device_is_used():
    observation = obs.full((1,), home_device=0)
    assert by(observation, "gpumem_ooms_total", "device") == {"0": 0, "1": 1}
    both = obs.full((0, 1), home_device=0)
    assert by(both, "gpumem_ooms_total", "device") == {"0": 1, "1": 1}


def test_accounting_mismatches_are_counted():
    assert only(obs.full(), "gpumem_exporter_readouts_raced_total") == 2
    assert only(obs.full(), "gpumem_exporter_readouts_breached_total") == 1


def test_without_a_device_there_is_no_row():
    nothing = obs.full(
        (),
        status=SourceStatus(armed=False, supported=False, reason="no_cuda"),
        devices=(),
        totals={},
    )
    assert series(nothing) == {}


def test_events_are_zero_from_the_first_moment():
    shown = series(obs.bare(yields=YieldStatus()))
    for name in NAMES:
        if name.endswith("_total"):
            assert set(shown[name].values()) == {0}, name
    assert by(obs.bare(), "gpumem_exporter_dropped_total", "reason") == {
        "connect": 0, "timeout": 0, "rate_limited": 0, "rejected": 0, "other": 0,
    }  # fmt: skip
    assert by(obs.bare(), "gpumem_exporter_errors_total", "stage") == {
        "read": 0, "push": 0, "listen": 0, "control": 0, "other": 0,
    }  # fmt: skip
    assert only(obs.bare(), "gpumem_exporter_dropped_total", Level.MINIMAL) == 0


def test_what_is_not_known_has_no_row():
    shown = series(obs.bare())
    assert "gpumem_limit_bytes" not in shown
    assert "gpumem_outside_bytes" not in shown
    assert "gpumem_host_pinned_bytes" not in shown
    assert "hw_gpu_memory_limit_bytes" not in shown
    assert "gpumem_blocks" not in shown
    assert "gpumem_pool_reserved_bytes" not in shown
    assert "gpumem_last_step_timestamp_seconds" not in shown
    assert "gpumem_step_floor_bytes" not in shown
    assert "gpumem_last_push_timestamp_seconds" not in shown


def test_counters_beyond_the_fixed_list_are_in_other():
    observation = obs.full()
    assert by(observation, "gpumem_exporter_dropped_total", "reason") == {
        "connect": 2, "timeout": 0, "rate_limited": 0, "rejected": 0, "other": 3,
    }  # fmt: skip
    assert only(observation, "gpumem_exporter_dropped_total", Level.STANDARD) == 5
    assert by(observation, "gpumem_exporter_errors_total", "stage") == {
        "read": 1, "push": 0, "listen": 4, "control": 0, "other": 1,
    }  # fmt: skip
    assert by(observation, "gpumem_exporter_seconds_total", "stage") == {
        "read": 0.25, "encode": 0, "push": 0, "other": 1.5,
    }  # fmt: skip
    assert only(observation, "gpumem_exporter_stall_seconds_total") == 0.125
    assert only(observation, "gpumem_exporter_pushed_bytes_total") == 1_234_567


def test_cached_is_split_by_cause():
    assert by(obs.full(), "gpumem_cached_bytes", "cause") == {
        "waiting_for_stream": 300_000_000,
        "split_remainders": 400_000_000,
        "private_pools": 100_000_000,
        "free_segments": 1_200_000_000,
    }
    assert only(obs.full(), "gpumem_fragmentation_ratio") == 0.05


def test_cached_without_a_read_out_uses_the_allocators_own_counter():
    assert by(obs.full(totals={}), "gpumem_cached_bytes", "cause") == {
        "waiting_for_stream": 300_000_000,
        "split_remainders": 300_000_000,
        "private_pools": 0,
        "free_segments": 1_400_000_000,
    }


SIZES = st.integers(min_value=0, max_value=1 << 40)


@given(
    allocated=SIZES,
    pending=SIZES,
    free=SIZES,
    splits=SIZES,
    pools=SIZES,
    remainders=SIZES,
    read_out=st.booleans(),
)
def test_cached_always_sums_to_reserved_less_allocated(  # noqa: PLR0917 - drawn by hypothesis
    allocated, pending, free, splits, pools, remainders, read_out
):
    """However old the read-out is: no cause is negative, and they add up."""
    now = obs.stats(
        allocated_bytes=allocated,
        active_bytes=allocated + pending,
        reserved_bytes=allocated + pending + free,
        inactive_split_bytes=splits,
    )
    old = obs.totals(split_remainder_bytes=remainders, private_pool_free_bytes=pools)
    observation = obs.full(devices=(now,), totals={0: old} if read_out else {})
    sizes = by(observation, "gpumem_cached_bytes", "cause")
    assert sum(sizes.values()) == now.reserved_bytes - now.allocated_bytes
    assert min(sizes.values()) >= 0
    assert sizes["waiting_for_stream"] == pending
    assert 0 <= only(observation, "gpumem_fragmentation_ratio") <= 1


def test_outside_closes_the_device():
    assert by(obs.full(), "gpumem_outside_bytes", "cause") == {
        "context": 600_000_000, "other_process": 400_000_000, "unknown": 0
    }  # fmt: skip
    assert only(obs.full(), "gpumem_outside_bytes", Level.STANDARD) == 1_000_000_000
    without = obs.full(devices=(replace(obs.stats(0), process_used_bytes=None),))
    assert by(without, "gpumem_outside_bytes", "cause") == {"unknown": 1_000_000_000}
    alone = obs.full(devices=(replace(obs.stats(0), others_used_bytes=0),))
    assert by(alone, "gpumem_outside_bytes", "cause") == {
        "context": 600_000_000, "other_process": 0, "unknown": 400_000_000
    }  # fmt: skip
    shared = obs.full(devices=(replace(obs.stats(0), others_used_bytes=300_000_000),))
    assert by(shared, "gpumem_outside_bytes", "cause") == {
        "context": 600_000_000, "other_process": 300_000_000, "unknown": 100_000_000
    }  # fmt: skip
    raced = obs.full(devices=(obs.stats(device_used_bytes=7_999_000_000),))
    assert only(raced, "gpumem_outside_bytes", Level.STANDARD) == 0


def test_pools_show_three_and_the_rest():
    sizes = by(obs.full(), "gpumem_pool_reserved_bytes", "pool")
    assert sizes == {
        "default": 5_000_000_000,
        "private_0_1": 1_500_000_000,
        "private_0_2": 1_000_000_000,
        "other": 500_000_000,
    }
    assert sum(sizes.values()) == obs.totals().reserved_bytes
    plain = obs.full(totals={0: obs.totals(pool_reserved_bytes={(0, 0): 7})})
    assert by(plain, "gpumem_pool_reserved_bytes", "pool") == {"default": 7}


@pytest.mark.parametrize("reason", ["allocator_backend", "no_caching"])
def test_another_allocator_has_no_false_zeros(reason):
    """Only the device and ourselves are exported, and that profiles are not available."""
    status = SourceStatus(armed=True, supported=False, reason=reason, devices=(0,))
    observation = obs.full(status=status)
    shown = series(observation)
    assert not {"gpumem_allocated_bytes", "gpumem_reserved_bytes", "gpumem_cached_bytes",
                "gpumem_ooms_total", "gpumem_outside_bytes"} & set(shown)  # fmt: skip
    assert by(observation, "gpumem_supported", "reason") == {reason: 0}
    assert only(observation, "hw_gpu_memory_usage_bytes") == 9_000_000_000


def test_supported_without_a_reason_has_the_reason_none():
    assert by(obs.full(), "gpumem_supported", "reason") == {"none": 1}


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"world_size": 1, "device_uuids": {0: "GPU-a", 1: "GPU-b"}}, {"0", "1"}),
        ({"local_rank": 1, "device_uuids": {0: "GPU-a", 1: "GPU-b"}}, {"1"}),
        ({"local_rank": 2, "device_uuids": {0: "GPU-a", 1: "GPU-b"}}, set()),
        ({"local_rank": 5, "device_uuids": {0: "GPU-a"}}, {"0"}),
        ({"local_rank": 0, "device_uuids": {}}, set()),
    ],
    ids=["alone", "own device", "devices of another rank", "uses one GPU only", "no uuid"],
)
def test_one_rank_reports_a_gpu(changes, reported):
    observation = obs.full((0, 1), identity=obs.identity(**changes))
    shown = series(observation).get("hw_gpu_memory_usage_bytes", {})
    assert {dict(key)["device"] for key in shown} == reported
    assert all(dict(key)["hw.id"].startswith("GPU-") for key in shown)


def test_steps_of_devices_that_are_not_armed_are_left_out():
    strange = replace(obs.full().steps, floor_bytes={0: 1, 7: 2})
    assert by(obs.full(steps=strange), "gpumem_step_floor_bytes", "device") == {"0": 1}
    assert "gpumem_step_floor_bytes" not in series(obs.full(steps=StepStats()))
    assert only(obs.full(), "gpumem_last_step_timestamp_seconds") == 1_790_000_000.25


def test_help_is_a_sentence_and_fits_a_line():
    for metric in METRICS:
        assert metric.help.endswith(".")
        assert metric.help.isascii()
        assert "\n" not in metric.help


def test_classes_add_up_at_every_level():
    observation = obs.full()
    allocated = observation.totals[0].allocated_bytes
    full = by(observation, "gpumem_class_bytes", "tensor_class")
    standard = by(observation, "gpumem_class_bytes", "tensor_class", Level.STANDARD)
    assert full == observation.classes[0]
    assert sum(full.values()) == sum(standard.values()) == allocated
    assert standard.keys() == {
        "parameter", "gradient", "optimizer_state", "activation", "kv_cache",
        "unattributed", "other",
    }  # fmt: skip
    rare = (
        "unsharded_parameter", "buffer", "input", "temporary", "workspace", "communication",
    )  # fmt: skip
    assert standard["other"] == sum(full[name] for name in rare)


def test_before_a_readout_there_are_no_classes_and_then_unattributed_is_one():
    assert "gpumem_class_bytes" not in series(obs.bare())
    observation = obs.full(classes={0: {"parameter": 7}})
    sizes = by(observation, "gpumem_class_bytes", "tensor_class")
    assert sizes == {"parameter": 7, "unattributed": 0}


def test_one_series_shows_the_state():
    assert series(obs.full((0, 1)))["gpumem_yield_state"] == {
        (("device", "0"), ("rank", "3"), ("state", "yielded")): 1
    }


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        (YieldState.RUNNING, "", "running"),
        (YieldState.YIELDED, "", "yielded"),
        (YieldState.YIELDED, "the lease has ended: 3 GiB are missing", "overdue"),
        (YieldState.RESTORING, "3 GiB are missing", "restoring"),
        (YieldState.FAILED, "checksums differ", "failed"),
    ],
)
def test_memory_that_should_be_back_and_is_not_is_overdue(state, reason, expected):
    observation = obs.full(yields=obs.yields(state=state, reason=reason))
    for level in Level:
        assert by(observation, "gpumem_yield_state", "state", level) == {expected: 1}


def test_yields_are_shown_by_cause_and_phase():
    observation = obs.full((0, 1))
    assert by(observation, "gpumem_yield_residual_bytes", "cause") == {
        "context": 1000, "communicator": 2000, "graphs": 3000, "foreign": 4000, "kept": 5000,
        "other_process": 6000, "unknown": 7000,
    }  # fmt: skip
    assert by(observation, "gpumem_yield_seconds_total", "phase") == {
        "prepare": 0.25, "release": 0.5, "checkpoint": 0.75, "restore": 1, "reload": 1.25,
        "verify": 1.5,
    }  # fmt: skip
    assert only(observation, "gpumem_yield_moved_bytes") == 5_000_000_000
    assert only(observation, "gpumem_yield_lease_expiry_timestamp_seconds") == 1_790_000_060.5


def test_without_lease_and_yield_there_is_no_row_of_them():
    status = obs.yields(state=YieldState.RUNNING, lease_expiry_ns=0, residual_bytes={})
    shown = series(obs.full(yields=status))
    assert "gpumem_yield_lease_expiry_timestamp_seconds" not in shown
    assert "gpumem_yield_residual_bytes" not in shown
    assert not [name for name in series(obs.full(yields=None)) if "yield" in name]
