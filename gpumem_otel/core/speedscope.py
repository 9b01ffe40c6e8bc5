"""Heap profiles in the file format of speedscope.

Format: https://www.speedscope.app/file-format-schema.json. Of the two kinds of profile it knows,
`sampled` has what we have: stacks, root first, and a weight for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpumem_otel.core.model import HeapProfile, ProfileKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.core.model import Frame

__all__ = ["SCHEMA", "speedscope_form"]

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope_form(
    profiles: Sequence[HeapProfile],
    *,
    name: str,
    exporter: str,
    kind: ProfileKind = ProfileKind.LIVE,
) -> dict[str, Any]:
    """Plain objects for `json.dumps`; weights are bytes.

    Args:
        profiles: one per device; they share their table of frames.
        name: of the file, shown as its title.
        exporter: the program that wrote it, with its version.
        kind: what to call an empty profile where there is none: speedscope opens no file without.
    """
    indexes: dict[Frame, int] = {}
    shown = [_profile(one, indexes) for one in profiles or (HeapProfile(kind, 0, ()),)]
    return {
        "$schema": SCHEMA,
        "shared": {"frames": [_frame(frame) for frame in indexes]},
        "profiles": shown,
        "name": name,
        "activeProfileIndex": 0,
        "exporter": exporter,
    }


def _profile(profile: HeapProfile, indexes: dict[Frame, int]) -> dict[str, Any]:
    return {
        "type": "sampled",
        "name": f"device {profile.device}, {profile.kind.value}",
        "unit": "bytes",
        "startValue": 0,
        "endValue": profile.total_bytes,
        "samples": [
            [indexes.setdefault(frame, len(indexes)) for frame in reversed(sample.frames)]
            for sample in profile.samples
        ],
        "weights": [sample.size_bytes for sample in profile.samples],
    }


def _frame(frame: Frame) -> dict[str, Any]:
    form: dict[str, Any] = {"name": frame.name}
    if frame.filename:
        form["file"] = frame.filename
        if frame.line:
            form["line"] = frame.line
    return form
