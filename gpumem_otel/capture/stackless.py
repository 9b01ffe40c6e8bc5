"""Names the roots of live memory without a stack.

If Python stacks are recorded and a block has none, no Python code ran on the allocating thread:
nearly always a thread of the autograd engine. This conclusion needs our own recording at the time
of the allocation, and an engine that has threads.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from gpumem_otel.base.protocols import no_pause
from gpumem_otel.snapshot.stacks import BACKWARD, BEFORE_INSTALL, NO_PYTHON_FRAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpumem_otel.base.protocols import Pause, StacklessRule
    from gpumem_otel.capture.gil_pacing import Pacer

_BLOCKS_PER_PAUSE: Final = 32
_THREADS: Final = Path("/proc/self/task")
_NONE: Final[Mapping[tuple[int, int], str]] = MappingProxyType({})
_ENGINE_THREAD: Final = b"autograd"  # `pt_autograd_0` since torch 2.4, after the first backward


Roots: TypeAlias = "Mapping[tuple[int, int], str]"
"""(device, address) -> named root."""


class StacklessRoots:
    """Remembers blocks without a stack that the backward did not allocate.

    `update` is for one thread at a time; rules may be called from any.

    Args:
        pacer: slices the pass over all blocks.
        engine_is_named: whether this torch names the threads of its autograd engine.
    """

    def __init__(self, pacer: Pacer, *, engine_is_named: bool) -> None:
        self._pacer = pacer
        self._engine_runs = not engine_is_named
        self._known: dict[tuple[int, int], str] = {}

    def remember_before_install(self, raw: Any) -> None:
        """After a late install: blocks without a stack are older. On the job's own thread."""
        self._known = dict.fromkeys(_stackless_blocks(raw, no_pause), BEFORE_INSTALL)

    def update(self, raw: Any, *, unrecorded: bool, restored: Roots = _NONE) -> float:
        """Forget addresses that are free, or were allocated again with a stack.

        Args:
            raw: the snapshot as torch returns it.
            unrecorded: recording was off, or the job's, until just before this snapshot: blocks
                without a stack may be of that time.
            restored: roots of restored blocks that had no stack before; "" if unknown.

        Returns:
            Seconds of work in slices.
        """
        known = self.remembered(restored)
        if not known and not unrecorded:
            return 0.0
        still: dict[tuple[int, int], str] = {}
        self._pacer.begin()
        try:
            for block in _stackless_blocks(raw, self._pacer.pause):
                root = known.get(block)
                if root:
                    still[block] = root
                elif unrecorded:
                    still[block] = NO_PYTHON_FRAME
            self._known = still  # never changed in place: older rules use the old one
        finally:
            seconds = self._pacer.end()
        return seconds

    def remembered(self, restored: Roots = _NONE) -> Roots:
        """(device, address) -> root of known blocks; for `restored` see `update`."""
        return {**self._known, **restored} if restored else self._known

    def of_blocks(self, *, ours: bool, restored: Roots = _NONE) -> StacklessRule:
        """The rule for live blocks.

        Args:
            ours: recorded with our settings; with the job's, the meaning of a missing stack is
                unknown.
            restored: see `update`.
        """
        known = self.remembered(restored)
        rest = "" if ours else NO_PYTHON_FRAME

        def rule(device: int, address: int | None) -> str:
            nonlocal rest
            root = known.get((device, address)) if address is not None else None
            if root:
                return root
            rest = rest or self._ours()
            return rest

        return rule

    def of_events(self) -> StacklessRule:
        """The rule for allocations of one of our windows, which are all recorded."""
        rest = ""

        def rule(device: int, address: int | None) -> str:  # noqa: ARG001 - a `StacklessRule`
            nonlocal rest
            rest = rest or self._ours()
            return rest

        return rule

    def _ours(self) -> str:
        # checked after the snapshot: a thread exists before its allocations
        self._engine_runs = self._engine_runs or autograd_has_threads()
        return BACKWARD if self._engine_runs else NO_PYTHON_FRAME


def autograd_has_threads() -> bool:
    """Whether the autograd engine has started its threads, by their names; True if unknown."""
    try:
        threads = list(_THREADS.iterdir())
    except OSError:
        return True
    return any(_ENGINE_THREAD in _name_of(thread) for thread in threads)


def _name_of(thread: Path) -> bytes:
    try:
        return (thread / "comm").read_bytes()
    except OSError:  # it has just ended
        return b""


def _stackless_blocks(raw: Any, pause: Pause) -> Iterator[tuple[int, int]]:
    """(device, address) of every live block that carries no frames."""
    count = 0
    for segment in raw["segments"] if isinstance(raw, dict) else raw:
        for block in segment["blocks"]:
            count += 1
            if not count % _BLOCKS_PER_PAUSE:
                pause()
            if block["state"] == "active_allocated" and not block.get("frames"):
                address = block.get("address")
                if address is not None:
                    yield segment["device"], address
