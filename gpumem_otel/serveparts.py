"""The parts that listen: for scrapes and pulls, and for commands to yield and restore."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from gpumem_otel.config import ServeConfig
from gpumem_otel.ranks import in_notebook

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.answers import Answers
    from gpumem_otel.config import Config
    from gpumem_otel.core.counters import Counters
    from gpumem_otel.core.model import Identity
    from gpumem_otel.core.ports import Observer, YieldControl
    from gpumem_otel.serve.control import ControlListener
    from gpumem_otel.serve.server import Listener
    from gpumem_otel.undoing import Undoing

__all__ = ["ServeParts"]

LISTENER_STOP_SECONDS = 1.0
"""What a listener is given to stop, of what all have together."""


class ServeParts:
    """Starts what others connect to.

    Args:
        config: everything resolved.
        counters: what the parts count about themselves.
        undoing: told of each part that starts.
        answers: what the parts ask, once CUDA is there.
        observe: where the metrics get their values.
        engine: the engine of yields, made when it is asked for.

    Attributes:
        listener: of scrapes and pulls; None where nothing listens.
        control: of commands; None where nothing listens.
    """

    def __init__(
        self,
        config: Config,
        *,
        counters: Counters,
        undoing: Undoing,
        answers: Callable[[], Answers],
        observe: Observer,
        engine: Callable[[], YieldControl],
    ) -> None:
        self._config = config
        self._counters = counters
        self._undoing = undoing
        self._answers = answers
        self._observe = observe
        self._engine = engine
        self._announced: Identity | None = None
        self.listener: Listener | None = None
        self.control: ControlListener | None = None

    def start_listener(self) -> None:
        """Serve /metrics and profiles, where that is wanted."""
        if not self._config.serve.enabled:
            return
        from gpumem_otel.capture.lines import published_metrics
        from gpumem_otel.export.clock import SystemClock
        from gpumem_otel.export.prometheus import Exposition
        from gpumem_otel.serve.deps import AppDeps
        from gpumem_otel.serve.server import Listener

        answers = self._answers()
        identity = answers.identity()
        exposition = Exposition(
            self._observe,
            self._config.metrics.level,
            clock=SystemClock(),
            counters=self._counters,
        )
        listener = Listener(
            AppDeps(
                metrics=exposition.render,
                profile=answers.profile,
                health=answers.health,
                service_name=identity.service_name,
                lines=lambda: published_metrics(answers.identity().rank),
            ),
            _for_notebooks(self._config.serve),
            local_rank=identity.local_rank,
            counters=self._counters,
            identity=answers.identity,
        )
        # daemons in any case: a profile that is being made does not hold up the exit
        self._undoing.begin(
            "listen",
            listener.start,
            lambda left: listener.stop(min(left, LISTENER_STOP_SECONDS)),
        )
        self.listener, self._announced = listener, identity

    def start_control(self) -> None:
        """Take commands to yield and restore, where the job says so.

        Raises:
            ServeError: the listener can not be, or its port; the socket may be there all the same.
        """
        if not self._config.control.enabled:
            return
        from gpumem_otel.serve.control import ControlListener

        answers = self._answers()
        listener = ControlListener(
            self._engine(),
            self._config.control,
            run_dir=self._config.serve.run_dir,
            identity=answers.identity(),
            counters=self._counters,
        )
        self._undoing.begin(
            "control",
            listener.start,
            lambda left: listener.stop(min(left, LISTENER_STOP_SECONDS)),
        )
        self.control = listener
        listener.must_have_port()  # else counted and said as any failure: the socket is there

    def announce(self, identity: Identity) -> None:
        """This is who the process is now: torch.distributed may have come up meanwhile."""
        if identity == self._announced:
            return
        self._announced = identity  # the run file says the rank
        listener, control = self.listener, self.control
        if listener is not None:
            listener.announce()
        if control is not None:
            control.announce(identity)

    def stopped(self) -> None:
        """All was undone: nobody is asked for an address any more."""
        self.listener = self.control = None

    def close_in_child(self) -> None:
        """In a forked child: the sockets are the parent's."""
        for listener in (self.listener, self.control):
            if listener is not None:
                self._undoing.guard.run("fork", listener.close_in_child)


def _for_notebooks(config: ServeConfig) -> ServeConfig:
    """Several kernels run side by side on one machine: any free port, unless one was chosen."""
    if config.port == ServeConfig().port and in_notebook(sys.modules):
        return replace(config, port=0)
    return config
