"""What holds memory: the tensor report, the holders of a tensor, release after an error.

    print(gpumem_otel.report(model, optimizer))
    print(gpumem_otel.holders(x))
    gpumem_otel.release_traceback()

Everything runs on the calling thread, with or without `install()`. No object is kept alive, and no
CUDA context is created.
"""

from __future__ import annotations

import html
import json
import sys
import traceback
from typing import TYPE_CHECKING, Any

from gpumem_otel.api import lifecycle
from gpumem_otel.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pandas as pd

    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.snapshot.reading import Reading, Source
    from gpumem_otel.tensors.holders import Holders
    from gpumem_otel.tensors.report import DeviceReport, ReportData, TensorInfo


class Report:
    """All tensors of the process, the allocator's total, and the difference by cause.

    Attributes:
        data: the rows and totals; `data.devices` has one entry per device.
    """

    def __init__(self, data: ReportData, *, verbose: bool = False) -> None:
        self.data = data
        self._verbose = verbose

    def __repr__(self) -> str:
        devices = {device.device: device.used_bytes for device in self.devices}
        return f"<gpumem_otel.Report tensors={len(self.tensors)} used_bytes={devices}>"

    def __str__(self) -> str:
        from gpumem_otel.tensors.report import report_text

        return report_text(self.data, verbose=self._verbose)

    @property
    def devices(self) -> tuple[DeviceReport, ...]:
        """One entry per device, GPUs first."""
        return self.data.devices

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The rows of all devices."""
        return self.data.rows

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers should know, one sentence each."""
        return self.data.notes

    def to_json(self, *, indent: int | None = None) -> str:
        """Everything as JSON; sizes are bytes, stacks leaf first."""
        from gpumem_otel.tensors.report import to_json

        return json.dumps(to_json(self.data), indent=indent)

    def to_pandas(self) -> pd.DataFrame:
        """One row per tensor, as a `pandas.DataFrame`; sizes are bytes.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        from gpumem_otel.tensors.report import columns

        try:
            import pandas as pd
        except ImportError:
            raise MissingPackageError("to_pandas() needs pandas: pip install pandas") from None
        return pd.DataFrame(columns(self.data))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def report(
    model_or_models: Any = None,
    optimizer: Any = None,
    device: Any = None,
    verbose: bool = False,
) -> Report:
    """All tensors by name: shape, bytes, class, block, and the stack that allocated them.

    Names come from the models and optimizers given, from what `watch()` named, and from the
    variables of the calling code; gradients and optimizer state are named by their parameter. It
    runs on the calling thread and reads `.grad` there, except while a backward runs on any thread.
    The report keeps no tensor alive.

    Args:
        model_or_models: a model, several, or a dict of them by name; optional.
        optimizer: one, or several; optional, those that exist are found.
        device: only this one, as torch writes it (`"cuda:0"`, `0`, a `torch.device`).
        verbose: print every stack in full, and all names of tied weights.

    Raises:
        ConfigError: an argument of another type.
    """
    models = _models(model_or_models)
    optimizers = _several(optimizer, "optimizer", "state")
    devices = _device_names(device)
    try:
        return _report(models, optimizers, devices, sys._getframe(1), verbose=verbose)  # noqa: SLF001
    except Exception as error:
        # a traceback that the caller keeps must not keep every object of the process
        traceback.clear_frames(error.__traceback__)
        raise


def holders(x: Any) -> Holders:
    """The stack that allocated a tensor, storage or address, its class, size and references.

    References are followed from object to object through Python's collector, up to variables of
    functions that run or that the last traceback keeps, module attributes, a notebook's outputs,
    closures and classes; each comes with its path. Of what C++ holds, only what autograd saved is
    found. Costs a few passes over all objects. No reference is kept.

    Args:
        x: a tensor, a storage, or the address of a byte of device memory.

    Raises:
        ConfigError: it is of another type, or torch is not imported.
    """
    try:
        return _holders(x, sys._getframe(1))  # noqa: SLF001
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise


def _holders(x: Any, frame: Any) -> Holders:
    from gpumem_otel.tensors.holders import describe, find

    subject, held_by, notes = find(x, frame)
    reading, recorded, why = _reading() if subject.device.startswith("cuda") else (None, False, "")
    if why:
        notes.append(f"no block: {why}")
    return describe(
        subject, held_by, reading, namer=_namer(), recorded=recorded, notes=tuple(notes)
    )


def release_traceback() -> int:
    """Release what the last error and a notebook's outputs keep alive; returns the bytes freed.

    Clears the local variables of the frames of the last traceback (`sys.last_exc` and the like, and
    the exception that is being handled), which keep every tensor of the failed call alive; in
    IPython also `Out`, `_`, `_5` and the traceback that the shell keeps for `%tb` and `%debug`.
    What the job's own variables refer to stays. Collects garbage. Works without torch or IPython.

    Returns:
        How many bytes less all allocators hold together; never negative.
    """
    from gpumem_otel.tensors.tracebacks import release
    from gpumem_otel.tensors.walk import allocated_now

    before = allocated_now()
    release()
    return max(before - allocated_now(), 0)


def _report(
    models: list[tuple[str, Any]],
    optimizers: list[Any],
    devices: list[str],
    frame: Any,
    *,
    verbose: bool,
) -> Report:
    from gpumem_otel.tensors.join import join
    from gpumem_otel.tensors.walk import walk

    tensors, notes = walk(models, optimizers, lifecycle.watched(), frame)
    reading, recorded, why = _reading()
    if why:
        notes.append(f"no blocks: {why}")
    data = join(tensors, reading, namer=_namer(), recorded=recorded, notes=notes, devices=devices)
    return Report(data, verbose=verbose)


def _source() -> Source | None:
    agent = lifecycle.current()
    return agent.source if agent is not None else None


def _reading() -> tuple[Reading | None, bool, str]:
    from gpumem_otel.settings.config import process_environ
    from gpumem_otel.tensors.walk import read_allocator

    return read_allocator(_source(), process_environ())


def _namer() -> FrameNamer:
    from gpumem_otel.capture.frame_names import QualifiedNamer

    return QualifiedNamer()


def _models(given: Any) -> list[tuple[str, Any]]:
    """(prefix of its names, model) of each."""
    if given is None:
        return []
    if isinstance(given, dict):
        named: Mapping[str, Any] = given
        models = [(f"{name}.", model) for name, model in named.items()]
    elif hasattr(given, "named_parameters"):
        models = [("", given)]
    else:
        several = _several(given, "model", "named_parameters")
        models = [(f"{type(m).__name__}{number}.", m) for number, m in enumerate(several)]
    for _, model in models:
        _check(model, "model", "named_parameters")
    return models


def _several(given: Any, what: str, needs: str) -> list[Any]:
    if given is None:
        return []
    if hasattr(given, needs):
        return [given]
    try:
        several: Iterable[Any] = list(given)
    except TypeError:
        several = [given]
    for each in several:
        _check(each, what, needs)
    return list(several)


def _check(item: Any, what: str, needs: str) -> None:
    if not hasattr(item, needs):
        kind = type(item).__name__
        raise ConfigError(f"report: {kind!r} is no {what}; give a {what}, several, or nothing")


def _device_names(device: Any) -> list[str]:
    if device is None:
        return []
    if isinstance(device, int) and not isinstance(device, bool):
        return [f"cuda:{device}"]
    name = str(device)
    torch = sys.modules.get("torch")
    if name == "cuda":
        current = torch is not None and torch.cuda.is_initialized()
        return [f"cuda:{torch.cuda.current_device() if torch is not None and current else 0}"]
    kind, _, index = name.partition(":")
    if not kind.isidentifier() or (index and not index.isdigit()):
        raise ConfigError(f"device {device!r}: not one like 'cuda:0', 0 or 'cpu'")
    return [name]
