"""Finds, names and measures every tensor of this process, and reads the allocator.

The walk runs on the calling thread and starts nothing on the device; the values that it returns
refer to no tensor. `.grad` is read only while no other thread works with tensors.

Limits: objects set aside by `gc.freeze()` are found only through models and variables; of the
tensors that C++ holds only those that autograd saved are found.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

from gpumem_otel.capture.device_stats import StatsReader
from gpumem_otel.capture.objects.python_objects import Kinds, frames_from, instance_dict
from gpumem_otel.capture.objects.storages import address_of, parts_of
from gpumem_otel.capture.objects.thread_activity import read_autograd
from gpumem_otel.capture.recorder import Recorder
from gpumem_otel.capture.source import TorchSource
from gpumem_otel.capture.table_entries import workspace_sizes
from gpumem_otel.errors import CaptureError
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.tensor_classes import Classifier, TensorClass, workspaces_in
from gpumem_otel.tensors.report import FoundTensor
from gpumem_otel.tensors.saved import can_be_read, grad_fn, saved_tensors
from gpumem_otel.tensors.tensor_names import Named, Naming

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import FrameType

    from gpumem_otel.snapshot.reading import Source

# The allocator, for an explicit call, with or without `install()`.


def read_allocator(
    source: Source | None, environ: Mapping[str, str]
) -> tuple[Reading | None, bool, str]:
    """What the allocators of this process hold now.

    Makes no context, starts nothing and switches no recording on: blocks have stacks only where
    `install()` or the job records them.

    Args:
        source: of the installed agent, None without one; a recording that is played is ignored.
        environ: the process's environment, for the size of cuBLAS's workspace.

    Returns:
        The reading, None where there is nothing to read; whether stacks are recorded; and why
        there is no reading, "" where CUDA is not in use.
    """
    torch = sys.modules.get("torch")
    if isinstance(source, TorchSource) and source.status().supported:
        try:
            reading = source.read_at_once(float("inf"))
            return None if reading is None else source.completed(reading), True, ""
        except CaptureError as error:
            return None, True, str(error)
    if torch is None or not _in_use(torch):
        return None, False, ""
    try:
        backend = str(torch.cuda.get_allocator_backend())
        if backend != "native":
            return None, False, f"the allocator backend {backend} lists no blocks"
        return _read(torch, environ), False, ""
    except (CaptureError, RuntimeError) as error:
        return None, False, str(error)


def allocated_now() -> int:
    """Bytes allocated on all devices together; 0 where CUDA is not in use."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not _in_use(torch):
            return 0
        stats = StatsReader(torch)
        return sum(stats.allocated(stats.devices()).values())
    except RuntimeError:
        return 0


def _in_use(torch: Any) -> bool:
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _read(torch: Any, environ: Mapping[str, str]) -> Reading:
    recorder = Recorder()
    recorder.prepare(torch)  # so that naming the first frames does not import the compiler
    try:
        stats = StatsReader(torch)
        devices = stats.devices()
        before = stats.counters(devices)
        raw = recorder.snapshot(traces=False)
        after = stats.counters(devices)
    finally:
        recorder.stop()
    segments = raw["segments"] if isinstance(raw, dict) else raw
    workspaces = workspaces_in(segments, workspace_sizes(environ), ())
    return Reading(
        snapshot=from_torch(raw),
        time_ns=0,
        before=before,
        after=after,
        classifier=Classifier({}, workspaces),
    )


def kinds_of(torch: Any) -> Kinds:
    """Distinguishes fake tensors, tensors, storages, modules and optimizers."""

    def imported(module: str, name: str) -> Any:
        return getattr(sys.modules.get(module), name, None)

    bases = {
        "fake": imported("torch._subclasses.fake_tensor", "FakeTensor"),
        "functional": imported("torch._subclasses.functional_tensor", "FunctionalTensor"),
        "tensor": torch.Tensor,
        "storage": torch.UntypedStorage,
        "module": torch.nn.Module,
        "optimizer": imported("torch.optim.optimizer", "Optimizer"),
    }
    return Kinds(**{kind: base for kind, base in bases.items() if isinstance(base, type)})


def walk(
    models: Sequence[tuple[str, Any]] = (),
    optimizers: Sequence[Any] = (),
    watched: Iterable[tuple[str, Any]] = (),
    frame: FrameType | None = None,
) -> tuple[list[FoundTensor], list[str]]:
    """Every tensor of this process, in the order of the report, and notes about the walk.

    The order: models, optimizers, watched objects, what variables of the calling code name, models
    and optimizers without a name, all other tensors from the largest to the smallest.

    Args:
        models: (prefix of its names, model).
        optimizers: whose state belongs to parameters.
        watched: (name, object) pairs that the job named.
        frame: of the caller.

    Returns:
        Values that refer to no tensor; ([], []) where torch is not imported.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return [], []
    kinds = kinds_of(torch)
    by_kind = kinds.collected()
    naming = Naming(torch, kinds)
    notes = _notes(by_kind)
    measured = _Measured(torch)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch.overrides documents
        for prefix, model in models:
            naming.model(model, prefix)
        for optimizer in optimizers:
            naming.optimizer(optimizer)
        _add_watched(naming, kinds, watched)
        _add_variables(naming, by_kind, frame, {id(model) for _, model in models})
        _add_rest(torch, naming, by_kind)
        gradients, saved, refused = _of_autograd(torch, naming)
        _name_saved(naming, saved)
        for entry in _in_order(torch, naming, gradients):
            measured.add(entry)
        for label, tensor in saved:
            measured.add(Named(tensor, label, TensorClass.ACTIVATION), saved=True)
    if refused:
        notes.append(f"gradients have no names of their own, the graph is not read: {refused}")
    elif not can_be_read(torch) and torch.cuda.is_initialized():
        notes.append(
            "what autograd saved is not listed: this torch does not show it, newer ones do"
        )
    if measured.unread:
        notes.append(f"{measured.unread} tensors could not be read")
    return measured.rows, notes


def _add_variables(
    naming: Naming, by_kind: dict[str, list[Any]], frame: FrameType | None, given: set[int]
) -> None:
    """What variables of the calling code name, and models and optimizers without a name."""
    for number, caller in enumerate(frames_from(frame)):
        naming.frame(caller, own=number == 0)
    naming.namespace(vars(sys.modules["__main__"]))
    naming.unnamed_models(by_kind.get("module", ()))
    for name, model in naming.models_found():
        if id(model) not in given:
            naming.model(model, f"{name}.")
    for optimizer in [*naming.optimizers.values(), *by_kind.get("optimizer", ())]:
        naming.optimizer(optimizer)
    naming.add_variables()


def _add_rest(torch: Any, naming: Naming, by_kind: dict[str, list[Any]]) -> None:
    for tensor in sorted(by_kind.get("tensor", ()), key=_bytes_held, reverse=True):
        naming.add(tensor, "", TensorClass.PARAMETER if is_parameter(torch, tensor) else None)


def _notes(by_kind: dict[str, list[Any]]) -> list[str]:
    notes = []
    if fakes := len(by_kind.get("fake", ())) + len(by_kind.get("functional", ())):
        notes.append(f"{fakes} fake tensors of torch.compile hold no memory and are left out")
    if frozen := gc.get_freeze_count():
        notes.append(
            f"{frozen} objects are set aside by gc.freeze(): tensors among them are listed only "
            "where a model, an optimizer or a variable leads to them"
        )
    return notes


def _add_watched(naming: Naming, kinds: Kinds, watched: Iterable[tuple[str, Any]]) -> None:
    for name, item in watched:
        kind = kinds.of(item)
        if kind == "module":
            naming.roots.setdefault(id(item), (name or type(item).__name__, item))
        elif kind == "optimizer":
            naming.optimizers.setdefault(id(item), item)
        elif kind == "tensor":
            naming.add(item, name or naming.number(type(item).__name__), _class_named(name))
        else:
            for path, tensor in naming.tensors_in(item):
                naming.add(tensor, f"{name}{path}", _class_named(name))


def _class_named(name: str) -> TensorClass | None:
    try:
        return TensorClass(name)
    except ValueError:
        return None


def _of_autograd(torch: Any, naming: Naming) -> tuple[dict[int, Any], list[tuple[str, Any]], str]:
    """Gradients by their tensor's id, and what is saved for backward; or why they are not read."""
    tensors = [entry.tensor for entry in naming]

    def read() -> tuple[dict[int, Any], list[tuple[str, Any]]]:
        gradients = {id(tensor): _gradient_of(tensor) for tensor in tensors}
        return gradients, list(saved_tensors(torch, map(grad_fn, tensors)))

    values, refused = read_autograd(torch, read)
    gradients, saved = values or ({}, [])
    gradients = {key: gradient for key, gradient in gradients.items() if gradient is not None}
    return gradients, saved, refused


def _in_order(torch: Any, naming: Naming, gradients: dict[int, Any]) -> list[Named]:
    """Each tensor followed by its gradient; those without a name are numbered."""
    wrapped: set[int] = set()
    for tensor in [*(entry.tensor for entry in naming), *gradients.values()]:
        wrapped.update(_parts_inside(torch, tensor))
    are_gradients = {id(gradient) for gradient in gradients.values()}
    entries: list[Named] = []
    for entry in naming:
        key = id(entry.tensor)
        if key in are_gradients or (not entry.name and key in wrapped):
            continue
        entry.name = entry.name or naming.number(type(entry.tensor).__name__)
        entries.append(entry)
        if key in gradients:
            gradient = gradients[key]
            entries.append(Named(gradient, f"{entry.name}.grad", TensorClass.GRADIENT))
    return entries


def _parts_inside(torch: Any, tensor: Any) -> list[int]:
    """The tensors that a wrapper is made of."""
    try:
        return [id(part) for _, part in parts_of(torch, tensor) if part is not tensor]
    except Exception:  # a subclass may raise anything
        return []


def is_parameter(torch: Any, tensor: Any) -> bool:
    """Whether it is an `nn.Parameter`, by its type or by the mark that torch gives subclasses."""
    if any(base is torch.nn.Parameter for base in type(tensor).__mro__):
        return True
    return instance_dict(tensor).get("_is_param") is True


def _gradient_of(tensor: Any) -> Any:
    try:
        return tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    except Exception:  # a subclass
        return None


def _bytes_held(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())
    except Exception:  # sparse, wrappers
        return 0


def _name_saved(naming: Naming, saved: list[tuple[str, Any]]) -> None:
    """Name tensors without a name after what autograd saved of the same storage.

    What is saved is often another view of the storage, or the tensor without its history.
    """
    labels: dict[int, str] = {}
    for label, tensor in saved:
        labels.setdefault(_identity(tensor), label)
    labels.pop(0, None)
    for entry in naming:
        label = "" if entry.name else labels.get(_identity(entry.tensor), "")
        if label:
            entry.name, entry.tensor_class = label, entry.tensor_class or TensorClass.ACTIVATION


def _identity(tensor: Any) -> int:
    """The identity of its storage, 0 where it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001
    except Exception:  # sparse, wrappers
        return 0


class _Measured:
    """The rows of the tensors measured so far; none refers to its tensor."""

    def __init__(self, torch: Any) -> None:
        self.rows: list[FoundTensor] = []
        self.unread = 0
        self._torch = torch
        self._held: set[int] = set()

    def add(self, entry: Named, *, saved: bool = False) -> None:
        try:
            rows = self._rows(entry, saved=saved)
        except Exception:  # a subclass may raise anything
            self.unread += 1
            return
        self.rows += rows

    def _rows(self, entry: Named, *, saved: bool) -> list[FoundTensor]:
        tensor = entry.tensor
        parts = parts_of(self._torch, tensor)
        rows = []
        for suffix, part in parts:
            storage = part.untyped_storage()
            size = int(storage.nbytes())
            address = address_of(storage) if size and part.device.type != "meta" else 0
            if not address:
                size = 0
            key = address or -int(storage._cdata)  # noqa: SLF001 - identity of the storage
            if saved and key in self._held:
                continue
            if not size and not _numel(part) and len(parts) == 1:
                continue  # it has neither elements nor memory
            if not saved:
                self._held.add(key)
            shown = tensor if len(parts) == 1 else part
            elements = _numel(part)
            rows.append(
                FoundTensor(
                    name=f"{entry.name}{suffix}",
                    device=str(part.device),
                    shape=_shape(shown),
                    dtype=str(part.dtype).removeprefix("torch."),
                    kind=_kind(tensor),
                    elements=elements,
                    tensor_bytes=elements * int(part.element_size()),
                    storage_bytes=size,
                    storage=key,
                    address=address,
                    tensor_class=_class_of(entry, tensor),
                    saved=saved,
                    aliases=tuple(f"{alias}{suffix}" for alias in entry.aliases),
                )
            )
        return rows


def _class_of(entry: Named, tensor: Any) -> TensorClass | None:
    if entry.tensor_class is not None:
        return entry.tensor_class
    # made by a forward, and not a view of an older tensor
    made = tensor.grad_fn is not None and not tensor._is_view()  # noqa: SLF001 - torch's own name
    return TensorClass.ACTIVATION if made else None


def _kind(tensor: Any) -> str:
    name = type(tensor).__name__
    layout = str(tensor.layout).removeprefix("torch.")
    return name if layout == "strided" else f"{name} {layout}"


def _numel(tensor: Any) -> int:
    try:
        return int(tensor.numel())
    except Exception:  # nested, symbolic
        return 0


def _shape(tensor: Any) -> tuple[int | str, ...]:
    try:
        return tuple(size if type(size) is int else str(size) for size in tensor.shape)
    except Exception:  # strided nested tensors have none
        return ("nested",)
