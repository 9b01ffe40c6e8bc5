"""Start without a change to the job: OpenTelemetry's entry point, and `gpumem-otel run`.

Both reach every Python child of the job (compile workers, spawned loaders), so nothing here
imports torch or an SDK: a process is armed by its own first use of CUDA, or never.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpumem_otel.api import lifecycle
from gpumem_otel.base.logs import named_logger

if TYPE_CHECKING:
    from collections.abc import Collection

_log = named_logger("gpumem_otel.instrumentor")


def start_from_environment() -> None:
    """`install()` with the environment's settings; never raises, since no user called it."""
    try:
        lifecycle.install()
    except Exception:
        _log.exception("gpumem_otel could not be started; the job goes on without it")


class GpumemInstrumentor:
    """What `opentelemetry-instrument` loads by the entry point `gpumem_otel`.

    It has the methods of OpenTelemetry's BaseInstrumentor that the loader calls, without deriving
    from it, so that OpenTelemetry stays optional.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """Requires no package: torch may be imported later, or never."""
        return ()

    def instrument(self, **kwargs: Any) -> None:
        """Start with the environment's settings; the loader's keywords are ignored."""
        del kwargs
        start_from_environment()

    def uninstrument(self, **kwargs: Any) -> None:
        """Undo `instrument`."""
        del kwargs
        lifecycle.uninstall()
