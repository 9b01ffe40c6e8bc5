"""Accounts for what each line of code did to the memory of each device.

Input are moments (a line begins, a function is entered or left) with the counters at that moment.
The interval between two moments belongs to one line of each running function:

* what a line allocates is counted for the line itself and for every line that called it, as in a
  `line_profiler`; the tree of calls keeps what is a line's own, so that a flame graph adds up;
* devices have one allocator for all threads, so what other threads do meanwhile counts too;
* a suspended generator or coroutine does not run, and nothing is counted for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.snapshot.stacks import cut_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALLOCATED: Final = "allocated_bytes.all.current"
PEAK: Final = "allocated_bytes.all.peak"
ACTIVE_PEAK: Final = "active_bytes.all.peak"
RESERVED_PEAK: Final = "reserved_bytes.all.peak"
ALLOCATION_BYTES: Final = "allocated_bytes.all.allocated"
ALLOCATION_COUNT: Final = "allocation.all.allocated"

BASE_COLUMNS: Final = (
    ALLOCATED,
    PEAK,
    ACTIVE_PEAK,
    RESERVED_PEAK,
    ALLOCATION_BYTES,
    ALLOCATION_COUNT,
)
"""Counters that are always read, named as in `torch.cuda.memory_stats()`; others follow them."""

_ALLOCATED, _PEAK, _BYTES, _COUNT = 0, 1, 4, 5

MAX_NODES: Final = 10_000
"""Distinct chains of calls that are kept; any further one counts for its caller."""

_MAX_DEPTH: Final = 512
"""Frames of a stack in a profile; a deeper recursion is cut in the middle."""

Moment: TypeAlias = "Mapping[int, Sequence[int]]"
"""Device -> counters in the order of the columns; a `.peak` is that since the last moment."""


@dataclass(frozen=True, slots=True)
class LineUse:
    """What all executions of one line did on one device.

    Attributes:
        after_bytes: allocated after the line, in the execution that left most.
        last_bytes: allocated after its last execution.
        net_bytes: allocated after minus before, over all executions: what the line left behind.
        peak_bytes: the most that was allocated while it ran.
        peak_rise_bytes: the largest difference between the peak of an execution and what was
            allocated before it.
        allocation_bytes: allocated by it and what it called, over all executions; as the
            allocator rounds, freed or not.
        allocations: how many allocations that were.
        columns: torch's name -> the largest value in any execution: of a `.current` after it, of
            a `.peak` while it ran, of an `.allocated` or `.freed` what the execution added.
        shown: the device was the one to show (`set_target_gpu`) when the line ran.
    """

    after_bytes: int
    last_bytes: int
    net_bytes: int
    peak_bytes: int
    peak_rise_bytes: int
    allocation_bytes: int
    allocations: int
    columns: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    shown: bool = True


@dataclass(frozen=True, slots=True)
class LineRow:
    """One line of source that ran.

    Attributes:
        hits: how often; for the first line of a function how often it was called.
        devices: what it did, by device.
    """

    line: int
    hits: int
    devices: Mapping[int, LineUse]


@dataclass(frozen=True, slots=True)
class FunctionLines:
    """The lines of one function, in order.

    Attributes:
        name: qualified name.
        source: its lines of text from `first_line` on, () where they cannot be found.
        rows: the lines that ran.
    """

    name: str
    module: str
    filename: str
    first_line: int
    calls: int
    rows: tuple[LineRow, ...]
    source: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """Module and qualified name, as flame graphs show functions."""
        return f"{self.module}.{self.name}" if self.module else self.name


class _Use:
    """Totals of one line on one device."""

    __slots__ = ("allocation_bytes", "allocations", "high", "last", "net", "rise", "shown")

    def __init__(self, width: int) -> None:
        self.high = [0] * width
        self.last = self.net = self.rise = self.allocation_bytes = self.allocations = 0
        self.shown = False


class _Line:
    __slots__ = ("devices", "hits")

    def __init__(self) -> None:
        self.hits = 0
        self.devices: dict[int, _Use] = {}


class _Activation:
    """A running function in one thread, and the interval of its current line.

    Attributes:
        entered: counters when the function was entered; `before`, when its current line began.
        peaks: by device, of the current line; `high`, of all lines that have ended.
        called: device -> [allocations, bytes] of what the current line called.
        is_call: no line has begun since the call.
    """

    __slots__ = (
        "before", "called", "entered", "function", "high", "is_call", "line", "node", "peaks"
    )  # fmt: skip

    def __init__(self, function: int, line: int, node: int, now: Moment) -> None:
        self.function = function
        self.line = line
        self.node = node
        self.entered = self.before = now
        self.peaks: dict[int, list[int]] = {}
        self.high: dict[int, list[int]] = {}
        self.called: dict[int, list[int]] = {}
        self.is_call = False


class LineAccounts:
    """Totals by function and line. Not safe from several threads at once: the caller locks.

    Args:
        columns: names of the counters in a `Moment`; begins with `BASE_COLUMNS`.
        max_nodes: see `MAX_NODES`.

    Attributes:
        target: the device to show; None: all.
    """

    def __init__(self, columns: Sequence[str] = BASE_COLUMNS, max_nodes: int = MAX_NODES) -> None:
        self.columns = tuple(columns)
        self.target: int | None = None
        kinds = [name.rpartition(".")[2] for name in self.columns]
        self._peaks = [i for i, kind in enumerate(kinds) if kind == "peak"]
        self._counts = [i for i, kind in enumerate(kinds) if kind in {"allocated", "freed"}]
        self._states = [
            i for i in range(len(kinds)) if i not in self._peaks and i not in self._counts
        ]
        self._max_nodes = max_nodes
        self._stacks: dict[int, list[_Activation]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what was counted; running functions are counted again from their next line on."""
        self._stacks.clear()
        self._lines: dict[int, dict[int, _Line]] = {}
        self._calls: dict[int, int] = {}
        self._nodes: dict[tuple[int, int, int], int] = {}
        self._own: list[dict[int, list[int]]] = []

    def enter(self, thread: int, function: int, line: int, now: Moment, *, call: bool) -> None:
        """A function begins (`call`) or goes on after it was suspended."""
        self._raise_peaks(now)
        stack = self._stacks.setdefault(thread, [])
        if call:
            self._calls[function] = self._calls.get(function, 0) + 1
            self._hit(function, line)
        node = self._node(stack[-1].node if stack else -1, function, line)
        stack.append(_Activation(function, line, node, now))
        stack[-1].is_call = call

    def line(self, thread: int, function: int, line: int, now: Moment) -> None:
        """A line begins; the one before it in this function has ended."""
        stack = self._stacks.get(thread)
        if not stack or stack[-1].function != function:
            self.enter(thread, function, line, now, call=False)  # it ran before profiling began
            self._hit(function, line)
            return
        self._raise_peaks(now)
        top = stack[-1]
        is_call, top.is_call = top.is_call, False
        if is_call and line == top.line:
            return  # a function of one line, which is its call and its body
        self._close(top, now)
        top.line, top.before, top.peaks, top.called = line, now, {}, {}
        top.node = self._node(stack[-2].node if len(stack) > 1 else -1, function, line)
        self._hit(function, line)

    def leave(self, thread: int, function: int, now: Moment) -> None:
        """A function returns, raises or is suspended."""
        stack = self._stacks.get(thread)
        if not stack or stack[-1].function != function:
            return
        self._raise_peaks(now)
        self._pop(thread, stack, now)

    def drop(self, thread: int, now: Moment) -> None:
        """No function runs in this thread any more."""
        stack = self._stacks.get(thread)
        self._raise_peaks(now)
        while stack:
            self._pop(thread, stack, now)

    def open_threads(self) -> tuple[int, ...]:
        """Threads in which a function runs."""
        return tuple(self._stacks)

    def calls(self, function: int) -> int:
        """How often a function was called."""
        return self._calls.get(function, 0)

    def rows(self, function: int) -> tuple[LineRow, ...]:
        """The lines of one function that ran, in order."""
        return tuple(
            LineRow(
                number,
                line.hits,
                MappingProxyType({d: self._use(use) for d, use in sorted(line.devices.items())}),
            )
            for number, line in sorted(self._lines.get(function, {}).items())
        )

    def chains(self) -> dict[tuple[tuple[int, int], ...], dict[int, tuple[int, int]]]:
        """Chain of (function, line), innermost first -> device -> own (allocations, bytes)."""
        keys = list(self._nodes)
        chains = {}
        for key, own in zip(keys, self._own, strict=True):
            if not own:
                continue
            (parent, *line), chain = key, []
            while True:
                chain.append((line[0], line[1]))
                if parent < 0:
                    break
                parent, *line = keys[parent]
            chains[tuple(chain)] = {d: (count, size) for d, (count, size) in own.items()}
        return chains

    def _use(self, use: _Use) -> LineUse:
        return LineUse(
            after_bytes=use.high[_ALLOCATED],
            last_bytes=use.last,
            net_bytes=use.net,
            peak_bytes=use.high[_PEAK],
            peak_rise_bytes=use.rise,
            allocation_bytes=use.allocation_bytes,
            allocations=use.allocations,
            columns=MappingProxyType(dict(zip(self.columns, use.high, strict=True))),
            shown=use.shown,
        )

    def _hit(self, function: int, line: int) -> None:
        lines = self._lines.setdefault(function, {})
        lines.setdefault(line, _Line()).hits += 1

    def _node(self, parent: int, function: int, line: int) -> int:
        key = (parent, function, line)
        if key not in self._nodes:
            if len(self._nodes) >= self._max_nodes:
                return parent
            self._nodes[key] = len(self._nodes)
            self._own.append({})
        return self._nodes[key]

    def _raise_peaks(self, now: Moment) -> None:
        """Count the peak since the last moment for the innermost line of every thread."""
        for stack in self._stacks.values():
            _raise_to(stack[-1].peaks, now, self._peaks)

    def _pop(self, thread: int, stack: list[_Activation], now: Moment) -> None:
        callee = stack.pop()
        self._close(callee, now)
        if not stack:
            del self._stacks[thread]
            return
        caller = stack[-1]
        _raise_to(caller.peaks, callee.high, self._peaks)
        for device, values in now.items():
            before = callee.entered.get(device)
            called = caller.called.setdefault(device, [0, 0])
            called[0] += _growth(before, values, _COUNT)
            called[1] += _growth(before, values, _BYTES)

    def _close(self, activation: _Activation, now: Moment) -> None:
        """Count the interval of the activation's current line, which ends now."""
        lines = self._lines.setdefault(activation.function, {})
        devices = lines.setdefault(activation.line, _Line()).devices
        for device, values in now.items():
            use = devices.get(device)
            if use is None:
                use = devices[device] = _Use(len(self.columns))
            before = activation.before.get(device)
            high, peaks = use.high, activation.peaks.get(device, values)
            for i in self._states:
                high[i] = max(high[i], values[i])
            for i in self._peaks:
                high[i] = max(high[i], peaks[i])
            for i in self._counts:
                high[i] = max(high[i], _growth(before, values, i))
            allocated_before = before[_ALLOCATED] if before is not None else 0
            count, size = _growth(before, values, _COUNT), _growth(before, values, _BYTES)
            use.last = values[_ALLOCATED]
            use.net += values[_ALLOCATED] - allocated_before
            use.rise = max(use.rise, peaks[_PEAK] - allocated_before)
            use.allocations += count
            use.allocation_bytes += size
            use.shown = use.shown or self.target is None or self.target == device
            called = activation.called.get(device, (0, 0))
            count, size = max(0, count - called[0]), max(0, size - called[1])
            if activation.node >= 0 and (count or size):
                own = self._own[activation.node].setdefault(device, [0, 0])
                own[0] += count
                own[1] += size
        _raise_to(activation.high, activation.peaks, self._peaks)


def _raise_to(maxima: dict[int, list[int]], values: Moment, columns: Sequence[int]) -> None:
    for device, row in values.items():
        maximum = maxima.get(device)
        if maximum is None:
            maxima[device] = list(row)
        else:
            for i in columns:
                maximum[i] = max(maximum[i], row[i])


def _growth(before: Sequence[int] | None, after: Sequence[int], column: int) -> int:
    """What a counter has grown by; where it was reset meanwhile, since then."""
    start = before[column] if before is not None else 0
    return after[column] - start if after[column] >= start else after[column]


def line_profiles(
    functions: Mapping[int, FunctionLines],
    chains: Mapping[tuple[tuple[int, int], ...], Mapping[int, tuple[int, int]]],
    time_ns: int = 0,
) -> tuple[HeapProfile, ...]:
    """What profiled lines allocated, one profile per device; each frame is a line.

    Bytes count once, for the innermost profiled line; the total is the growth of the allocator's
    counter over the outermost calls.

    Args:
        functions: by their numbers in the chains.
        chains: `LineAccounts.chains`.
        time_ns: when it was asked for, nanoseconds since 1970.
    """
    samples: dict[int, list[Sample]] = {}
    for chain, devices in chains.items():
        frames = tuple(
            Frame(f"{functions[number].full_name}:{line}", functions[number].filename, line)
            for number, line in chain
        )
        if len(frames) > _MAX_DEPTH:
            half = _MAX_DEPTH // 2
            cut = Frame(cut_name(len(frames) - _MAX_DEPTH + 1))
            frames = (*frames[:half], cut, *frames[half - _MAX_DEPTH + 1 :])
        for device, (count, size) in devices.items():
            samples.setdefault(device, []).append(Sample(frames, count, size))
    return tuple(
        HeapProfile(
            ProfileKind.ALLOCATED,
            device,
            tuple(sorted(samples[device], key=lambda s: (-s.size_bytes, s.frames[0].name))),
            time_ns=time_ns,
            comments=("allocated by profiled lines, as the allocator rounds; freed or not",),
        )
        for device in sorted(samples)
    )
