"""The IPython extension: `%load_ext gpumem_otel`, then `%gpumem` and `%%gpumem`.

The package exports these two functions, and everything behind them is imported when IPython calls
the first: a training job has no use for it.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

_NAME: Final = "gpumem"


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics; called by `%load_ext gpumem_otel`."""
    from gpumem_otel.magics import Magic

    ipython.register_magic_function(Magic(ipython), "line_cell", _NAME)


def unload_ipython_extension(ipython: Any) -> None:
    """Take them away again; called by `%unload_ext gpumem_otel`."""
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop(_NAME, None)
