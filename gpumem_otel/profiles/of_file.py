"""A file of either kind, and the profiles that can be made of it.

| kind | a snapshot file | one of our recordings |
| --- | --- | --- |
| live | its blocks | the blocks of its last reading |
| allocated | the events in its trace | its last window, scaled to the allocator's counters |
| peak | what was alive when most was, by its trace | the reading that held most |
| pinned | its pinned host memory (torch 2.14) | no recording holds it |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.errors import NoHistoryError, SnapshotError
from gpumem_otel.profiles import heap
from gpumem_otel.profiles.pinned import pinned_profile
from gpumem_otel.snapshot.load import RecordingBytes, decode, read_all
from gpumem_otel.snapshot.snapshot import TorchSnapshot, from_file
from gpumem_otel.snapshot.stacks import file_function_namer
from gpumem_otel.snapshot.validate import check

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from gpumem_otel.base.profile import DeviceStats, HeapProfile
    from gpumem_otel.recording.recorded import RecordedWindow, Recording
    from gpumem_otel.snapshot.labels import Label


@dataclass(frozen=True, slots=True, eq=False)
class OpenedFile:
    """What a file holds.

    Attributes:
        snapshot: the snapshot; of a recording its last reading.
        recording: all of it, where it is one of our recordings.
    """

    snapshot: TorchSnapshot
    recording: Recording | None = None

    def profiles(
        self,
        kind: ProfileKind,
        device: int | None = None,
        *,
        label: Label | None = None,
        time_ns: int = 0,
    ) -> tuple[HeapProfile, ...]:
        """One profile of this kind per device that has one, in order of the devices.

        Args:
            kind: live, allocated, peak or pinned; pinned memory is of no device: one profile,
                under the lowest or the one asked for.
            device: only this one.
            label: an additional label of the samples; recorded windows have none.
            time_ns: moment of the reading, where it is not in the file.

        Raises:
            NoHistoryError: the kind needs events, or pinned memory, and the file holds none.
            SnapshotError: sizes in the trace are invalid.
            ValueError: files hold no profiles of this kind.
        """
        if kind is ProfileKind.ALLOCATED:
            return self._allocated(device, label, time_ns)
        if kind is ProfileKind.PEAK:
            return self._peak(device, label, time_ns)
        if kind is ProfileKind.PINNED:
            return self._pinned(device, time_ns)
        if kind is not ProfileKind.LIVE:
            raise ValueError(f"no file holds a profile of kind {kind.value}")
        return tuple(
            heap.live_profile(
                self.snapshot, number, namer=file_function_namer, time_ns=time_ns, label=label
            )
            for number in self._chosen(self.snapshot.devices(), device)
        )

    def has(self, kind: ProfileKind) -> bool:
        """Whether there is a profile of this kind."""
        if kind is ProfileKind.LIVE or (self.recording is not None and kind is ProfileKind.PEAK):
            return True
        if kind is ProfileKind.PINNED:
            return bool(self.snapshot.host_segments)
        if self.recording is not None:
            return bool(self.recording.windows)
        have = _allocates if kind is ProfileKind.ALLOCATED else TorchSnapshot.has_timeline
        return any(have(self.snapshot, device) for device in self.snapshot.devices())

    def warnings_of(self, kind: ProfileKind) -> tuple[str, ...]:
        """What a reader of profiles of this kind should know, one sentence each."""
        warnings = self.snapshot.warnings
        if kind is ProfileKind.PEAK and self.recording is None:
            for device in filter(self.snapshot.has_timeline, self.snapshot.devices()):
                warnings += self.snapshot.replay(device).warnings
        return warnings

    def window(self) -> tuple[TorchSnapshot, RecordedWindow] | None:
        """The last window of a recording with its events; None where it is a snapshot file.

        Raises:
            NoHistoryError: a recording without windows.
        """
        if self.recording is None:
            return None
        if not self.recording.windows:
            raise NoHistoryError(
                f"{self.snapshot.source}: holds no windows of allocation events; record with "
                "--profiles live,allocated to see what was allocated"
            )
        window = self.recording.windows[-1]
        return window.reading().snapshot, window

    def _allocated(
        self, device: int | None, label: Label | None, time_ns: int
    ) -> tuple[HeapProfile, ...]:
        last = self.window()
        if last is not None:
            snapshot, window = last
            chosen = self._chosen(snapshot.devices(), device)
            return tuple(window_profile(snapshot, window, number, label=label) for number in chosen)
        return tuple(
            heap.allocated_profile(
                self.snapshot,
                number,
                namer=file_function_namer,
                time_ns=time_ns,
                duration_ns=0,
                label=label,
            )
            for number in self._with_events(device, "to see what was allocated", _allocates)
        )

    def _peak(
        self, device: int | None, label: Label | None, time_ns: int
    ) -> tuple[HeapProfile, ...]:
        if self.recording is not None:
            devices = self._chosen(self.snapshot.devices(), device)
            return tuple(_fullest(self.recording, number, label) for number in devices)
        return tuple(
            heap.replayed_profile(
                self.snapshot, number, namer=file_function_namer, time_ns=time_ns, label=label
            )
            for number in self._with_events(device, "to see the peak", TorchSnapshot.has_timeline)
        )

    def _pinned(self, device: int | None, time_ns: int) -> tuple[HeapProfile, ...]:
        if not self.snapshot.host_segments:
            raise NoHistoryError(
                f"{self.snapshot.source}: holds no pinned host memory; torch 2.14 and newer record "
                "it with torch.cuda.memory._record_memory_history(record_pinned_host_memory=True)"
            )
        home = min(self.snapshot.devices(), default=0) if device is None else device
        return (pinned_profile(self.snapshot, home, namer=file_function_namer, time_ns=time_ns),)

    def _with_events(
        self, device: int | None, why: str, have: Callable[[TorchSnapshot, int], bool]
    ) -> tuple[int, ...]:
        snapshot = self.snapshot
        having = tuple(
            number for number in self._chosen(snapshot.devices(), device) if have(snapshot, number)
        )
        if not having:
            single_event = have is not _allocates and any(
                map(snapshot.raw_events, snapshot.devices())
            )
            content = (
                "a single event, which is no timeline" if single_event else "no allocation events"
            )
            raise NoHistoryError(
                f"{snapshot.source}: holds {content}; record history "
                f"(torch.cuda.memory._record_memory_history()) {why}; what was alive is --kind live"
            )
        return having

    @staticmethod
    def _chosen(devices: tuple[int, ...], device: int | None) -> tuple[int, ...]:
        return (
            devices if device is None else tuple(number for number in devices if number == device)
        )


def _allocates(snapshot: TorchSnapshot, device: int) -> bool:
    return any(event.get("action") == "alloc" for event in snapshot.raw_events(device))


def window_profile(
    snapshot: TorchSnapshot, window: RecordedWindow, device: int, *, label: Label | None = None
) -> HeapProfile:
    """What was allocated on a device in a recorded window, scaled to the allocator's counters.

    Args:
        snapshot: the window's own, with its events.
        window: for its counters and its length.
        device: torch's index.
        label: an additional label of the samples.
    """
    return heap.allocated_profile(
        snapshot,
        device,
        namer=file_function_namer,
        requested_total_bytes=_grown(window, device, "requested_allocation_bytes"),
        objects_total=_grown(window, device, "allocations"),
        time_ns=window.time_ns,
        duration_ns=round(window.seconds * 1e9),
        label=label,
    )


def _grown(window: RecordedWindow, device: int, field: str) -> int | None:
    first, last = (_stats_of(stats, device) for stats in (window.before, window.after))
    if first is None or last is None:
        return None
    # the job may have reset its counters
    increase: int = getattr(last, field) - getattr(first, field)
    return max(increase, 0)


def _stats_of(all_stats: tuple[DeviceStats, ...], device: int) -> DeviceStats | None:
    return next((stats for stats in all_stats if stats.device == device), None)


def _fullest(recording: Recording, device: int, label: Label | None) -> HeapProfile:
    """The reading at which a device held most; the first of several."""
    held = [reading.allocated_bytes(device) for reading in recording.readings]
    number = held.index(max(held))
    reading = recording.readings[number]
    live = heap.live_profile(
        reading.snapshot,
        device,
        namer=file_function_namer,
        time_ns=reading.time_ns,
        label=label,
    )
    where = (
        f"reading {number + 1} of {len(held)}, the one that held most: what was alive between "
        "readings is not known"
    )
    return replace(live, kind=ProfileKind.PEAK, comments=(where,))


def open_file(path: str | os.PathLike[str] | BinaryIO, *, name: str | None = None) -> OpenedFile:
    """Read a file, as `load_snapshot` does.

    Raises:
        SnapshotError: it cannot be read or is no snapshot.
    """
    return open_bytes(*read_all(path, name))


def open_bytes(data: bytes, source: str) -> OpenedFile:
    """Read a file's bytes, as `parse_snapshot` does.

    Raises:
        SnapshotError: it is no readable snapshot; no other error leaves this function.
    """
    return OpenedFile(*parse(data, source))


def parse_snapshot(data: bytes, source: str) -> TorchSnapshot:
    """Read a snapshot file's bytes: pickle, JSON, or one of our recordings; plain or gzip.

    The kind is found by content. Nothing in the data is run, and what reading it takes is bounded
    by its size: see `unpickle`, `load` and `validate`.

    Args:
        data: the whole file.
        source: name for messages.

    Raises:
        SnapshotError: it is no readable snapshot; no other error leaves this function.
    """
    return parse(data, source)[0]


def parse(data: bytes, source: str) -> tuple[TorchSnapshot, Recording | None]:
    """As `parse_snapshot`, and of one of our recordings all the rest of it too.

    Raises:
        SnapshotError: it is no readable snapshot; no other error leaves this function.
    """
    raw = raw_or_recording(data, source)
    if isinstance(raw, RecordingBytes):
        return _last_of_recording(raw.data, source)
    return from_file(raw, source), None


def raw_or_recording(data: bytes, source: str) -> object:
    """The root of a snapshot file, every value that is read checked; or a `RecordingBytes`.

    Raises:
        SnapshotError: it is no readable snapshot; no other error leaves this function.
    """
    try:
        raw, size_bytes = decode(data, source)
        if not isinstance(raw, RecordingBytes):
            check(raw, source, size_bytes)
        return raw
    except SnapshotError:
        raise
    except MemoryError:
        raise SnapshotError(source, "it does not fit into memory") from None
    except Exception as error:
        # no known case; an untrusted file must still not raise any other error
        raise SnapshotError(source, f"cannot be read: {type(error).__name__}") from error


def load_snapshot(
    path: str | os.PathLike[str] | BinaryIO, *, name: str | None = None
) -> TorchSnapshot:
    """Read a snapshot file; of one of our recordings the last snapshot in it.

    Args:
        path: file name, or a file open for reading bytes.
        name: what messages call it, by default its name.

    Raises:
        SnapshotError: it cannot be read or is no snapshot.
    """
    data, source = read_all(path, name)
    return parse_snapshot(data, source)


def _last_of_recording(data: bytes, source: str) -> tuple[TorchSnapshot, Recording]:
    # late, since reading a recording is written in terms of this module
    from gpumem_otel.recording.reader import load_recording  # noqa: PLC0415

    recording = load_recording(data, name=source)
    if not recording.readings:
        raise SnapshotError(source, "a recording without a single reading")
    snapshot = recording.readings[-1].snapshot
    snapshot.source = source
    snapshot.warn(recording.warnings)
    return snapshot, recording
