"""The job's callbacks before a yield and after a restore."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.copy.mover import never

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Hurried: TypeAlias = Callable[[], bool]

_log = named_logger("gpumem_otel.yield")

_TICK_SECONDS: Final = 0.05
"""How soon a wait ends after an interrupt."""

_GRACE_SECONDS: Final = 1.0
"""How long to wait for a callback where the job is interrupted."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    before_yield: Callable[[], object] | None
    after_restore: Callable[[], object] | None
    on_evict: Callable[[str], object] | None
    timeout_seconds: float


class Callbacks:
    """Sets of up to three callbacks; each runs on its own thread, within its time limit.

    `after_restore` is called for each set whose `before_yield` did not raise, in reverse order,
    after a restore and also after a yield that failed.

    Both run with the current device of the job's thread. A new thread's is device 0: a call of
    torch would create a context on a device that the job never used.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._asked: list[_Entry] = []
        self._device: int | None = None

    def add(
        self,
        before_yield: Callable[[], object] | None,
        after_restore: Callable[[], object] | None,
        on_evict: Callable[[str], object] | None,
        timeout_seconds: float,
    ) -> Callable[[], None]:
        """Register a set; returns the function that removes it."""
        entry = _Entry(before_yield, after_restore, on_evict, timeout_seconds)
        with self._lock:
            self._entries.append(entry)
        return partial(self._remove, entry)

    def _remove(self, entry: _Entry) -> None:
        with self._lock:
            if entry in self._entries:
                self._entries.remove(entry)

    def before(self, device: int | None = None, hurried: Hurried = never) -> None:
        """Call each `before_yield`, in order.

        Args:
            device: the current one of the job's thread; None where it is not known.
            hurried: called during the wait for a callback: True ends the wait soon.

        Raises:
            YieldRefusedError: one raised or took too long. The caller calls `after` in any case.
        """
        with self._lock:
            entries = list(self._entries)
        self._asked, self._device = [], device
        for entry in entries:
            error, late = (
                _run(entry.before_yield, entry.timeout_seconds, device, hurried)
                if entry.before_yield is not None
                else (None, "")
            )
            if error is None:
                self._asked.append(entry)  # also a late one: it goes on
            if error is not None or late:
                problem = late or f"raised {error!r}"
                raise YieldRefusedError(
                    f"yield: before_yield {_name(entry.before_yield)} {problem}; nothing was moved"
                )

    def after(self, hurried: Hurried = never) -> tuple[str, ...]:
        """Call each `after_restore` that is due; a line for each that raised or took too long.

        Args:
            hurried: called during the wait for a callback: True ends the wait soon.

        Raises:
            BaseException: what interrupted the wait for one of them; all were called.
        """
        asked, self._asked = self._asked, []
        notes: list[str] = []
        interrupt: BaseException | None = None
        for entry in reversed(asked):
            call, seconds = entry.after_restore, entry.timeout_seconds
            if call is None:
                continue
            try:
                ended = _run(call, seconds, self._device, hurried)
                notes += _complaint(f"after_restore {_name(call)}", *ended)
            except BaseException as error:  # it goes on; the others are still due
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return tuple(notes)

    def evict(self, reason: str) -> tuple[str, ...]:
        """Call each `on_evict`: the memory is not back when it should be."""
        with self._lock:
            entries = list(self._entries)
        notes = []
        for entry in entries:
            if entry.on_evict is not None:
                ended = _run(partial(entry.on_evict, reason), entry.timeout_seconds, None, never)
                notes += _complaint(f"on_evict {_name(entry.on_evict)}", *ended)
        return tuple(notes)


def _complaint(named: str, error: BaseException | None, late: str) -> list[str]:
    if error is None and not late:
        return []
    line = f"{named} {late} and goes on" if late else f"{named} raised {error!r}"
    _log.warning("%s", line)
    return [line]


def _run(
    call: Callable[[], object], seconds: float, device: int | None, hurried: Hurried
) -> tuple[BaseException | None, str]:
    """(what it raised, why it still runs)."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            if device is not None:
                torch: Any = sys.modules["torch"]  # imported, since it gave the device
                torch.cuda.set_device(device)
            call()
        except BaseException as error:  # an exit or a cancellation refuses, too
            raised.append(error)

    thread = threading.Thread(target=run, name="gpumem-otel-callback", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no thread can be started: the interpreter may be ending
        return error, ""
    ends, late = time.monotonic() + seconds, f"took longer than {seconds:g} s"
    soon = False
    while thread.is_alive():
        left = ends - time.monotonic()
        if left <= 0:
            return None, late
        if hurried() and not soon:
            soon, left = True, min(left, _GRACE_SECONDS)
            ends, late = time.monotonic() + left, "is not waited for (the job is interrupted)"
        thread.join(min(left, _TICK_SECONDS))
    return (raised[0] if raised else None), ""


def _name(call: Callable[..., object] | None) -> str:
    return str(getattr(call, "__qualname__", None) or type(call).__name__)
