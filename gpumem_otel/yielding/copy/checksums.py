"""Checksums of storages, computed on the device with integer sums that wrap at 64 bits.

For each slice: the sum of its words, and the sum of its words times odd weights that rise with the
position. A changed word changes the first sum, swapped words change the second. Slices are small,
so that the working memory fits on a full device.

Limits: two changes may cancel out; this detects faulty copies, not forgeries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD: Final = 8
_SLICE_WORDS: Final = (16 << 20) // _WORD
_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def checksums(torch: Any, views: Sequence[Any]) -> list[int]:
    """One checksum for each byte tensor; all are on one device."""
    counts = [-(-view.numel() // (_SLICE_WORDS * _WORD)) for view in views]
    if not sum(counts):
        return [0] * len(views)
    device = next(view for view in views if view.numel()).device
    longest = min(max(view.numel() for view in views) // _WORD + 1, _SLICE_WORDS)
    weights = torch.arange(longest, dtype=torch.int64, device=device).mul_(2).add_(1)
    room = torch.empty(longest, dtype=torch.int64, device=device)
    sums = torch.zeros(2, sum(counts), dtype=torch.int64, device=device)
    at = 0
    for view, count in zip(views, counts, strict=True):
        for number in range(count):
            start = number * _SLICE_WORDS * _WORD
            words = _words(torch, view[start : start + _SLICE_WORDS * _WORD])
            length = words.numel()
            sums[0, at] = words.sum()
            sums[1, at] = torch.mul(words, weights[:length], out=room[:length]).sum()
            at += 1
    plain, weighted = sums.tolist()
    results, at = [], 0
    for view, count in zip(views, counts, strict=True):
        value = view.numel()
        for first, second in zip(plain[at : at + count], weighted[at : at + count], strict=True):
            value = ((value * _MIX + first) * _MIX + second) & _MASK
        results.append(value)
        at += count
    return results


def _words(torch: Any, part: Any) -> Any:
    """As 8-byte words; the last is padded with zeros."""
    tail = part.numel() % _WORD
    if not tail:
        return part.view(torch.int64)
    whole = torch.zeros(part.numel() + _WORD - tail, dtype=torch.uint8, device=part.device)
    whole[: part.numel()].copy_(part)
    return whole.view(torch.int64)
