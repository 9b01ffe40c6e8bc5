r"""Folded stacks (flamegraph.pl, speedscope, inferno) and a JSON form of heap profiles.

One line per stack, root first, frames joined by ";", then a blank and the value. That form has no
escapes of its own, and its readers split at every ";", at every newline, and take a second number
before the value for the other side of a comparison: names that hold such things are written with
`\xNN` in their place.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.profile import HeapProfile, ProfileKind
from gpumem_otel.snapshot.grouping import Interned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpumem_otel.base.profile import Frame

# Heap profiles in the file format of speedscope.
#
# Format: https://www.speedscope.app/file-format-schema.json. Of the two kinds of profile it knows,
# `sampled` has what we have: stacks, root first, and a weight for each.

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
    frames = Interned()
    shown = [_profile(one, frames) for one in profiles or (HeapProfile(kind, 0, ()),)]
    return {
        "$schema": SCHEMA,
        "shared": {"frames": [_frame(frame) for frame in frames.all]},
        "profiles": shown,
        "name": name,
        "activeProfileIndex": 0,
        "exporter": exporter,
    }


def _profile(profile: HeapProfile, frames: Interned) -> dict[str, Any]:
    return {
        "type": "sampled",
        "name": f"device {profile.device}, {profile.kind.value}",
        "unit": "bytes",
        "startValue": 0,
        "endValue": profile.total_bytes,
        "samples": [
            [frames.index(frame) for frame in reversed(sample.frames)] for sample in profile.samples
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


_UNSAFE = re.compile(r"[;\\\x00-\x1f\x7f-\x9f\u2028\u2029]")
_LOOKS_LIKE_VALUE = re.compile(r"\s(?=[0-9]+(?:\.[0-9]*)?$)")


def escape_name(name: str) -> str:
    """The name, so that no reader of folded stacks takes a part of it for something else."""
    name = _UNSAFE.sub(_hex, name)
    return _LOOKS_LIKE_VALUE.sub(_hex, name)


def folded_text(profiles: Iterable[HeapProfile], *, objects: bool = False) -> str:
    """Folded stacks, the largest first; "" for no samples.

    Args:
        profiles: of several, each stack's root is a frame `[device N]`.
        objects: count allocations instead of bytes.
    """
    parts = list(profiles)
    names: dict[Frame, str] = {}
    lines = []
    for profile in parts:
        root = [f"[device {profile.device}]"] if len(parts) > 1 else []
        for sample in profile.samples:
            value = sample.objects if objects else sample.size_bytes
            shown = list(root)
            for frame in reversed(sample.frames):
                name = names.get(frame)
                if name is None:
                    name = names[frame] = escape_name(frame.name)
                shown.append(name)
            lines.append(f"{';'.join(shown)} {value}\n")
    return "".join(lines)


def json_form(profile: HeapProfile) -> dict[str, Any]:
    """The profile as plain objects for `json.dumps`.

    Frames are leaf first, as everywhere here, and listed once: a sample's `stack` holds indexes
    of `frames`.
    """
    frames = Interned()
    samples = [
        {
            "stack": [frames.index(frame) for frame in sample.frames],
            "objects": sample.objects,
            "size_bytes": sample.size_bytes,
            **({"labels": dict(sample.labels)} if sample.labels else {}),
        }
        for sample in profile.samples
    ]
    return {
        "kind": profile.kind.value,
        "device": profile.device,
        "time_ns": profile.time_ns,
        "duration_ns": profile.duration_ns,
        "sizes": profile.sizes.value,
        "total_bytes": profile.total_bytes,
        "total_objects": profile.total_objects,
        "comments": list(profile.comments),
        "stack_order": "leaf first",
        "frames": [
            {"name": frame.name, "filename": frame.filename, "line": frame.line}
            for frame in frames.all
        ],
        "samples": samples,
    }


def _hex(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"  # noqa: PLR2004 (one byte)
