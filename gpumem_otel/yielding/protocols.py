"""What the engine asks of the parts that move memory, as it asks it."""

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
    """Looks for what can go."""

    def find(self, *, assume_private: bool) -> ScanResult:
        """At a safe point: every storage that can go, and what stays."""
        ...

    def probable(self) -> Sequence[Candidate]:
        """What `find` will probably say can go, as far as it is large; cheap, () before one."""
        ...


class Offloading(Protocol):
    """Copies storages to the host and back.

    Attributes:
        held_bytes: by tensor class, of which only the host has the contents.
        discarded_bytes: by tensor class, neither kept nor there.
        bytes_per_second: as measured, 0.0 before.
        notes: what a person should know of the last yield and its restore.
        zeroed: classes that `free` had thrown away already when it had to undo itself.
        copies_ahead: what was begun is on its way.
        on_waiting: told why a restore waits for room on a device.
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
        """Start to copy what will probably go; reads alone. `admit` or `abandon` comes next."""
        ...

    def admit(self, movables: Sequence[Candidate], request: YieldRequest) -> tuple[int, int]:
        """Reserve host memory and disk; (bytes of each).

        Raises:
            YieldRefusedError: what is short.
        """
        ...

    def copy_out(self, progress: Callable[[int, int], None], stop: Callable[[], bool]) -> PhaseTime:
        """Copy; nothing of the job is changed."""
        ...

    def free(self) -> None:
        """Free on the device what was copied or discarded: all of it, or nothing."""
        ...

    def discard(self, classes: Collection[str]) -> None:
        """Throw away what is kept of these, all of which was freed: zeros when it is back."""
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
            YieldRefusedError: how many bytes of device memory are missing.
        """
        ...

    def close(self) -> bool:
        """Give all host memory back; whether nothing is held any more."""
        ...

    def verify(self) -> str:
        """Compare: "equal", or "" where no checksums were asked for.

        Raises:
            YieldFailedError: contents differ.
        """
        ...


class Moves(Protocol):
    """Is told what was moved, so that profiles show whose it is. Raises nothing."""

    def placing(self, moved: Candidate, restored_in: str) -> AbstractContextManager[None]:
        """Within, this storage is given memory again, by code of this file."""
        ...

    def settled(self, movables: Collection[Candidate]) -> None:
        """These storages have other addresses than before, or none."""
        ...


class Checkpointing(Protocol):
    """The driver's checkpoint of this process.

    Attributes:
        state: `running`, `locked`, `checkpointed` or `failed`.
        on_restored: called where a lease has brought the driver's part back by itself.
        on_waiting: called where a lease is over and it cannot come back yet; says why.
    """

    state: str
    on_restored: Callable[[PhaseTime], object] | None
    on_waiting: Callable[[str], object] | None

    def prepare(self) -> None:
        """Make ready what does the work; may run beside copies.

        Raises:
            YieldRefusedError: it cannot.
        """
        ...

    def refusal(self) -> str:
        """Why it would not come back here, "" where it would."""
        ...

    def lock_and_checkpoint(self, timeout_seconds: float, lease_seconds: float | None) -> PhaseTime:
        """Give all memory back, the context's too."""
        ...

    def restore(self, wait_seconds: float) -> PhaseTime:
        """Take it again; does nothing where nothing was given back."""
        ...

    def close(self, wait_seconds: float = 0.0) -> bool:
        """Let go of what does the work; it brings the process back first. Whether it runs."""
        ...


class Gate(Protocol):
    """Keeps our own threads from torch and CUDA while the driver holds the process."""

    def close(self, timeout: float) -> bool:
        """Let nobody in, and wait for those within; whether all are out."""
        ...

    def open(self) -> None:
        """Let them in again."""
        ...


class YieldControl(Protocol):
    """Commands to yield and restore, and what became of them; from any thread."""

    def submit(self, request: YieldRequest | RestoreRequest, who: str) -> Operation:
        """Begin it in the background.

        A command that repeats the one that runs, or the state that is there, gives that operation.

        Raises:
            YieldRefusedError: another operation runs, or it cannot be begun at all.
        """
        ...

    def operation(self, operation_id: str) -> Operation | None:
        """One of the last hundred, None where it is unknown."""
        ...

    def wait(self, version: int, seconds: float) -> YieldStatus:
        """The status, once its version is another than this one, or after so long.

        Never calls torch or CUDA.
        """
        ...
