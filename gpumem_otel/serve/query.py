"""The query of `/debug/pprof/gpumem`, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpumem_otel.core.model import ProfileKind

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MAX_SECONDS", "ProfileQuery", "profile_query"]

MAX_SECONDS: Final = 300.0
"""Longest window that `?seconds=` may ask for."""

_MAX_DEVICE: Final = 1023

_SERVED: Final = tuple(ProfileKind)
_OF_A_MOMENT: Final = frozenset({ProfileKind.LIVE, ProfileKind.PINNED, ProfileKind.GROWTH})


@dataclass(frozen=True, slots=True)
class ProfileQuery:
    """What a reader asked for.

    Attributes:
        device: index, None for all devices.
        seconds: length of the window, None where the reader does not say.
    """

    kind: ProfileKind
    device: int | None
    seconds: float | None

    @property
    def of_a_window(self) -> bool:
        """Whether events are recorded for it, which takes as long as they are."""
        return self.kind not in _OF_A_MOMENT


def profile_query(items: Iterable[tuple[str, str]]) -> ProfileQuery:
    """Read `kind`, `device` and `seconds`; other names are left alone, as Go's handlers do.

    `seconds` without a kind asks for the allocations of that window, which is Go's convention.

    Raises:
        ValueError: a value that can not be used; one line that says what can.
    """
    found: dict[str, str] = {}
    for name, value in items:
        if name in {"kind", "device", "seconds"}:
            if name in found:
                raise ValueError(f"{name} is given twice")
            found[name] = value
    seconds = _seconds(found["seconds"]) if "seconds" in found else None
    fallback = ProfileKind.LIVE if seconds is None else ProfileKind.ALLOCATED
    kind = _kind(found["kind"]) if "kind" in found else fallback
    if kind in _OF_A_MOMENT and seconds is not None:
        raise ValueError(
            "seconds goes with kind=allocated and kind=peak: "
            f"a profile of kind {kind.value} is of one moment"
        )
    device = _device(found["device"]) if "device" in found else None
    return ProfileQuery(kind, device, seconds)


def _kind(text: str) -> ProfileKind:
    for kind in _SERVED:
        if text == kind.value:
            return kind
    raise ValueError(f"kind must be one of {', '.join(kind.value for kind in _SERVED)}")


def _device(text: str) -> int:
    # No int() first: it takes signs, spaces, underscores and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_DEVICE))):
        raise ValueError(f"device must be a number from 0 to {_MAX_DEVICE}")
    device = int(text)
    if device > _MAX_DEVICE:
        raise ValueError(f"device must be a number from 0 to {_MAX_DEVICE}")
    return device


def _seconds(text: str) -> float:
    refusal = f"seconds must be a number above 0 and at most {MAX_SECONDS:g}"
    if not text.isascii() or "_" in text:
        raise ValueError(refusal)
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(refusal) from None
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_SECONDS):
        raise ValueError(refusal)
    return seconds
