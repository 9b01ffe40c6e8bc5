"""The parts that read: the source, the reader of profiles, the recording, steps and regions."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gpumem_otel.answers import Answers
from gpumem_otel.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpumem_otel.capture.marks import AllocationMarks
    from gpumem_otel.capture.pacer import Pacer
    from gpumem_otel.capture.readout import Reader
    from gpumem_otel.capture.steps import StepCounter
    from gpumem_otel.capture.tensors import TensorTable
    from gpumem_otel.config import Config
    from gpumem_otel.core.counters import Counters
    from gpumem_otel.core.ports import FrameNamer, Reading, Source
    from gpumem_otel.core.quiet import QuietGate
    from gpumem_otel.core.yields import YieldStatus
    from gpumem_otel.undoing import Undoing

__all__ = ["Armed", "ReadParts"]


class Armed(NamedTuple):
    """What is there once CUDA is; the other parts stand on it."""

    source: Source
    reader: Reader
    answers: Answers

    @property
    def tensors(self) -> TensorTable | None:
        """The address table of this process's torch; None where there is none."""
        return _tensors_of(self.source)


class ReadParts:
    """Starts what reads the memory of this process.

    Args:
        config: everything resolved.
        given: the source that is read; None for the torch of this process.
        environ: the process's environment.
        counters: what the parts count about themselves.
        undoing: told of each part that starts.
        pacer: rests between slices of our work.
        gate: closed while nothing of ours may call torch or CUDA.
        on_boundary: called on the job's thread between two pieces of its work.

    Attributes:
        source: what is read; None before torch is waited for.
        reader: profiles on demand; None until armed.
        answers: what the parts ask; None until armed.
        steps: counts those of the job; None where nobody would see them.
        marks: torch's allocation metadata, for regions; None where nobody would see them.
    """

    def __init__(
        self,
        config: Config,
        *,
        given: Source | None,
        environ: Mapping[str, str],
        counters: Counters,
        undoing: Undoing,
        pacer: Pacer,
        gate: QuietGate,
        on_boundary: Callable[[], object],
    ) -> None:
        self._config = config
        self._given = given
        self._environ = environ
        self._counters = counters
        self._undoing = undoing
        self._pacer = pacer
        self._gate = gate
        self._on_boundary = on_boundary
        self.source = given
        self.reader: Reader | None = None
        self.answers: Answers | None = None
        self.steps: StepCounter | None = None
        self.marks: AllocationMarks | None = None

    @property
    def tensors(self) -> TensorTable | None:
        """The address table of this process's torch; None where there is none."""
        return _tensors_of(self.source)

    def armed(self) -> Armed:
        """What the other parts stand on.

        Raises:
            CaptureError: `start_reading` has not gone through.
        """
        if self.source is None or self.reader is None or self.answers is None:
            raise CaptureError("read: nothing is armed")
        return Armed(self.source, self.reader, self.answers)

    def await_cuda(self, on_cuda: Callable[[], object]) -> None:
        """Have that called, on the job's thread, once it initialises CUDA; hooks only."""
        from gpumem_otel.capture.arming import Arming
        from gpumem_otel.capture.sources import TorchSource

        source = TorchSource(
            stacks=self._config.capture.stacks,
            max_window_events=self._config.capture.max_window_events,
            counters=self._counters,
            environ=self._environ,
            pacer=self._pacer,
            classes=self._config.profiles.class_as != "off",
            pinned="pinned" in self._config.profiles.kinds,
            annotations=self._config.profiles.phases,
            gate=self._gate,
        )
        self.source = source
        arming = Arming(on_cuda, on_import=source.prepare)
        self._undoing.defer("arm", lambda _: source.stop())
        self._undoing.begin("arm", arming.start, lambda _: arming.stop())

    def start_reading(
        self,
        *,
        on_reading: Callable[[Reading], object],
        yield_status: Callable[[], YieldStatus | None],
    ) -> None:
        """Switch recording on; CUDA is there.

        Args:
            on_reading: told of each, before the other parts are.
            yield_status: asked for what the engine of yields says; None where there is none.

        Raises:
            CaptureError: there is nothing to read.
        """
        from gpumem_otel.capture.beside import Beside
        from gpumem_otel.capture.names import QualifiedNamer
        from gpumem_otel.capture.readout import Reader
        from gpumem_otel.core.frames import with_basename_paths
        from gpumem_otel.export.clock import SystemClock

        source = self.source
        if source is None:
            raise CaptureError("read: there is no source")
        start = getattr(source, "start", None)
        if start is not None:
            start()
        namer: FrameNamer = QualifiedNamer(pause=self._pacer.pause)
        if self._config.profiles.redact_paths:
            namer = with_basename_paths(namer)
        reader = Reader(
            source,
            namer=namer,
            clock=SystemClock(),
            counters=self._counters,
            config=self._config.profiles,
            pacer=self._pacer,
            describe=lambda: () if self.answers is None else self.answers.describe(),
        )
        reader.tap.append(on_reading)
        recorder = getattr(source, "recorder", None)
        beside = Beside(
            namer=namer,
            config=self._config.profiles,
            counters=self._counters,
            pacer=self._pacer,
            stats=source.stats,
            records_pinned=lambda: recorder is not None and recorder.records_pinned,
        )
        reader.tap.append(beside.note)
        self.reader = reader
        self.answers = Answers(
            self._config,
            environ=self._environ,
            source=source,
            reader=reader,
            counters=self._counters,
            pacer=self._pacer,
            beside=beside,
            live_process=self._given is None,
            gate=self._gate,
        )
        reader.windows.steps = self.answers.steps
        self.answers.yield_status = yield_status
        if self._config.record_path:
            self._undoing.guard.run("record", partial(self._start_recording, namer))

    def _start_recording(self, namer: FrameNamer) -> None:
        from gpumem_otel.capture.process import process_facts
        from gpumem_otel.export.recordfile import RecordingFile

        _, reader, answers = self.armed()
        guard = self._undoing.guard
        recording = RecordingFile(
            self._config.record_path,
            identity=answers.identity(),
            facts=process_facts(answers.devices()),
            namer=namer,
            counters=self._counters,
            pacer=self._pacer,
        )
        self._undoing.defer("record", lambda _: recording.close())
        reader.tap.append(
            lambda reading: guard.run(
                "record", partial(recording.add, reading, answers.step_stats())
            )
        )
        reader.window_tap.append(
            lambda reading, seconds: guard.run(
                "record", partial(recording.add_window, reading, seconds)
            )
        )

    def start_steps(self) -> None:
        """Hear of the job's steps; those of a recording are in it."""
        answers = self.armed().answers
        recorded = getattr(self._given, "steps", None)
        if recorded is not None:
            answers.step_stats = recorded
            return
        tensors = self.tensors
        counted = self._config.capture.steps
        if self._given is not None or not (counted or tensors):
            return
        from gpumem_otel.capture.steps import StepCounter

        counter = StepCounter(
            allocated=getattr(self.source, "allocated", dict) if counted else None,
            on_optimizer=tensors.stepped if tensors else None,
            on_boundary=self._on_boundary,
        )
        if tensors is not None:
            tensors.on_forward = self._on_boundary
        self._undoing.begin("steps", counter.start, lambda _: counter.stop())
        self.steps = counter
        if counted:
            answers.step_stats = counter.stats

    def start_regions(self) -> None:
        """Regions are labelled where somebody may ask for profiles that show them."""
        torch = sys.modules.get("torch")
        wanted = "allocated" in self._config.profiles.kinds or self._config.serve.enabled
        if self._given is not None or torch is None or not wanted:
            return
        from gpumem_otel.capture.marks import AllocationMarks

        self.marks = AllocationMarks(torch, gate=self._gate)
        self._undoing.defer("steps", lambda _: setattr(self, "marks", None))

    def stop_hooks_in_child(self) -> None:
        """In a forked child, which has no CUDA."""
        for hooks in (self.steps, self.tensors):
            if hooks is not None:
                self._undoing.guard.run("fork", hooks.stop)


def _tensors_of(source: Source | None) -> TensorTable | None:
    found: TensorTable | None = getattr(source, "tensors", None)
    return found
