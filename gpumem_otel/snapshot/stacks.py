"""Recorded frames -> stacks for people: what is dropped, how the rest is named, how it is cut.

What real recordings hold: Python frames with a source file; C++ frames, demangled, with the file
"??", "" or a C++ source name; symbols of the interpreter, often those of a neighbour where the
library was stripped.

Limits: a stripped symbol that got a neighbour's name which no rule knows stays in the stack under
that wrong name; a Python function whose file is called `x.cpp` is taken for C++.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpumem_otel.base.profile import Frame, Stack
from gpumem_otel.snapshot.torch_format import RawReader, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypeAlias

    from gpumem_otel.base.protocols import FrameNamer

    AnyFrame: TypeAlias = Mapping[str, Any] | Frame

BACKWARD = "[backward]"
"""Root of memory allocated on the thread of the autograd engine."""
BEFORE_INSTALL = "[allocated before install]"
"""Root of live memory whose allocation was not recorded."""
INTERNAL_ONLY = "[internal frames only]"
"""Stands for a recorded stack of which no frame says anything about the job."""
NO_PYTHON_FRAME = "[no Python frame]"
"""Root of memory whose allocation was recorded while no Python code ran."""
NOT_RECORDED = "[not recorded]"
"""Root of what the allocator counted while no event was recorded."""
PEAK_NOT_RECORDED = "[peak not recorded]"
"""Root of what the allocator's peak rose above the highest moment that was recorded."""
REGION_FILE = "gpumem_otel.region"
"""File of the frame that stands for a region of code, so that its name is
`gpumem_otel.region:<name>`."""
OTHER = "[other]"
"""Root of what a budget merged away."""
UNNAMED = "[unnamed]"
"""Stands for an empty function name."""

STACKLESS_ROOTS = frozenset({BACKWARD, BEFORE_INSTALL, NO_PYTHON_FRAME})
"""A stack of one frame with one of these names stands for a block without a stack. A stack that
was recorded never has that form, so that recordings keep `bytes_without_stack` exact."""

DROPPED_PREFIXES: tuple[tuple[str, str], ...] = (
    ("torch::unwind::", "takes the stack"),
    ("torch::CapturedTraceback::", "takes the stack"),
    ("torch::cuda::(anonymous namespace)::gather", "takes the stack"),
    ("torch::(anonymous namespace)::gather", "takes the stack"),
    ("c10::cuda::CUDACachingAllocator::", "the allocator"),
    ("c10::cuda::CUDAMallocAsync", "the allocator"),
    ("c10::CachingDeviceAllocator", "the allocator"),
    ("at::detail::empty_", "asks the allocator, for every tensor"),
    ("at::detail::_empty_", "asks the allocator, for every tensor"),
    ("at::TensorBase at::detail::_empty_", "asks the allocator, for every tensor"),
    ("at::(anonymous namespace)::create_out(", "asks the allocator, for every result"),
    ("c10::impl::wrap_kernel_functor_", "dispatcher: repeats the operator beside it"),
    ("c10::impl::make_boxed_from_", "dispatcher: repeats the operator beside it"),
    ("c10::impl::BoxedKernelWrapper", "dispatcher: repeats the operator beside it"),
    ("c10::impl::call_functor_with_args", "dispatcher: repeats the operator beside it"),
    ("c10::BoxedKernel", "dispatcher: repeats the operator beside it"),
    ("c10::KernelFunction::", "dispatcher: repeats the operator beside it"),
    ("c10::Dispatcher::", "dispatcher: repeats the operator beside it"),
    ("torch::autograd::Engine::", "autograd engine: every node, and [backward] says it"),
    ("torch::autograd::python::PythonEngine::", "autograd engine: every node"),
    ("torch::autograd::Node::operator()", "autograd engine: the node is the frame below"),
    ("torch::autograd::THPVariable_", "binds Python to the operator beside it"),
    ("THPVariable_", "binds Python to the operator beside it"),
    ("_object* torch::autograd::", "binds Python to the operator beside it"),
    ("torch::handle_torch_function", "binds Python to the operator beside it"),
    ("pybind11::", "binds Python to the function beside it"),
    ("void pybind11::", "binds Python to the function beside it"),
    ("_object* pybind11::", "binds Python to the function beside it"),
    ("__Pyx_", "binds Python to the function beside it"),
    ("std::_Function_handler<", "calls the function beside it"),
    ("std::function<", "calls the function beside it"),
    ("std::__invoke", "calls the function beside it"),
    ("std::thread::", "starts the thread"),
    ("std::error_code::default_error_condition() const", "starts the thread (misread symbol)"),
    ("execute_native_thread_routine", "starts the thread"),
    ("pthread_", "starts the thread"),
    ("__libc_start_", "starts the process"),
    ("__libc_init_first", "starts the process"),
)
"""C++ frames that say nothing about the job, by the beginning of their name, with the reason."""

_DROPPED_NAMES = {
    "": "no symbol",
    "<unwind unsupported>": "no symbol",
    "??": "no symbol",
    "_start": "starts the process",
    "__clone": "starts the thread",
    "clone": "starts the thread",
    "clone3": "starts the thread",
    "start_thread": "starts the thread",
}
_DROPPED_STARTS = tuple(prefix for prefix, _ in DROPPED_PREFIXES)
_ENGINE_STARTS = ("torch::autograd::Engine::", "torch::autograd::python::PythonEngine::")

# C functions of CPython carry no argument list, unlike demangled C++
_INTERPRETER_NAME = re.compile(r"_{0,2}Py[A-Za-z0-9]*_\w*")
_INTERPRETER_FILE = re.compile(
    r"(?:^|[/\\])(?:(?:Python|Objects|Modules|Parser|Programs)[/\\]\w+\.c"
    r"|pycore_\w+\.h|(?:cpython|Include)[/\\]\w+\.h|(?:bytecodes|generated_cases)\.c(?:\.h)?)$"
)
_C_SYMBOL = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
_NATIVE_FILE = re.compile(
    r"\.(?:c|cc|cpp|cxx|c\+\+|cu|cuh|h|hh|hpp|hxx|inl|inc|s|S|asm|rs|so|so\.[\d.]+)$"
)

_MAX_LINE = 2**63 - 1
_PYTHON = 1
_ENGINE = 2


def cut_name(count: int) -> str:
    """Name of the frame that stands for so many frames cut out of the middle of a stack."""
    return f"[{count} frames cut]"


def basename(filename: str) -> str:
    """Last part of a POSIX or Windows path."""
    return filename[max(filename.rfind("/"), filename.rfind("\\")) + 1 :]


def file_function_namer(name: str, filename: str, line: int) -> str:  # noqa: ARG001 (FrameNamer)
    """`file.py:function`, all that a plain snapshot file holds."""
    return f"{basename(filename)}:{name}" if filename else name


def identity_namer(name: str, filename: str, line: int) -> str:  # noqa: ARG001 (FrameNamer)
    """The name as it is, for recordings that hold final names."""
    return name


class _BasenamePaths:
    """A namer that marks that no directory is to be shown."""

    def __init__(self, namer: FrameNamer) -> None:
        self._namer = namer

    def __call__(self, name: str, filename: str, line: int) -> str:
        return self._namer(name, filename, line)


def with_basename_paths(namer: FrameNamer) -> FrameNamer:
    """The same names, and every `StackBuilder` that is given this keeps no directory.

    The wrapped namer still sees whole paths, since qualified names are looked up by them.
    """
    return namer if redacts_paths(namer) else _BasenamePaths(namer)


def redacts_paths(namer: FrameNamer) -> bool:
    """Whether a namer came from `with_basename_paths`."""
    return isinstance(namer, _BasenamePaths)


def is_python(name: str, filename: str) -> bool:
    """Whether a recorded frame is one of Python's rather than a native symbol."""
    if not filename or filename == "??" or "::" in name:
        return False
    return _NATIVE_FILE.search(filename) is None


def why_dropped(name: str, filename: str) -> str:
    """Why a recorded frame is not shown, "" where it is.

    Python frames are shown, all but the frozen start-up code of the interpreter: people search
    for what they wrote and for what they called.
    """
    if is_python(name, filename):
        return "starts the interpreter" if filename.startswith("<frozen ") else ""
    reason = _DROPPED_NAMES.get(name)
    if reason is not None:
        return reason
    if name.startswith(_DROPPED_STARTS):
        return next(reason for prefix, reason in DROPPED_PREFIXES if name.startswith(prefix))
    if _C_SYMBOL.fullmatch(name) and (
        _INTERPRETER_NAME.fullmatch(name) or _INTERPRETER_FILE.search(filename)
    ):
        return "the interpreter"
    return ""


class StackBuilder:
    """Builds final stacks out of the frames of one snapshot.

    Every distinct raw frame is looked at once, however many stacks it is in. Raw frames are known
    by identity and kept alive for that, so use one builder per snapshot and let it go.
    """

    def __init__(self, namer: FrameNamer, max_depth: int = 512, *, resolved: bool = False) -> None:
        """Make a builder.

        Args:
            namer: names Python frames; C++ symbols keep their name, it is qualified already.
            max_depth: frames per stack, at least 1; the middle of a longer one is cut.
            resolved: names are final: nothing is dropped or renamed.
        """
        self._namer = namer
        self._max_depth = max(1, max_depth)
        self._resolved = resolved
        self._basenames = redacts_paths(namer)
        self._by_id: dict[int, tuple[AnyFrame, Frame | None, int]] = {}
        self._by_value: dict[tuple[str, str, int], tuple[Frame | None, int]] = {}
        self._roots: dict[str, Stack] = {}
        self._text = RawReader().text

    def build(self, raw_frames: Sequence[AnyFrame]) -> Stack:
        """The stack to show, leaf first; () only for ().

        Memory that the autograd engine allocated without any Python code gets `[backward]` as
        its root; a stack of which nothing is worth showing says `[internal frames only]`.
        """
        frames: list[Frame] = []
        seen = 0
        known = self._by_id
        for raw in raw_frames:
            entry = known.get(id(raw))
            if entry is None:
                entry = known[id(raw)] = (raw, *self._look_at(raw))
            seen |= entry[2]
            if entry[1] is not None:
                frames.append(entry[1])
        if not frames and raw_frames:
            frames.append(Frame(INTERNAL_ONLY))
        if seen == _ENGINE:
            frames.append(Frame(BACKWARD))
        return self._cut(frames)

    def root(self, name: str) -> Stack:
        """The stack of memory that has none: one frame with this name."""
        stack = self._roots.get(name)
        if stack is None:
            stack = self._roots[name] = (Frame(text(name) or UNNAMED),)
        return stack

    def _look_at(self, raw: AnyFrame) -> tuple[Frame | None, int]:
        # cut before anything searches them: a long name may be that of a hundred thousand frames
        if isinstance(raw, Frame):
            name, filename, line = self._text(raw.name), self._text(raw.filename), raw.line
        else:
            name = self._text(raw.get("name"))
            filename = self._text(raw.get("filename"))
            line = _line(raw.get("line"))
        key = (name, filename, line)
        entry = self._by_value.get(key)
        if entry is None:
            entry = self._by_value[key] = self._name(name, filename, line)
        return entry

    def _name(self, name: str, filename: str, line: int) -> tuple[Frame | None, int]:
        shown = basename(filename) if self._basenames else filename
        if self._resolved:
            return Frame(name or UNNAMED, shown, _line(line)), 0
        python = is_python(name, filename)
        kind = _PYTHON if python else _ENGINE if name.startswith(_ENGINE_STARTS) else 0
        if why_dropped(name, filename):
            return None, kind
        final = self._namer(name or UNNAMED, filename, line) if python else name
        return Frame(text(final) or UNNAMED, shown, _line(line)), kind

    def _cut(self, frames: list[Frame]) -> Stack:
        limit = self._max_depth
        if len(frames) <= limit:
            return tuple(frames)
        at_root = (limit - 1) // 2
        at_leaf = limit - 1 - at_root
        gone = len(frames) - at_root - at_leaf
        return (
            *frames[:at_leaf],
            Frame(cut_name(gone)),
            *frames[len(frames) - at_root :],
        )


def build_stack(raw_frames: Sequence[AnyFrame], namer: FrameNamer, max_depth: int = 512) -> Stack:
    """`StackBuilder.build` for a single stack."""
    return StackBuilder(namer, max_depth).build(raw_frames)


def _line(value: object) -> int:
    # 2**64 - 1 occurs in real files; the wire format has signed 64-bit lines
    if isinstance(value, int) and 0 <= value <= _MAX_LINE:
        return int(value)
    return 0
