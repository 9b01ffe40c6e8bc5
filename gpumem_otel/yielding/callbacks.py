"""What the job does before its memory goes and after it came back."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Callbacks"]

_log = named_logger("gpumem_otel.yield")


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    before_yield: Callable[[], object] | None
    after_restore: Callable[[], object] | None
    on_evict: Callable[[str], object] | None
    timeout_seconds: float


class Callbacks:
    """Registered in sets of three; each runs on a thread of its own, within its time.

    `after_restore` is called for each set whose `before_yield` was called and did not raise, in
    reverse order, after a restore as well as where the yield came to nothing.

    Those two run with the current device of the job's thread: on a new thread it would be the first
    one, and a call of torch there would make a context on a device that the job never used.
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
        """Register a set; what is returned takes it away again."""
        entry = _Entry(before_yield, after_restore, on_evict, timeout_seconds)
        with self._lock:
            self._entries.append(entry)
        return partial(self._remove, entry)

    def _remove(self, entry: _Entry) -> None:
        with self._lock:
            if entry in self._entries:
                self._entries.remove(entry)

    def before(self, device: int | None = None) -> None:
        """Ask all, in order.

        Args:
            device: that is current in the job's thread; None where it is not known.

        Raises:
            YieldRefusedError: one raised or took too long. `after` is to be called all the same.
        """
        with self._lock:
            entries = list(self._entries)
        self._asked, self._device = [], device
        for entry in entries:
            error, late = (
                _run(entry.before_yield, entry.timeout_seconds, device)
                if entry.before_yield is not None
                else (None, False)
            )
            if error is None:
                self._asked.append(entry)  # a late one goes on, and is told of the end as well
            if error is not None or late:
                what = (
                    f"took longer than {entry.timeout_seconds:g} s" if late else f"raised {error!r}"
                )
                raise YieldRefusedError(
                    f"yield: before_yield {_name(entry.before_yield)} {what}; nothing was moved"
                )

    def after(self) -> tuple[str, ...]:
        """Tell all that were asked; one line for each that raised or took too long.

        Raises:
            BaseException: what interrupted the wait for one of them; all were told.
        """
        asked, self._asked = self._asked, []
        notes: list[str] = []
        interrupt: BaseException | None = None
        for entry in reversed(asked):
            call, seconds = entry.after_restore, entry.timeout_seconds
            if call is None:
                continue
            try:
                notes += _complaint("after_restore", call, call, seconds, self._device)
            except BaseException as error:  # it goes on by itself; the others are owed theirs
                interrupt = error
        if interrupt is not None:
            raise interrupt
        return tuple(notes)

    def evict(self, reason: str) -> tuple[str, ...]:
        """Tell all that the memory is not back when it should be."""
        with self._lock:
            entries = list(self._entries)
        notes = []
        for entry in entries:
            if entry.on_evict is not None:
                call = partial(entry.on_evict, reason)
                notes += _complaint("on_evict", entry.on_evict, call, entry.timeout_seconds)
        return tuple(notes)


def _complaint(
    kind: str,
    named: Callable[..., object],
    call: Callable[[], object],
    seconds: float,
    device: int | None = None,
) -> list[str]:
    error, late = _run(call, seconds, device)
    if error is None and not late:
        return []
    what = f"takes longer than {seconds:g} s and goes on" if late else f"raised {error!r}"
    line = f"{kind} {_name(named)} {what}"
    _log.warning("%s", line)
    return [line]


def _run(
    call: Callable[[], object], seconds: float, device: int | None
) -> tuple[BaseException | None, bool]:
    """(what it raised, whether it is still at it)."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            if device is not None:
                torch: Any = sys.modules["torch"]  # it named the device
                torch.cuda.set_device(device)
            call()
        except BaseException as error:  # an exit or a cancellation is no consent
            raised.append(error)

    thread = threading.Thread(target=run, name="gpumem-otel-callback", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no thread can be started, for one at the interpreter's end
        return error, False
    thread.join(seconds)
    return (raised[0], False) if raised else (None, thread.is_alive())


def _name(call: Callable[..., object] | None) -> str:
    return str(getattr(call, "__qualname__", None) or type(call).__name__)
