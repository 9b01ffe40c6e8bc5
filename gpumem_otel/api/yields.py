"""The job's own calls to give the GPU's memory back and to take it again.

    with gpumem_otel.yielded():
        run_something_else_on_the_gpu()

It frees memory, not the allocation of the GPU by a scheduler. See docs/yield.md.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from gpumem_otel.api.lifecycle import current, participants, register_engine, step_without_install
from gpumem_otel.errors import ConfigError, GpumemError, YieldRefusedError
from gpumem_otel.settings.config import process_environ
from gpumem_otel.yielding.callbacks import Callbacks
from gpumem_otel.yielding.engine.safepoint import SafePoints
from gpumem_otel.yielding.request_fields import DeviceNumbers, Names, Seconds, fields_of
from gpumem_otel.yielding.scan.torch_state import not_between_steps
from gpumem_otel.yielding.signals import GRACE_SECONDS, StopSignals
from gpumem_otel.yielding.validation import restore_fault, yield_fault
from gpumem_otel.yielding.values import RestoreRequest, YieldLevel, YieldRequest, YieldState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from typing_extensions import Self, Unpack

    from gpumem_otel.runtime.agent import Agent
    from gpumem_otel.yielding.engine.engine import YieldEngine
    from gpumem_otel.yielding.values import YieldReport

EXIT_SECONDS = 5.0
"""How long the end of a process waits for device memory that the driver needs for it."""

_CALLBACK_SECONDS = Seconds(0.001, 86_400.0, "30")


class YieldOptions(TypedDict, total=False):
    """Keywords of `yield_memory`: the fields of `values.YieldRequest`, with the level as text."""

    level: str
    devices: tuple[int, ...] | None
    classes: tuple[str, ...] | None
    keep: tuple[str, ...]
    discard: tuple[str, ...]
    lease_seconds: float | None
    deadline_seconds: float | None
    wait_seconds: float
    dry_run: bool
    verify: bool
    assume_private: bool
    release_host: bool
    disk_dir: str


class _State:
    """Callbacks and engines of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.callbacks = Callbacks()
        self.bare: YieldEngine | None = None
        self.engine: YieldEngine | None = None  # the last one used
        self.engines: weakref.WeakSet[YieldEngine] = weakref.WeakSet()
        self.at_fork = False


_STATE = _State()


# the job's calls


def yield_memory(**options: Unpack[YieldOptions]) -> YieldReport:
    """Give the memory of this process's GPUs back, and return once it is free.

    On the training thread (the one that reached the first safe point; the main thread before that)
    the call itself is the safe point. Until `restore()` the tensors are empty: using them raises an
    error of torch, or gives wrong values. On another thread the call waits for the next safe point,
    and the training thread is stopped there until the memory is back.

    Raises:
        YieldRefusedError: it cannot be done, and everything is as before.
        YieldFailedError: it ended in another state, which the message names; or contents to discard
            are lost and everything else is as before.
        ConfigError: a keyword that cannot be used.
    """
    request = _request(options)
    engine, bare = _engine()
    if bare and "assume_private" not in options:
        request = replace(request, assume_private=True)
    return engine.yield_(request)


def restore(classes: Collection[str] | None = None, *, wait_seconds: float = 60.0) -> YieldReport:
    """Take the memory again, and return once everything is back.

    Args:
        classes: bring back only these tensor classes now, for instance `("parameter",)`.
        wait_seconds: how long to wait for room on the devices.

    Raises:
        YieldRefusedError: there is no room; the memory stays yielded and can be restored later.
        YieldFailedError: something is lost.
        ConfigError: a class or a number that cannot be used.
    """
    chosen = _names("restore", "classes", classes)
    request = RestoreRequest(classes=chosen, wait_seconds=wait_seconds)
    fault = restore_fault(request)
    if fault:
        raise ConfigError(f"restore: {fault}")
    engine, _ = _engine("restore")
    return engine.restore(request)


@contextmanager
def yielded(**options: Unpack[YieldOptions]) -> Iterator[YieldReport]:
    """Give the memory back within the block, and take it again afterwards.

    Raises:
        YieldRefusedError: see `yield_memory` and `restore`.
        YieldFailedError: see `yield_memory` and `restore`.
    """
    away = not options.get("dry_run")
    with _restoring_once_more():
        try:
            try:
                report = yield_memory(**options)
            except GpumemError:
                away = False
                raise
            yield report
        finally:  # also for an interrupt right after the yield
            if away:
                restore()


@contextmanager
def _restoring_once_more() -> Iterator[None]:
    """For an interrupt before a restore has begun; a second restore does nothing."""
    try:
        yield
    except (GpumemError, GeneratorExit):  # the latter when an abandoned generator is collected
        raise
    except BaseException:
        with suppress(GpumemError):  # the interrupt is what is raised
            restore()
        raise


class Courtesy:
    """A replacement for pytorch_memlab's class of this name.

    courtesy = gpumem_otel.Courtesy()
    courtesy.yield_memory()
    courtesy.restore()

    Args:
        options: of each `yield_memory`.

    Raises:
        ConfigError: a keyword that cannot be used.
    """

    def __init__(self, **options: Unpack[YieldOptions]) -> None:
        _request(options)
        self._options = options

    def yield_memory(self) -> None:
        """See `gpumem_otel.yield_memory`."""
        yield_memory(**self._options)

    def restore(self) -> None:
        """See `gpumem_otel.restore`."""
        restore()

    def __enter__(self) -> Self:
        self.yield_memory()
        return self

    def __exit__(self, *_: object) -> None:
        with _restoring_once_more():
            self.restore()


def yield_callbacks(
    *,
    before_yield: Callable[[], object] | None = None,
    after_restore: Callable[[], object] | None = None,
    on_evict: Callable[[str], object] | None = None,
    timeout_seconds: float = 30.0,
) -> Callable[[], None]:
    """Register callbacks for each yield; returns the function that removes them.

    Args:
        before_yield: called while the training thread is stopped, before anything is moved. The
            yield is refused where it raises or takes too long.
        after_restore: called when all memory is back or the yield has failed, if `before_yield` was
            called.
        on_evict: called with one line when memory is not back though it should be: a restore or the
            end of a lease found no room, or something is lost. Once for each yield.
        timeout_seconds: time limit of each.

    Raises:
        ConfigError: one of them cannot be called, or the time limit is out of range.
    """
    for name, call in (
        ("before_yield", before_yield),
        ("after_restore", after_restore),
        ("on_evict", on_evict),
    ):
        if call is not None and not callable(call):
            raise ConfigError(f"{name}: {type(call).__name__!r} cannot be called")
    fault = _CALLBACK_SECONDS.fault("timeout_seconds", timeout_seconds)
    if fault:
        raise ConfigError(f"yield_callbacks: {fault}")
    return _STATE.callbacks.add(before_yield, after_restore, on_evict, timeout_seconds)


def yield_on_stop_signal(**options: Unpack[YieldOptions]) -> Callable[[], None]:
    """Yield on SIGTSTP and restore on SIGCONT; returns the function that undoes this.

    Slurm stops the process two seconds after SIGTSTP: where a safe point and the copy do not fit
    into that time, nothing is moved. Previous handlers are called as well; without one, the process
    stops once the memory is given back or that was refused.

    Raises:
        ConfigError: not on the main thread, or a keyword that cannot be used.
    """
    options.setdefault("deadline_seconds", GRACE_SECONDS)
    options.setdefault("wait_seconds", GRACE_SECONDS)
    request = _request(options)

    def stop() -> None:
        engine, bare = _engine()
        wanted = replace(request, assume_private=True) if bare else request
        engine.yield_(wanted, who="SIGTSTP")

    def go_on() -> None:
        engine, _ = _engine()
        if engine.status.state is YieldState.YIELDED:
            engine.restore(who="SIGCONT")

    signals = StopSignals(stop, go_on)
    signals.start()
    return signals.stop


# engines


def engine_of(agent: Agent) -> YieldEngine:
    """The engine of this agent; the same each time.

    Raises:
        YieldRefusedError: the process uses no GPU yet.
    """
    with _STATE.lock:
        known: Any = agent.yields
        if known is not None:
            return known  # type: ignore[no-any-return]
        source: Any = agent.source
        if agent.reader is None or not hasattr(source, "recorder"):
            raise _nothing_to_give_back()
        from gpumem_otel.yielding.wiring import compose

        engine = compose(
            source,
            safe_points=agent.safe_points,
            callbacks=_STATE.callbacks,
            participants=participants,
            environ=agent.environ,
            counters=agent.counters,
            run_dir=agent.config.serve.run_dir,
            limits=agent.config.yields,
            why_not_now=lambda: agent.why_not_now,
            several=lambda: agent.several_optimizers,
        )
        if agent.config.metrics.otlp:
            from gpumem_otel.metrics.spans import YieldSpans

            spans = YieldSpans(agent.rank)
            engine.watch(spans.phase_ended, spans.operation_ended)
        _at_fork(engine)
        agent.yields = engine
        agent.defer("yield", engine.close)
        return engine


register_engine(engine_of)


def _engine(verb: str = "yield") -> tuple[YieldEngine, bool]:
    """(the engine to use, whether it works without `install()`)."""
    with _STATE.lock:
        last = _STATE.engine
        if last is not None and last.status.state is not YieldState.RUNNING:
            return last, last is _STATE.bare  # the engine that yielded restores
        agent = current()
        if agent is not None and agent.reader is not None and hasattr(agent.source, "recorder"):
            _STATE.engine = engine_of(agent)
            return _STATE.engine, False
        if _STATE.bare is None:
            _STATE.bare = _bare_engine(verb)
        _STATE.engine = _STATE.bare
        return _STATE.bare, True


def _bare_engine(verb: str) -> YieldEngine:
    """An engine without `install()`, with its own source from now on."""
    from gpumem_otel.base.counters import Counters
    from gpumem_otel.capture.source import TorchSource
    from gpumem_otel.settings.options import resolve
    from gpumem_otel.yielding.wiring import compose

    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        raise _nothing_to_give_back(verb)
    environ = process_environ()
    config = resolve(environ)
    counters = Counters()
    source = TorchSource(counters=counters, environ=environ)
    source.start()
    safe_points = SafePoints(not_between_steps)
    engine = compose(
        source,
        safe_points=safe_points,
        callbacks=_STATE.callbacks,
        participants=participants,
        environ=environ,
        counters=counters,
        run_dir=config.serve.run_dir,
        limits=config.yields,
        note="sharing was not tracked before this call: all memory was taken to be private",
    )
    _at_fork(engine)
    step_without_install(safe_points.reached)
    atexit.register(engine.close, EXIT_SECONDS)
    return engine


def _nothing_to_give_back(verb: str = "yield") -> YieldRefusedError:
    torch: Any = sys.modules.get("torch")
    # torch sets it in forked children of a process that used a device; CUDA does not work there
    forked = getattr(getattr(torch, "cuda", None), "_is_in_bad_fork", None)
    if callable(forked) and forked():
        return YieldRefusedError(f"{verb}: a forked child holds nothing of its parent's memory")
    result = "nothing was given back" if verb == "restore" else "nothing to give back"
    return YieldRefusedError(f"{verb}: this process uses no GPU yet; {result}")


def _request(options: YieldOptions) -> YieldRequest:
    given: dict[str, Any] = dict(options)
    known = fields_of(YieldRequest)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"yield: unknown keyword {unknown[0]!r}")
    try:
        level = YieldLevel(given.pop("level", YieldLevel.AUTO))
    except ValueError as error:
        levels = ", ".join(level.value for level in YieldLevel)
        raise ConfigError(f"yield: {error}; levels are {levels}") from error
    for name, value in given.items():
        if isinstance(known[name].kind, (DeviceNumbers, Names)):
            given[name] = _names("yield", name, value)
    request = YieldRequest(level=level, **given)
    fault = yield_fault(request)
    if not fault and request.disk_dir and not os.path.isdir(request.disk_dir):  # noqa: PTH112
        fault = f"disk_dir {request.disk_dir!r} is no folder; make it first"
    if fault:
        raise ConfigError(f"yield: {fault}")
    return request


def _names(verb: str, name: str, value: Any) -> Any:
    """A list or set as a tuple; other values are left to the check.

    Raises:
        ConfigError: a single string or number.
    """
    if isinstance(value, (str, int)):
        raise ConfigError(f"{verb}: {name} is a list; write ({value!r},)")
    return tuple(value) if isinstance(value, Iterable) else value


def _at_fork(engine: YieldEngine) -> None:
    _STATE.engines.add(engine)
    if not _STATE.at_fork:
        _STATE.at_fork = True
        # cannot be unregistered; it drops what belongs to the parent
        os.register_at_fork(after_in_child=_after_fork_in_child)


def _after_fork_in_child() -> None:
    engines, _STATE.engines = list(_STATE.engines), weakref.WeakSet()
    _STATE.lock = threading.RLock()
    _STATE.bare = _STATE.engine = None
    step_without_install(None)
    for engine in engines:
        engine.after_fork_in_child()
