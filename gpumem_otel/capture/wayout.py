"""Runs something of ours when an exception ends the process or a thread, before it is shown.

`sys.excepthook` and `threading.excepthook` are chained: whoever was there is called afterwards
with the very same objects, whatever became of ours. Not installed before there is a reason to, so
that a job that never fails never has a hook of ours.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from gpumem_otel.capture.patching import Patch
from gpumem_otel.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WayOut"]

_log = named_logger("gpumem_otel.oom")


class WayOut:
    """Chains both hooks from `start` to `stop`.

    Args:
        before: called with the exception and whether the process ends by it, or a thread does; it
            may wait, within a bound of its own.
    """

    def __init__(self, before: Callable[[BaseException | None, bool], object]) -> None:
        self._before = before
        self._pid = os.getpid()
        self._open = False
        self._patches: list[Patch] = []

    @property
    def is_open(self) -> bool:
        """Whether the hooks are chained."""
        return self._open

    def start(self) -> None:
        """Chain the hooks that are there now; does nothing where that was done."""
        if self._open:
            return
        self._open = True
        self._patches = [
            Patch(sys, "excepthook", self._wrap_sys),
            Patch(threading, "excepthook", self._wrap_threading),
        ]

    def stop(self) -> None:
        """Put back what was there; where somebody chained ours in turn, it only passes on."""
        self._open = False
        patches, self._patches = self._patches, []
        for patch in reversed(patches):
            patch.revert()

    def _wrap_sys(self, original: Callable[..., object]) -> Callable[..., object]:
        def excepthook(kind: Any, value: Any, traceback: Any) -> object:
            try:
                self._run(value, ending=True)
            finally:  # a signal handler may raise while we wait: the job's own error is shown first
                shown = original(kind, value, traceback)
            return shown

        return excepthook

    def _wrap_threading(self, original: Callable[..., object]) -> Callable[..., object]:
        def excepthook(arguments: Any) -> object:
            try:
                self._run(getattr(arguments, "exc_value", None), ending=False)
            finally:
                shown = original(arguments)
            return shown

        return excepthook

    def _run(self, error: BaseException | None, *, ending: bool) -> None:
        if not self._open or self._pid != os.getpid():
            return
        try:
            self._before(error, ending)
        except KeyboardInterrupt:
            pass  # somebody does not want to wait: the job's own exception is shown now
        except Exception:
            _log.warning("an out-of-memory could not be waited for", exc_info=True)
