"""Finds what refers to a tensor, from object to object up to a root.

Each level is one pass of the collector over all objects (`gc.get_referrers`). The collector does
not track running functions (Python 3.11 and newer), so the variables of this thread's frames and of
the last traceback are looked up apart. No code of the objects runs.

Limits: eight levels, two thousand objects, sixty-four at once. Not found are running functions of
other threads, and what C++ holds other than what autograd saved.
"""

from __future__ import annotations

import re
import sys
import types
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.text import human_bytes, printable
from gpumem_otel.capture.objects.python_objects import (
    frame_title,
    frames_from,
    is_module_level,
    variables,
)
from gpumem_otel.capture.objects.storages import address_of, storages_of
from gpumem_otel.capture.objects.thread_activity import read_autograd
from gpumem_otel.errors import ConfigError
from gpumem_otel.profiles.tables import stack_lines
from gpumem_otel.snapshot.tensor_classes import TensorClass
from gpumem_otel.tensors.join import Blocks
from gpumem_otel.tensors.referrers import SUSPENDED, Node, Nodes, qualname, referrers_of, ways
from gpumem_otel.tensors.saved import grad_fn, saved_tensors
from gpumem_otel.tensors.tracebacks import last_frames
from gpumem_otel.tensors.walk import is_parameter, kinds_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from gpumem_otel.base.profile import Stack
    from gpumem_otel.base.protocols import FrameNamer
    from gpumem_otel.snapshot.reading import Reading


@dataclass(frozen=True, slots=True)
class Holder:
    """One way that leads to the memory.

    Attributes:
        path: as code writes it, from a root on: `model.layers[0].weight`.
        kind: of the root: `module`, `frame`, `last traceback`, `notebook output`, `closure`,
            `class`, `autograd`, `object` (nothing known refers to it).
        place: function and line of a frame, module of an attribute; "" where there is none.
    """

    path: str
    kind: str
    place: str = ""

    def __str__(self) -> str:
        place = f", {self.place}" if self.place else ""
        return printable(f"{self.path}  [{self.kind}{place}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The memory that was asked about.

    Attributes:
        title: for instance `Tensor (1024, 1024) float32`.
        address: where its storage begins, or as given; 0 where it has no memory.
        storage_bytes: that its storage asked for; 0 where only an address is known.
        tensors: Python objects that have this storage.
    """

    title: str
    device: str
    address: int
    storage_bytes: int
    tensors: int
    tensor_class: TensorClass | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """What holds a piece of memory; `str()` of it is for people.

    Attributes:
        block_bytes: of the allocator's block, rounding included; None where torch has no live block
            there.
        requested_bytes: that were asked for it.
        stack: that allocated the block, leaf first; () where it is unknown.
        held_by: the ways that lead to it, the shortest first.
    """

    subject: Subject
    tensor_class: TensorClass
    block_bytes: int | None
    requested_bytes: int | None
    stack: Stack
    held_by: tuple[Holder, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        subject = self.subject
        size = f"{human_bytes(subject.storage_bytes)} asked for" if subject.storage_bytes else ""
        if self.block_bytes is not None:
            block = f"a block of {human_bytes(self.block_bytes)} ({self.block_bytes} bytes)"
            size = f"{size}, {block}" if size else block
        where = f" at 0x{subject.address:x}" if subject.address else ""
        lines = [
            f"{printable(subject.title)} on {subject.device}{where}: {size or 'no memory'}",
            f"class: {self.tensor_class.value}",
        ]
        if self.stack:
            lines += ["allocated by", *(f"    {line}" for line in stack_lines(self.stack))]
        if self.held_by:
            lines += ["held by", *(f"    {holder}" for holder in self.held_by)]
        else:
            lines.append("held by nothing that Python can see")
        lines += [f"note: {printable(note)}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; sizes are bytes, the stack is leaf first."""
        return {
            **asdict(self.subject),
            "tensor_class": self.tensor_class.value,
            "block_bytes": self.block_bytes,
            "requested_bytes": self.requested_bytes,
            "stack": [[frame.name, frame.filename, frame.line] for frame in self.stack],
            "held_by": [asdict(holder) for holder in self.held_by],
            "notes": list(self.notes),
        }


def describe(
    subject: Subject,
    held_by: tuple[Holder, ...],
    reading: Reading | None,
    *,
    namer: FrameNamer,
    recorded: bool,
    notes: tuple[str, ...] = (),
) -> Holders:
    """The holders, with what the allocator knows of the block.

    Args:
        subject: the memory that was asked about.
        held_by: the ways that lead to it.
        reading: of the allocator, None where there is none.
        namer: names Python frames.
        recorded: whether stacks are recorded.
        notes: what a reader should know.
    """
    tensor_class = subject.tensor_class
    stack: Stack = ()
    block = None
    if reading is not None and subject.address:
        for index in reading.snapshot.devices():
            if subject.device not in ("cuda", f"cuda:{index}"):
                continue
            blocks = Blocks(reading, index, namer, recorded=recorded)
            block = blocks.at(subject.address)
            if block is not None:
                subject = replace(subject, device=f"cuda:{index}")
                stack = blocks.stack(block)
                tensor_class = tensor_class or blocks.class_of(block)
                break
    return Holders(
        subject=subject,
        tensor_class=tensor_class or TensorClass.UNATTRIBUTED,
        block_bytes=block["size"] if block is not None else None,
        requested_bytes=block.get("requested_size") if block is not None else None,
        stack=stack,
        held_by=held_by,
        notes=notes,
    )


_MOST_LEVELS: Final = 8
_MOST_OBJECTS: Final = 2_000
_MOST_AT_ONCE: Final = 64
_MOST_HOLDERS: Final = 50
_MOST_WAYS: Final = 4
"""That are followed from one object to the memory."""
_OUTPUT: Final = re.compile(r"Out|_+|_\d+")
_IPYTHON: Final = ("IPython.", "ipykernel.")


def find(x: Any, frame: FrameType | None) -> tuple[Subject, tuple[Holder, ...], list[str]]:
    """The memory that is asked about, the ways that lead to it, and notes.

    Args:
        x: tensor, storage or address.
        frame: of the caller; its variables and those of its callers are searched.

    Raises:
        ConfigError: it is none of these, or torch is not imported.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        raise ConfigError("holders: torch is not imported, so there are no tensors")
    matching = _Matching(torch, x)
    search = _Search(frame)
    subject, tensors, notes = _tensors_of(torch, matching, search)
    search.begin_with(tensors)
    del tensors
    search.run()
    held_by = (*search.holders, *matching.autograd)
    if search.cut:
        notes.append(
            f"the search ended at its limits ({search.visited} objects): there may be more"
        )
    return subject, held_by, notes


class _Matching:
    """The storages that are asked about.

    Attributes:
        autograd: nodes that saved them.
    """

    def __init__(self, torch: Any, x: Any) -> None:
        self.title, self.device = "", ""
        self.size = self.address = 0
        self.autograd: tuple[Holder, ...] = ()
        self._identities: set[int] = set()
        self._asked_address = 0
        if isinstance(x, torch.Tensor):
            self._take(storages_of(x), f"{type(x).__name__} {_shape(x)}", str(x.device))
        elif isinstance(x, torch.UntypedStorage):
            self._take([x], "storage", str(x.device))
        elif isinstance(x, torch.TypedStorage):
            self._take([x._untyped_storage], "storage", str(x.device))  # noqa: SLF001
        elif type(x) is int and x > 0:
            self._asked_address = self.address = x
            self.title, self.device = "address", ""
        else:
            kind = type(x).__name__
            raise ConfigError(f"holders: {kind!r} is not a tensor, storage or address")

    def _take(self, storages: list[Any], title: str, device: str) -> None:
        self.title, self.device = title, device
        self._identities = {storage._cdata for storage in storages}  # noqa: SLF001
        self.size = sum(storage.nbytes() for storage in storages)
        self.address = address_of(storages[0]) if storages else 0

    def has(self, storage: Any) -> bool:
        if not self._asked_address:
            return storage._cdata in self._identities  # noqa: SLF001
        start = address_of(storage)
        if not start or not start <= self._asked_address < start + storage.nbytes():
            return False
        self.device = self.device or str(storage.device)
        self.size = max(self.size, storage.nbytes())
        return True


def _tensors_of(
    torch: Any, matching: _Matching, search: _Search
) -> tuple[Subject, list[Any], list[str]]:
    """Every Python object with one of the storages; what autograd saved of them."""
    by_kind = kinds_of(torch).collected()
    tensors = [storage for storage in by_kind.get("storage", ()) if matching.has(storage)]
    owners: list[Any] = []
    count = 0
    tensor_class: TensorClass | None = None
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch.overrides documents
        gradients, saved, refused = _of_autograd(torch, by_kind.get("tensor", ()))
        for item in by_kind.pop("tensor", ()):
            if any(map(matching.has, storages_of(item))):
                tensors.append(item)
                count += 1
                if is_parameter(torch, item):
                    tensor_class = TensorClass.PARAMETER
        for owner, gradient in gradients:
            if any(map(matching.has, storages_of(gradient))):
                owners.append(owner)
                tensor_class = TensorClass.GRADIENT
        matching.autograd = tuple(
            Holder(label, "autograd", "saved for backward")
            for label, tensor in saved
            if any(map(matching.has, storages_of(tensor)))
        )
    by_kind.clear()
    gradients.clear()
    saved.clear()
    search.begin_with(owners, ".grad")
    notes = [f"gradients and autograd's graph are not searched: {refused}"] if refused else []
    subject = Subject(
        title=matching.title,
        device=matching.device or "cuda",
        address=matching.address,
        storage_bytes=matching.size,
        tensors=count,
        tensor_class=tensor_class,
    )
    return subject, tensors, notes


def _of_autograd(
    torch: Any, tensors: Sequence[Any]
) -> tuple[list[tuple[Any, Any]], list[tuple[str, Any]], str]:
    """(tensor, its gradient) and what is saved for backward; or why they are not read."""

    def read() -> tuple[list[tuple[Any, Any]], list[tuple[str, Any]]]:
        pairs = [(item, _of(item, "grad")) for item in tensors if _of(item, "is_leaf")]
        return pairs, list(saved_tensors(torch, map(grad_fn, tensors)))

    values, refused = read_autograd(torch, read)
    pairs, saved = values or ([], [])
    return [(item, gradient) for item, gradient in pairs if gradient is not None], saved, refused


class _Search:
    """Follows references backwards, level by level.

    Attributes:
        holders: the roots that were reached.
        cut: whether a limit ended it.
    """

    def __init__(self, frame: FrameType | None) -> None:
        self.holders: list[Holder] = []
        self.cut = False
        self._seen: Nodes = {}
        self._level: list[Node] = []
        self._running: dict[int, list[tuple[str, str, str]]] = {}
        self._frames: set[int] = set()
        self._paths: set[str] = set()
        self._modules: dict[int, str] = {}
        for name, module in list(sys.modules.items()):
            if issubclass(type(module), types.ModuleType):
                self._modules.setdefault(id(vars(module)), name)
        own: FrameType | None = sys._getframe()  # noqa: SLF001
        while own is not None:  # Python 3.10 sees running frames as referrers
            self._frames.add(id(own))
            own = own.f_back
        for caller in frames_from(frame):
            self._note_variables(caller, "frame")
        for ended in last_frames():
            self._frames.add(id(ended))
            self._note_variables(ended, "last traceback")

    @property
    def visited(self) -> int:
        return len(self._seen)

    def _note_variables(self, frame: FrameType, kind: str) -> None:
        if not is_module_level(frame):
            title = frame_title(frame)
            for name, value in variables(frame):
                self._running.setdefault(id(value), []).append((name, kind, title))

    def begin_with(self, items: list[Any], rest: str = "") -> None:
        """Begin with these, and empty the list; `rest`: the way from them to the memory."""
        for item in items:
            self._add(Node(item, rest))
        items.clear()

    def run(self) -> None:
        """Go up until nothing is left or a limit is reached."""
        for depth in range(_MOST_LEVELS):
            level, self._level = self._level, []
            if not level:
                return
            for start in range(0, len(level), _MOST_AT_ONCE):
                if len(self._seen) >= _MOST_OBJECTS or len(self.holders) >= _MOST_HOLDERS:
                    self.cut = True
                    return
                nodes: Nodes = {}
                for node in level[start : start + _MOST_AT_ONCE]:
                    nodes.setdefault(id(node.item), []).append(node)
                self._go_up(nodes)
            for node in level if depth else ():  # what only C++ holds is not a holder
                if not node.held and type(node.item) not in (dict, tuple, types.CellType):
                    self._hold(f"<{type(node.item).__name__}>{node.tail()}", "object")
        self.cut = self.cut or bool(self._level)

    def _go_up(self, nodes: Nodes) -> None:
        items = [ways_there[0].item for ways_there in nodes.values()]
        # all other objects of ours refer to nodes only
        for referrer in referrers_of(items, self._frames):
            for node, rest, key in ways(referrer, nodes):
                node.held = True
                if not node.leads_through(referrer):
                    self._reach(referrer, rest, key, node)

    def _add(self, node: Node) -> None:
        """A node to go on from, and the variables that name it."""
        ways_there = self._seen.setdefault(id(node.item), [])
        if len(ways_there) >= _MOST_WAYS:
            return
        ways_there.append(node)
        self._level.append(node)
        for name, kind, title in self._running.get(id(node.item), ()):
            node.held = True
            self._hold(f"{name}{node.tail()}", kind, title)

    def _hold(self, path: str, kind: str, place: str = "") -> None:
        key = f"{kind} {path} {place}"
        if key not in self._paths and len(self.holders) < _MOST_HOLDERS:
            self._paths.add(key)
            self.holders.append(Holder(path, kind, place))

    def _reach(self, referrer: Any, rest: str, key: tuple[Any, ...], node: Node) -> None:
        """A root ends the way; anything else is one more object on it."""
        kind = type(referrer)
        if id(referrer) in self._modules and kind is dict:
            self._reach_module(self._modules[id(referrer)], str(key[0]), rest)
        elif kind is types.FrameType:
            self._hold(f"{key[0]}{rest}", "frame", frame_title(referrer))
        elif kind in SUSPENDED:
            self._hold(f"{key[0]}{rest}", "frame", f"suspended {qualname(referrer)}")
        elif kind is types.FunctionType:
            self._hold(f"{qualname(referrer)}:{key[0]}{rest}", "closure", referrer.__module__ or "")
        elif issubclass(kind, type):
            self._hold(f"{qualname(referrer)}{rest}", "class", str(referrer.__module__))
        elif str(getattr(kind, "__module__", "")).startswith(_IPYTHON):
            self._hold(f"{kind.__name__}{rest}", "notebook output", "kept by IPython")
        elif kind is not types.ModuleType:
            item = key[0] if key else None
            self._add(Node(referrer, rest, item, has_key=bool(key), after=node))

    def _reach_module(self, module: str, name: str, rest: str) -> None:
        if module != "__main__":
            self._hold(f"{module}.{name}{rest}", "module")
        elif "IPython" in sys.modules and _OUTPUT.fullmatch(name):
            self._hold(f"{name}{rest}", "notebook output")
        elif name != "_oh":
            self._hold(f"{name}{rest}", "module", "__main__")


def _of(tensor: Any, name: str) -> Any:
    try:
        return getattr(tensor, name)
    except Exception:  # a subclass
        return None


def _shape(tensor: Any) -> str:
    try:
        return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    except Exception:  # nested tensors have none
        return str(_of(tensor, "dtype"))
