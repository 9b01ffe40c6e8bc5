"""What profiled lines did, as text, in a notebook, as JSON, pandas and pprof."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpumem_otel.core import linetext
from gpumem_otel.errors import MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from gpumem_otel.core.lines import FunctionLines
    from gpumem_otel.core.model import HeapProfile

__all__ = ["LineReport"]


class LineReport:
    """What profiled lines did, at the moment it was asked for.

    Args:
        functions: with their lines.
        profiles: the same by chain of calls, one per device.
        columns: names of counters to show in place of the usual columns.
        device: the one to show; None: those of `set_target_gpu`, else all.
    """

    def __init__(
        self,
        functions: Sequence[FunctionLines],
        profiles: Sequence[HeapProfile] = (),
        *,
        columns: Sequence[str] = (),
        device: int | None = None,
    ) -> None:
        self.functions = tuple(functions)
        self.profiles = tuple(profiles)
        self._columns = tuple(columns)
        self._device = device

    def __str__(self) -> str:
        return linetext.lines_text(self.functions, self._columns, self._device)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return linetext.lines_html(self.functions, self._columns, self._device)

    def to_dict(self) -> dict[str, Any]:
        """Everything, of all devices, as JSON takes it."""
        return linetext.lines_json(self.functions)

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    def pprof(self) -> bytes:
        """Bytes allocated, a line as frame, as gzipped pprof for `go tool pprof` and Pyroscope."""
        from gpumem_otel.core import pprof
        from gpumem_otel.core.model import ProfileKind

        kind = ProfileKind.ALLOCATED
        return pprof.gzip_bytes(pprof.encode(self.profiles, device_labels={}, kind=kind))

    def to_pandas(self) -> pd.DataFrame:
        """One row per function, line and device.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise MissingPackageError("to_pandas() needs pandas: pip install pandas") from None
        rows: list[dict[str, Any]] = []
        for function in self.to_dict()["functions"]:
            place = {name: function[name] for name in ("module", "name", "file")}
            for line in function["lines"]:
                for device, use in line["devices"].items():
                    sums = {key: value for key, value in use.items() if key != "columns"}
                    rows.append(
                        {
                            **place,
                            "line": line["line"],
                            "code": line["code"],
                            "device": int(device),
                            "hits": line["hits"],
                            **sums,
                            **use["columns"],
                        }
                    )
        return pd.DataFrame(rows)
