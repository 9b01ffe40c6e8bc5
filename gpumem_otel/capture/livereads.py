"""Readings of what is alive: a snapshot, and what torch does not say of its blocks.

Beside a snapshot go the classes of its blocks, the names of those without a stack, and whose memory
it is that a restore has allocated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpumem_otel.capture.restored import Replaced
from gpumem_otel.capture.stackless import StacklessRoots
from gpumem_otel.capture.tensors import TensorTable
from gpumem_otel.capture.workspaces import workspace_sizes
from gpumem_otel.core.classify import Classifier, workspaces_in
from gpumem_otel.core.ports import no_pause

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from gpumem_otel.capture.pacer import Pacer
    from gpumem_otel.capture.recorder import Recorder
    from gpumem_otel.capture.restored import Entries, Restored
    from gpumem_otel.capture.snapshots import SnapshotTaker
    from gpumem_otel.capture.stackless import Roots
    from gpumem_otel.capture.stats import StatsReader
    from gpumem_otel.capture.tableentries import TableEntries
    from gpumem_otel.core.counters import Counters
    from gpumem_otel.core.ports import Reading
    from gpumem_otel.core.snapshot import Snapshot

__all__ = ["LiveReads"]


class LiveReads:
    """Makes readings; torch may be called, and that is for others to see to.

    Args:
        recorder: knows whose recording it is.
        snapshots: takes them.
        tensors: the address table; None where no classes are told.
        restored: which memory was allocated by a restore.
        pacer: gives up the interpreter lock between slices of a pass over all blocks.
        environ: the process's environment, for the size of cuBLAS's workspace.
        counters: takes `exporter_stall_seconds` of `completed`.

    Attributes:
        roots: names blocks without a stack.
    """

    def __init__(
        self,
        recorder: Recorder,
        snapshots: SnapshotTaker,
        *,
        tensors: TensorTable | None,
        restored: Restored,
        pacer: Pacer,
        environ: Mapping[str, str],
        counters: Counters,
    ) -> None:
        self._recorder = recorder
        self._snapshots = snapshots
        self._tensors = tensors
        self._restored = restored
        self._pacer = pacer
        self._environ = environ
        self._counters = counters
        self._workspaces: tuple[int, ...] | None = None
        self._workspaces_before: set[int] = set()
        self._gaps_seen = 0
        self.forget_roots()

    def forget_roots(self, *, engine_is_named: bool = False) -> None:
        """Nothing is known of any block.

        Args:
            engine_is_named: see `StacklessRoots`.
        """
        self.roots = StacklessRoots(self._pacer, engine_is_named=engine_is_named)

    def recording_began(self) -> None:
        """What was allocated before is older than our recording."""
        self._gaps_seen = self._recorder.gaps

    def forget_parent(self) -> None:
        """In a forked child: its parent's workspaces are not in this process."""
        self._workspaces_before = set()

    # on our thread, in slices

    def read(self, stats: StatsReader) -> Reading:
        """What is alive now, see `Source.read`."""
        self._recorder.keep_on()
        gaps = self._recorder.gaps
        entries = self._tensors.snapshot() if self._tensors is not None else {}
        restored = self._restored.entries()
        raw, reading = self._snapshots.take(stats, traces=False)
        self._snapshots.note_copy(reading.stall_seconds)
        replaced, sliced_seconds = self.put_originals(raw, restored)
        sliced_seconds += self.roots.update(
            raw, unrecorded=gaps != self._gaps_seen, restored=replaced.roots
        )
        self._gaps_seen = gaps
        classifier = None
        if self._tensors is not None:
            classifier, seconds = self.classifier(reading.snapshot, entries)
            sliced_seconds += seconds
        return replace(
            reading,
            stall_seconds=reading.stall_seconds + sliced_seconds,
            stackless=self.roots.of_blocks(ours=not self._recorder.job_records),
            classifier=classifier,
        )

    def put_originals(self, raw: Any, before: Entries) -> tuple[Replaced, float]:
        """What restores allocated shows whose it is; and the seconds that took in slices.

        Args:
            raw: the snapshot.
            before: what was known when it was asked for: what is not in it is gone.
        """
        entries = {**before, **self._restored.entries()}
        if not entries:
            return Replaced((), {}), 0.0
        self._pacer.begin()
        try:
            replaced = self._restored.put_into(raw, entries, self._pacer.pause)
            self._restored.forget(before, replaced.addresses, self._pacer.pause)
        finally:
            seconds = self._pacer.end()
        return replaced, seconds

    def classifier(self, snapshot: Snapshot, entries: TableEntries) -> tuple[Classifier, float]:
        """What tells the classes of a snapshot's blocks, and the seconds that took in slices."""
        if not entries and not self._workspace_sizes():
            return Classifier({}), 0.0
        self._pacer.begin()
        try:
            known = TensorTable.alive(entries, self._pacer.pause)
            self._workspaces_before = workspaces = self._workspaces_in(snapshot, known)
        finally:
            seconds = self._pacer.end()
        return Classifier(known, workspaces), seconds

    def _workspaces_in(self, snapshot: Snapshot, known: Collection[int]) -> set[int]:
        return workspaces_in(
            snapshot.raw_segments(),
            self._workspace_sizes(),
            known,
            self._workspaces_before,
            self._pacer.pause,
        )

    def _workspace_sizes(self) -> tuple[int, ...]:
        if self._workspaces is None:
            self._workspaces = workspace_sizes(self._environ)
        return self._workspaces

    # on the job's own thread, at once

    def read_at_once(self, stats: StatsReader, budget_seconds: float) -> Reading | None:
        """The snapshot, and which storages of the address table live.

        Blocks without a stack are named by what the last `read` knew.

        Args:
            stats: reads the counters.
            budget_seconds: None where the snapshot would take longer.
        """
        entries = self._tensors.snapshot() if self._tensors is not None else {}
        if self._snapshots.expected_seconds(stats, len(entries)) > budget_seconds:
            return None
        raw, reading = self._snapshots.take(stats, traces=False)
        replaced = self._restored.put_into(raw, self._restored.entries(), no_pause)
        roots = self.roots.of_blocks(ours=not self._recorder.job_records, restored=replaced.roots)
        classifier = None
        if self._tensors is not None:
            # now: on its way out the job lets go of what is alive at this moment
            classifier = Classifier(TensorTable.alive(entries, no_pause))
        return replace(reading, stackless=roots, classifier=classifier)

    def completed(self, reading: Reading) -> Reading:
        """A reading of `read_at_once` with what took too long for the job's thread."""
        if reading.classifier is None:
            return reading
        known = reading.classifier.by_address
        self._pacer.begin()
        try:
            workspaces = self._workspaces_in(reading.snapshot, known)
        finally:
            self._counters.add("exporter_stall_seconds", self._pacer.end())
        return replace(reading, classifier=Classifier(known, workspaces))

    def as_before_restores(self, raw: Any) -> Roots:
        """Put the stacks of before into a snapshot, at once; what blocks without one are called."""
        replaced = self._restored.put_into(raw, self._restored.entries(), no_pause)
        return self.roots.remembered(replaced.roots)
