"""The functions that give the listener's handlers their answers; they know nothing of HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from gpumem_otel.base.profile import ProfileKind

ProfileCall: TypeAlias = "Callable[[ProfileKind, int | None, float | None, threading.Event], bytes]"
"""(kind, device or None for all, seconds of the window or None, stop) -> gzipped pprof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the exporter itself works; not the state of the job.

    Attributes:
        ok: nothing is wrong.
        reasons: one line for each thing that is wrong.
        ages: seconds since the last `read`, `push` and so on, by name.
    """

    ok: bool
    reasons: tuple[str, ...] = ()
    ages: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class AppDeps:
    """Where the answers come from; each is called on a thread of ours, never on the job's.

    Attributes:
        metrics: value of the Accept header -> content type and body of the exposition.
        profile: may wait for its window, but must return once `stop` is set: the client went
            away, or the listener stops. May raise CaptureError (answered 503), ValueError or
            ConfigError (400).
        health: state of the exporter.
        service_name: shown on the page with links and in file names.
        lines: Prometheus text of profiled lines, "" where there are none.
    """

    metrics: Callable[[str], tuple[str, bytes]]
    profile: ProfileCall
    health: Callable[[], Health]
    service_name: str = ""
    lines: Callable[[], str] = str
