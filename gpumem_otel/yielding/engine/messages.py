"""Words of the engine for requests, states and errors."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpumem_otel.errors import YieldFailedError, YieldRefusedError
from gpumem_otel.yielding.values import RestoreRequest, YieldRequest, YieldState

if TYPE_CHECKING:
    from collections.abc import Mapping

WITHOUT: Final = "%s: the job goes on WITHOUT its memory"


def kind_of(request: YieldRequest | RestoreRequest) -> str:
    """`yield` or `restore`."""
    return "restore" if isinstance(request, RestoreRequest) else "yield"


def gives(request: YieldRequest | RestoreRequest) -> bool:
    """Whether it takes memory away."""
    return isinstance(request, YieldRequest) and not request.dry_run


def line_of(kind: str, error: BaseException) -> str:
    """One line for people, whatever was raised."""
    if isinstance(error, YieldRefusedError | YieldFailedError):
        return str(error)
    return f"{kind}: {type(error).__name__}: {error}" if str(error) else f"{kind}: {error!r}"


def way_on(state: YieldState) -> str:
    """What to do in the state that an error leaves."""
    return {
        YieldState.YIELDED: "nothing is lost: restore() once the device has room",
        YieldState.FAILED: "the job must be started again",
    }.get(state, "the job goes on")


def less_of(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, int]:
    """By how much each of them became less."""
    gone = {name: size - after.get(name, 0) for name, size in before.items()}
    return MappingProxyType({name: size for name, size in gone.items() if size > 0})
