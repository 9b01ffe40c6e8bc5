"""What verbs read: the environment, snapshots, recordings and their devices."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumem_otel.cli.output import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.profiles.of_file import OpenedFile
    from gpumem_otel.snapshot.snapshot import TorchSnapshot
    from gpumem_otel.snapshot.stacks import StackBuilder

STDIN_NAME = "<stdin>"

_PPROF_BYTES = 64 << 20

_PPROF_TEXT_BYTES = 32 << 20


def environ() -> Mapping[str, str]:
    """The environment of the command line."""
    from gpumem_otel.settings.config import process_environ

    return process_environ()


def keep_inputs(output: str, *inputs: str | None) -> None:
    """Refuse to overwrite an input, which may be the only copy.

    Raises:
        click.BadParameter: the output is one of the inputs, by this name or another.
    """
    for path in inputs:
        if path is None or "-" in {path, output}:
            continue
        with suppress(OSError):
            if Path(output).samefile(path):
                raise click.BadParameter(
                    f"{output} is the input; give another name", param_hint="'--output'"
                )


def read_bytes(path: str) -> bytes:
    """The whole input, which may be a snapshot, a recording or pprof; `-` is standard input.

    Raises:
        SnapshotError: it cannot be read, or is none of these.
    """
    from gpumem_otel.errors import SnapshotError
    from gpumem_otel.snapshot.load import read_all

    if path != "-":
        return read_all(path, path, pprof=True)[0]
    if sys.stdin is None:
        raise SnapshotError(STDIN_NAME, "standard input is closed")
    return read_all(sys.stdin.buffer, STDIN_NAME, pprof=True)[0]


def name_of(path: str) -> str:
    """The name of an input in messages."""
    return STDIN_NAME if path == "-" else path


def load(path: str) -> TorchSnapshot:
    """Read a snapshot, or the last one of a recording; `-` is standard input.

    Raises:
        SnapshotError: it cannot be read.
    """
    return open_source(path).snapshot


def open_source(path: str) -> OpenedFile:
    """Read a snapshot or recording; `-` is standard input.

    Raises:
        SnapshotError: it cannot be read.
    """
    from gpumem_otel.profiles.of_file import open_bytes

    _collect_no_garbage()
    with progress(f"reading {path}"):
        data = read_bytes(path)
        with _pprof_named(data):
            return open_bytes(data, name_of(path))


def _collect_no_garbage() -> None:
    """Until the verb ends: a snapshot is millions of objects, and none of them is garbage."""
    context = click.get_current_context(silent=True)
    if context is not None and gc.isenabled():
        gc.disable()
        context.call_on_close(gc.enable)


@contextmanager
def _pprof_named(data: bytes) -> Iterator[None]:
    """Where the input is a pprof profile (which `convert` writes), the error says so."""
    from gpumem_otel.errors import EncodeError, SnapshotError

    try:
        yield
    except SnapshotError as error:
        from gpumem_otel.profiles import pprof

        if len(data) > _PPROF_BYTES:
            raise
        try:
            types = pprof.decode(data, max_bytes=_PPROF_TEXT_BYTES).sample_types
        except (EncodeError, MemoryError):
            types = ()
        if not types:
            raise
        reason = "a pprof profile, not a snapshot: go tool pprof reads it"
        raise SnapshotError(error.source, reason) from None


def namer_for(snapshot: TorchSnapshot) -> FrameNamer:
    """Recordings hold final names; the names of plain files become `file.py:function`."""
    from gpumem_otel.snapshot import stacks

    return stacks.identity_namer if snapshot.resolved else stacks.file_function_namer


def stack_builder(snapshot: TorchSnapshot) -> StackBuilder:
    """Builds stacks of the snapshot's frames, with `namer_for` as their names."""
    from gpumem_otel.snapshot.stacks import StackBuilder

    return StackBuilder(namer_for(snapshot), resolved=snapshot.resolved)


def pick_devices(snapshot: TorchSnapshot, device: int | None) -> tuple[int, ...]:
    """All devices of the snapshot, or the one asked for.

    Raises:
        click.BadParameter: the snapshot has no such device.
    """
    devices = snapshot.devices()
    if device is None:
        return devices
    if device not in devices:
        raise no_such_device(device, f"not in {snapshot.source}", devices)
    return (device,)


def no_such_device(device: int, where: str, devices: Iterable[int]) -> click.BadParameter:
    """The error about a device that no input has."""
    known = ", ".join(map(str, devices)) or "none"
    message = f"device {device} is {where} (devices: {known})"
    return click.BadParameter(message, param_hint="'--device'")
