"""Which sizes cuBLAS asks the allocator for as its workspace."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["workspace_sizes"]

_KIB = 1024
_HOPPER = (9, 0)
_LARGE = 4096 * 8 * _KIB
_SMALL = 4096 * 2 * _KIB + 16 * 8 * _KIB
_LT = 1024 * _KIB


def workspace_sizes(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Sizes in bytes of one workspace of cuBLAS and of cuBLASLt, () where they can not be told.

    As torch chooses them (`aten/src/ATen/cuda/CublasHandlePool.cpp`): `CUBLAS_WORKSPACE_CONFIG`
    (`:KiB:count` pairs), else 32 MiB from Hopper on and 8,320 KiB before; `CUBLASLT_WORKSPACE_SIZE`
    in KiB, else 1 MiB (newer versions share the other).
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    try:
        hopper = tuple(torch.cuda.get_device_capability()) >= _HOPPER
    except Exception:
        return ()
    sizes = {_configured(environ) or (_LARGE if hopper else _SMALL)}
    lt = environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    sizes.add(int(lt) * _KIB if lt.isdigit() else _LT)
    return tuple(sorted(sizes - {0}))


def _configured(environ: Mapping[str, str]) -> int:
    """Bytes that `CUBLAS_WORKSPACE_CONFIG` adds up to; 0 where it says nothing."""
    pairs: list[Any] = re.findall(r":(\d+):(\d+)", environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(count) for size, count in pairs) * _KIB
