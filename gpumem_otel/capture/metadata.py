"""Sets torch's allocation metadata: a string that torch records with each allocation.

The job may use it too, so the previous string is restored. Up to torch 2.13 there is one string per
device for all threads, since 2.14 one per thread (backward's threads do not inherit it). Source:
`torch/cuda/memory.py`, `_set_memory_metadata`; torch 2.10 and newer.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.gate import QuietGate
from gpumem_otel.base.logs import named_logger
from gpumem_otel.capture.recorder import torch_version

if TYPE_CHECKING:
    from collections.abc import Callable

_log = named_logger("gpumem_otel.capture")

_PER_THREAD_SINCE: Final = (2, 14)


class OpenMark:
    """A string that is set, and the previous one.

    Attributes:
        below: the mark of ours that set the previous one, if any.
    """

    __slots__ = ("before", "below", "closed", "device", "text")

    def __init__(self, text: str, device: int, before: Any, below: OpenMark | None) -> None:
        self.text = text
        self.device = device
        self.before = before
        self.below = below
        self.closed = False

    def let_go(self) -> None:
        """Skip closed marks below; threads with overlapping regions would make an endless chain."""
        while self.below is not None and self.below.closed:
            self.before, self.below = self.below.before, self.below.below


class _Open(threading.local):
    """The open marks of each thread, the newest last."""

    def __init__(self) -> None:
        self.marks: list[OpenMark] = []


class AllocationMarks:
    """Sets and restores the string. CUDA is initialised. Nothing here raises.

    Args:
        gate: while it is closed nothing is set, and the thread's next region restores the previous
            string (torch keeps it under the allocator's lock).

    Attributes:
        supported: whether this torch has such a string.
    """

    def __init__(self, torch: Any, *, gate: QuietGate | None = None) -> None:
        self._gate = gate or QuietGate()
        c = torch._C  # noqa: SLF001 - the string has no public name
        self._get: Callable[[], Any] | None = getattr(c, "_cuda_getMemoryMetadata", None)
        self._set: Callable[[Any], None] | None = getattr(c, "_cuda_setMemoryMetadata", None)
        self._device: Callable[[], int] = getattr(c, "_cuda_getDevice", lambda: 0)
        self._exchange: Callable[[int], int] | None = getattr(c, "_cuda_exchangeDevice", None)
        per_thread = torch_version(torch) >= _PER_THREAD_SINCE
        self._per_thread = per_thread
        self._mine = _Open()
        self._shared: list[OpenMark] = []
        self._lock = threading.RLock()  # a finalizer may enter a region within `enter`
        self._pid = os.getpid()
        self.supported = callable(self._get) and callable(self._set)
        ask = getattr(c, "_cuda_memoryMetadataSupported", None)
        if self.supported and ask is not None:
            self.supported = bool(ask())

    def enter(self, text: str) -> OpenMark | None:
        """Set the string; None if that is not possible."""
        get, put = self._get, self._set
        if not self.supported or get is None or put is None or self._pid != os.getpid():
            return None
        if not self._gate.enter():
            return None
        try:
            with self._lock:
                marks = self._marks()
                for late in [mark for mark in marks if mark.closed]:
                    self._end(late, get, put)
                device = -1 if self._per_thread else self._device()
                before = get()
                below = _newest(marks, device, before)
                if below is not None:
                    below.let_go()
                mark = OpenMark(text, device, before, below)
                put(text)
                marks.append(mark)
                return mark
        except Exception:
            self._give_up()
            return None
        finally:
            self._gate.leave()

    def exit(self, mark: OpenMark) -> None:
        """Restore the previous string, unless the job has set another one meanwhile."""
        get, put = self._get, self._set
        if get is None or put is None or self._pid != os.getpid():
            return
        mark.closed = True
        if not self._gate.enter():
            return
        try:
            with self._lock:
                self._end(mark, get, put)
        except Exception:
            self._give_up()
        finally:
            self._gate.leave()

    def _end(self, mark: OpenMark, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        marks = self._marks()
        if mark in marks:
            marks.remove(mark)
        self._on_device(mark.device, lambda: self._put_back(mark, get, put))

    def _marks(self) -> list[OpenMark]:
        return self._mine.marks if self._per_thread else self._shared

    def _put_back(self, mark: OpenMark, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        if get() != mark.text:
            return  # the job's, or that of another thread's open region
        others = self._marks()
        if any(other.text == mark.text and other.device == mark.device for other in others):
            return
        mark.let_go()  # other threads may have ended regions since
        put(mark.before)

    def _on_device(self, device: int, action: Callable[[], None]) -> None:
        """The string belongs to the device that was current when it was set."""
        exchange = self._exchange
        if device < 0 or exchange is None or self._device() == device:
            action()
            return
        current = exchange(device)
        try:
            action()
        finally:
            exchange(current)

    def _give_up(self) -> None:
        if self.supported:
            self.supported = False
            _log.warning("regions no longer label allocations", exc_info=True)


def _newest(marks: list[OpenMark], device: int, text: Any) -> OpenMark | None:
    """The newest mark of ours that set this string on this device."""
    return next((m for m in reversed(marks) if m.device == device and m.text == text), None)
