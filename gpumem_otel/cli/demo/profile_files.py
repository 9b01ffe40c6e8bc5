"""The profiles of the demo: the last ones and the fullest, written to files."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_otel.cli.output import write_output

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gpumem_otel.base.profile import DeviceTotals, HeapProfile, ProfileKind


@dataclass(frozen=True, slots=True)
class Moment:
    """Live profiles of one reading, one per device, with totals and steps of the same time."""

    profiles: tuple[HeapProfile, ...]
    totals: Mapping[int, DeviceTotals]
    steps: int

    @property
    def size_bytes(self) -> int:
        """All that was allocated."""
        return sum(profile.total_bytes for profile in self.profiles)

    def reserved_bytes(self, profile: HeapProfile) -> int | None:
        """Reserved on the profile's device; None where the totals are of another reading."""
        totals = self.totals.get(profile.device)
        if totals is None or totals.allocated_bytes != profile.total_bytes:
            return None
        return totals.reserved_bytes


class LastProfiles:
    """Keeps what was read last, and the fullest; the main thread writes the files.

    `live.pb.gz` is the last moment, `fullest.pb.gz` the one with most allocated, and
    `allocated.pb.gz` what the last window allocated.

    Attributes:
        fullest: the moment in `fullest.pb.gz`.
        written: the files by name, without `.pb.gz`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for stem in ("live", "fullest", "allocated"):  # of an earlier demo
            (folder / f"{stem}.pb.gz").unlink(missing_ok=True)
        self.written: dict[str, Path] = {}
        self.fullest: Moment | None = None
        self._lock = threading.Lock()
        self._live: Moment | None = None
        self._new: dict[str, tuple[HeapProfile, ...]] = {}
        self._over = False

    def take(
        self,
        kind: ProfileKind,
        profiles: tuple[HeapProfile, ...],
        totals: Mapping[int, DeviceTotals],
        steps: int,
    ) -> None:
        """Called on the agent's thread, right after the reading."""
        from gpumem_otel.base.profile import ProfileKind

        with self._lock:
            if self._over or not profiles:
                return
            self._new[kind.value] = profiles
            if kind is not ProfileKind.LIVE:
                return
            self._live = now = Moment(profiles, totals, steps)
            if self.fullest is None or now.size_bytes > self.fullest.size_bytes:
                self.fullest = now
                self._new["fullest"] = profiles

    def write(self, *, last: bool = False) -> Moment | None:
        """Write what is new; returns what `live.pb.gz` holds now, None before the first reading.

        Ctrl-C may interrupt this: the next call writes what is missing.

        Args:
            last: take nothing from now on, so that the file stays what was shown.

        Raises:
            CommandFailed: the folder cannot be written.
        """
        from gpumem_otel.profiles import pprof

        with self._lock:
            self._over |= last
            new, live = sorted(self._new.items()), self._live
        for name, profiles in new:
            path = self.folder / f"{name}.pb.gz"
            data = pprof.encode(profiles, device_labels={}, kind=profiles[0].kind)
            write_output(str(path), pprof.gzip_bytes(data))
            self.written[name] = path
            with self._lock:
                if self._new.get(name) is profiles:  # else there is a newer one
                    del self._new[name]
        return live
