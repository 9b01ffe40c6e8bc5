"""The driver's checkpoint as a part of a yield, and the gate that blocks our own reads."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpumem_otel.errors import YieldRefusedError
from gpumem_otel.yielding.values import YieldLevel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpumem_otel.yielding.engine.dependencies import YieldDependencies
    from gpumem_otel.yielding.protocols import Checkpointing
    from gpumem_otel.yielding.values import PhaseTime, YieldRequest

GATE_SECONDS = 5.0
"""How long the driver waits for our own reads to end."""

_NO_DRIVER = "the driver's checkpoint is not part of this process"


class DriverPhases:
    """The driver's checkpoint for the phases; does nothing where there is none.

    Args:
        parts: its checkpoint and gate are used.
    """

    def __init__(self, parts: YieldDependencies) -> None:
        self._parts = parts
        self._gate_closed = False

    @property
    def _checkpoint(self) -> Checkpointing | None:
        return self._parts.checkpoint

    @property
    def state(self) -> str:
        """`running`, `locked`, `checkpointed` or `failed`."""
        return "running" if self._checkpoint is None else self._checkpoint.state

    def refusal(self, request: YieldRequest) -> str | None:
        """Why the driver would not restore the process, "" where it would; None: not asked for.

        Raises:
            YieldRefusedError: it would not, and level `process` was asked for.
        """
        if request.level is YieldLevel.TENSORS:
            return None
        refusal = _NO_DRIVER if self._checkpoint is None else self._checkpoint.refusal()
        if refusal and request.level is YieldLevel.PROCESS:
            raise YieldRefusedError(
                f"yield: the driver would not bring this process back: {refusal}"
            )
        return refusal

    @contextmanager
    def made_ready(self, *, wanted: bool) -> Iterator[list[BaseException]]:
        """Start its helper while the block runs, and wait for it at the end of the block.

        Args:
            wanted: whether to start it at all.

        Yields:
            Errors of the helper; filled at the end.
        """
        errors: list[BaseException] = []
        checkpoint = self._checkpoint
        if checkpoint is None or not wanted:
            yield errors
            return

        def prepare() -> None:
            try:
                checkpoint.prepare()
            except BaseException as error:  # any error: it is not ready
                errors.append(error)

        thread = threading.Thread(target=prepare, name="gpumem-otel-helper", daemon=True)
        thread.start()
        try:
            yield errors
        finally:
            thread.join()

    def take(self, timeout_seconds: float, lease_seconds: float | None) -> PhaseTime:
        """Take what the process has on its devices; call `close_gate` before.

        Raises:
            YieldRefusedError: the driver refused, and the process is as before.
            YieldFailedError: the process's memory is lost.
        """
        if self._checkpoint is None:
            raise YieldRefusedError(f"yield: {_NO_DRIVER}")
        return self._checkpoint.lock_and_checkpoint(timeout_seconds, lease_seconds)

    def close_gate(self) -> None:
        """Block our own reads, and wait for those that run.

        Raises:
            YieldRefusedError: one of them did not end.
        """
        gate = self._parts.gate
        if gate is None:
            return
        self._gate_closed = True
        if not gate.close(GATE_SECONDS):
            raise YieldRefusedError(
                f"yield: a read of ours did not end within {GATE_SECONDS:g} s; try again"
            )

    def open_gate(self) -> None:
        """Allow our own reads again, where the driver holds nothing."""
        gate = self._parts.gate
        if gate is not None and self._gate_closed and self.state == "running":
            self._gate_closed = False
            gate.open()

    def restore(self, wait_seconds: float) -> PhaseTime | None:
        """Give back what was taken; None where nothing was.

        Raises:
            YieldRefusedError: not now; everything stays as it is.
            YieldFailedError: the process's memory is lost.
        """
        if self._checkpoint is None or self._checkpoint.state == "running":
            return None
        return self._checkpoint.restore(wait_seconds)

    def undo(self, wait_seconds: float) -> None:
        """Restore after a failure, and end a helper that has nothing to do."""
        checkpoint = self._checkpoint
        if checkpoint is not None and checkpoint.state in {"locked", "checkpointed"}:
            checkpoint.restore(wait_seconds)
        elif checkpoint is not None and checkpoint.state == "running":
            checkpoint.close()
