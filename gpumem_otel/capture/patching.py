"""Replaces attributes of torch's modules, and restores them."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LAZY = "_inductor"


class Patch:
    """Keeps the object that it replaced, and restores exactly that.

    Args:
        owner: the module whose attribute is replaced.
        name: the attribute; it must exist.
        wrap: original -> replacement. Once switched off, the replacement must behave like the
            original, since it stays in place if other code has wrapped it in turn.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._name = name
        self.original = getattr(owner, name)
        self.replacement = wrap(self.original)
        setattr(owner, name, self.replacement)

    def revert(self) -> bool:
        """Restore the original; False if other code has replaced the attribute since."""
        if getattr(self._owner, self._name, None) is not self.replacement:
            return False
        setattr(self._owner, self._name, self.original)
        return True


class InductorGuard:
    """Keeps our first snapshot from importing `torch._inductor`, by replacing `torch.__getattr__`.

    To name compiler-generated frames, torch evaluates `hasattr(torch, "_inductor")`. That attribute
    is lazy: it imports 883 modules, 3.6 to 5 s with the interpreter lock held, in the middle of
    training. On our threads the answer is "no" until the job itself has imported it; then the
    attribute is found without the replaced hook. If torch has no module `__getattr__`, `_inductor`
    is not lazy.
    """

    def __init__(self) -> None:
        self._patch: Patch | None = None
        self._ours: dict[int, int] = {}  # thread -> process, since a forked child inherits this

    def install(self, torch: Any) -> None:
        """Replace the hook, if torch has one."""
        if self._patch is None and callable(vars(torch).get("__getattr__")):
            self._patch = Patch(torch, "__getattr__", self._wrap)

    def uninstall(self) -> None:
        """Put torch's own hook back."""
        if self._patch is not None:
            self._patch.revert()
            self._patch = None

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Within, this thread takes a snapshot of ours. Not reentrant."""
        ident = threading.get_ident()
        self._ours[ident] = os.getpid()
        try:
            yield
        finally:
            self._ours.pop(ident, None)

    def _wrap(self, original: Callable[[str], Any]) -> Callable[[str], Any]:
        def refuse() -> None:
            # an import on another thread may not have bound the attribute yet; do not wait for it
            if self._ours.get(threading.get_ident()) == os.getpid():
                raise AttributeError(_LAZY)

        return _hook(original, refuse)


def _hook(original: Callable[[str], Any], refuse: Callable[[], None]) -> Callable[[str], Any]:
    """`original`, but `refuse` is called first for the name `_inductor`.

    torch warns of deprecated names with the location two frames up, and filters by that location: a
    Python function in between would let these warnings through to the job. So `original` is called
    from C, as `__missing__` of a dict. Its only key has the hash of `_inductor`, so that it is
    compared only for that name.
    """

    class Key:
        def __hash__(self) -> int:
            return hash(_LAZY)

        def __eq__(self, other: object) -> bool:
            if other == _LAZY:
                refuse()
            return False

    names = type("_Names", (dict,), {"__missing__": staticmethod(original)})
    hook: Callable[[str], Any] = names({Key(): None}).__getitem__
    return hook
