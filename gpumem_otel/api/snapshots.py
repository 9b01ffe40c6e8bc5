"""Snapshot files in Python: profiles, comparisons, pandas tables and notebook pages.

    snapshot = gpumem_otel.load_snapshot("snapshot.pickle")
    snapshot.profile("peak").top(5)

Nothing here uses torch or the running job. In a notebook each object is shown as the page that
`gpumem-otel flamegraph` writes.
"""

from __future__ import annotations

import html
import os
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.errors import ConfigError, MissingPackageError, NoHistoryError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    import pandas as pd

    from gpumem_otel.base.profile import HeapProfile, Sample
    from gpumem_otel.profiles.heap import DiffEntry
    from gpumem_otel.profiles.of_file import OpenedFile
    from gpumem_otel.profiles.tables import TopRow
    from gpumem_otel.snapshot.labels import Label
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

SnapshotKind = Literal["live", "allocated", "peak", "pinned"]
"""What `Snapshot.profile` counts: live allocations, those of the recorded events, those alive at
the peak, or pinned host memory (torch 2.14 and newer)."""

SnapshotTable = Literal["blocks", "segments", "events"]
"""The rows of `Snapshot.to_pandas`."""

TopBy = Literal["stack", "function", "file", "line"]
"""What `Profile.top` groups by."""

_PAGE_HEIGHT = 640


def load_snapshot(path: str | os.PathLike[str] | BinaryIO, *, name: str | None = None) -> Snapshot:
    """Read a snapshot file (pickle or JSON, plain or gzip) or a recording of ours.

    Nothing in the file is run, and no torch is needed.

    Args:
        path: file name, or a file open for reading bytes.
        name: its name in messages; by default that of the file.

    Raises:
        SnapshotError: it cannot be read or is not a snapshot.
        ConfigError: the argument is neither a name nor a file.
    """
    from gpumem_otel.profiles.of_file import open_file

    if not isinstance(path, str | os.PathLike) and not hasattr(path, "read"):
        raise ConfigError(
            f"load_snapshot: {type(path).__name__!r} is neither a file name nor a file"
        )
    return Snapshot(open_file(path, name=name))


class Snapshot:
    """The contents of a snapshot file; `load_snapshot` makes one.

    For a recording, `live` is its last reading, `allocated` its last window, and `peak` the reading
    with the most bytes.
    """

    def __init__(self, opened: OpenedFile) -> None:
        self._opened = opened

    def __repr__(self) -> str:
        return f"<gpumem_otel.Snapshot {self.source!r} devices={list(self.devices)}>"

    def __str__(self) -> str:
        from gpumem_otel.base.text import printable
        from gpumem_otel.profiles.tables import totals_table

        totals = (self._opened.snapshot.totals(device) for device in self.devices)
        return f"{printable(self.source)}\n{totals_table(totals)}"

    @property
    def source(self) -> str:
        """Name of the file."""
        return self._opened.snapshot.source

    @property
    def core(self) -> TorchSnapshot:
        """The snapshot itself, with segments, events, totals and the replayed trace."""
        return self._opened.snapshot

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices that have segments or events, sorted."""
        return self._opened.snapshot.devices()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Limits of the numbers, one sentence each."""
        return self._opened.snapshot.warnings

    def profile(
        self, kind: SnapshotKind = "live", device: int | None = None, *, label: Label | None = None
    ) -> Profile:
        """Bytes by stack.

        Args:
            kind: live, allocated, peak or pinned. The sizes of allocated and peak come from the
                trace and are requested bytes; those of live are the allocator's blocks.
            device: torch's index; None: all devices together. Devices peak at different moments,
                so that the sum of their peaks was never alive at once.
            label: split each stack by `pool`, `compile_context` or `annotation`.

        Raises:
            ConfigError: there is no such kind, device or label.
            NoHistoryError: the kind needs events of the device, or pinned host memory, and the file
                holds none.
        """
        from gpumem_otel.base.profile import HeapProfile
        from gpumem_otel.snapshot.labels import LABELS

        if kind not in get_args(SnapshotKind):
            raise ConfigError(f"kind {kind!r}: not one of {', '.join(get_args(SnapshotKind))}")
        if label is not None and label not in LABELS:
            raise ConfigError(f"label {label!r}: not one of {', '.join(LABELS)}")
        self._check(device)
        profiles = self._opened.profiles(ProfileKind(kind), device, label=label)
        if not profiles:
            if device is not None:
                raise NoHistoryError(f"{self.source}: holds no events of device {device}")
            return Profile(HeapProfile(ProfileKind(kind), -1, ()))
        return Profile(*profiles)

    def diff(
        self, before: Snapshot, kind: SnapshotKind = "live", device: int | None = None
    ) -> Difference:
        """What has grown or shrunk since an earlier snapshot, by stack.

        Raises:
            ConfigError: as `profile`.
            NoHistoryError: as `profile`.
        """
        if not isinstance(before, Snapshot):
            raise ConfigError(f"diff: {type(before).__name__!r} is not a Snapshot")
        return self.profile(kind, device).diff(before.profile(kind, device))

    def to_pandas(self, table: SnapshotTable = "blocks", device: int | None = None) -> pd.DataFrame:
        """One row per block, segment or event, as a `pandas.DataFrame`; sizes are bytes.

        Args:
            table: which rows.
            device: only this one.

        Raises:
            ConfigError: there is no such table or device.
            MissingPackageError: pandas is not installed.
        """
        from gpumem_otel.profiles import dataframes

        self._check(device)

        makers = {
            "blocks": dataframes.blocks,
            "segments": dataframes.segments,
            "events": dataframes.events,
        }
        if table not in makers:
            raise ConfigError(f"table {table!r}: not one of {', '.join(makers)}")
        return _data_frame(makers[table](self._opened.snapshot, device))

    def _check(self, device: int | None) -> None:
        if device is not None and device not in self.devices:
            there = ", ".join(map(str, self.devices)) or "none"
            raise ConfigError(f"device {device} is not in {self.source} (devices: {there})")

    def html(self) -> str:
        """The page about this file: flame graphs, timeline, segments; one string, no network.

        Raises:
            PageError: the page was not built into this installation.
        """
        from gpumem_otel.page import html as page

        view = "flamegraph" if self._opened.recording is None else "timeline"
        return page.file_html(self._opened, view=view)

    def _repr_html_(self) -> str:
        return _shown(self)


class Profile:
    """Bytes by stack, of one kind.

    Attributes:
        parts: one profile per device, or the profiles that were merged.
        heap: all of them as one, with its samples; a stack is leaf first.
    """

    def __init__(self, *parts: HeapProfile) -> None:
        """Merge profiles of one kind.

        Raises:
            ValueError: they are of different kinds or sizes.
        """
        from gpumem_otel.profiles import heap

        self.parts = parts
        self.heap = parts[0] if len(parts) == 1 else heap.merge(parts)

    def __repr__(self) -> str:
        return (
            f"<gpumem_otel.Profile {self.kind} device={self.device} bytes={self.total_bytes} "
            f"stacks={len(self.samples)}>"
        )

    def __str__(self) -> str:
        from gpumem_otel.profiles.tables import top_table

        return top_table(self.heap, "function", 10)

    @property
    def kind(self) -> str:
        """live, allocated, peak or pinned."""
        return self.heap.kind.value

    @property
    def device(self) -> int:
        """Torch's index; -1 for several devices together."""
        return self.heap.device

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Each distinct stack and what it holds, the largest first."""
        return self.heap.samples

    @property
    def total_bytes(self) -> int:
        """Sum over all stacks."""
        return self.heap.total_bytes

    @property
    def total_objects(self) -> int:
        """Number of allocations over all stacks."""
        return self.heap.total_objects

    def top(self, number: int = 10, by: TopBy = "stack") -> list[TopRow]:
        """The rows with most bytes, the largest first.

        Raises:
            ConfigError: there is no such `by`.
        """
        from gpumem_otel.profiles.tables import top_rows

        try:
            return top_rows(self.heap, by, number)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def diff(self, before: Profile) -> Difference:
        """What has grown or shrunk since another profile, by stack.

        Raises:
            ConfigError: one is in requested bytes, the other in the allocator's blocks.
        """
        from gpumem_otel.profiles import heap

        if not isinstance(before, Profile):
            raise ConfigError(f"diff: {type(before).__name__!r} is not a Profile")
        try:
            heap.common_sizes((before.heap, self.heap))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return Difference(before, self)

    def merge(self, *others: Profile) -> Profile:
        """Merge this profile and others: of devices, ranks or files.

        Raises:
            ConfigError: they are of different kinds or sizes.
        """
        try:
            return Profile(*self.parts, *(part for other in others for part in other.parts))
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def to_pandas(self) -> pd.DataFrame:
        """One row per stack, as a `pandas.DataFrame`.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        from gpumem_otel.profiles import dataframes

        return _data_frame(dataframes.stacks(self.samples))

    def pprof(self) -> bytes:
        """The profile as gzipped pprof, for `go tool pprof` and Pyroscope, by device."""
        from gpumem_otel.profiles import pprof

        return pprof.gzip_bytes(pprof.encode(self.parts, device_labels={}))

    def html(self) -> str:
        """The page with its flame graph; one string, no network.

        Raises:
            PageError: the page was not built into this installation.
        """
        from gpumem_otel.page import html as page

        return page.profiles_html([self.heap])

    def _repr_html_(self) -> str:
        return _shown(self)


class Difference:
    """What changed from one profile to another; empty if nothing did.

    Attributes:
        before: the first profile.
        after: the second.
    """

    def __init__(self, before: Profile, after: Profile) -> None:
        self.before = before
        self.after = after
        self._entries: tuple[DiffEntry, ...] | None = None

    def __repr__(self) -> str:
        return (
            f"<gpumem_otel.Difference {self.after.kind} bytes={self.total_bytes:+d} "
            f"stacks={len(self)}>"
        )

    def __str__(self) -> str:
        from gpumem_otel.base.text import human_bytes, printable

        stacks = "1 stack" if len(self) == 1 else f"{len(self)} stacks"
        lines = [f"{human_bytes(self.total_bytes)} in {stacks} that changed"]
        lines += [
            f"{human_bytes(entry.size_bytes):>10}  {printable(entry.frames[0].name)}"
            for entry in self.entries[:10]
        ]
        return "\n".join(lines) + "\n"

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def entries(self) -> Sequence[DiffEntry]:
        """Each stack that changed, the largest change first; they add up to `total_bytes`."""
        if self._entries is None:
            from gpumem_otel.profiles import heap

            self._entries = heap.diff(self.before.heap, self.after.heap)
        return self._entries

    @property
    def total_bytes(self) -> int:
        """Growth from the first to the second; negative if it shrank."""
        return self.after.total_bytes - self.before.total_bytes

    def to_pandas(self) -> pd.DataFrame:
        """One row per stack that changed, as a `pandas.DataFrame`.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        from gpumem_otel.profiles import dataframes

        return _data_frame(dataframes.stacks(self.entries))

    def html(self) -> str:
        """The page with the difference as a flame graph; one string, no network.

        Raises:
            PageError: the page was not built into this installation.
        """
        from gpumem_otel.page import html as page

        return page.profiles_html([self.after.heap], before=[self.before.heap])

    def _repr_html_(self) -> str:
        return _shown(self)


def _data_frame(columns: dict[str, list[Any]]) -> pd.DataFrame:
    try:
        import pandas as pd
    except ImportError:
        raise MissingPackageError("to_pandas() needs pandas: pip install pandas") from None
    return pd.DataFrame({name: _column(pd, values) for name, values in columns.items()})


def _column(pd: Any, values: list[Any]) -> Any:
    """Keep whole numbers whole if some are unknown: an address is not a float."""
    if None in values and all(value is None or type(value) is int for value in values):
        try:
            return pd.array(values, dtype="Int64")
        except (OverflowError, TypeError, ValueError):  # beyond 63 bits
            return values
    return values


def _shown(what: Snapshot | Profile | Difference) -> str:
    """What a notebook shows: the page in a frame of its own, or text if the page was not built."""
    from gpumem_otel.page import html as page

    if not page.available():
        return f"<pre>{html.escape(str(what))}</pre>"
    # no same-origin: names in an untrusted file get no access to the notebook
    return (
        f'<iframe srcdoc="{html.escape(what.html())}" sandbox="allow-scripts allow-downloads" '
        f'style="width: 100%; height: {_PAGE_HEIGHT}px; border: 0"></iframe>'
    )
