"""Names tensors after models, optimizers and the variables of the calling code.

It runs on the caller's thread and keeps tensors alive only as long as the `Naming` lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.capture.objects.python_objects import instance_dict, is_module_level, variables
from gpumem_otel.snapshot.tensor_classes import TensorClass
from gpumem_otel.tensors.referrers import key_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import FrameType

    from gpumem_otel.capture.objects.python_objects import Kinds

_MOST_VISITED: Final = 20_000
_MOST_IN_ONE: Final = 1_000
_MOST_DEPTH: Final = 3
_PLAIN_CONTAINERS: Final = (list, tuple, dict)
_NO_NAMES_IN: Final = (int, float, bool, str, bytes, type(None), FunctionType, type)


@dataclass(slots=True)
class Named:
    """A tensor with its name.

    Attributes:
        name: "" where it has none.
        aliases: other names that its model has for it.
    """

    tensor: Any
    name: str
    tensor_class: TensorClass | None = None
    aliases: list[str] = field(default_factory=list)


class Naming:
    """Tensors in the order in which they were named; the first name stays.

    Args:
        torch: the module.
        kinds: distinguishes tensors, modules and optimizers.
    """

    def __init__(self, torch: Any, kinds: Kinds) -> None:
        self._named: dict[int, Named] = {}
        self.roots: dict[int, tuple[str, Any]] = {}
        self.optimizers: dict[int, Any] = {}
        self._torch = torch
        self._kinds = kinds
        self._numbers: dict[str, int] = {}
        self._visited = 0
        self._in_frames: list[tuple[int, str, Any]] = []
        self._inside: set[int] = set()

    def __iter__(self) -> Iterator[Named]:
        return iter(list(self._named.values()))

    def add(self, tensor: Any, name: str, tensor_class: TensorClass | None = None) -> Named:
        """Name a tensor, unless it has a name already."""
        known = self._named.get(id(tensor))
        if known is None:
            known = self._named[id(tensor)] = Named(tensor, name, tensor_class)
        return known

    def number(self, kind: str) -> str:
        """`Tensor0`, `Tensor1`, ... for those without a name."""
        count = self._numbers.get(kind, 0)
        self._numbers[kind] = count + 1
        return f"{kind}{count}"

    # models

    def model(self, model: Any, prefix: str) -> None:
        """Parameters and buffers by the names that the model gives them."""
        for method, tensor_class in (
            ("named_parameters", TensorClass.PARAMETER),
            ("named_buffers", TensorClass.BUFFER),
        ):
            new: set[int] = set()
            for own_name, tensor in self._named_in(model, method):
                name = f"{prefix}{own_name}"
                if id(tensor) not in self._named:
                    new.add(id(tensor))
                known = self.add(tensor, name, tensor_class)
                if known.name != name and id(tensor) in new:
                    known.aliases.append(name)

    def models_found(self) -> list[tuple[str, Any]]:
        """(name, model) of those that were met, whole models before parts of others."""
        return sorted(self.roots.values(), key=lambda entry: id(entry[1]) in self._inside)

    def _named_in(self, model: Any, method: str) -> list[tuple[str, Any]]:
        for options in ({"remove_duplicate": False}, {}):
            try:
                return list(getattr(model, method)(**options))
            except Exception:  # noqa: S112, PERF203 - a model may override these
                continue
        return []

    def optimizer(self, optimizer: Any) -> None:
        """State by the parameter's name: `Adam.weight.exp_avg`."""
        kind = type(optimizer).__name__
        state = instance_dict(optimizer).get("state")
        for parameter, of_parameter in _items(state):
            if self._kinds.of(parameter) != "tensor":
                continue
            known = self._named.get(id(parameter))
            if known is None:
                name = self.number(type(parameter).__name__)
                known = self.add(parameter, name, TensorClass.PARAMETER)
            for path, tensor in self.tensors_in(of_parameter):
                self.add(tensor, f"{kind}.{known.name}{path}", TensorClass.OPTIMIZER_STATE)

    def tensors_in(self, item: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
        """(how code leads to it, tensor) of the item itself, or of what its containers hold."""
        if self._kinds.of(item) == "tensor":
            yield "", item
        elif depth <= _MOST_DEPTH:
            for key, value in _items(item):
                for path, tensor in self.tensors_in(value, depth + 1):
                    yield f".{key}{path}", tensor

    # variables

    def frame(self, frame: FrameType, *, own: bool) -> None:
        """Note the local variables of a frame; of the innermost its globals too.

        Args:
            frame: of this thread.
            own: the caller's own: its names stand alone, others have the function before them.
        """
        if is_module_level(frame):
            if own:
                self.namespace(frame.f_globals)
            return
        prefix = "" if own else f"{frame.f_code.co_name}():"
        for name, value in variables(frame):
            self._variable(f"{prefix}{name}", value, 0)
        if own:
            self.namespace(frame.f_globals)

    def namespace(self, names: Mapping[str, Any]) -> None:
        """Note global names; a notebook's outputs and private ones last."""
        public = [name for name in list(names) if name[:1] != "_" and name not in {"In", "Out"}]
        private = [name for name in list(names) if name[:1] == "_" and name[:2] != "__"]
        for name in (*public, "Out", *private):
            if name in names and name not in {"_oh", "_ih", "_dh"}:
                self._variable(name, names[name], 0)

    def _variable(self, name: str, value: Any, depth: int) -> None:
        self._visited += 1
        if self._visited > _MOST_VISITED:
            return
        kind = self._kinds.of(value)
        if kind == "tensor":
            self._in_frames.append((depth, name, value))
        elif kind == "module":
            self.roots.setdefault(id(value), (name, value))
        elif kind == "optimizer":
            self.optimizers.setdefault(id(value), value)
        else:
            for path, inner in _inside(value, depth)[:_MOST_IN_ONE]:
                self._variable(f"{name}{path}", inner, depth + 1)

    def add_variables(self) -> None:
        """Name tensors after variables; last, so that models and optimizers name theirs first.

        A tensor in a variable and in a list is named after the variable.
        """
        for _, name, tensor in sorted(self._in_frames, key=lambda entry: entry[0]):
            self.add(tensor, name)
        self._in_frames.clear()

    def unnamed_models(self, modules: Iterable[Any]) -> None:
        """Note models that no variable names, by their class; parts of others are left out."""
        modules = list(modules)
        self._inside = {
            id(child)
            for module in modules
            for _, child in _items(instance_dict(module).get("_modules"))
        }
        for module in modules:
            if id(module) not in self._inside and id(module) not in self.roots:
                name = type(module).__name__
                count = self._numbers.get(f"model {name}", 0)
                self._numbers[f"model {name}"] = count + 1
                self.roots[id(module)] = (f"{name}{count or ''}", module)


def _inside(value: Any, depth: int) -> list[tuple[str, Any]]:
    """(how code writes it, object) for the items of a container or the attributes of an object."""
    kind = type(value)
    if kind in _PLAIN_CONTAINERS:
        if depth >= _MOST_DEPTH:
            return []
        return [(f"[{key_text(key)}]", inner) for key, inner in _items(value)]
    if depth >= _MOST_DEPTH - 1 or kind in _NO_NAMES_IN or issubclass(kind, ModuleType):
        return []
    return [(f".{key}", inner) for key, inner in list(instance_dict(value).items())]


def _items(container: Any) -> list[tuple[Any, Any]]:
    """(key, value) of a dict, (index, value) of a list or tuple."""
    if issubclass(type(container), dict):
        return list(dict.items(container))
    if type(container) in (list, tuple):
        return list(enumerate(container))
    return []
