"""Cadence, retries, drops and counters, without a thread and with a clock of our own."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from support.push_parts import ARMED, NOON, FakeClock, FakeReader, FakeSink, S, dependencies

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import Identity, ProfileKind, SourceStatus
from gpumem_otel.errors import BusyError, CaptureError, PushError
from gpumem_otel.push.rounds import Rounds
from gpumem_otel.push.schedule import phase
from gpumem_otel.settings.config import ProfileConfig

PLACE = phase("r", 0)
LIVE = ("live",)


class Bench:
    """Rounds with everything around them."""

    def __init__(self, *, devices=(0,), seconds=0.0, start_ns=NOON + S, **more) -> None:
        self.clock = FakeClock(start_ns)
        self.reader = FakeReader(self.clock, devices)
        self.sink = FakeSink(self.clock, seconds=seconds)
        self.counters = Counters()
        made = dependencies(self.clock, self.reader, self.sink, counters=self.counters, **more)
        self.stop = threading.Event()
        self.rounds = Rounds(made, self.stop)

    def run(self, until: float) -> None:
        """Turn after turn, as the thread does, until so many seconds after noon."""
        while True:
            seconds = self.rounds.turn()
            if self.clock.since_noon + seconds > until:
                self.clock.now_ns = NOON + round(until * S)
                return
            self.clock.pass_seconds(seconds)

    def count(self, name: str, **attributes: str) -> float:
        return self.counters.get(name, **attributes)

    @property
    def dropped(self) -> dict[str, float]:
        return {
            dict(key[1])["reason"]: value
            for key, value in self.counters.snapshot().items()
            if key[0] == "exporter_dropped"
        }

    @property
    def read_at(self) -> list[float]:
        return [at for kind, at in self.reader.readings if kind == "live"]


def refused(reason: str, *, retryable: bool = False, after: float | None = None) -> PushError:
    return PushError(reason, reason=reason, retryable=retryable, retry_after_seconds=after)


def test_reads_at_multiples_and_sends_at_the_ranks_phase():
    """The first read-out at the next 15 s, then each minute; sending spread over half of it."""
    bench = Bench()
    bench.run(until=200)
    assert bench.read_at == [15, 60, 120, 180]
    sent = [at for _, at, _ in bench.sink.tried]
    spans = [(15, 45), (60, 60), (120, 60), (180, 60)]
    expected = [start + PLACE * 0.5 * length for start, length in spans]
    assert sent == pytest.approx(expected[: len(sent)], abs=1e-6)
    assert len(sent) >= 3
    assert bench.sink.stored[:3] == [b"live 0: 1", b"live 0: 2", b"live 0: 3"]
    assert bench.dropped == {}
    assert bench.count("exporter_runs", stage="push") == len(sent)
    last = bench.count("last_push_timestamp_seconds", kind="live")
    assert last == pytest.approx(NOON / S + sent[-1], abs=1e-3)


def test_all_ranks_read_together_and_send_apart():
    benches = []
    for rank in range(8):
        identity = Identity(service_name="s", run_id="r", rank=rank, world_size=8)
        bench = Bench(
            identity=lambda identity=identity: identity, start_ns=NOON + rank * S // 2 + S
        )
        bench.run(until=119)
        benches.append(bench)
    assert {tuple(bench.read_at) for bench in benches} == {(15, 60)}
    assert len({bench.sink.tried[1][1] for bench in benches}) == 8


def test_a_short_interval_needs_no_early_start():
    bench = Bench(config=ProfileConfig(kinds=LIVE, interval_seconds=5))
    bench.run(until=21)
    assert bench.read_at == [5, 10, 15, 20]


def test_a_push_ends_before_the_next_read_out():
    """A server that never answers in time costs profiles, not read-outs."""
    bench = Bench(
        seconds=1000, devices=(0, 1, 2), config=ProfileConfig(kinds=LIVE, interval_seconds=10)
    )
    bench.sink.errors = [refused("timeout") for _ in range(100)]
    bench.run(until=60.5)
    assert bench.read_at == [10, 20, 30, 40, 50, 60]
    assert all(deadline <= 10 for _, _, deadline in bench.sink.tried)
    for name, at, deadline in bench.sink.tried:
        assert at + deadline <= (at // 10 + 1) * 10 - 0.25 + 1e-6, name
    assert bench.rounds.waiting == 3
    assert bench.dropped["timeout"] >= 5
    assert bench.dropped["superseded"] >= 10


@pytest.mark.parametrize("push_seconds", [2.0, 4.0, 7.0])
def test_a_slow_server_gets_some_of_each_kind(push_seconds):
    """GIVEN more to send than an interval has room for THEN no kind is superseded for ever."""
    kinds = ("live", "growth", "pinned")
    config = ProfileConfig(kinds=kinds, interval_seconds=10)
    bench = Bench(devices=(0, 1, 2), seconds=push_seconds, config=config)
    bench.run(until=600)
    stored = Counter(data.decode().partition(":")[0] for data in bench.sink.stored)
    assert set(stored) == {f"{kind} {device}" for kind in kinds for device in (0, 1, 2)}
    assert min(stored.values()) >= max(stored.values()) // 2


def test_short_intervals_are_pushed_too():
    bench = Bench(seconds=0.01, config=ProfileConfig(kinds=LIVE, interval_seconds=0.5))
    bench.run(until=10.2)
    assert bench.read_at == [1.5 + 0.5 * turn for turn in range(18)]
    assert len(bench.sink.tried) == 18
    assert bench.dropped == {}


def test_the_deadline_is_that_of_the_configuration():
    bench = Bench(push_timeout_seconds=3.0)
    bench.run(until=59)
    assert [deadline for *_, deadline in bench.sink.tried] == [3.0]


@pytest.mark.parametrize(
    ("stall", "interval"), [(0.0, 60), (0.05, 60), (0.061, 120), (0.2, 240), (1e6, 3600)]
)
def test_the_stall_stretches_the_interval(stall, interval):
    bench = Bench(stall_seconds=lambda: stall)
    bench.run(until=30)
    assert bench.rounds.interval_seconds == interval


def test_the_stall_of_encoding_counts_too():
    bench = Bench(encode=lambda _: bench.counters.add("exporter_stall_seconds", 0.1) or b"x")
    bench.counters.add("exporter_stall_seconds", 1000.0)
    bench.run(until=30)
    assert bench.rounds.interval_seconds == 120


def test_the_jobs_byte_budget_stretches_the_interval():
    """256 ranks of 2 devices with 200 kB each at 1 MB/s for the job: 102 s."""
    identity = Identity(service_name="s", run_id="r", world_size=256)
    bench = Bench(devices=(0, 1), identity=lambda: identity, encode=lambda _: b"x" * 200_000)
    bench.run(until=250)
    assert bench.rounds.interval_seconds == 120
    assert bench.read_at == [15, 120, 240]


def test_a_server_that_limits_us_is_asked_less_often():
    """Each round with a 429 doubles the interval, each without halves it again."""
    bench = Bench()
    intervals = []
    for _ in range(6):
        bench.sink.errors = [refused("rate_limited", retryable=True)]
        seen = len(bench.reader.readings)
        while len(bench.reader.readings) == seen:
            bench.clock.pass_seconds(bench.rounds.turn())
        intervals.append(bench.rounds.interval_seconds)
    assert intervals == [60, 120, 240, 480, 480, 480]
    bench.sink.errors = []
    for expected in (240, 120, 60, 60):
        seen = len(bench.reader.readings)
        while len(bench.reader.readings) == seen:
            bench.clock.pass_seconds(bench.rounds.turn())
        assert bench.rounds.interval_seconds == expected


def test_what_may_be_tried_again_is():
    bench = Bench()
    bench.sink.errors = [refused("connect", retryable=True) for _ in range(3)]
    bench.run(until=59)
    first, *again = [at for _, at, _ in bench.sink.tried]
    keep = 1 - PLACE / 2
    assert [at - first for at in again] == pytest.approx([keep, 3 * keep, 7 * keep], abs=1e-6)
    assert bench.sink.stored == [b"live 0: 1"]
    assert bench.dropped == {}
    assert bench.count("exporter_errors", stage="push") == 3


def test_attempts_are_bounded():
    bench = Bench()
    bench.sink.errors = [refused("connect", retryable=True) for _ in range(99)]
    bench.run(until=59)
    assert len(bench.sink.tried) <= 5
    assert bench.dropped == {"connect": 1}
    assert bench.rounds.waiting == 0


def test_the_server_sets_when_to_retry():
    bench = Bench()
    bench.sink.errors = [refused("unavailable", retryable=True, after=20.0)]
    bench.run(until=59)
    (_, first, _), (_, second, _) = bench.sink.tried
    assert second - first == pytest.approx(20, abs=1e-6)
    assert bench.sink.stored == [b"live 0: 1"]


def test_a_wait_beyond_the_next_read_out_is_not_worth_it():
    bench = Bench()
    bench.sink.errors = [refused("rate_limited", retryable=True, after=500.0)]
    bench.run(until=59)
    assert bench.dropped == {"rate_limited": 1}
    assert len(bench.sink.tried) == 1


def test_what_grew_too_old_is_not_sent():
    """A server refuses profiles older than an hour."""
    bench = Bench(config=ProfileConfig(kinds=LIVE, interval_seconds=7200))
    bench.sink.errors = [refused("unavailable", retryable=True, after=3400.0)]
    bench.run(until=7000)
    assert bench.dropped == {"unavailable": 1}


@pytest.mark.parametrize(
    "error",
    [refused("timeout"), refused("rejected"), refused("server_error"), RuntimeError("defect")],
)
def test_the_rest_is_dropped_at_once(error):
    bench = Bench(devices=(0, 1))
    bench.sink.errors = [error]
    bench.run(until=59)
    assert [name for name, *_ in bench.sink.tried] == ["live0", "live1"]
    assert bench.sink.stored == [b"live 1: 1"]
    assert bench.dropped == {getattr(error, "reason", "error"): 1}


def test_after_a_failure_worth_a_retry_the_others_wait_too():
    """They would meet the same server; and the one that failed goes last."""
    bench = Bench(devices=(0, 1))
    bench.sink.errors = [refused("connect", retryable=True)]
    bench.run(until=59)
    assert [name for name, *_ in bench.sink.tried] == ["live0", "live1", "live0"]
    assert bench.sink.tried[0][1] < bench.sink.tried[1][1]


def test_memory_is_bounded_and_the_newest_wins():
    bench = Bench(devices=(0, 1))
    bench.sink.errors = [refused("connect", retryable=True) for _ in range(10_000)]
    most = 0
    for _ in range(300):
        bench.clock.pass_seconds(bench.rounds.turn())
        most = max(most, bench.rounds.waiting)
    assert most == 2
    bench.sink.errors = []
    number = len(bench.read_at)
    bench.run(until=bench.clock.since_noon + 100)
    assert int(bench.sink.stored[0].rpartition(b" ")[2]) >= number
    lost = sum(bench.dropped.values())
    assert lost + len(bench.sink.stored) + bench.rounds.waiting == 2 * len(bench.read_at)


def test_windows_are_recorded_between_two_read_outs():
    bench = Bench(config=ProfileConfig(kinds=("live", "allocated", "peak")))
    bench.run(until=119)
    kinds, moments = zip(*bench.reader.readings, strict=True)
    assert kinds == ("live", "peak", "allocated", "live", "peak", "allocated")
    assert (moments[0], moments[3]) == (15, 60)
    for begin, read, following in ((moments[1], 15, 60), (moments[4], 60, 120)):
        assert read + 0.5 * (following - read) <= begin < read + 0.75 * (following - read)
    assert moments[1:3] == (moments[1],) * 2
    assert sorted(bench.sink.stored) == [
        b"allocated 0: 1", b"allocated 0: 2", b"live 0: 1", b"live 0: 2",
        b"peak 0: 1", b"peak 0: 2",
    ]  # fmt: skip
    assert bench.count("last_push_timestamp_seconds", kind="allocated") > 0
    assert bench.count("last_push_timestamp_seconds", kind="peak") > 0


def test_the_moments_of_windows_are_those_of_all_ranks_and_never_the_same():
    moments = []
    for rank in (0, 7):
        identity = Identity(service_name="s", run_id="r", rank=rank, world_size=8)
        config = ProfileConfig(kinds=("peak",))
        bench = Bench(config=config, identity=lambda identity=identity: identity)
        bench.run(until=1200)
        moments.append([at for kind, at in bench.reader.readings if kind == "peak"])
    assert moments[0] == moments[1]
    places = {round(at % 60, 3) for at in moments[0][1:]}
    assert len(places) == len(moments[0]) - 1 == 19


def test_a_window_ends_before_the_next_read_out():
    bench = Bench(config=ProfileConfig(kinds=("live", "allocated"), interval_seconds=4))
    bench.reader.window_seconds = 60.0
    bench.run(until=39)
    assert bench.read_at == list(range(4, 40, 4))
    begins = [at for kind, at in bench.reader.readings if kind == "allocated"]
    ends = [at + limit for at, limit in zip(begins, bench.reader.windows, strict=True)]
    assert [round(end % 4, 3) for end in ends] == [3.8] * 9


def test_a_window_that_stalls_the_job_is_followed_by_a_rest():
    bench = Bench(config=ProfileConfig(kinds=("live", "peak"), max_stall_ratio=0.001))
    windowed = bench.reader.windowed

    def stalling(*args):
        bench.counters.add("exporter_stall_seconds", 0.15)
        return windowed(*args)

    bench.reader.windowed = stalling
    bench.run(until=599)
    begins = [at for kind, at in bench.reader.readings if kind == "peak"]
    assert len(begins) == 4
    assert all(later - earlier >= 150 for earlier, later in pairwise(begins))
    # live profiles are not held up by what a window cost
    assert bench.read_at == [15, *range(60, 600, 60)]
    assert bench.rounds.interval_seconds == 60


def test_a_recording_held_by_another_is_waited_for_and_no_error(caplog):
    caplog.set_level(logging.INFO, "gpumem_otel")
    bench = Bench(config=ProfileConfig(kinds=("live", "peak")))
    bench.reader.window_error = BusyError("window: the job records memory history itself")
    bench.run(until=300)
    assert bench.counters.get("exporter_errors", stage="window") == 0
    assert [r.getMessage() for r in caplog.records] == [
        "window: the job records memory history itself"
    ]
    bench.reader.window_error = None
    bench.run(until=400)
    assert bench.count("last_push_timestamp_seconds", kind="peak") > 0


def test_a_window_that_fails_is_counted_and_the_next_one_tried():
    bench = Bench(config=ProfileConfig(kinds=("live", "peak")))
    bench.reader.window_error = CaptureError("device lost")
    bench.run(until=119)
    assert bench.counters.get("exporter_errors", stage="window") == 2
    assert bench.dropped == {}
    assert bench.read_at == [15, 60]


def test_kinds_that_go_with_a_live_read_out():
    bench = Bench(config=ProfileConfig(kinds=("growth", "pinned")))
    bench.run(until=119)
    assert bench.reader.readings == [
        ("live", 15), ("growth", 15), ("pinned", 15), ("live", 60), ("growth", 60), ("pinned", 60),
    ]  # fmt: skip
    # the live profile itself is read for them, and not pushed
    assert sorted(bench.sink.stored)[:2] == [b"growth 0: 1", b"growth 0: 2"]
    assert not any(stored.startswith(b"live") for stored in bench.sink.stored)


def test_bytes_of_windows_count_for_the_budget():
    config = ProfileConfig(kinds=("live", "peak"), job_push_bytes_per_second=1)
    bench = Bench(config=config, encode=lambda made: b"x" * 50)
    bench.run(until=16)
    assert bench.rounds.interval_seconds == 60
    bench.run(until=61)
    assert bench.rounds.interval_seconds == 120


def test_an_end_in_the_middle_of_a_window_counts_its_profiles_as_lost():
    bench = Bench(config=ProfileConfig(kinds=("live", "allocated", "peak")))
    windowed = bench.reader.windowed
    bench.reader.windowed = lambda *args: (bench.rounds.abandon(), windowed(*args))[1]
    bench.run(until=59)
    assert bench.dropped == {"shutdown": 2}


@pytest.mark.parametrize(
    "status", [SourceStatus(armed=False, supported=True), replace(ARMED, supported=False)]
)
def test_nothing_is_read_before_there_is_something(status):
    current = [status]
    bench = Bench(status=lambda: current[0])
    bench.run(until=119)
    assert bench.reader.readings == []
    current[0] = ARMED
    bench.run(until=179)
    assert bench.read_at == [120]


def test_failures_to_read_are_counted_and_logged_once(caplog):
    caplog.set_level(logging.INFO, "gpumem_otel")
    bench = Bench()
    bench.reader.error = CaptureError("allocator gone")
    bench.run(until=250)
    assert bench.count("exporter_errors", stage="read") == 5
    bench.reader.error = None
    bench.run(until=400)
    assert bench.sink.stored
    assert [r.getMessage() for r in caplog.records] == [
        "read failed: allocator gone (more like it are only counted)",
        "read works again after 5 failures",
    ]


def test_each_kind_of_push_failure_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "gpumem_otel")
    bench = Bench()
    bench.sink.errors = [refused("rejected"), refused("timeout"), refused("rejected")]
    bench.run(until=300)
    assert [r.getMessage().partition(" (")[0] for r in caplog.records] == [
        "push failed: rejected",
        "push failed: timeout",
        "push works again after 3 failures",
    ]
    assert {r.name for r in caplog.records} == {"gpumem_otel.push"}


def test_a_server_that_comes_and_goes_does_not_fill_the_log(caplog):
    caplog.set_level(logging.INFO, "gpumem_otel.push")
    bench = Bench(config=ProfileConfig(kinds=LIVE, interval_seconds=1))
    for _ in range(120):
        bench.sink.errors = [refused("rejected")]
        bench.run(until=bench.clock.since_noon + 2)
    assert bench.count("exporter_errors", stage="push") >= 100
    assert [r.getMessage() for r in caplog.records] == [
        "push failed: rejected (more like it are only counted)",
        "push works again after 2 failures",
        "push failed 10 times: rejected (more like it are only counted)",
        "push works again after 8 failures",
        "push failed 100 times: rejected (more like it are only counted)",
        "push works again after 90 failures",
    ]


def test_a_profile_that_cannot_be_encoded_does_not_affect_the_others():
    def encode(made):
        if made.device == 0:
            raise ValueError("no")
        return b"fine"

    bench = Bench(devices=(0, 1), encode=encode)
    bench.run(until=59)
    assert bench.sink.stored == [b"fine"]
    assert bench.count("exporter_errors", stage="encode") == 1
    assert bench.dropped == {"encode": 1}


def test_whatever_is_handed_in_may_raise():
    def broken(*_):
        raise RuntimeError("broken")

    bench = Bench(identity=broken, stall_seconds=broken, on_profiles=(broken,))
    bench.run(until=59)
    assert bench.sink.stored == [b"live 0: 1"]
    assert bench.count("exporter_errors", stage="record") == 1
    bench = Bench(status=broken)
    bench.run(until=59)
    assert bench.count("exporter_errors", stage="read") == 1


def test_profiles_are_shown_also_where_nothing_is_pushed():
    shown = []
    bench = Bench(on_profiles=(lambda kind, profiles: shown.append((kind, profiles)),))
    without = Bench(on_profiles=(lambda kind, profiles: shown.append((kind, profiles)),))
    without.rounds = Rounds(replace(without.rounds._deps, sink=None), without.stop)
    for each in (bench, without):
        each.run(until=59)
    assert [(kind, made[0].total_bytes) for kind, made in shown] == [(ProfileKind.LIVE, 1)] * 2
    assert without.rounds.waiting == 0


def test_the_wall_clock_is_set_back_and_forth():
    bench = Bench()
    bench.run(until=61)
    bench.clock.pass_seconds(-3600)
    assert bench.rounds.turn() <= 60
    bench.run(until=-3450)
    assert bench.read_at == [15, 60, -3480]
    bench.clock.pass_seconds(86_400 + 7)
    assert bench.rounds.turn() <= 60
    assert len(bench.read_at) == 3


def test_flush_reads_and_sends_at_once():
    bench = Bench(devices=(0, 1), config=ProfileConfig(kinds=("live", "allocated")))
    assert bench.rounds.flush(5.0)
    assert bench.reader.readings == [("live", 1.0)]
    assert bench.sink.stored == [b"live 0: 1", b"live 1: 1"]
    assert [deadline for *_, deadline in bench.sink.tried] == [5.0, 5.0]
    bench.sink.errors = [refused("rejected")]
    assert not bench.rounds.flush(5.0)
    bench.reader.error = CaptureError("gone")
    assert not bench.rounds.flush(5.0)


def test_flush_keeps_to_its_bound():
    bench = Bench(devices=(0, 1, 2), seconds=4.0)
    assert not bench.rounds.flush(5.0)
    assert [deadline for *_, deadline in bench.sink.tried] == [5.0, 1.0]
    assert bench.clock.since_noon == 6.0


def test_the_end_sends_once_more_and_counts_what_is_lost():
    bench = Bench(devices=(0, 1))
    bench.run(until=16)
    bench.sink.errors = [refused("connect", retryable=True)]
    bench.rounds.finish(5.0)
    assert bench.rounds.waiting == 0
    assert bench.sink.stored[-1] == b"live 1: 2"
    assert bench.dropped["shutdown"] == 1


@pytest.mark.parametrize(
    ("sink", "shown", "final_read", "reads"),
    [
        (False, False, False, 0),
        (False, False, True, 1),
        (False, True, False, 1),
        (True, False, False, 1),
    ],
    ids=["nothing uses it", "a recording does", "a callback does", "a server does"],
)
def test_the_last_reading_is_taken_only_where_it_is_used(sink, shown, final_read, reads):
    bench = Bench(final_read=final_read, on_profiles=(lambda *_: None,) if shown else ())
    if not sink:
        bench.rounds = Rounds(replace(bench.rounds._deps, sink=None), bench.stop)
    bench.rounds.finish(5.0)
    assert len(bench.reader.readings) == reads
    assert bench.dropped == {}


def test_given_up_while_reading_all_that_would_have_been_sent_is_counted_once():
    """GIVEN the end comes during a read-out THEN its devices' profiles and those that wait."""
    bench = Bench(devices=(0, 1), status=lambda: replace(ARMED, devices=(0, 1)))
    bench.run(until=15)
    assert bench.rounds.waiting == 2
    live = bench.reader.live

    def slow():
        bench.rounds.abandon()  # as the thread that stops us does
        return live()

    bench.reader.live = slow
    bench.rounds.finish(5.0)
    assert bench.dropped == {"shutdown": 4}
    assert bench.sink.tried == []
    bench.rounds.finish(5.0)
    bench.rounds.abandon()
    assert bench.dropped == {"shutdown": 4}


def test_given_up_while_sending_nothing_is_counted_twice():
    bench = Bench(devices=(0, 1), status=lambda: replace(ARMED, devices=(0, 1)))
    push = bench.sink.push

    def hanging(*arguments):
        bench.rounds.abandon()
        push(*arguments)

    bench.sink.push = hanging
    bench.sink.errors = [refused("timeout")]
    bench.rounds.finish(5.0)
    assert bench.dropped == {"shutdown": 2}
    assert [name for name, *_ in bench.sink.tried] == ["live0"]


def test_given_up_while_encoding():
    """One is encoded and waits, one is being encoded, one was not begun."""
    devices = (0, 1, 2)

    def encode(made):
        if made.device == 1:
            bench.rounds.abandon()
        return b"x"

    bench = Bench(devices=devices, status=lambda: replace(ARMED, devices=devices), encode=encode)
    bench.rounds.finish(5.0)
    assert bench.dropped == {"shutdown": 3}
    assert bench.rounds.waiting == 0


def test_without_a_server_nothing_is_lost_at_the_end():
    bench = Bench()
    rounds = Rounds(replace(bench.rounds._deps, sink=None), bench.stop)
    live = bench.reader.live
    bench.reader.live = lambda: (rounds.abandon(), live())[1]
    rounds.finish(5.0)
    assert bench.dropped == {}
