"""What the engine says about requests, states and errors."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from gpumem_otel.core.yields import RestoreRequest, YieldRequest, YieldState
from gpumem_otel.errors import YieldFailedError, YieldRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "WITHOUT",
    "asks_same",
    "gives",
    "kind_of",
    "less_of",
    "line_of",
    "other_than",
    "way_on",
]

WITHOUT: Final = "%s: the job goes on WITHOUT its memory"

_MEMORY = ("level", "devices", "classes", "keep", "discard", "dry_run")
"""What says which memory goes, and how."""


def kind_of(request: YieldRequest | RestoreRequest) -> str:
    """`yield` or `restore`."""
    return "restore" if isinstance(request, RestoreRequest) else "yield"


def gives(request: YieldRequest | RestoreRequest) -> bool:
    """Whether it takes memory away."""
    return isinstance(request, YieldRequest) and not request.dry_run


def asks_same(had: YieldRequest | RestoreRequest, asked: YieldRequest | RestoreRequest) -> bool:
    """Whether the second of two requests of one kind is met where the first one is."""
    if isinstance(had, YieldRequest) and isinstance(asked, YieldRequest):
        return not other_than(had, asked)
    return had.classes == asked.classes


def other_than(had: YieldRequest, asked: YieldRequest) -> str:
    """What the second asks for and the first does not bring, "" for nothing."""
    for name in _MEMORY:
        before, now = getattr(had, name), getattr(asked, name)
        if before != now:
            return f"{name} {_shown(now)}, where it has {_shown(before)},"
    if asked.lease_seconds is not None and asked.lease_seconds != had.lease_seconds:
        before = "none" if had.lease_seconds is None else f"{had.lease_seconds:g} s"
        return f"a lease of {asked.lease_seconds:g} s, where it has {before},"
    for name in ("verify", "release_host"):
        if getattr(asked, name) and not getattr(had, name):
            return name
    return ""


def _shown(value: object) -> str:
    """As it is asked for; what is not said is all of it."""
    if value is None:
        return "all"
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return str(getattr(value, "value", value))


def line_of(kind: str, error: BaseException) -> str:
    """One line for people, whatever was raised."""
    if isinstance(error, YieldRefusedError | YieldFailedError):
        return str(error)
    return f"{kind}: {type(error).__name__}: {error}" if str(error) else f"{kind}: {error!r}"


def way_on(state: YieldState) -> str:
    """What to do in the state that is left by an error."""
    return {
        YieldState.YIELDED: "nothing is lost: restore() once the device has room",
        YieldState.FAILED: "the job must be started again",
    }.get(state, "the job goes on")


def less_of(before: Mapping[str, int], after: Mapping[str, int]) -> Mapping[str, int]:
    """By how much each of them became less."""
    gone = {name: size - after.get(name, 0) for name, size in before.items()}
    return MappingProxyType({name: size for name, size in gone.items() if size > 0})
