"""Qualified names for frames: `torch.nn.modules.linear.Linear.forward`.

A recorded frame has a bare function name, a file and a line; flame graphs merge by name, so the
name must identify the function. It is taken from the code objects of loaded modules: the module is
found by its file, its functions by walking its contents, and the line decides between functions of
the same name. No source is read, nothing is imported, no code of the job runs (no `__getattr__` of
lazy modules, no properties).

Files of no loaded module (notebook cells, generated code) are searched in `__main__`, which is
walked once for all of them, and again only when its number of names has changed.

Limits: functions no longer in a module (replaced, made by `exec`) get `module.name`; two lambdas in
one line are the same; functions neither in a module nor in `__main__` get `file.py:name`.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.snapshot.stacks import REGION_FILE, file_function_namer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gpumem_otel.base.protocols import Pause

_PAUSE_EVERY: Final = 32
_MAX_NAMES: Final = 200_000
_MAX_FILES: Final = 2_000
_MAX_CODES_PER_FILE: Final = 50_000
_MAX_DEPTH: Final = 8
_FUNCTIONS_ASKED: Final = 64
_LOCALS: Final = ".<locals>."
_FUNCTION_FLAGS: Final = 0x1  # CO_OPTIMIZED: set for functions, not for class bodies
_CODE_HAS_QUALNAME: Final = sys.version_info >= (3, 11)


class QualifiedNamer:
    """A `FrameNamer` for the modules of this process.

    Args:
        pause: called every 32 objects, so that the first naming of a file, which may take
            milliseconds, is done in slices.
    """

    def __init__(self, pause: Pause | None = None) -> None:
        self._pause = pause
        self._looked_at = 0
        self._names: dict[tuple[str, str, int], str] = {}
        self._modules: dict[str, str] = {}
        self._modules_seen: set[str] = set()
        self._files: dict[str, _File] = {}
        self._of_main: dict[str, _File] = {}  # files of no module, all from one walk
        self._main_size = -1

    def __call__(self, name: str, filename: str, line: int) -> str:
        """The qualified name; never raises."""
        key = (filename, name, line)
        known = self._names.get(key)
        if known is None:
            try:
                known = self._find(name, filename, line)
            except Exception:  # an unusual module
                known = file_function_namer(name, filename, line)
            if len(self._names) >= _MAX_NAMES:
                self._names.clear()
            self._names[key] = known
        return known

    def _find(self, name: str, filename: str, line: int) -> str:
        module_name = self._module_of(filename)
        if module_name is None:
            # notebook cells and executed scripts define their functions in __main__
            known = filename not in ("", REGION_FILE) and name != "<module>"
            qualname = self._in_main(filename, name, line) if known else None
            if qualname is None:
                return file_function_namer(name, filename, line)
            return f"__main__.{qualname}"
        qualname = self._qualname(module_name, filename, name, line)
        return f"{module_name}.{qualname or name}"

    # module

    def _module_of(self, filename: str) -> str | None:
        if not filename:
            return None
        found = self._modules.get(filename)
        if found is None and len(sys.modules) != len(self._modules_seen):
            self._see_new_modules()
            found = self._modules.get(filename)
        return found

    def _see_new_modules(self) -> None:
        seen = self._modules_seen
        current = list(sys.modules.items())
        for module_name, module in current:
            self._step()
            if module_name in seen:
                continue
            seen.add(module_name)
            file = _namespace(module).get("__file__")
            if type(file) is str and file:
                # a module loaded under two names keeps the first; a script is __main__
                self._modules.setdefault(file, module_name)
        seen.intersection_update([module_name for module_name, _ in current])

    # function

    def _qualname(self, module_name: str, filename: str, name: str, line: int) -> str | None:
        if name == "<module>":
            return name
        namespace = _namespace(sys.modules.get(module_name))
        file = self._files.get(filename)
        if file is None or (file.size != len(namespace) and file.find(name, line) is None):
            # the first time, or the module has changed (a running script)
            file = _File(len(namespace))
            for code, qualname in self._codes(namespace, filename.__eq__):
                file.add(code, qualname)
            self._files.pop(filename, None)
            while len(self._files) >= _MAX_FILES:
                self._files.pop(next(iter(self._files)), None)  # the oldest
            self._files[filename] = file
        return file.find(name, line)

    def _in_main(self, filename: str, name: str, line: int) -> str | None:
        namespace = _namespace(sys.modules.get("__main__"))
        file = self._of_main.get(filename)
        found = file.find(name, line) if file is not None else None
        if found is not None or self._main_size == len(namespace):
            return found
        size = len(namespace)
        files: dict[str, _File] = {}
        for code, qualname in self._codes(namespace, lambda other: other not in self._modules):
            files.setdefault(code.co_filename, _File(size)).add(code, qualname)
        self._of_main, self._main_size = files, size
        file = files.get(filename)
        return file.find(name, line) if file is not None else None

    def _codes(
        self, namespace: dict[str, Any], wanted: Callable[[str], bool]
    ) -> Iterator[tuple[types.CodeType, str]]:
        """The functions in a module, from the wanted files."""
        own_name = namespace.get("__name__")
        seen: set[int] = set()
        todo: list[tuple[Any, int]] = [(value, 0) for value in list(namespace.values())]
        while todo and len(seen) < _MAX_CODES_PER_FILE:
            self._step()
            value, depth = todo.pop()
            if id(value) in seen:
                continue
            kind = type(value)
            if kind is types.FunctionType:
                seen.add(id(value))
                qualname = _own_qualname(value)
                if qualname and wanted(value.__code__.co_filename):
                    yield from self._nested(value.__code__, qualname)
                if depth < _MAX_DEPTH:
                    # a decorator's wrapper: the wrapped function may be from a wanted file
                    todo += [(inner, depth + 1) for inner in _inside_function(value)]
            elif issubclass(kind, type):
                seen.add(id(value))
                members = type.__getattribute__(value, "__dict__")
                if depth < _MAX_DEPTH and _may_be_from(members, own_name, wanted):
                    todo += [(member, depth + 1) for member in list(members.values())]
            elif depth < _MAX_DEPTH:
                todo += [(inner, depth + 1) for inner in _inside_wrapper(value, kind)]

    def _nested(self, code: types.CodeType, qualname: str) -> Iterator[tuple[types.CodeType, str]]:
        todo = [(code, qualname)]
        while todo:
            self._step()
            code, qualname = todo.pop()
            yield code, qualname
            between = _LOCALS if code.co_flags & _FUNCTION_FLAGS else "."
            for constant in code.co_consts:
                if type(constant) is types.CodeType:
                    if _CODE_HAS_QUALNAME:
                        todo.append((constant, constant.co_qualname))  # type: ignore[attr-defined]
                    else:
                        todo.append((constant, f"{qualname}{between}{constant.co_name}"))

    def _step(self) -> None:
        self._looked_at += 1
        if self._pause is not None and not self._looked_at % _PAUSE_EVERY:
            self._pause()


class _File:
    """The functions of one file; keeps no objects of the job.

    Attributes:
        size: number of names in the module when it was walked.
    """

    __slots__ = ("_by_name", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._by_name: dict[str, list[tuple[int, int, str]]] = {}

    def add(self, code: types.CodeType, qualname: str) -> None:
        first = code.co_firstlineno
        last = max((line for _, _, line in code.co_lines() if line is not None), default=first)
        self._by_name.setdefault(code.co_name, []).append((first, last, qualname))

    def find(self, name: str, line: int) -> str | None:
        """The innermost function of that name around the line."""
        holding = [entry for entry in self._by_name.get(name, ()) if entry[0] <= line <= entry[1]]
        return max(holding)[2] if holding else None


def _namespace(module: Any) -> dict[str, Any]:
    """A module's names, without running a `__getattr__`."""
    try:
        names = object.__getattribute__(module, "__dict__")
    except Exception:
        return {}
    return names if type(names) is dict else {}


def _may_be_from(
    members: Mapping[str, Any], module_name: Any, wanted: Callable[[str], bool]
) -> bool:
    """Whether a class is of the module, even if its `__module__` differs (as `torch.Tensor`)."""
    own_module = members.get("__module__")
    if type(own_module) is str and type(module_name) is str and own_module == module_name:
        return True
    functions = (m for m in list(members.values()) if type(m) is types.FunctionType)
    return any(
        wanted(function.__code__.co_filename)
        for function in itertools.islice(functions, _FUNCTIONS_ASKED)
    )


def _own_qualname(function: types.FunctionType) -> str:
    """The qualified name of the function's code, "" if `functools.wraps` changed it."""
    if _CODE_HAS_QUALNAME:
        return function.__code__.co_qualname  # type: ignore[attr-defined,no-any-return]
    qualname = function.__qualname__
    return qualname if qualname.rpartition(".")[2] == function.__code__.co_name else ""


def _inside_function(function: types.FunctionType) -> list[Any]:
    inner = list(function.__dict__.values())
    inner += [value for cell in function.__closure__ or () for value in _content(cell)]
    return [value for value in inner if _may_hold_code(type(value))]


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not bound yet
        return ()


_WRAPPED: Final = {
    id(staticmethod): ("__func__",),
    id(classmethod): ("__func__",),
    id(types.MethodType): ("__func__",),
    id(property): ("fget", "fset", "fdel"),
    id(functools.partial): ("func",),
    id(functools.partialmethod): ("func",),
    id(functools.cached_property): ("func",),
    id(type(functools.lru_cache(maxsize=1)(len))): ("__wrapped__",),
}
"""Attributes in which the standard wrappers keep the wrapped function, by the id of the exact type
(a metaclass may define `__hash__`). Reading them runs no code of the job."""


def _inside_wrapper(value: Any, kind: type) -> list[Any]:
    return [getattr(value, attribute) for attribute in _WRAPPED.get(id(kind), ())]


def _may_hold_code(kind: type) -> bool:
    return kind is types.FunctionType or id(kind) in _WRAPPED or issubclass(kind, type)
