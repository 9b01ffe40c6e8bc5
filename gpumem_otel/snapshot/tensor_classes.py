"""What kind of tensor a block holds: the certain passes first, none overwrites an earlier one.

1. By address: the job's own thread keeps a table of the storages of parameters, buffers, gradients
   and optimizer state, and of what the user named. A block that begins at the address of such a
   storage, and for which as many bytes were asked, is that storage.
2. By stack: the innermost frame that a rule matches, from the leaf on. So a forward that runs
   inside backward (checkpointing) is a forward.
3. The rest is `unattributed`.

Limits, since a snapshot does not hold it: cuBLAS workspaces look like what a forward allocates, and
are known by their size alone; what user code makes outside of any module, for instance a batch that
it moves to the device, has no class unless the user names it; a temporary of a forward looks like
an activation until it is freed.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from gpumem_otel.base.profile import Frame
from gpumem_otel.snapshot.stacks import BACKWARD, OTHER, STACKLESS_ROOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from gpumem_otel.base.profile import HeapProfile, Stack
    from gpumem_otel.base.protocols import Pause
    from gpumem_otel.snapshot.torch_format import RawBlock, RawFrame, RawSegment

ClassAs = Literal["root", "label"]
"""Where a profile holds the class of a sample: in its root frame, or in the label below."""

CLASS_LABEL = "tensor_class"

_BLOCKS_PER_PAUSE = 32
_WORKSPACES_PER_STREAM = 2


class TensorClass(str, Enum):
    """What a block holds. The value is used in metrics and profiles."""

    PARAMETER = "parameter"
    UNSHARDED_PARAMETER = "unsharded_parameter"
    """Gathered for a moment from the ranks that hold its shards."""
    BUFFER = "buffer"
    GRADIENT = "gradient"
    """Of parameters, and what backward allocates on the way to them."""
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activation"
    """Allocated by a forward and alive: saved for backward, or about to be used."""
    KV_CACHE = "kv_cache"
    INPUT = "input"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"
    """Of cuBLAS; probable, by the size alone."""
    COMMUNICATION = "communication"
    UNATTRIBUTED = "unattributed"


_C = TensorClass

_RULES: tuple[tuple[str, str, TensorClass], ...] = (
    # the file's end or middle, the function, the class
    (r"/torch/optim/", r"", _C.OPTIMIZER_STATE),
    (r"/(bitsandbytes/optim|apex/optimizers|torchao/optim)/", r"", _C.OPTIMIZER_STATE),
    (r"/torch/(cuda/)?amp/grad_scaler\.py$", r"", _C.OPTIMIZER_STATE),
    (r"/torch/distributed/fsdp/", r".*(all_gather|unshard).*|_alloc_storage",
     _C.UNSHARDED_PARAMETER),
    (r"/torch/distributed/fsdp/", r".*reduce.*", _C.COMMUNICATION),
    (r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$", r"", _C.COMMUNICATION),
    (r"/torch/distributed/(algorithms|optim|_symmetric_memory)/", r"", _C.COMMUNICATION),
    (r"/torch/nn/parallel/(distributed|comm|scatter_gather)\.py$", r"", _C.COMMUNICATION),
    (r"/torch/utils/data/", r"", _C.INPUT),
    (r"/torch/nn/modules/module\.py$", r"_(wrapped_)?call_impl|_slow_forward", _C.ACTIVATION),
    (r"/torch/nn/modules/module\.py$", r"_apply|convert|to|to_empty|cuda|_load_from_state_dict",
     _C.PARAMETER),
    (r"/torch/nn/modules/", r"__init__|reset_parameters|_reset_parameters|initialize_parameters",
     _C.PARAMETER),
    (r"/torch/nn/(parameter|init)\.py$", r"", _C.PARAMETER),
    (r"/torch/nn/utils/clip_grad\.py$", r"", _C.GRADIENT),
    (r"/torch/nn/functional\.py$", r"", _C.ACTIVATION),
    (r"/torch/autograd/function\.py$", r"apply", _C.GRADIENT),  # a custom node runs in backward
    (r"/torch/_functorch/_aot_autograd/runtime_wrappers\.py$", r"backward|_backward_impl",
     _C.GRADIENT),
    (r"/torch/_functorch/_aot_autograd/runtime_wrappers\.py$", r"forward", _C.ACTIVATION),
    (r"/torch/autograd/(__init__|graph)\.py$", r"backward|grad|_engine_run_backward", _C.GRADIENT),
    (r"/torch/_tensor\.py$", r"backward", _C.GRADIENT),
)  # fmt: skip
"""Of several that match one frame, the first counts."""

_COMPILED_CALL = re.compile(r"/torch/_dynamo/eval_frame\.py$")
"""A compiled function or its backward; only where no other frame says which."""

_OTHER = (Frame(OTHER),)
_OTHER_OF = {
    Frame(tensor_class.value): (_OTHER[0], Frame(tensor_class.value))
    for tensor_class in TensorClass
}

_CPP_BACKWARD = re.compile(r"torch::autograd::(Engine::|generated::\w+Backward|PyNode::apply)")


def _compiled() -> Callable[[str, str], TensorClass | None]:
    rules = [
        (re.compile(file), re.compile(name), tensor_class) for file, name, tensor_class in _RULES
    ]

    def find(name: str, filename: str) -> TensorClass | None:
        if not filename.endswith(".py"):
            return _C.GRADIENT if _CPP_BACKWARD.match(name) else None
        if "torch" not in filename and "optim" not in filename:
            return None
        path, function = filename.replace("\\", "/"), name.rpartition(".")[2]
        for file_rule, name_rule, tensor_class in rules:
            if file_rule.search(path) and (not name_rule.pattern or name_rule.fullmatch(function)):
                return tensor_class
        return None

    return find


_FIND = _compiled()


def class_of_frame(name: str, filename: str) -> TensorClass | None:
    """The class by one frame, None where no rule matches.

    Args:
        name: function as torch records it, or with its module and class before it.
        filename: source file.
    """
    if not filename and name in STACKLESS_ROOTS:
        return class_of_root(name)
    return _FIND(name, filename)


def class_of_root(root: str) -> TensorClass:
    """Class of memory without a stack, from the named root that stands for it."""
    return TensorClass.GRADIENT if root == BACKWARD else TensorClass.UNATTRIBUTED


def classes_of(profile: HeapProfile, class_as: ClassAs = "root") -> dict[TensorClass, int]:
    """Bytes by class of a live profile that was made with a classifier; they add up to its total.

    Args:
        profile: before a budget merges samples.
        class_as: where the class is.
    """
    totals: dict[TensorClass, int] = {}
    for sample in profile.samples:
        name = sample.frames[-1].name if class_as == "root" else dict(sample.labels)[CLASS_LABEL]
        tensor_class = TensorClass(name)
        totals[tensor_class] = totals.get(tensor_class, 0) + sample.size_bytes
    return totals


def other_stack(frames: Stack) -> Stack:
    """The stack `[other]` that takes a stack that is merged away: of the same class, if it has one.

    The same object for the same class.
    """
    return _OTHER_OF.get(frames[-1], _OTHER) if frames else _OTHER


def workspaces_in(
    segments: Iterable[RawSegment],
    sizes: Collection[int],
    known: Collection[int],
    before: Collection[int] = (),
    pause: Pause | None = None,
) -> set[int]:
    """Addresses of what is probably a workspace of cuBLAS.

    It keeps one per thread and stream, and a job multiplies on two threads: its own and that of
    backward. So blocks of a size that cuBLAS asks for are taken for workspaces only where a stream
    has at most two of them: activations of that size come in numbers. A block once
    taken for one stays one for as long as it is allocated, since a workspace is never freed.

    Args:
        segments: of a snapshot.
        sizes: what cuBLAS asks for in one piece, in bytes.
        known: addresses of which something certain is known.
        before: the result of the last call.
        pause: called every 32 blocks.
    """
    by_stream: dict[tuple[int, int, int], list[int]] = {}
    count = 0
    for segment in segments:
        for block in segment["blocks"]:
            count += 1
            if pause is not None and not count % _BLOCKS_PER_PAUSE:
                pause()
            requested = block.get("requested_size")
            if requested is None or requested not in sizes or block["state"] != "active_allocated":
                continue
            address = block.get("address")
            if address is not None and address not in known:
                key = segment["device"], segment.get("stream", 0), requested
                by_stream.setdefault(key, []).append(address)
    workspaces: set[int] = set()
    for addresses in by_stream.values():
        still = [address for address in addresses if address in before]
        if len(addresses) <= _WORKSPACES_PER_STREAM:
            still = addresses
        workspaces.update(still)
    return workspaces


class Classifier:
    """Classes of the blocks of one snapshot.

    Frames are known by identity and kept alive for that: one classifier per snapshot.

    Attributes:
        by_address: address of a storage -> (bytes asked for, class); of storages that were alive
            before and after the snapshot, since an address is soon given out again.
        workspaces: addresses of what is probably a workspace.
        by_stack_alone: only the stacks decide, which can be asked again with the snapshot.
    """

    by_stack_alone = False

    def __init__(
        self,
        by_address: Mapping[int, tuple[int, TensorClass]],
        workspaces: Collection[int] = (),
    ) -> None:
        self.by_address = by_address
        self.workspaces = workspaces
        self._of_frame: dict[int, tuple[Any, TensorClass | None, bool]] = {}

    def of_block(self, block: RawBlock) -> TensorClass | None:
        """What is known of an allocated block without looking at its stack."""
        address = block.get("address")
        if address is None:
            return None
        tensor_class = self.by_address.get(address)
        if tensor_class is not None and block.get("requested_size") in (tensor_class[0], None):
            return tensor_class[1]
        return TensorClass.WORKSPACE if address in self.workspaces else None

    def of_stack(self, frames: Sequence[RawFrame]) -> TensorClass:
        """By the innermost frame that says something; `unattributed` where none does."""
        known = self._of_frame
        compiled = False
        for raw in frames:
            entry = known.get(id(raw))
            if entry is None:
                name, filename = str(raw.get("name", "")), str(raw.get("filename", ""))
                tensor_class = class_of_frame(name, filename)
                calls = bool(_COMPILED_CALL.search(filename))
                entry = known[id(raw)] = (raw, tensor_class, calls)
            if entry[1] is not None:
                return entry[1]
            compiled = compiled or entry[2]
        return TensorClass.ACTIVATION if compiled else TensorClass.UNATTRIBUTED


class RecordedClassifier(Classifier):
    """Of a recording: its blocks carry their class, but for those of older versions.

    Of those, and of snapshot files, stacks alone tell.

    Args:
        by_stack_alone: see `Classifier`.
    """

    def __init__(self, *, by_stack_alone: bool = True) -> None:
        super().__init__({})
        self.by_stack_alone = by_stack_alone

    def of_block(self, block: RawBlock) -> TensorClass | None:
        """As recorded."""
        tensor_class = block.get("tensor_class")
        return TensorClass(tensor_class) if tensor_class is not None else None
