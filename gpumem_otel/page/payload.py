"""What a page shows, in the form in which the page reads it (`web/src/data.ts`).

All views of a page draw on the same tables: stacks as one tree, profiles as bytes by its nodes,
the timeline as births and deaths, the segments block by block. Where something is too large for a
browser the smallest become `[other]`, and a sentence in the page says so: totals never change.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpumem_otel.base.aggregate import add
from gpumem_otel.base.profile import Frame, ProfileKind, Sizes
from gpumem_otel.errors import NoHistoryError
from gpumem_otel.page.columns import OTHER_NODE, Columns, PageStacks, packed
from gpumem_otel.page.segments import segments_form
from gpumem_otel.page.timeline import events_form, readings_form
from gpumem_otel.profiles.heap import live_profile
from gpumem_otel.profiles.of_file import OpenedFile
from gpumem_otel.snapshot.stacks import file_function_namer, identity_namer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpumem_otel.base.profile import HeapProfile, Stack
    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.recording.recorded import Recording
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

FORM = 1
"""Version of the form; page and data come out of one installation, a stale page says so."""

_MAX_SAMPLES = 100_000
"""Of a profile."""

_UNITS = {
    Sizes.REQUESTED: "requested bytes",
    Sizes.ALLOCATED: "bytes as the allocator rounds them",
}


class PageForm:
    """Collects what goes into a page: sources in order (before, then after), then `packed`."""

    def __init__(self, *, max_samples: int = _MAX_SAMPLES) -> None:
        self._stacks = PageStacks()
        self._columns = Columns()
        self._sources: list[dict[str, Any]] = []
        self._profiles: list[dict[str, Any]] = []
        self._timelines: list[dict[str, Any]] = []
        self._segments: list[dict[str, Any]] = []
        self._max_samples = max_samples

    def add_source(self, name: str, warnings: Sequence[str]) -> None:
        """Begin with a file; what is added next belongs to it."""
        self._sources.append({"name": name, "warnings": list(warnings), "devices": []})

    def add_before(self, opened: OpenedFile, device: int | None = None) -> None:
        """The profiles of the file that another one is compared with.

        Args:
            opened: of either kind.
            device: only this one.
        """
        self.add_source(opened.snapshot.source, opened.snapshot.warnings)
        self._add_profiles(opened, device)

    def add_snapshot(self, snapshot: TorchSnapshot, device: int | None = None) -> None:
        """A snapshot's profiles, timeline and segments.

        Args:
            snapshot: of which nothing is changed.
            device: only this one.
        """
        self.add_source(snapshot.source, snapshot.warnings)
        self._add_profiles(OpenedFile(snapshot), device)
        namer = _namer_of(snapshot)
        for number in snapshot.devices() if device is None else (device,):
            self._add_events(snapshot, number, namer)
            self._add_segments(snapshot, number, namer)

    def add_recording(
        self,
        recording: Recording,
        device: int | None = None,
        *,
        allocated: Sequence[HeapProfile] = (),
    ) -> None:
        """A recording: its last reading, all its readings over time, its segments.

        Args:
            recording: with at least one reading.
            device: only this one.
            allocated: what was allocated in its last window.
        """
        last = recording.readings[-1].snapshot
        self.add_source(recording.source, (*recording.warnings, *last.warnings))
        named = [(reading, reading.snapshot.devices()) for reading in recording.readings]
        every = sorted({number for _, devices in named for number in devices})
        for number in every if device is None else (device,):
            readings = [reading for reading, devices in named if number in devices]
            if not readings:
                continue
            self.add_profile(live_profile(last, number, namer=identity_namer))
            form, peak, notes = readings_form(
                readings, number, self._stacks, self._columns, identity_namer
            )
            at_peak = live_profile(readings[peak].snapshot, number, namer=identity_namer)
            self.add_profile(
                at_peak,
                kind=ProfileKind.PEAK,
                comments=(
                    "the reading with the most allocated: between two it may have been more",
                ),
            )
            for profile in allocated:
                if profile.device == number:
                    self.add_profile(profile)
            self._add_timeline(form, notes)
            self._add_segments(last, number, identity_namer)

    def add_profile(
        self,
        profile: HeapProfile,
        *,
        kind: ProfileKind | None = None,
        comments: Sequence[str] | None = None,
    ) -> None:
        """Bytes by stack. Labels of a sample become frames above its root."""
        totals: dict[int, list[int]] = {}
        merged = 0
        for place, sample in enumerate(profile.samples):
            node = OTHER_NODE
            if place < self._max_samples:
                node = self._stacks.node(_labelled(sample.frames, sample.labels))
            merged += node == OTHER_NODE
            add(totals, node, sample.objects, sample.size_bytes)
        sentences = list(profile.comments if comments is None else comments)
        if merged > 1:
            sentences.append(
                f"the {merged} smallest of {len(profile.samples)} stacks are in [other]"
            )
        self._profiles.append(
            {
                "source": len(self._sources) - 1,
                "device": profile.device,
                "kind": (kind or profile.kind).value,
                "unit": _UNITS[profile.sizes],
                "comments": sentences,
                "total_bytes": profile.total_bytes,
                "node": self._columns.add("u32", totals),
                "objects": self._columns.add("f64", (entry[0] for entry in totals.values())),
                "bytes": self._columns.add("f64", (entry[1] for entry in totals.values())),
            }
        )
        self._seen(profile.device)

    def packed(
        self, *, title: str, view: str, kind: ProfileKind, device: int | None, made_by: str
    ) -> str:
        """Everything, as text without special characters of HTML.

        Args:
            title: of the page.
            view: `flamegraph`, `timeline`, `segments` or `difference`: where it opens.
            kind: of the profile that is shown first.
            device: that is shown first; None: the one with the most memory.
            made_by: name and version of the program.
        """
        header = {
            "form": FORM,
            "title": title,
            "view": view,
            "kind": kind.value,
            "device": device,
            "made_by": made_by,
            "sources": self._sources,
            "profiles": self._profiles,
            "timelines": self._timelines,
            "segments": self._segments,
            **self._stacks.form(self._columns),
        }
        return packed(header, self._columns)

    def _add_profiles(self, opened: OpenedFile, device: int | None) -> None:
        kinds = (ProfileKind.LIVE, ProfileKind.PEAK, ProfileKind.ALLOCATED, ProfileKind.PINNED)
        for kind in kinds:
            with suppress(NoHistoryError):  # then the page does not offer the kind
                for profile in opened.profiles(kind, device):
                    self.add_profile(profile)

    def _seen(self, device: int) -> None:
        devices = self._sources[-1]["devices"]
        if device not in devices:
            devices.append(device)

    def _add_events(self, snapshot: TorchSnapshot, device: int, namer: FrameNamer) -> None:
        if snapshot.has_timeline(device) and not snapshot.resolved:
            form, notes = events_form(snapshot, device, self._stacks, self._columns, namer)
            self._add_timeline(form, [*notes, *snapshot.replay(device).warnings])

    def _add_timeline(self, form: dict[str, Any], notes: Sequence[str]) -> None:
        self._timelines.append({"source": len(self._sources) - 1, **form})
        warnings = self._sources[-1]["warnings"]
        warnings += [sentence for sentence in notes if sentence not in warnings]

    def _add_segments(self, snapshot: TorchSnapshot, device: int, namer: FrameNamer) -> None:
        form = segments_form(snapshot, device, self._stacks, self._columns, namer)
        if form is not None:
            self._segments.append({"source": len(self._sources) - 1, **form})
            self._seen(device)


def _namer_of(snapshot: TorchSnapshot) -> FrameNamer:
    """Recordings carry final names; plain files give `file.py:function`."""
    return identity_namer if snapshot.resolved else file_function_namer


def _labelled(frames: Stack, labels: Sequence[tuple[str, str]]) -> Stack:
    return (*frames, *(Frame(f"{key}: {value or '-'}") for key, value in reversed(labels)))
