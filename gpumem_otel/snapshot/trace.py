"""A recorded trace, played through: what was allocated when, freed when, and held at every moment.

The rules, all of them seen in real files:

* sizes in a trace are requested bytes, not the rounded size of the block;
* `free_requested` and `free_completed` are one free: memory is given back at the first of them;
* what is alive at the dump without an allocation in the trace is older than the trace, and counts
  from its beginning on; so does what is freed without having been allocated in it;
* `snapshot` entries carry a size that belongs to nothing.

A moment is a number from 0, before the first event, to the length of the trace, which is the dump
itself: there the blocks of the dump are what is alive, whatever the trace says.

Source of the actions: `TraceEntry` in `c10/cuda/CUDACachingAllocator.h`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.profile import BlockState
from gpumem_otel.base.protocols import no_pause
from gpumem_otel.snapshot.grouping import Interned, StackTable
from gpumem_otel.snapshot.torch_format import (
    DEFAULT_POOL,
    RawReader,
    frames_of,
    maybe_whole,
    pool_of,
    requested_of,
    segment_size,
    state_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpumem_otel.base.protocols import Pause
    from gpumem_otel.snapshot.torch_format import RawBlock, RawEvent, RawFrame, RawSegment

_NO_CONTEXT = "N/A"
_LARGE_POOL_ID = 2**32
"""Pool ids are counters; many larger numbers with equal hashes can be made."""
_INT64 = 2**63
_UINT64 = 2**64
_GROWS = frozenset({"segment_alloc", "segment_map"})
_SHRINKS = frozenset({"segment_free", "segment_unmap"})
_MARKS = frozenset({"oom", "annotate"})
_MAX_MARKS = 20_000
"""A trace may consist of nothing else."""
_GONE = -1
_FREES = frozenset({"free_requested", "free_completed"})
PIECE = 32
"""Events, or blocks, between two pauses."""


@dataclass(frozen=True, slots=True)
class TraceMark:
    """An event to be seen in a timeline.

    Attributes:
        moment: after this event.
        action: `oom`, or `annotate` (torch 2.14 and newer).
        text: its description.
        device_free_bytes: what the device had free, only on `oom`.
    """

    moment: int
    action: str
    text: str
    device_free_bytes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The trace of a device in columns: a trace may have a million events.

    Attributes:
        device: torch's index.
        events: length of the trace; moments are 0 to this.
        stacks: distinct recorded stacks, leaf first, never to be changed; 0 is (), none recorded.
        stack: of each allocation, an index of `stacks`. Allocations stand in order of their
            birth, those from before the trace first.
        size_bytes: of each allocation, as it was requested.
        block_bytes: what the allocator holds for it, 0 unless it is alive in the dump.
        address: of each allocation, 0 where unknown.
        traced: indexes of the allocations whose event is in the trace; those before are older
            than the trace, those after it were made when it had ended.
        born: first moment at which it is alive, 0 where it is older than the trace.
        died: first moment at which it is gone, events + 1 where it is alive at the dump.
        pool: index of `pools`.
        context: index of `contexts`.
        pools: None where it is unknown.
        contexts: compile contexts; 0 is "", not compiled.
        time_us: of each moment, microseconds since 1970, -1 where unknown (before torch 2.2).
        allocated_bytes: at each moment, requested bytes.
        reserved_bytes: at each moment.
        marks: in order; at most 20,000, of which the newest of failed allocations go first.
        warnings: what a reader of the numbers should know, one sentence each.
    """

    device: int
    events: int
    stacks: Sequence[Sequence[RawFrame]]
    stack: array[int]
    size_bytes: array[int]
    block_bytes: array[int]
    address: array[int]
    traced: range
    born: array[int]
    died: array[int]
    pool: array[int]
    context: array[int]
    pools: Sequence[tuple[int, int] | None]
    contexts: Sequence[str]
    time_us: array[int]
    allocated_bytes: array[int]
    reserved_bytes: array[int]
    marks: tuple[TraceMark, ...]
    warnings: tuple[str, ...]

    @property
    def peak_moment(self) -> int:
        """The first moment at which the most was allocated."""
        return self.allocated_bytes.index(max(self.allocated_bytes))

    def alive(self, moment: int) -> list[int]:
        """Indexes of the allocations that are alive at a moment.

        Raises:
            ValueError: there is no such moment.
        """
        if not 0 <= moment <= self.events:
            raise ValueError(f"moment {moment}: not one of 0 to {self.events}")
        return [
            index
            for start in range(0, len(self.born), PIECE)
            for index in self.alive_among(moment, start)
        ]

    def alive_among(self, moment: int, start: int) -> list[int]:
        """As `alive`, of the 32 allocations from an index on: for work in slices."""
        end = start + PIECE
        pairs = zip(self.born[start:end], self.died[start:end], strict=True)
        return [index for index, (born, died) in enumerate(pairs, start) if born <= moment < died]


def replay_trace(
    device: int,
    segments: Sequence[RawSegment],
    events: Sequence[RawEvent],
    *,
    pause: Pause | None = None,
    frees_have_stacks: bool = False,
) -> Replay:
    """Play a device's trace through, and settle it with the dump at its end.

    Args:
        device: torch's index.
        segments: of this device, as torch wrote them.
        events: its trace, oldest first.
        pause: called every 32 events or blocks.
        frees_have_stacks: the frames of a free are those of its allocation, as torch writes them
            where `context` is not `all` (`context ? context : block->context_when_allocated` in
            the allocator's `free`): so what is older than the trace keeps its stack.

    Raises:
        OverflowError: its sizes add up to more than 64 bits hold.
    """
    player = _Player(segments, pause, frees_have_stacks=frees_have_stacks)
    player.play(events)
    player.settle(len(events))
    return player.result(device, len(events))


class _Lives:
    """Columns of allocations; the names are those of `Replay`.

    Attributes:
        block: only of those that have one, by index.
        context: only of those that have one, by index.
    """

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.size: list[int] = []
        self.block: dict[int, int] = {}
        self.address: list[int] = []
        self.born: list[int] = []
        self.died: list[int] = []
        self.pool: list[int] = []
        self.context: dict[int, int] = {}

    def add(self, size: int, address: int | None, born: int, died: int, pool: int) -> int:
        """One more, without stack and context; its index."""
        self.stack.append(0)
        self.size.append(size)
        self.address.append(address if address is not None and 0 <= address < _UINT64 else 0)
        self.born.append(born)
        self.died.append(died)
        self.pool.append(pool)
        return len(self.size) - 1


class _Player:
    """The state while a trace is played through."""

    def __init__(
        self, segments: Sequence[RawSegment], pause: Pause | None, *, frees_have_stacks: bool
    ) -> None:
        self._segments = segments
        self._pause = pause or no_pause
        self._frees_have_stacks = frees_have_stacks
        self._stacks = StackTable()
        self._pools = Interned(DEFAULT_POOL)
        self._contexts = Interned("")
        self._place = _Places(segments)
        self._pool_at: dict[int | None, int] = {}
        self._before = _Lives()
        self._seen = _Lives()
        self._after = _Lives()
        self._at: dict[int | None, int] = {}  # index of what is alive there, or _GONE
        self._held: list[int] = [0]
        self._reserved: list[int] = [0]
        self._times: list[int] = [-1]
        self._marks: list[TraceMark] = []
        self._marks_left_out = 0
        self._text = RawReader().text
        self._halves = False
        self._overwritten = self._unlike = self._overflown = 0

    # the trace

    def play(self, events: Sequence[RawEvent]) -> None:
        """Two passes over the events; the running totals begin at 0 and are raised by `result`."""
        actions: list[str | None] = []
        for piece in self._pieces(events):
            actions += [event.get("action") for event in piece]
            times = (event.get("time_us") for event in piece)
            self._times += [t if t is not None and 0 <= t < _INT64 else -1 for t in times]
        # some writers keep the second half alone; a single event (record mode `state`)
        # does not show which, and torch writes both
        self._halves = len(events) == 1 or "free_requested" in actions
        if events:
            self._times[0] = self._times[1]
        self._play_segments(events, actions)
        held, moment, add_held = 0, 0, self._held.append
        at, died, sizes = self._at, self._seen.died, self._seen.size
        for piece in self._pieces(events):
            for moment, event in enumerate(piece, moment + 1):  # noqa: B020 - counts on
                action = actions[moment - 1]
                if action == "alloc":
                    held += self._alloc(moment, event)
                elif action in _FREES:
                    address = event.get("addr")
                    index = at.get(address)
                    if index is None:
                        held -= self._free_unseen(moment, event)
                    elif index != _GONE:
                        died[index] = moment
                        at[address] = _GONE
                        held -= sizes[index]
                    # else the second half of a free; or it was allocated and freed since, and that
                    # allocation was not recorded: its time is unknown
                add_held(held)

    def _pieces(self, entries: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """The entries in small pieces, with a pause before each."""
        for start in range(0, len(entries), PIECE):
            self._pause()
            yield entries[start : start + PIECE]

    def _play_segments(self, events: Sequence[RawEvent], actions: Sequence[str | None]) -> None:
        """What is reserved, and the marks."""
        reserved, last, moment = 0, 0, 0
        ooms, others = array("I"), array("I")
        for piece in self._pieces(actions):
            for moment, action in enumerate(piece, moment + 1):  # noqa: B020 - counts on
                if action == "alloc" or action in _FREES:
                    continue
                event = events[moment - 1]
                if action in _GROWS or action in _SHRINKS:
                    self._reserved += [reserved] * (moment - 1 - last)
                    last = moment - 1
                    size = event.get("size") or 0
                    reserved += size if action in _GROWS else -size
                elif action in _MARKS:
                    (ooms if action == "oom" else others).append(moment)
        kept = ooms[-_MAX_MARKS:]
        kept += others[: _MAX_MARKS - len(kept)]
        self._marks = [self._mark(moment, events[moment - 1]) for moment in sorted(kept)]
        self._marks_left_out = len(ooms) + len(others) - len(kept)
        self._reserved += [reserved] * (len(actions) - last)

    def _mark(self, moment: int, event: RawEvent) -> TraceMark:
        action = event.get("action")
        if action == "annotate":
            return TraceMark(moment, action, self._text(event.get("user_metadata")))
        free = maybe_whole(event.get("device_free"))
        size = event.get("size") or 0
        text = f"out of memory: {size} bytes asked for"
        return TraceMark(moment, "oom", text if free is None else f"{text}, {free} free", free)

    def _alloc(self, moment: int, event: RawEvent) -> int:
        """How many bytes more are held."""
        address, size, seen = event.get("addr"), event.get("size") or 0, self._seen
        grown = size
        last = self._at.get(address, _GONE)
        if last != _GONE:  # its free is not in the trace
            self._overwritten += 1
            seen.died[last] = moment
            grown -= seen.size[last]
        index = seen.add(size, address, moment, 0, self._pool(event, address))
        frames = event.get("frames")
        if frames:
            seen.stack[index] = self._stacks.index(frames)
        context = event.get("compile_context")
        if context is not None and context != _NO_CONTEXT:
            seen.context[index] = self._contexts.index(self._text(context))
        self._at[address] = index
        return grown

    def _free_unseen(self, moment: int, event: RawEvent) -> int:
        """Bytes that are given back by the free of an allocation that is not in the trace."""
        if self._halves and event.get("action") == "free_completed":
            return 0  # the second half of a free
        address, size = event.get("addr"), event.get("size") or 0
        self._at[address] = _GONE
        index = self._before.add(size, address, 0, moment, self._pool(event, address))
        # otherwise the frames of a free are those of the code that freed it
        frames = event.get("frames") if self._frees_have_stacks else None
        if frames:
            self._before.stack[index] = self._stacks.index(frames)
        return size

    def _pool(self, event: RawEvent, address: int | None) -> int:
        pool = pool_of(event.get("pool_id")) if "pool_id" in event else None
        if pool is None:
            index = self._pool_at.get(address)
            if index is None:
                index = self._pools.index(self._place.pool(address))
                self._pool_at[address] = index
            return index
        return self._pools.index(pool if max(map(abs, pool)) < _LARGE_POOL_ID else None)

    # the dump

    def settle(self, end: int) -> None:
        """Make the last moment the dump: its allocated blocks are what is alive there."""
        left = self._at
        last = 0
        for count, (segment, block) in enumerate(_allocated_blocks(self._segments)):
            if not count % PIECE:
                self._pause()
            address = _address_of(block)
            requested = requested_of(block)
            index = None if address is None else left.get(address)
            lives, gone = self._seen, index == _GONE
            if index is not None and not gone:
                del left[address]
                if lives.size[index] != requested:
                    last -= lives.size[index]
                    lives.died[index] = end
                    left[address] = _GONE
                    gone = True
            if index is None or gone:
                pool = self._pools.index(pool_of(segment.get("segment_pool_id")) or DEFAULT_POOL)
                # freed in the trace and here again: allocated after the trace had ended
                lives = self._after if gone else self._before
                index = lives.add(requested, address, end if gone else 0, 0, pool)
                last += requested if gone else 0
                self._unlike += gone
                frames = frames_of(block)
                if frames:
                    lives.stack[index] = self._stacks.index(frames)
                    self._overflown += not gone
            lives.block[index] = block["size"]
            lives.died[index] = end + 1
        waiting = set(_waiting_addresses(self._segments))
        for address, index in left.items():
            if index == _GONE:
                continue
            if self._segments:
                last -= self._seen.size[index]
                self._unlike += address not in waiting
            self._seen.died[index] = end if self._segments else end + 1
        self._held[-1] += last

    # the result

    def result(self, device: int, events: int) -> Replay:
        """Everything in columns."""
        parts = (self._before, self._seen, self._after)
        first = len(self._before.size)
        base = sum(self._before.size)
        reserved = sum(map(segment_size, self._segments)) - self._reserved[-1]
        # a trace without its dump knows no more than that it never was less than nothing
        reserved = max(reserved, -min(self._reserved))

        def column(code: str, name: str) -> array[int]:
            values = array(code)
            for part in parts:
                for piece in self._pieces(getattr(part, name)):
                    values += array(code, piece)
            return values

        def raised(by: int, column: Sequence[int]) -> array[int]:
            values = array("q")
            for piece in self._pieces(column):
                values += array("q", [by + value for value in piece])
            return values

        def sparse(code: str, name: str) -> array[int]:
            values = array(code, bytes(array(code).itemsize * sum(len(p.size) for p in parts)))
            start = 0
            for part in parts:
                for index, value in getattr(part, name).items():
                    values[start + index] = value
                start += len(part.size)
            return values

        return Replay(
            device=device,
            events=events,
            stacks=self._stacks.all,
            stack=column("I", "stack"),
            size_bytes=column("Q", "size"),
            block_bytes=sparse("Q", "block"),
            address=column("Q", "address"),
            traced=range(first, first + len(self._seen.size)),
            born=column("I", "born"),
            died=column("I", "died"),
            pool=column("I", "pool"),
            context=sparse("I", "context"),
            pools=self._pools.all,
            contexts=self._contexts.all,
            time_us=array("q", self._times),
            allocated_bytes=raised(base, self._held),
            reserved_bytes=raised(reserved, self._reserved),
            marks=tuple(self._marks),
            warnings=tuple(self._warnings(device, events)),
        )

    def _warnings(self, device: int, events: int) -> Iterator[str]:
        if events == 1:
            yield (
                f"device {device}: the trace holds a single event and is no timeline: record with "
                "torch.cuda.memory._record_memory_history(max_entries=100_000)"
            )
        if self._overflown and events > 1:
            yield (
                f"device {device}: {self._overflown} live blocks were recorded before the first "
                f"event in the trace: its ring of {events} events was full, or was cleared"
            )
        if self._overwritten:
            yield (
                f"device {device}: {self._overwritten} allocations at addresses that were in use: "
                "their frees are not in the trace"
            )
        if self._unlike:
            yield (
                f"device {device}: {self._unlike} blocks of the dump are not as the trace left "
                "them: recording had ended before"
            )
        if self._marks_left_out:
            yield (
                f"device {device}: {self._marks_left_out} of "
                f"{self._marks_left_out + len(self._marks)} failed allocations and annotations "
                "are left out of the timeline"
            )


class _Places:
    """Pools by address, for events without one (before torch 2.12)."""

    def __init__(self, segments: Sequence[RawSegment]) -> None:
        ranges = sorted(
            (
                start,
                start + segment_size(segment),
                pool_of(segment.get("segment_pool_id")) or DEFAULT_POOL,
            )
            for segment in segments
            if (start := maybe_whole(segment.get("address"))) is not None
        )
        self._starts = [start for start, _, _ in ranges]
        self._ends = [end for _, end, _ in ranges]
        self._pools = [pool for _, _, pool in ranges]

    def pool(self, address: int | None) -> tuple[int, int] | None:
        """The pool of the segment there at the dump; None: it is gone, or was never recorded."""
        if address is None:
            return None
        index = bisect_right(self._starts, address) - 1
        return self._pools[index] if index >= 0 and address < self._ends[index] else None


def _allocated_blocks(segments: Sequence[RawSegment]) -> Iterator[tuple[RawSegment, RawBlock]]:
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield segment, block


def _waiting_addresses(segments: Sequence[RawSegment]) -> Iterator[int | None]:
    """Blocks that are freed, and wait for another stream."""
    for segment in segments:
        for block in segment["blocks"]:
            if state_of(block["state"]) is BlockState.ACTIVE_PENDING_FREE:
                yield _address_of(block)


def _address_of(block: RawBlock) -> int | None:
    """Torch 2.0 keeps it in the history alone; before that there is none."""
    address = block.get("address")
    if address is not None:
        return address
    history = block.get("history")
    return maybe_whole(history[0].get("addr")) if history else None
