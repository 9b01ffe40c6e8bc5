"""Time that stands still until a test moves it."""

from __future__ import annotations


class FakeClock:
    """A `Clock`: waiting takes no time and moves both of its hands."""

    def __init__(self, time_ns: int = 1_700_000_000_000_000_000) -> None:
        self.now_ns = time_ns
        self.seconds = 0.0
        self.on_wait = []

    def time_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
        self.now_ns += round(seconds * 1e9)

    def wait(self, event, seconds: float) -> bool:
        for call in self.on_wait:
            call()
        if not event.is_set():
            self.advance(seconds)
        return event.is_set()
