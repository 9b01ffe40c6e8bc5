"""The interfaces between the engine of yields and the parts that move memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    from gpumem_otel.yielding.values import (
        Candidate,
        Operation,
        PhaseTime,
        RestoreRequest,
        ScanResult,
        YieldRequest,
        YieldStatus,
    )


class Finding(Protocol):
    """Finds storages that can be moved."""

    def find(self, *, assume_private: bool) -> ScanResult:
        """At a safe point: every storage that can be moved, and what cannot."""
        ...

    def probable(self) -> Sequence[Candidate]:
        """Large storages that `find` will probably return; cheap, () before the first `find`."""
        ...


class Offloading(Protocol):
    """Copies storages to the host and back.

    Attributes:
        held_bytes: by tensor class, contents that only the host has.
        discarded_bytes: by tensor class, contents that were thrown away.
        bytes_per_second: as measured, 0.0 before.
        notes: what a person should know about the last yield and its restore.
        zeroed: classes that `free` had already thrown away when it had to undo itself.
        copies_ahead: a copy that `begin` started is running.
        on_waiting: called with the reason while a restore waits for room on a device.
    """

    on_waiting: Callable[[str], object]
    notes: list[str]
    zeroed: set[str]

    @property
    def copies_ahead(self) -> bool: ...  # noqa: D102 - see the class

    @property
    def held_bytes(self) -> Mapping[str, int]: ...  # noqa: D102 - see the class

    @property
    def discarded_bytes(self) -> Mapping[str, int]: ...  # noqa: D102

    @property
    def host_bytes(self) -> int: ...  # noqa: D102

    @property
    def disk_bytes(self) -> int: ...  # noqa: D102

    @property
    def bytes_per_second(self) -> float: ...  # noqa: D102

    def begin(self, movables: Sequence[Candidate]) -> None:
        """Start to copy what will probably go; only reads. `admit` or `abandon` comes next."""
        ...

    def admit(self, movables: Sequence[Candidate], request: YieldRequest) -> tuple[int, int]:
        """Reserve host memory and disk; (bytes of each).

        Raises:
            YieldRefusedError: one of them is short.
        """
        ...

    def copy_out(self, progress: Callable[[int, int], None], stop: Callable[[], bool]) -> PhaseTime:
        """Copy to the host; changes nothing of the job."""
        ...

    def free(self) -> None:
        """Free on the device what was copied or discarded: everything, or nothing."""
        ...

    def discard(self, classes: Collection[str]) -> None:
        """Throw away the copies of these freed classes: zeros after the restore."""
        ...

    def abandon(self) -> None:
        """Undo `begin`, `admit` and `copy_out`."""
        ...

    def copy_back(
        self,
        classes: Collection[str] | None,
        wait_seconds: float,
        progress: Callable[[int, int], None],
        stop: Callable[[], bool],
    ) -> PhaseTime:
        """Allocate and copy back; all of these classes, or nothing.

        Raises:
            YieldRefusedError: device memory is missing, and how much.
        """
        ...

    def close(self) -> bool:
        """Free all host memory; whether nothing is held any more."""
        ...

    def verify(self) -> str:
        """Compare checksums: "equal", or "" where none were asked for.

        Raises:
            YieldFailedError: contents differ.
        """
        ...


class Moves(Protocol):
    """Learns what was moved, so that profiles still show its stacks. Raises nothing."""

    def placing(self, moved: Candidate, restored_in: str) -> AbstractContextManager[None]:
        """Within the block, code of this file allocates memory for this storage again."""
        ...

    def settled(self, movables: Collection[Candidate]) -> None:
        """The addresses of these storages have changed, or they have none."""
        ...


class Checkpointing(Protocol):
    """The driver's checkpoint of this process.

    Attributes:
        state: `running`, `locked`, `checkpointed` or `failed`.
        on_restored: called where the end of a lease has restored the driver's part.
        on_waiting: called with the reason where a lease has ended and the restore must wait.
    """

    state: str
    on_restored: Callable[[PhaseTime], object] | None
    on_waiting: Callable[[str], object] | None

    def prepare(self) -> None:
        """Start the helper process; copies may run meanwhile.

        Raises:
            YieldRefusedError: it does not start.
        """
        ...

    def refusal(self) -> str:
        """Why the process could not be restored here, "" where it could."""
        ...

    def lock_and_checkpoint(self, timeout_seconds: float, lease_seconds: float | None) -> PhaseTime:
        """Give all memory back, also the context's."""
        ...

    def restore(self, wait_seconds: float) -> PhaseTime:
        """Take it again; do nothing where nothing was given back."""
        ...

    def close(self, wait_seconds: float = 0.0) -> bool:
        """End the helper, which restores the process first; whether the process runs."""
        ...


class Gate(Protocol):
    """Keeps our own threads from torch and CUDA while the driver holds the process."""

    def close(self, timeout: float) -> bool:
        """Block new reads, and wait for running ones; whether all have ended."""
        ...

    def open(self) -> None:
        """Allow reads again."""
        ...


class YieldControl(Protocol):
    """Commands to yield and restore, and their operations; from any thread."""

    def submit(self, request: YieldRequest | RestoreRequest, who: str) -> Operation:
        """Begin an operation in the background.

        A command that repeats the running one, or asks for the current state, gets that operation.

        Raises:
            YieldRefusedError: another operation runs, or this one cannot begin.
        """
        ...

    def operation(self, operation_id: str) -> Operation | None:
        """One of the last hundred, None where it is unknown."""
        ...

    def wait(self, version: int, seconds: float) -> YieldStatus:
        """The status when its version is another than this one, or after so long.

        Never calls torch or CUDA.
        """
        ...
