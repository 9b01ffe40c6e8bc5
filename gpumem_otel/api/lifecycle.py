"""The public calls of a job: one agent per process, switched on and off here."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import ConfigError
from gpumem_otel.runtime.agent import Agent
from gpumem_otel.settings.config import process_environ
from gpumem_otel.settings.options import keyword_help, keyword_signature, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Unpack

    from gpumem_otel.settings.options import InstallOptions
    from gpumem_otel.yielding.protocols import YieldControl

_log = named_logger("gpumem_otel")


class _State:
    """What is installed in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.agent: Agent | None = None
        self.at_fork = False
        self.watched: dict[tuple[str, int], weakref.ReferenceType[object]] = {}
        self.unwatchable: set[str] = set()
        self.participants: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.on_step: Callable[[], object] | None = None
        self.build_engine: Callable[[Agent], YieldControl] | None = None


_STATE = _State()


def install(**options: Unpack[InstallOptions]) -> None:
    """Make the GPU memory of this process visible; call it before the model is built.

    It returns at once and starts nothing but a hook: recording, the background thread and the
    listener begin with the process's own first use of CUDA, and never where there is none. Called
    again it changes nothing. A keyword wins over its environment variable, that over the default.

    Raises:
        ConfigError: a keyword that is unknown or cannot be used. Nothing else is ever raised.
    """
    config = resolve(process_environ(), **options)
    with _STATE.lock:
        if _STATE.agent is not None:
            if _STATE.agent.config != config:
                _log.warning("already installed with other settings; uninstall() first")
            return
        if config.enabled:
            adopt(Agent(config))


# for `help(install)` and editors: all keywords, from the one table of settings
install.__signature__ = keyword_signature("None")  # type: ignore[attr-defined]
install.__doc__ = (install.__doc__ or "").replace(
    "    Raises:", f"    Args:\n{keyword_help()}\n    Raises:"
)


def adopt(agent: Agent) -> None:
    """Start an agent as the one of this process: ended at exit, silent in forked children."""
    with _STATE.lock:
        _STATE.agent = agent
        agent.build_engine = _STATE.build_engine
        if not _STATE.at_fork:
            # cannot be undone: does nothing while nothing is installed
            os.register_at_fork(after_in_child=_after_fork_in_child)
            _STATE.at_fork = True
        atexit.register(uninstall)
        agent.start()
        for name, item in watched():
            agent.watch(name, item)


def register_engine(build: Callable[[Agent], YieldControl]) -> None:
    """Make the engine of yields of each agent of this process in this way from now on."""
    _STATE.build_engine = build


def uninstall() -> None:
    """Push once more, within 5 s, and undo everything that `install()` did; safe to call twice."""
    with _STATE.lock:
        agent, _STATE.agent = _STATE.agent, None
        _STATE.watched.clear()
        _STATE.participants.clear()
    atexit.unregister(uninstall)
    if agent is not None:
        agent.stop()


def current() -> Agent | None:
    """The agent of this process; None if nothing is installed."""
    return _STATE.agent


def step() -> None:
    """Mark the end of one step of the job, for loops without an optimizer.

    From the first call on only these calls count as steps. Costs about a microsecond. If nothing is
    installed it is only a safe point for a yield that is waiting for one.
    """
    agent = _STATE.agent
    if agent is not None:
        agent.step()
    elif (on_step := _STATE.on_step) is not None:
        on_step()


def step_without_install(reached: Callable[[], object] | None) -> None:
    """Make `step()` call this if nothing is installed."""
    _STATE.on_step = reached


def watch(*objects: object, **named: object) -> None:
    """Name what holds memory: models, optimizers, and other tensors with their class as keyword.

        gpumem_otel.watch(model, optimizer, kv_cache=cache)

    The inputs of a watched model get a class of their own, by hooks on that model
    (`torch.jit.script` and `make_graphed_callables` refuse models with hooks: watch it after them).
    The parameters of a server, which steps no optimizer, are read after forwards without gradients.
    The keyword is a tensor class of docs/profiles.md. References are weak, so that nothing is
    kept alive; of a list, a tuple or a dict, its present items are watched.
    """
    todo = [*(("", item) for item in objects), *named.items()]
    opened: set[int] = set()
    while todo:
        name, item = todo.pop()
        if isinstance(item, dict | list | tuple | set):
            if id(item) in opened:
                continue
            opened.add(id(item))
            inside = item.values() if isinstance(item, dict) else item
            todo += [(name, inner) for inner in inside]
            continue
        key = name, id(item)
        try:
            # the entry goes with its object
            reference = weakref.ref(item, partial(_forget, key))
        except TypeError:
            kind = type(item).__name__
            if kind not in _STATE.unwatchable:
                _STATE.unwatchable.add(kind)
                _log.warning("watch: no weak reference to %s objects", kind)
            continue
        _STATE.watched[key] = reference
        agent = _STATE.agent
        if agent is not None:
            agent.watch(name, item)


def _forget(key: tuple[str, int], gone: object) -> None:  # noqa: ARG001 - as weakref calls it
    _STATE.watched.pop(key, None)


def watched() -> Iterator[tuple[str, object]]:
    """(name, object) of what is watched and still alive; the name is "" if none was given."""
    for (name, _), reference in list(_STATE.watched.items()):
        item = reference()
        if item is not None:
            yield name, item


def participant(thread: threading.Thread | None = None) -> None:
    """Declare that a thread (this one by default) does not use the GPU while the job is stopped.

    It promises not to use GPU tensors from the moment the training thread stops at a safe point
    until that continues, for instance because it waits for it. A yield ignores such a thread, and
    is refused because of any other that may use the GPU.

    Raises:
        ConfigError: the argument is no thread.
    """
    if thread is not None and not isinstance(thread, threading.Thread):
        raise ConfigError(f"participant: {type(thread).__name__!r} is not a threading.Thread")
    _STATE.participants.add(thread or threading.current_thread())


def participants() -> frozenset[threading.Thread]:
    """The registered threads that still exist."""
    return frozenset(_STATE.participants)


def _after_fork_in_child() -> None:
    # the parent's lock may have been held by a thread that does not exist here
    _STATE.lock = threading.RLock()
    agent = _STATE.agent
    if agent is not None:
        agent.after_fork_in_child()
