"""Counters about ourselves, fed by every part and read by the METRICS table."""

from __future__ import annotations

import threading

CounterKey = tuple[str, tuple[tuple[str, str], ...]]
"""(name, attributes sorted by key)."""


class Counters:
    """A bag of monotonic counters and a few gauges, safe to use from any thread.

    Names are those of the METRICS table without the `gpumem_` prefix and unit suffixes of the
    exposition, for instance `exporter_dropped` with `reason="too_large"`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[CounterKey, float] = {}

    def add(self, name: str, value: float = 1.0, **attributes: str) -> None:
        """Raise a counter."""
        key = (name, tuple(sorted(attributes.items())))
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + value

    def set(self, name: str, value: float, **attributes: str) -> None:
        """Set a gauge, for instance the time of the last push."""
        key = (name, tuple(sorted(attributes.items())))
        with self._lock:
            self._values[key] = value

    def get(self, name: str, **attributes: str) -> float:
        """One value, 0.0 where nothing was counted."""
        with self._lock:
            return self._values.get((name, tuple(sorted(attributes.items()))), 0.0)

    def snapshot(self) -> dict[CounterKey, float]:
        """All values at one moment."""
        with self._lock:
            return dict(self._values)

    def reset_lock_after_fork(self) -> None:
        """Make the bag usable in a forked child, whose parent may have held the lock."""
        self._lock = threading.Lock()
