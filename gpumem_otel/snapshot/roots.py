"""Named roots of memory without a stack, and the builder of stacks that has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_otel.snapshot.stacks import (
    BEFORE_INSTALL,
    NO_PYTHON_FRAME,
    StackBuilder,
    identity_namer,
    redacts_paths,
    with_basename_paths,
)

if TYPE_CHECKING:
    from gpumem_otel.base.protocols import FrameNamer, StacklessRule
    from gpumem_otel.snapshot.snapshot import TorchSnapshot


def builder_for(snapshot: TorchSnapshot, namer: FrameNamer, max_depth: int = 512) -> StackBuilder:
    """The stack builder for a snapshot, which leaves names alone where they are final."""
    key = (namer, max_depth)
    builder = snapshot.builders.get(key)
    if builder is not None:
        return builder
    if snapshot.resolved:
        namer = with_basename_paths(identity_namer) if redacts_paths(namer) else identity_namer
    builder = snapshot.builders[key] = StackBuilder(namer, max_depth, resolved=snapshot.resolved)
    return builder


def stackless_root(has_event: bool) -> str:
    """Named root of a live block without a stack, from its snapshot file.

    A trace that holds the block's allocation was recorded while no Python code ran; otherwise
    recording had not begun, or the trace has dropped the event since.
    """
    return NO_PYTHON_FRAME if has_event else BEFORE_INSTALL


def recorded_root(stackless: StacklessRule | None, device: int, address: int | None) -> str:
    """Named root of a recorded allocation without a stack."""
    root = NO_PYTHON_FRAME if stackless is None else stackless(device, address)
    # the event itself proves that recording was on
    return NO_PYTHON_FRAME if root == BEFORE_INSTALL else root
