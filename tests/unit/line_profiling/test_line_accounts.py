"""The accounts of the line profiler compared with a model that keeps every moment."""

from __future__ import annotations

import pytest
from support.line_memory import Memory
from support.pprof_proto import parse

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.line_profiling.accounts import (
    BASE_COLUMNS,
    FunctionLines,
    LineAccounts,
    line_profiles,
)
from gpumem_otel.profiles import pprof

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

PATHS = [name.split(".") for name in BASE_COLUMNS]


def moment(memory):
    """The counters of every device, with peaks since the last moment."""
    counters = {}
    for device in range(len(memory.devices)):
        raw = memory.stats(device)
        counters[device] = tuple(raw[a][b][c] for a, b, c in PATHS)
        memory.reset_peaks(device)
    return counters


def function(number, name="f"):
    return FunctionLines(f"{name}{number}", "mod", f"/src/{name}.py", number * 10, 0, ())


def test_a_line_has_what_was_allocated_after_it_its_peak_and_both_differences():
    memory, accounts = Memory(), LineAccounts()
    kept = memory.alloc(1024)
    accounts.enter(1, 0, 10, moment(memory), call=True)
    accounts.line(1, 0, 11, moment(memory))
    temporary, left = memory.alloc(4096), memory.alloc(2048)
    temporary.free()
    accounts.line(1, 0, 12, moment(memory))
    kept.free()
    left.free()
    accounts.leave(1, 0, moment(memory))

    first, second, third = accounts.rows(0)

    assert [(row.line, row.hits) for row in (first, second, third)] == [(10, 1), (11, 1), (12, 1)]
    assert first.devices[0].after_bytes == first.devices[0].peak_bytes == 1024
    use = second.devices[0]
    assert (use.after_bytes, use.net_bytes) == (3072, 2048)
    assert (use.peak_bytes, use.peak_rise_bytes) == (7168, 6144)
    assert (use.allocation_bytes, use.allocations) == (6144, 2)
    assert use.columns["active_bytes.all.peak"] == 7168
    assert use.columns["reserved_bytes.all.peak"] == 2 << 20
    use = third.devices[0]
    assert (use.after_bytes, use.last_bytes, use.net_bytes) == (0, 0, -3072)
    assert (use.peak_bytes, use.peak_rise_bytes, use.allocation_bytes) == (3072, 0, 0)


def test_nothing_is_counted_for_a_suspended_generator():
    memory, accounts = Memory(), LineAccounts()
    accounts.enter(1, 0, 1, moment(memory), call=True)
    accounts.line(1, 0, 2, moment(memory))
    memory.alloc(512)
    accounts.leave(1, 0, moment(memory))
    memory.alloc(1 << 20)
    accounts.enter(1, 0, 2, moment(memory), call=False)
    memory.alloc(1024)
    accounts.leave(1, 0, moment(memory))

    use = accounts.rows(0)[1].devices[0]

    assert accounts.calls(0) == 1
    assert (accounts.rows(0)[1].hits, use.allocation_bytes, use.net_bytes) == (1, 1536, 1536)
    assert use.peak_rise_bytes == 1024


def test_what_another_thread_allocates_counts_for_every_running_line():
    memory, accounts = Memory(), LineAccounts()
    accounts.enter(1, 0, 1, moment(memory), call=True)
    accounts.enter(2, 1, 1, moment(memory), call=True)
    memory.alloc(4096).free()
    accounts.leave(2, 1, moment(memory))
    accounts.leave(1, 0, moment(memory))

    assert accounts.rows(0)[0].devices[0].peak_bytes == 4096
    assert accounts.rows(1)[0].devices[0].peak_bytes == 4096


def test_counters_that_the_job_resets_are_never_negative():
    memory, accounts = Memory(), LineAccounts()
    memory.alloc(4096)
    accounts.enter(1, 0, 1, moment(memory), call=True)
    for entry in (memory.devices[0]["allocated_bytes"], memory.devices[0]["allocation"]):
        entry["all"]["allocated"] = 0
    memory.alloc(1024)
    accounts.leave(1, 0, moment(memory))

    use = accounts.rows(0)[0].devices[0]
    assert use.allocation_bytes == 1024
    assert use.columns["allocated_bytes.all.allocated"] == 1024


def test_a_device_that_appears_later_began_with_nothing():
    accounts = LineAccounts()
    accounts.enter(1, 0, 1, {}, call=True)
    accounts.leave(1, 0, {3: (512, 1024, 1024, 2048, 1536, 3)})

    use = accounts.rows(0)[0].devices[3]
    assert (use.net_bytes, use.peak_rise_bytes) == (512, 1024)
    assert (use.allocation_bytes, use.allocations) == (1536, 3)


def test_a_function_that_ran_before_is_followed_from_its_next_line():
    memory, accounts = Memory(), LineAccounts()
    accounts.leave(1, 0, moment(memory))
    accounts.line(1, 0, 7, moment(memory))
    memory.alloc(512)
    accounts.drop(1, moment(memory))

    (row,) = accounts.rows(0)
    assert (row.line, row.hits, row.devices[0].allocation_bytes) == (7, 1, 512)
    assert accounts.open_threads() == ()


def test_chains_beyond_the_limit_count_for_their_caller():
    memory, accounts = Memory(), LineAccounts(max_nodes=1)
    accounts.enter(1, 0, 1, moment(memory), call=True)
    for line in range(5):
        accounts.enter(1, 1, line, moment(memory), call=True)
        memory.alloc(512)
        accounts.leave(1, 1, moment(memory))
    accounts.leave(1, 0, moment(memory))

    assert accounts.chains() == {((0, 1),): {0: (5, 2560)}}


def test_a_deep_recursion_is_cut_in_the_middle_of_a_profile():
    chain = tuple((0, 1000 - depth) for depth in range(900))
    (profile,) = line_profiles({0: function(0)}, {chain: {0: (1, 512)}})

    names = [frame.name for frame in profile.samples[0].frames]
    assert len(names) == 512
    assert (names[0], names[-1]) == ("mod.f0:1000", "mod.f0:101")
    assert "[389 frames cut]" in names


def test_the_pprof_holds_each_byte_once_with_the_line_as_frame():
    memory, accounts = Memory(devices=2), LineAccounts()
    accounts.enter(1, 0, 5, moment(memory), call=True)
    memory.alloc(512)
    accounts.enter(1, 1, 15, moment(memory), call=True)
    memory.alloc(4096, device=1)
    accounts.leave(1, 1, moment(memory))
    accounts.leave(1, 0, moment(memory))

    profiles = line_profiles({0: function(0), 1: function(1)}, accounts.chains(), 77)

    assert [(p.device, p.kind, p.total_bytes, p.time_ns) for p in profiles] == [
        (0, ProfileKind.ALLOCATED, 512, 77),
        (1, ProfileKind.ALLOCATED, 4096, 77),
    ]
    inner = profiles[1].samples[0].frames
    assert [(f.name, f.line) for f in inner] == [("mod.f1:15", 15), ("mod.f0:5", 5)]
    parsed = parse(pprof.encode(profiles, device_labels={}, kind=ProfileKind.ALLOCATED))
    types = [parsed.string_table[kind.type] for kind in parsed.sample_type]
    assert types[:2] == ["alloc_objects", "alloc_space"]
    assert sum(sample.value[1] for sample in parsed.sample) == 4608


class Model:
    """Keeps what is allocated at every moment, and the intervals of all running lines."""

    def __init__(self):
        self.held, self.open, self.done = 0, [], []

    def begin(self, function_number, line):
        self.open.append(self._interval(function_number, line))

    def _interval(self, function_number, line):
        return {"at": (function_number, line), "held": [self.held], "bytes": 0}

    def line(self, line):
        self.done.append(self.open.pop())
        self.open.append(self._interval(self.done[-1]["at"][0], line))

    def end(self):
        self.done.append(self.open.pop())

    def moved(self, size):
        self.held += size
        for interval in self.open:
            interval["held"].append(self.held)
            interval["bytes"] += max(size, 0)

    def rows(self):
        counters = {}
        for interval in self.done:
            held = interval["held"]
            row = counters.setdefault(
                interval["at"], {"after": 0, "peak": 0, "rise": 0, "net": 0, "bytes": 0}
            )
            row["after"] = max(row["after"], held[-1])
            row["peak"] = max(row["peak"], *held)
            row["rise"] = max(row["rise"], max(held) - held[0])
            row["net"] += held[-1] - held[0]
            row["bytes"] += interval["bytes"]
        return counters


OPS = st.recursive(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(1, 9)),
        st.tuples(st.just("free"), st.integers(0, 9)),
        st.tuples(st.just("line"), st.integers(2, 5)),
    ),
    lambda inner: st.tuples(st.just("call"), st.integers(0, 2), st.lists(inner, max_size=6)),
    max_leaves=30,
)


@given(st.lists(OPS, max_size=12))
def test_any_program_gives_what_a_model_of_every_moment_gives(program):
    memory, accounts, model, blocks = Memory(), LineAccounts(), Model(), []

    def run(number, ops):
        accounts.enter(1, number, 1, moment(memory), call=True)
        model.begin(number, 1)
        for op in ops:
            if op[0] == "alloc":
                blocks.append((op[1] * 512, memory.alloc(op[1] * 512)))
                model.moved(op[1] * 512)
            elif op[0] == "free" and blocks:
                size, block = blocks.pop(op[1] % len(blocks))
                block.free()
                model.moved(-size)
            elif op[0] == "line":
                accounts.line(1, number, op[1], moment(memory))
                model.line(op[1])
            elif op[0] == "call":
                run(op[1], op[2])
        accounts.leave(1, number, moment(memory))
        model.end()

    run(0, program)

    seen = {
        (number, row.line): {
            "after": row.devices[0].after_bytes,
            "peak": row.devices[0].peak_bytes,
            "rise": row.devices[0].peak_rise_bytes,
            "net": row.devices[0].net_bytes,
            "bytes": row.devices[0].allocation_bytes,
        }
        for number in range(3)
        for row in accounts.rows(number)
    }
    assert seen == model.rows()
    own = sum(size for devices in accounts.chains().values() for _, size in devices.values())
    assert own == memory.devices[0]["allocated_bytes"]["all"]["allocated"]
