"""What of a recorded stack is shown, and under which name."""

from __future__ import annotations

import pickle
import zlib

import pytest
from support.raw_snapshots import frame

from gpumem_otel.base.profile import Frame
from gpumem_otel.profiles.of_file import load_snapshot
from gpumem_otel.snapshot import stacks as module
from gpumem_otel.snapshot.stacks import (
    BACKWARD,
    INTERNAL_ONLY,
    STACKLESS_ROOTS,
    UNNAMED,
    StackBuilder,
    build_stack,
    file_function_namer,
    identity_namer,
    is_python,
    why_dropped,
    with_basename_paths,
)


def names(stack):
    return [f.name for f in stack]


@pytest.mark.parametrize(
    ("name", "filename"),
    [
        ("torch::unwind::unwind()", "??"),
        ("torch::CapturedTraceback::gather(bool, bool, bool)", "??"),
        ("torch::cuda::(anonymous namespace)::gather_with_cpp()", "memory_snapshot.cpp"),
        ("c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(int)", ""),
        ("at::detail::empty_cuda(c10::ArrayRef<long>, c10::TensorOptions const&)", "??"),
        ("at::(anonymous namespace)::create_out(c10::ArrayRef<long>)", "RegisterCUDA_0.cpp"),
        ("c10::impl::wrap_kernel_functor_unboxed_<at::Tensor>::call()", "RegisterCUDA_0.cpp"),
        ("torch::autograd::Engine::thread_main(int)", "??"),
        ("torch::autograd::THPVariable_add(_object*, _object*, _object*)", "python_methods.cpp"),
        ("void pybind11::cpp_function::initialize<int>(int)", "??"),
        ("_PyEval_EvalFrameDefault", "??"),
        ("PyObject_Call", "/build/Objects/call.c"),
        ("_Py_Dealloc", "??"),
        ("PyInit__collections", "??"),
        ("slot_tp_call", "/workspace/Objects/typeobject.c"),
        ("do_call_core", "C:\\build\\Python\\ceval.c"),
        ("_PyEval_EvalFrame", "/workspace/internal/pycore_ceval.h"),
        ("Py_RunMain", "??"),
        ("__libc_start_main", "??"),
        ("__libc_start_call_main", "./csu/../sysdeps/nptl/libc_start_call_main.h"),
        ("_start", "??"),
        ("__clone", "??"),
        ("", "??"),
        ("??", ""),
        ("_run_module_as_main", "<frozen runpy>"),
    ],
)
def test_frames_that_say_nothing_are_dropped_for_a_reason(name, filename):
    assert why_dropped(name, filename) != ""
    assert names(build_stack([frame(name, filename, 0), frame("f")], identity_namer)) == ["f"]


@pytest.mark.parametrize(
    ("name", "filename"),
    [
        ("at::_ops::mm::call(at::Tensor const&, at::Tensor const&)", "??"),
        ("torch::autograd::generated::AddmmBackward0::apply(int)", "??"),
        ("PyFoo::bar(int)", "??"),
        ("ray::core::CoreWorker::ExecuteTask()", "??"),
        ("main (argc, argv)", ""),
        ("forward", "/workspace/train.py"),
        ("_call_impl", "/venv/torch/nn/modules/module.py"),
        ("_run_code", "/usr/lib/python3/runpy.py"),
        ("_start", "/workspace/train.py"),
        ("PyObject_Call", "/workspace/shim.py"),
        ("<module>", "/tmp/ipykernel_1/2415349784.py"),
        ("<lambda>", "<string>"),
        ("call", "/tmp/torchinductor_u/ab/cab.py"),
        ("f", "C:\\code\\x.py"),
    ],
)
def test_frames_about_the_job_stay(name, filename):
    assert why_dropped(name, filename) == ""


def test_what_is_python():
    assert is_python("f", "train.py")
    assert is_python("f", "<eval_with_key>.3")
    assert not is_python("f", "")
    assert not is_python("f", "??")
    assert not is_python("f", "x/RegisterCUDA_0.cpp")
    assert not is_python("f", "libtorch.so.2")
    assert not is_python("at::empty()", "x.py")


def test_every_dropped_prefix_has_a_reason_and_is_listed_once():
    prefixes = [prefix for prefix, _ in module.DROPPED_PREFIXES]
    assert len(set(prefixes)) == len(prefixes)
    assert all(prefix and reason for prefix, reason in module.DROPPED_PREFIXES)


def test_python_frames_get_file_and_function():
    stack = build_stack(
        [frame("forward", "/a/b/model.py", 7), frame("<module>", "C:\\w\\train.py", 9)],
        file_function_namer,
    )
    assert stack == (
        Frame("model.py:forward", "/a/b/model.py", 7),
        Frame("train.py:<module>", "C:\\w\\train.py", 9),
    )
    assert file_function_namer("f", "", 1) == "f"
    assert identity_namer("f", "a.py", 1) == "f"


def test_cpp_symbols_keep_their_name_and_never_meet_the_namer():
    seen = []

    def namer(name, filename, line):
        seen.append((name, filename, line))
        return f"<{name}>"

    stack = build_stack([frame("at::_ops::mm::call()", "??", 0), frame("f", "a.py", 3)], namer)
    assert names(stack) == ["at::_ops::mm::call()", "<f>"]
    assert seen == [("f", "a.py", 3)]


def test_each_distinct_frame_is_named_once():
    calls = []

    def namer(name, filename, line):
        calls.append(name)
        return name

    leaf, root = frame("leaf"), frame("root")
    builder = StackBuilder(namer)
    for _ in range(3):
        assert names(builder.build([leaf, dict(root)])) == ["leaf", "root"]
    assert calls == ["leaf", "root"]
    assert builder.build([leaf])[0] is builder.build([dict(leaf)])[0]


def test_raw_frames_are_kept_alive_so_that_identity_stays_theirs():
    builder = StackBuilder(identity_namer)
    for number in range(100):
        assert names(builder.build([frame(f"f{number}")])) == [f"f{number}"]


def test_backward_without_python_is_named():
    node = frame("torch::autograd::generated::MmBackward0::apply(x)", "??", 0)
    engine = frame("torch::autograd::Engine::thread_main(x)", "??", 0)
    clone = frame("__clone", "??", 0)
    assert names(build_stack([node, engine, clone], identity_namer)) == [node["name"], BACKWARD]
    python = frame("apply", "/venv/torch/autograd/function.py")
    assert names(build_stack([python, node, engine], identity_namer)) == ["apply", node["name"]]


def test_a_stack_of_which_nothing_stays_says_so_and_is_not_stackless():
    clone = frame("__clone", "??", 0)
    engine = frame("torch::autograd::Engine::thread_main(x)", "??", 0)
    assert names(build_stack([clone], identity_namer)) == [INTERNAL_ONLY]
    assert names(build_stack([engine], identity_namer)) == [INTERNAL_ONLY, BACKWARD]
    assert INTERNAL_ONLY not in STACKLESS_ROOTS
    assert build_stack([], identity_namer) == ()


def test_roots():
    builder = StackBuilder(identity_namer)
    assert builder.root(BACKWARD) == (Frame("[backward]"),)
    assert builder.root(BACKWARD) is builder.root(BACKWARD)
    assert builder.root("") == (Frame(UNNAMED),)


@pytest.mark.parametrize(
    ("line", "shown"),
    [(5, 5), (2**63 - 1, 2**63 - 1), (2**63, 0), (2**64 - 1, 0), (-1, 0), (None, 0), ("7", 0)],
)
def test_lines_fit_the_wire(line, shown):
    assert build_stack([frame("f", "a.py", line)], identity_namer) == (Frame("f", "a.py", shown),)


def test_strange_names():
    raw = [frame("", "a.py"), frame("a;b"), frame("x\ny"), frame("\ud800q", "\udfff.py"), {}]
    stack = build_stack(raw, identity_namer)
    assert names(stack) == [UNNAMED, "a;b", "x\ny", "?q"]
    assert stack[3].filename == "?.py"
    assert names(build_stack(raw[:1], file_function_namer)) == ["a.py:[unnamed]"]
    assert names(build_stack([frame("f")], lambda *_: "")) == [UNNAMED]
    for item in stack:
        item.name.encode()


def test_endless_names_are_cut_and_stay_distinct():
    long = "at::" + "x" * 10_000
    first, second = build_stack([frame(long + "a", ""), frame(long + "b", "")], identity_namer)
    assert len(first.name) == 4096
    assert f"[...{zlib.crc32((long + 'a').encode()):08x}...]" in first.name
    assert first != second


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 10])
def test_the_middle_of_a_deep_stack_is_cut(depth):
    raw = [frame(str(number)) for number in range(10)]
    stack = names(build_stack(raw, identity_namer, depth))
    assert len(stack) == depth
    if depth == 10:
        assert stack == [str(number) for number in range(10)]
        return
    cut = 10 - (depth - 1)
    at_leaf = (depth - 1) - (depth - 1) // 2
    assert stack[at_leaf] == f"[{cut} frames cut]"
    assert stack[:at_leaf] == [str(number) for number in range(at_leaf)]
    assert stack[at_leaf + 1 :] == [str(n) for n in range(10 - (depth - 1) // 2, 10)]


def test_depth_is_at_least_one():
    assert names(build_stack([frame("a"), frame("b")], identity_namer, 0)) == ["[2 frames cut]"]


def test_redaction_keeps_the_last_part_of_paths_and_the_names():
    seen = []

    def namer(name, filename, line):
        seen.append(filename)
        return name

    raw = [frame("f", "/home/me/secret/a.py"), frame("g", "C:\\secret\\b.py")]
    hidden = with_basename_paths(namer)
    assert build_stack(raw, hidden) == (Frame("f", "a.py", 1), Frame("g", "b.py", 1))
    assert seen == ["/home/me/secret/a.py", "C:\\secret\\b.py"]
    assert with_basename_paths(hidden) is hidden
    resolved = StackBuilder(hidden, resolved=True)
    assert resolved.build(raw) == (Frame("f", "a.py", 1), Frame("g", "b.py", 1))


def test_resolved_names_are_left_alone():
    raw = [frame("_start", "??", 0), frame("torch.nn.Linear.forward", "linear.py", 3)]
    builder = StackBuilder(file_function_namer, resolved=True)
    assert builder.build(raw) == (Frame("_start", "??"), Frame(raw[1]["name"], "linear.py", 3))


def test_frames_may_be_objects():
    assert build_stack([Frame("f", "d/a.py", 4)], file_function_namer) == (
        Frame("a.py:f", "d/a.py", 4),
    )


def test_real_stacks_keep_their_python_frames_and_no_internal_one(recordings):
    """Of every real stack exactly the frames without a reason stay, in order."""
    for path in recordings:
        builder = StackBuilder(identity_namer, 10_000)
        snapshot = load_snapshot(path)
        for device in snapshot.devices():
            for group in snapshot.live_groups(device):
                if not group.frames:
                    continue
                kept = [
                    raw for raw in group.frames if not why_dropped(raw["name"], raw["filename"])
                ]
                stack = builder.build(group.frames)
                shown = [f.name for f in stack if not f.name.startswith("[")]
                assert shown == [raw["name"] or UNNAMED for raw in kept]
                python = [f for f in group.frames if f["filename"].endswith(".py")]
                assert len([f for f in stack if f.filename.endswith(".py")]) == len(python)
                assert stack != ()
                pickle.dumps(stack)


def test_real_backward_stacks_name_their_node(recordings):
    """C++ stacks of the autograd thread: `[backward]` is the root, the node right below it."""
    path = next((p for p in recordings if p.name.startswith("h200-torch2.11-train-cpp")), None)
    if path is None:
        pytest.skip("the recording with C++ stacks is not in the folder")
    snapshot = load_snapshot(path)
    builder = StackBuilder(file_function_namer)
    stacks = {builder.build(g.frames) for g in snapshot.live_groups(0) if g.frames}
    roots = {stack[-1].name for stack in stacks}
    assert BACKWARD in roots
    for stack in stacks:
        if stack[-1].name == BACKWARD:
            assert stack[-2].name.startswith(("torch::autograd::", "void torch::autograd::"))
