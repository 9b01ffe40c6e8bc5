"""Torch's raw snapshot, key by key: types, and which keys each version lacks.

Torch's live objects are read as they are, so that a read-out costs nothing per block beyond what
it needs; files go through `validate` first.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, TypedDict

from gpumem_otel.base.profile import BlockState, Frame

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_POOL = (0, 0)
"""All other pools are private: of CUDA graphs, or of `torch.cuda.MemPool`."""

ROOT_KEYS = frozenset({"segments", "device_traces"})
"""A dict with neither is no snapshot."""

MAX_TEXT = 4096
"""Characters; Linux has no longer paths."""

_INT64_MAX = 2**63 - 1
_PIECE = 1 << 16
_UINT64 = 2**64
_ALLOCATED = "active_allocated"


class RawFrame(TypedDict, total=False):
    """One frame; `fx_*` keys from torch 2.10 are not read."""

    name: str
    filename: str
    line: int


class RawHistory(TypedDict, total=False):
    """What torch 1.13 and 2.0 keep of a block's past; entry 0 is the present."""

    addr: int
    real_size: int
    frames: Sequence[RawFrame]


class _BlockNeeds(TypedDict):
    size: int
    state: str


class RawBlock(_BlockNeeds, total=False):
    """A block; address and frames from torch 2.1, requested_size from 2.0."""

    address: int
    requested_size: int
    frames: Sequence[RawFrame]
    history: Sequence[RawHistory]
    tensor_class: str
    """Only in recordings of ours."""


class _SegmentNeeds(TypedDict):
    device: int
    blocks: Sequence[RawBlock]


class RawSegment(_SegmentNeeds, total=False):
    """A segment; pool and is_expandable from torch 2.1."""

    address: int
    total_size: int
    stream: int
    segment_type: str
    segment_pool_id: tuple[int, int]
    is_expandable: bool
    frames: Sequence[RawFrame]


class RawEvent(TypedDict, total=False):
    """A trace entry; `oom` has device_free and no addr."""

    action: str
    addr: int
    size: int
    stream: int
    time_us: int
    device_free: int
    frames: Sequence[RawFrame]
    compile_context: str
    user_metadata: str
    pool_id: tuple[int, int]


def whole(value: object) -> int:
    """The number, 0 for anything else, and for what is longer than torch's 64 bits."""
    return value if isinstance(value, int) and -_UINT64 < value < _UINT64 else 0


def maybe_whole(value: object) -> int | None:
    """The number, None for anything else, and for what is longer than torch's 64 bits."""
    return value if isinstance(value, int) and -_UINT64 < value < _UINT64 else None


def text(value: object) -> str:
    """The string, in what UTF-8 can hold; "" for anything else (a nest may be endless to print).

    Of a very long one both ends and a checksum that keeps it apart from others: a file may hold it
    once and name it a million times. See `RawReader`, which makes it once.
    """
    if not isinstance(value, str):
        return ""
    if len(value) > MAX_TEXT:
        value = _shortened(value)
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def pool_of(value: object) -> tuple[int, int] | None:
    """A pool id (a tuple, in JSON a list), None where it is none."""
    if isinstance(value, tuple | list) and len(value) == 2:  # noqa: PLR2004
        first, second = map(maybe_whole, value)
        if first is not None and second is not None:
            return (first, second)
    return None


def device_of(segment: RawSegment) -> int:
    """Torch's device index."""
    return segment["device"]


def frames_of(block: RawBlock) -> Sequence[RawFrame]:
    """The stack of a block that is not inactive, leaf first.

    Torch 1.13 and 2.0 keep stacks in a history, of which entry 0 is the allocation that lives.
    """
    frames = block.get("frames")
    if frames:
        return frames
    history = block.get("history")
    return (history[0].get("frames") or ()) if history else ()


def requested_of(block: RawBlock) -> int:
    """What was asked for; of an inactive block it is stale and means nothing."""
    size = block.get("requested_size")
    if size is not None:
        return size
    history = block.get("history")
    real = history[0].get("real_size") if history else None
    return block["size"] if real is None else real


def state_of(word: str) -> BlockState:
    """A state; torch's documentation says active_awaiting_free for active_pending_free."""
    if word == _ALLOCATED:
        return BlockState.ACTIVE_ALLOCATED
    if word.startswith("active"):
        return BlockState.ACTIVE_PENDING_FREE
    return BlockState.INACTIVE


def reserved_of(segment: RawSegment, blocks_bytes: int) -> int:
    """Size of a segment whose blocks hold so much; never less than these."""
    size = segment.get("total_size")
    return blocks_bytes if size is None or size < blocks_bytes else size


def segment_size(segment: RawSegment) -> int:
    """Size of a segment."""
    return reserved_of(segment, sum(block["size"] for block in segment["blocks"]))


class RawReader:
    """Text and stacks out of one snapshot, which lives longer; each distinct one is made once."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._frames: dict[int, Frame] = {}
        self._stacks: dict[int, tuple[Frame, ...]] = {}

    def text(self, value: object) -> str:
        """See `text`."""
        if not isinstance(value, str):
            return ""
        if len(value) <= MAX_TEXT and value.isascii():
            return value
        known = self._texts.get(value)
        if known is None:
            known = self._texts[value] = text(value)
        return known

    def maybe_text(self, value: object) -> str | None:
        """As `text`, None where there is no value."""
        return None if value is None else self.text(value)

    def stack(self, frames: Sequence[RawFrame] | None) -> tuple[Frame, ...]:
        """Frames as objects, names as recorded; a line that does not fit 64 bits becomes 0."""
        if not frames:
            return ()
        known = self._stacks.get(id(frames))
        if known is None:
            known = self._stacks[id(frames)] = tuple(map(self._frame, frames))
        return known

    def _frame(self, raw: RawFrame) -> Frame:
        known = self._frames.get(id(raw))
        if known is None:
            name, filename = self.text(raw.get("name")), self.text(raw.get("filename"))
            known = self._frames[id(raw)] = Frame(name, filename, _line(raw.get("line")))
        return known


def _shortened(value: str) -> str:
    checksum = 0
    for start in range(0, len(value), _PIECE):
        piece = value[start : start + _PIECE].encode("utf-8", "surrogatepass")
        checksum = zlib.crc32(piece, checksum)
    mark = f"[...{checksum:08x}...]"
    half = (MAX_TEXT - len(mark)) // 2
    return value[:half] + mark + value[-half:]


def _line(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= _INT64_MAX else 0
