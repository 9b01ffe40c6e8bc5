"""A recording that grows in a file while the job runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpumem_otel.core.recording import RecordingWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpumem_otel.core.model import Identity, StepStats
    from gpumem_otel.core.ports import FrameNamer, Reading

__all__ = ["RecordingFile", "rank_path"]


def rank_path(path: str, identity: Identity) -> Path:
    """One file per rank: `run.gpumem` of rank 3 is `run-rank3.gpumem`; alone it stays as it is."""
    plain = Path(path)
    if identity.world_size == 1:
        return plain
    return plain.with_name(f"{plain.stem}-rank{identity.rank}{plain.suffix}")


class RecordingFile:
    """Adds readings to a file; what is there can be read at any moment, also after a crash.

    Raises:
        OSError: the file can not be written.
    """

    def __init__(
        self, path: str, *, identity: Identity, facts: Mapping[str, str], namer: FrameNamer
    ) -> None:
        self._file = rank_path(path, identity).open("wb")
        self._writer = RecordingWriter(
            self._file, identity=identity, created_ns=time.time_ns(), facts=facts, namer=namer
        )

    def add(self, reading: Reading, steps: StepStats) -> None:
        """Add one reading."""
        self._writer.add(reading, steps)

    def add_window(self, reading: Reading, seconds: float) -> None:
        """Add the events of one recorded window."""
        self._writer.add_window(reading, seconds)

    def close(self) -> None:
        """End the recording; once is enough."""
        if not self._file.closed:
            self._writer.close()
            self._file.close()
