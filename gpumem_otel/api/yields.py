"""Give the GPU's memory back, and take it again: the job's own calls, and the engine behind them.

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
"""How long the end of a process waits for device memory that the driver needs to end it."""

_CALLBACK_SECONDS = Seconds(0.001, 86_400.0, "30")


class YieldOptions(TypedDict, total=False):
    """Keywords of `yield_memory`: the fields of `core.yields.YieldRequest`, the level as text."""

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
    """What this process has asked for."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.callbacks = Callbacks()
        self.bare: YieldEngine | None = None
        self.engine: YieldEngine | None = None  # the one that was used last
        self.engines: weakref.WeakSet[YieldEngine] = weakref.WeakSet()
        self.at_fork = False


_STATE = _State()


# the job's calls


def yield_memory(**options: Unpack[YieldOptions]) -> YieldReport:
    """Give the memory of this process's GPUs back, and return once it is free.

    Called by the thread that trains (the one that reached the first safe point; before there was
    one, the main thread), this is the safe point: no operation of that thread is under way. From
    then on its tensors are empty until `restore()`; whoever uses them meanwhile gets an error of
    torch, or wrong values. Called by another thread it waits for the next safe point, and the
    training thread stands still there until the memory is back.

    Raises:
        YieldRefusedError: it cannot be, and everything is as it was.
        YieldFailedError: it ended in another state, which the message names, or what was to be
            thrown away is gone though all else is as it was.
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
        wait_seconds: for room on the devices.

    Raises:
        YieldRefusedError: there is no room; it stays yielded, and can be restored later.
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
    """The memory is away within, and back afterwards.

    Raises:
        YieldRefusedError: as `yield_memory` and `restore`.
        YieldFailedError: likewise.
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
        finally:  # an interrupt right after the yield is within, too
            if away:
                restore()


@contextmanager
def _restoring_once_more() -> Iterator[None]:
    """An interrupt may come before a restore has begun; after one another does nothing."""
    try:
        yield
    except (GpumemError, GeneratorExit):  # the latter whenever one is collected that was left
        raise
    except BaseException:
        with suppress(GpumemError):  # the interrupt is what is raised
            restore()
        raise


class Courtesy:
    """The drop-in for pytorch_memlab's class of this name.

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
    """Have something done around each yield; what is returned takes it away again.

    Args:
        before_yield: called while the training thread stands still, before anything is moved. If
            it raises or takes too long the yield is refused.
        after_restore: called when all memory is back, or the yield came to nothing, for whoever's
            `before_yield` was called.
        on_evict: called with one line when memory is not back though it should be: a restore, or
            the end of a lease, found the device taken, or something is lost. Once for each yield.
        timeout_seconds: what each of them may take.

    Raises:
        ConfigError: one of them cannot be called, or takes no such time.
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
    """Give the memory back on SIGTSTP and take it again on SIGCONT; what is returned undoes it.

    On SIGTSTP the process has two seconds under Slurm before it is stopped: where no safe point and
    no copy fit into that, nothing is moved. Handlers that were there are called as well; where
    there was none, the process stops once the memory is away, or that was refused.

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
    """The engine of what `install()` started; the same each time.

    Raises:
        YieldRefusedError: nothing is armed, so there is nothing to give back.
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
    """(the engine to use, whether nothing was installed that watched beforehand)."""
    with _STATE.lock:
        last = _STATE.engine
        if last is not None and last.status.state is not YieldState.RUNNING:
            return last, last is _STATE.bare  # who has given memory back is who takes it again
        agent = current()
        if agent is not None and agent.reader is not None and hasattr(agent.source, "recorder"):
            _STATE.engine = engine_of(agent)
            return _STATE.engine, False
        if _STATE.bare is None:
            _STATE.bare = _bare_engine(verb)
        _STATE.engine = _STATE.bare
        return _STATE.bare, True


def _bare_engine(verb: str) -> YieldEngine:
    """Without `install()`: a source of its own, from now on."""
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
        note="nothing watched before this which memory others know: all was taken to be private",
    )
    _at_fork(engine)
    step_without_install(safe_points.reached)
    atexit.register(engine.close, EXIT_SECONDS)
    return engine


def _nothing_to_give_back(verb: str = "yield") -> YieldRefusedError:
    torch: Any = sys.modules.get("torch")
    # set by torch itself in the children of a process that used a device: no CUDA works there
    forked = getattr(getattr(torch, "cuda", None), "_is_in_bad_fork", None)
    if callable(forked) and forked():
        return YieldRefusedError(f"{verb}: a forked child holds nothing of its parent's memory")
    what = "nothing was given back" if verb == "restore" else "nothing to give back"
    return YieldRefusedError(f"{verb}: this process uses no GPU yet; {what}")


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
    """A list or set of names as a tuple; what is none of these is left to the check.

    Raises:
        ConfigError: one alone.
    """
    if isinstance(value, (str, int)):
        raise ConfigError(f"{verb}: {name} is a list; write ({value!r},)")
    return tuple(value) if isinstance(value, Iterable) else value


def _at_fork(engine: YieldEngine) -> None:
    _STATE.engines.add(engine)
    if not _STATE.at_fork:
        _STATE.at_fork = True
        # cannot be taken back: forgets what is the parent's
        os.register_at_fork(after_in_child=_after_fork_in_child)


def _after_fork_in_child() -> None:
    engines, _STATE.engines = list(_STATE.engines), weakref.WeakSet()
    _STATE.lock = threading.RLock()
    _STATE.bare = _STATE.engine = None
    step_without_install(None)
    for engine in engines:
        engine.after_fork_in_child()
