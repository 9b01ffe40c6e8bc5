"""Whether a thread of this process slept in the kernel all the time between two looks at it.

A thread that Linux reports as sleeping at both looks, and that was switched to the same number of
times, did not run in between: to run it must be switched to, and to sleep again switched away from.
Computing in C without the interpreter lock it would be running; waiting for that lock it wakes once
per switch interval to ask for it. Format of the files: proc_pid_status(5); `schedstat` is
Documentation/scheduler/sched-stats.rst of Linux.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["LONGEST_INTERVAL_SECONDS", "PROC", "Naps", "naps", "slept_on"]

PROC: Final = Path("/proc")
LONGEST_INTERVAL_SECONDS: Final = 0.0075
"""Of the interpreter's switch interval: with a longer one a thread that waits for the interpreter
lock might not wake between two looks."""
_STATE: Final = re.compile(r"^State:\t(\w)", re.MULTILINE)
_SWITCHES: Final = re.compile(r"^(?:non)?voluntary_ctxt_switches:\t(\d+)$", re.MULTILINE)

Naps: TypeAlias = "Mapping[int, tuple[int, int, str]]"
"""Native thread id -> how often a thread that sleeps was switched (of its own will, or not), and
its times in `schedstat` ("" where the kernel keeps none)."""


def naps(native_ids: Collection[int], proc: Path = PROC) -> Naps:
    """Those of the threads that sleep interruptibly now, for `slept_on`.

    One in an uninterruptible sleep (state D) is not among them: that is how a call of the GPU's
    driver may wait. Nor is any where `/proc` is not that of this process's PID namespace, does not
    say it, or the switch interval is too long.
    """
    found = {}
    try:
        if os.readlink(proc / "self") != str(os.getpid()):  # noqa: PTH115 - a string as it is
            return {}
    except OSError:
        return {}
    for native_id in native_ids:
        task = proc / "self" / "task" / str(native_id)
        status = _text(task / "status")
        state = _STATE.search(status)
        switches = [int(count) for count in _SWITCHES.findall(status)]
        # who sleeps has been switched away from: zeros are of something that does not count
        if state is not None and state[1] == "S" and len(switches) == 2 and any(switches):  # noqa: PLR2004
            found[native_id] = (switches[0], switches[1], _text(task / "schedstat"))
    # asked last: what began to wait for the lock after a longer one was set is not seen before it
    return found if sys.getswitchinterval() <= LONGEST_INTERVAL_SECONDS else {}


def slept_on(before: Naps, native_id: int | None, proc: Path = PROC) -> bool:
    """Whether this thread was asleep then, is now, and was so all the time."""
    if native_id is None or native_id not in before:
        return False
    return naps((native_id,), proc).get(native_id) == before[native_id]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
