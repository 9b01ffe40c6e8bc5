"""The peak of a recorded window: what was alive at its highest moment, by stack.

Sizes are requested bytes, since a trace holds no others; so the total never is above the
allocator's own peak, which counts rounded blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_otel.base.aggregate import add, samples_of
from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sizes
from gpumem_otel.snapshot.roots import builder_for, recorded_root
from gpumem_otel.snapshot.stacks import BEFORE_INSTALL, NO_PYTHON_FRAME, PEAK_NOT_RECORDED
from gpumem_otel.snapshot.tensor_classes import CLASS_LABEL, TensorClass, class_of_root
from gpumem_otel.snapshot.trace import PIECE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpumem_otel.base.aggregate import Labels, Totals
    from gpumem_otel.base.profile import DeviceStats, Stack
    from gpumem_otel.base.protocols import FrameNamer, Pause
    from gpumem_otel.snapshot.reading import Reading
    from gpumem_otel.snapshot.tensor_classes import ClassAs, Classifier
    from gpumem_otel.snapshot.torch_format import RawBlock
    from gpumem_otel.snapshot.trace import Replay

_EVERY = 32
_LONGEST_NS = 3600 * 10**9
"""Of a window: an interval is never longer."""
_REQUESTED = "sizes are requested bytes, before the allocator rounds them"


@dataclass(frozen=True, slots=True)
class PeakCounter:
    """The allocator's own peak of requested bytes, next to that of a window.

    Attributes:
        before_bytes: the counter when the profile before this one was made, 0 where there was none.
        now: the counters of the device; None where they are not known.
    """

    before_bytes: int = 0
    now: DeviceStats | None = None

    def reached_bytes(self) -> int:
        """The highest moment since the profile before, where the counter shows it, else 0.

        A counter that has not moved proves nothing: an earlier moment was higher. One that has
        fallen was reset by the job meanwhile, and has counted again since. The counter of requested
        bytes goes on counting what is freed and waits for another stream; so it is held against
        that of allocated bytes, which does not.
        """
        if self.now is None or self.now.requested_peak_bytes == self.before_bytes:
            return 0
        return min(self.now.requested_peak_bytes, self.now.allocated_peak_bytes)


def window_peak(
    reading: Reading,
    device: int,
    *,
    namer: FrameNamer,
    counter: PeakCounter,
    comments: tuple[str, ...] = (),
    pause: Pause | None = None,
    max_depth: int = 512,
    class_as: ClassAs | None = "root",
) -> HeapProfile:
    """What was alive at the highest moment of a window that was recorded with its frees.

    Args:
        reading: of the window, whose frees carry the stacks of their allocations.
        device: torch's index.
        namer: names Python frames.
        counter: where it has reached more since the profile before, the difference is
            `[peak not recorded]`: it was reached outside of this window.
        comments: sentences about the window.
        pause: called every few dozen events or allocations.
        max_depth: frames per stack; the middle is cut.
        class_as: where the tensor class stands; None: nowhere.

    Raises:
        SnapshotError: the sizes in the trace are no sizes.
    """
    replay = reading.snapshot.replay(device, pause=pause, frees_have_stacks=True)
    moment = replay.peak_moment
    highest = replay.allocated_bytes[moment]
    totals = _totals(reading, replay, moment, namer, pause, max_depth, class_as)
    missed = max(counter.reached_bytes() - highest, 0)
    if missed:
        add(totals, ((Frame(PEAK_NOT_RECORDED),), ()), 0, missed)
    sentences = [_REQUESTED, *comments, f"highest moment of the window: {highest} bytes"]
    now = counter.now
    if now is not None:
        sentences.append(
            f"the allocator's own peak: {now.requested_peak_bytes} bytes requested, "
            f"{now.allocated_peak_bytes} in its blocks"
        )
    if missed:
        sentences.append(
            f"{PEAK_NOT_RECORDED}: since the profile before this one the allocator has held "
            f"{missed} bytes more, outside of the window"
        )
    return HeapProfile(
        ProfileKind.PEAK,
        device,
        samples_of(totals, pause),
        _time_of(replay, moment, reading.time_ns),
        comments=tuple(sentences),
        sizes=Sizes.REQUESTED,
    )


def _time_of(replay: Replay, moment: int, read_ns: int) -> int:
    """When the moment was; where torch's clock is implausible, when it was read."""
    time_ns = replay.time_us[moment] * 1000
    return time_ns if read_ns - _LONGEST_NS <= time_ns <= read_ns else read_ns


def _totals(  # noqa: PLR0917
    reading: Reading,
    replay: Replay,
    moment: int,
    namer: FrameNamer,
    pause: Pause | None,
    max_depth: int,
    class_as: ClassAs | None,
) -> Totals:
    classifier = None if class_as is None else reading.classifier
    as_root = classifier is not None and class_as == "root"
    builder = builder_for(reading.snapshot, namer, max(max_depth - as_root, 1))
    classes = _Classes(replay, classifier)
    groups: dict[tuple[int, str, TensorClass | None], list[int]] = {}
    for index in _alive(replay, moment, pause):
        stack = replay.stack[index]
        root = "" if stack else _root(reading, replay, index)
        key = (stack, root, classes.of(index, root))
        entry = groups.get(key)
        if entry is None:
            entry = groups[key] = [0, 0]
        entry[0] += 1
        entry[1] += replay.size_bytes[index]
    totals: Totals = {}
    for (number, root, tensor_class), (objects, size) in groups.items():
        shown: Stack = builder.root(root) if root else builder.build(replay.stacks[number])
        labels: Labels = ()
        if tensor_class is not None and as_root:
            shown = (*shown, Frame(tensor_class.value))
        elif tensor_class is not None:
            labels = ((CLASS_LABEL, tensor_class.value),)
        add(totals, (shown, labels), objects, size)
        if pause is not None:
            pause()
    return totals


def _alive(replay: Replay, moment: int, pause: Pause | None) -> Iterator[int]:
    for start in range(0, len(replay.born), PIECE):
        for count, index in enumerate(replay.alive_among(moment, start)):
            if pause is not None and not count % _EVERY:
                pause()
            yield index


def _root(reading: Reading, replay: Replay, index: int) -> str:
    address = replay.address[index] or None
    if index >= replay.traced.start:
        return recorded_root(reading.stackless, replay.device, address)
    if reading.stackless_blocks is None:
        return BEFORE_INSTALL
    return reading.stackless_blocks(replay.device, address) or NO_PYTHON_FRAME


class _Classes:
    """Classes of allocations, by address where they still live at the end, else by stack.

    An address table is of this moment: another storage may have had the address before.
    """

    def __init__(self, replay: Replay, classifier: Classifier | None) -> None:
        self._replay = replay
        self._classifier = classifier
        self._by_stack: dict[int, TensorClass] = {}

    def of(self, index: int, root: str) -> TensorClass | None:
        """None where nothing tells classes here."""
        classifier, replay = self._classifier, self._replay
        if classifier is None:
            return None
        if replay.died[index] > replay.events:
            known = classifier.of_block(_block(replay, index))
            if known is not None:
                return known
        if root:
            return class_of_root(root)
        stack = replay.stack[index]
        tensor_class = self._by_stack.get(stack)
        if tensor_class is None:
            tensor_class = self._by_stack[stack] = classifier.of_stack(replay.stacks[stack])
        return tensor_class


def _block(replay: Replay, index: int) -> RawBlock:
    return {
        "address": replay.address[index],
        "requested_size": replay.size_bytes[index],
        "size": replay.block_bytes[index],
        "state": "active_allocated",
    }
