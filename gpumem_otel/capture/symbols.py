"""Keeps the first symbolization of Python frames from importing `torch._inductor`.

To name frames that a compiler generated, torch asks `hasattr(torch, "_inductor")`. That attribute
is lazy: asking imports 883 modules, 3.6 to 5 seconds with the interpreter lock held, in the middle
of training. On our threads the answer is therefore "no" as long as nobody else has imported it;
once it is imported, the attribute is found without the hook that is replaced here.

Where torch has no module `__getattr__`, its `_inductor` is not lazy and there is nothing to do.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpumem_otel.capture.patching import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["InductorGuard"]

_LAZY = "_inductor"


class InductorGuard:
    """Replaces `torch.__getattr__` from `install` to `uninstall`."""

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
        """Within: this thread takes a snapshot of ours. Not to be nested."""
        ident = threading.get_ident()
        self._ours[ident] = os.getpid()
        try:
            yield
        finally:
            self._ours.pop(ident, None)

    def _wrap(self, original: Callable[[str], Any]) -> Callable[[str], Any]:
        def refuse() -> None:
            # an import that is under way on another thread has not bound the attribute yet:
            # waiting for it would hold up our thread, and torch does without
            if self._ours.get(threading.get_ident()) == os.getpid():
                raise AttributeError(_LAZY)

        return _hook(original, refuse)


def _hook(original: Callable[[str], Any], refuse: Callable[[], None]) -> Callable[[str], Any]:
    """`original`, except that `refuse` is asked first when the name is `_inductor`.

    torch warns of deprecated names with the place two frames up, and filters such warnings by
    that place: a Python function in between would let them through to the job. So the way to
    `original` is one of C: a dict that lacks every name. Its only key has the hash of `_inductor`,
    so that it is compared when that is looked up, and never else.
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
