"""Whether nobody but the thread that stopped uses the GPU.

A safe point speaks for one thread. A prefetcher, a checkpoint that is written in the background or
a thread that averages weights goes on with storages that are about to be emptied. Three signs tell
of one: a thread that is at work in code that knows torch, memory on the device that such a thread
allocated, and counters of the allocator that move while the job stands still.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, TypeAlias

from gpumem_otel.errors import YieldRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from gpumem_otel.core.ports import Clock

__all__ = ["AllocatorCounters", "Stillness", "WhoElse"]

WhoElse: TypeAlias = "Callable[[threading.Thread, Collection[int], bool], str]"
"""(the thread that stopped, identities of those that take care of themselves, whether a glance is
enough) -> who works."""

AllocatorCounters: TypeAlias = "Callable[[], Mapping[int, tuple[int, int]]]"
"""Device -> (allocations, frees) so far."""

_AGAIN_SECONDS: Final = 0.1
_TRIES: Final = 10
"""A thread that pins the next batches is soon done, one that trains is not."""
_WAY_OUT: Final = (
    "stop it before the yield (yield_callbacks), or call gpumem_otel.participant() in it if it "
    "leaves the GPU alone while the training thread stands still"
)


class Stillness:
    """Looks after the other threads.

    Args:
        participants: threads that the job registered.
        who_else: names a thread at work, "" where there is none.
        counters: of the allocator; {} where they can not be read.
        clock: time.
    """

    def __init__(
        self,
        *,
        participants: Callable[[], Collection[threading.Thread]],
        who_else: WhoElse,
        counters: AllocatorCounters,
        clock: Clock,
    ) -> None:
        self._participants = participants
        self._who_else = who_else
        self._counters = counters
        self._clock = clock

    def check(self, parked: threading.Thread) -> None:
        """Look, while this thread stands still.

        Raises:
            YieldRefusedError: somebody else uses the GPU, or may.
        """
        why = ""
        for _ in range(_TRIES):
            why = self._moves(parked)
            if not why:
                return
            self._clock.wait(threading.Event(), _AGAIN_SECONDS)
        raise YieldRefusedError(f"yield: {why}; {_WAY_OUT}")

    def look(self, parked: threading.Thread) -> None:
        """Look once more, without the counters: copies of our own may have moved them.

        Raises:
            YieldRefusedError: somebody else is at work by now.
        """
        who = self._who(parked, glance=True)
        if who:
            raise YieldRefusedError(f"yield: {who}; {_WAY_OUT}")

    def _who(self, parked: threading.Thread, *, glance: bool) -> str:
        known = {one.ident for one in self._participants() if one.ident is not None}
        return self._who_else(parked, known | {threading.get_ident()}, glance)

    def _moves(self, parked: threading.Thread) -> str:
        who = self._who(parked, glance=True)
        if who:
            return who
        before = self._counters()
        # it gives all others some ten milliseconds first: who was woken a moment ago still seems
        # to wait, and who allocates does so meanwhile
        who = self._who(parked, glance=False)
        after = self._counters()
        moved = sorted(device for device, count in after.items() if before.get(device) != count)
        if who or not (before and moved):
            return who
        return (
            f"memory of device {moved[0]} is allocated or freed while the job's thread stands "
            "still, so another thread uses it"
        )
