"""Test doubles for what a pusher needs: a clock, a reader, a sink."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import (  # fmt: skip
    Frame,
    HeapProfile,
    Identity,
    ProfileKind,
    Sample,
    SourceStatus,
)
from gpumem_otel.push.interfaces import PushDependencies
from gpumem_otel.settings.config import ProfileConfig

if TYPE_CHECKING:
    import threading

S = 1_000_000_000
NOON = 1_700_000_040 * S
"""A multiple of 60 s and of 15 s."""
ARMED = SourceStatus(armed=True, supported=True, devices=(0,))


class FakeClock:
    """Moves when its `wait` or `pass_seconds` is called."""

    def __init__(self, start_ns: int = NOON + S) -> None:
        self.now_ns = start_ns

    def time_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / S

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            self.now_ns += round(seconds * S)
        return event.is_set()

    def pass_seconds(self, seconds: float) -> None:
        self.now_ns += round(seconds * S)

    @property
    def since_noon(self) -> float:
        return (self.now_ns - NOON) / S


def profile(size: int, device: int = 0, kind: ProfileKind = ProfileKind.LIVE) -> HeapProfile:
    return HeapProfile(kind, device, (Sample((Frame("f"),), 1, size),))


class FakeReader:
    """Counts its readings: the n-th live profile holds n bytes on each device."""

    def __init__(self, clock: FakeClock, devices: tuple[int, ...] = (0,)) -> None:
        self.clock = clock
        self.devices = devices
        self.readings: list[tuple[str, float]] = []
        self.error: Exception | None = None
        self.windows: list[float] = []
        self.window_seconds = 1.0
        self.window_error: Exception | None = None

    def live(self) -> tuple[HeapProfile, ...]:
        self.readings.append(("live", self.clock.since_noon))
        return self._made(ProfileKind.LIVE)

    def derived(self, kind: ProfileKind, live: tuple[HeapProfile, ...]) -> tuple[HeapProfile, ...]:
        self.readings.append((kind.value, self.clock.since_noon))
        assert live == self._made(ProfileKind.LIVE)
        return self._made(kind)

    def windowed(self, kinds, limit_seconds: float, stop: threading.Event):
        self.readings += [(kind.value, self.clock.since_noon) for kind in kinds]
        self.windows.append(limit_seconds)
        self.clock.wait(stop, min(self.window_seconds, limit_seconds))
        if self.window_error:
            raise self.window_error
        return {kind: self._made(kind) for kind in kinds}

    def _made(self, kind: ProfileKind) -> tuple[HeapProfile, ...]:
        if self.error:
            raise self.error
        number = sum(name == kind.value for name, _ in self.readings)
        return tuple(profile(number, device, kind) for device in self.devices)


class FakeSink:
    """Keeps what arrives; raises the first of `errors`."""

    def __init__(self, clock: FakeClock, *, seconds: float = 0.0) -> None:
        self.clock = clock
        self.seconds = seconds
        self.errors: list[Exception] = []
        self.tried: list[tuple[str, float, float]] = []
        self.stored: list[bytes] = []

    def push(self, data: bytes, kind: ProfileKind, device: int, deadline_seconds: float) -> None:
        self.tried.append((f"{kind.value}{device}", self.clock.since_noon, deadline_seconds))
        self.clock.pass_seconds(min(self.seconds, deadline_seconds))
        if self.errors:
            raise self.errors.pop(0)
        self.stored.append(data)


def encode(made: HeapProfile) -> bytes:
    return f"{made.kind.value} {made.device}: {made.total_bytes}".encode()


def dependencies(
    clock: FakeClock, reader: FakeReader, sink: FakeSink | None, **more
) -> PushDependencies:
    """Everything that a pusher needs; by default for rank 0 of run "r"."""
    identity = Identity(service_name="s", run_id="r")
    given = {
        "config": ProfileConfig(kinds=("live",)),
        "counters": Counters(),
        "identity": lambda: identity,
        "status": lambda: ARMED,
        "encode": encode,
        **more,
    }
    return PushDependencies(reader=reader, sink=sink, clock=clock, **given)
