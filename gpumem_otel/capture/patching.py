"""One attribute of somebody else's module, replaced and put back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Patch:
    """Keeps the object that it replaced, and restores exactly that.

    Args:
        owner: the module whose attribute is replaced.
        name: the attribute; it must exist.
        wrap: original -> replacement. The replacement must behave as the original once its maker
            is switched off, since it stays in place where somebody wrapped it in turn.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self._owner = owner
        self._name = name
        self.original = getattr(owner, name)
        self.replacement = wrap(self.original)
        setattr(owner, name, self.replacement)

    def revert(self) -> bool:
        """Put the original back; False where somebody has replaced the attribute since."""
        if getattr(self._owner, self._name, None) is not self.replacement:
            return False
        setattr(self._owner, self._name, self.original)
        return True
