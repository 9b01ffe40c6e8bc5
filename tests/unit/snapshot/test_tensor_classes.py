"""Tensor classes of blocks: by address, by stack, and what adds up."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import raw_snapshots as raw_form

from gpumem_otel.base.profile import Frame, HeapProfile, Identity, ProfileKind, Sample, StepStats
from gpumem_otel.profiles.heap import apply_budget, live_profile
from gpumem_otel.profiles.pprof import encode
from gpumem_otel.profiles.pprof_reader import decode
from gpumem_otel.recording.reader import load_recording
from gpumem_otel.recording.writer import RecordingWriter
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import (
    BACKWARD,
    NO_PYTHON_FRAME,
    file_function_namer,
    identity_namer,
)
from gpumem_otel.snapshot.tensor_classes import (
    Classifier,
    RecordedClassifier,
    TensorClass,
    class_of_frame,
    classes_of,
    other_stack,
    workspaces_in,
)

TORCH = "/usr/lib/python3/site-packages/torch"
CALL = ("_call_impl", f"{TORCH}/nn/modules/module.py")
USER = ("train", "/job/train.py")


@pytest.mark.parametrize(
    ("frames", "found"),
    [
        ([("linear", "/job/model.py"), CALL, USER], "activation"),
        ([("cross_entropy", f"{TORCH}/nn/functional.py"), USER], "activation"),
        ([("convert", f"{TORCH}/nn/modules/module.py"), USER], "parameter"),
        ([("__init__", f"{TORCH}/nn/modules/linear.py"), USER], "parameter"),
        ([("__init__", "/job/torch_models/linear.py"), USER], "unattributed"),
        ([("_init_group", f"{TORCH}/optim/adamw.py"), USER], "optimizer_state"),
        ([("_single_tensor_adam", f"{TORCH}/optim/adam.py"), CALL], "optimizer_state"),
        ([("__init__", f"{TORCH}/nn/parallel/distributed.py"), USER], "communication"),
        # inside DDP's forward the module's own comes first
        ([CALL, ("forward", f"{TORCH}/nn/parallel/distributed.py"), USER], "activation"),
        ([("foreach_all_gather", f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py"),
          CALL], "unsharded_parameter"),
        ([("foreach_reduce", f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py")],
         "communication"),
        # a forward that runs again inside backward is a forward
        ([CALL, ("backward", f"{TORCH}/utils/checkpoint.py"),
          ("apply", f"{TORCH}/autograd/function.py")], "activation"),
        ([("backward", "/job/my_op.py"), ("apply", f"{TORCH}/autograd/function.py")], "gradient"),
        ([("call", "/tmp/torchinductor_me/ab/cab.py"),
          ("_backward_impl", f"{TORCH}/_functorch/_aot_autograd/runtime_wrappers.py")],
         "gradient"),
        ([("call", "/tmp/torchinductor_me/ab/cab.py"), ("_fn", f"{TORCH}/_dynamo/eval_frame.py"),
          ("backward", f"{TORCH}/_functorch/_aot_autograd/runtime_wrappers.py")], "gradient"),
        ([("call", "/tmp/torchinductor_me/ab/cab.py"), ("_fn", f"{TORCH}/_dynamo/eval_frame.py"),
          USER], "activation"),
        ([("call", "/tmp/torchinductor_me/ab/cab.py"),
          ("forward", f"{TORCH}/_functorch/_aot_autograd/runtime_wrappers.py")], "activation"),
        ([("torch::autograd::generated::AddmmBackward0::apply(x)", "??")], "gradient"),
        ([("pin", f"{TORCH}/utils/data/_utils/pin_memory.py"), USER], "input"),
        ([USER], "unattributed"),
        # names that are final already
        ([("torch.nn.modules.module.Module._call_impl", CALL[1])], "activation"),
        ([(BACKWARD, "")], "gradient"),
        ([(NO_PYTHON_FRAME, "")], "unattributed"),
    ],
)  # fmt: skip
def test_the_innermost_frame_that_says_something(frames, found):
    stack = [raw_form.frame(name, filename=file) for name, file in frames]
    assert Classifier({}).of_stack(stack) is TensorClass(found)


@given(st.text(), st.text())
def test_any_frame_is_looked_at_without_an_error(name, filename):
    assert class_of_frame(name, filename) in {None, *TensorClass}


def test_an_address_counts_where_as_many_bytes_were_asked_for():
    """A block that was given out again to somebody else has another size, nearly always."""
    classifier = Classifier({4096: (1000, TensorClass.PARAMETER)})
    block = {"address": 4096, "size": 1024, "requested_size": 1000, "state": "active_allocated"}
    assert classifier.of_block(block) is TensorClass.PARAMETER
    assert classifier.of_block({**block, "requested_size": 999}) is None
    assert classifier.of_block({**block, "address": 8192}) is None


def _reading(classifier, blocks):
    raw = raw_form.snapshot([raw_form.segment(blocks, address=0)])
    return Reading(
        snapshot=from_torch(raw), time_ns=7, before=(), after=(), classifier=classifier,
        stackless=lambda device, address: BACKWARD,
    )  # fmt: skip


FORWARD = (raw_form.frame("forward", filename=CALL[1]), raw_form.frame(*CALL[:1], filename=CALL[1]))
PLAIN = (raw_form.frame("main", filename="/job/train.py"),)


def _blocks():
    return [
        raw_form.block(512, FORWARD, address=0),
        raw_form.block(512, FORWARD, address=512),
        raw_form.block(1024, (), address=1024),
        raw_form.block(2048, PLAIN, address=2048),
        raw_form.block(4096, (), address=4096),
    ]


BY_ADDRESS = {512: (512, TensorClass.INPUT), 4096: (4096, TensorClass.OPTIMIZER_STATE)}
CLASSES = {"activation": 512, "input": 512, "gradient": 1024, "unattributed": 2048,
           "optimizer_state": 4096}  # fmt: skip


def _told(sums):
    return {found.value: size for found, size in sums.items()}


@pytest.mark.parametrize("class_as", ["root", "label"])
def test_classes_of_a_profile_add_up_to_what_is_allocated(class_as):
    reading = _reading(Classifier(BY_ADDRESS), _blocks())
    profile = live_profile(
        reading.snapshot, 0, namer=file_function_namer, stackless=reading.stackless,
        classifier=reading.classifier, class_as=class_as,
    )  # fmt: skip
    assert _told(classes_of(profile, class_as)) == CLASSES
    assert profile.total_bytes == reading.snapshot.totals(0).allocated_bytes == 8192
    by_stack = {sample.frames[0].name: sample for sample in profile.samples}
    if class_as == "root":
        assert {s.frames[-1].name for s in profile.samples} == set(CLASSES)
        assert by_stack["[backward]"].frames[-1].name in {"gradient", "optimizer_state"}
    else:
        assert {s.labels for s in profile.samples} == {(("tensor_class", c),) for c in CLASSES}


def test_a_stack_stays_within_its_depth_with_the_class_on_top():
    deep = tuple(raw_form.frame(f"f{n}", line=n) for n in range(40))
    reading = _reading(Classifier({}), [raw_form.block(512, deep, address=0)])
    (sample,) = live_profile(
        reading.snapshot, 0, namer=identity_namer, classifier=reading.classifier, max_depth=10
    ).samples
    assert len(sample.frames) == 10
    assert sample.frames[-1].name == "unattributed"


def test_a_recording_keeps_the_classes():
    reading = _reading(Classifier(BY_ADDRESS), _blocks())
    file = io.BytesIO()
    writer = RecordingWriter(
        file, identity=Identity(service_name="s"), created_ns=1, facts={}, namer=identity_namer
    )
    writer.add(reading, StepStats())
    writer.close()
    (recorded,) = load_recording(file.getvalue()).readings
    again = recorded.reading()
    profile = live_profile(again.snapshot, 0, namer=identity_namer, classifier=again.classifier)
    assert _told(classes_of(profile)) == CLASSES


def test_a_recording_without_classes_is_told_by_its_stacks():
    reading = replace(_reading(None, _blocks()), classifier=None)
    file = io.BytesIO()
    writer = RecordingWriter(
        file, identity=Identity(service_name="s"), created_ns=1, facts={}, namer=identity_namer
    )
    writer.add(reading, StepStats())
    writer.close()
    assert b'"c"' not in file.getvalue()
    (recorded,) = load_recording(file.getvalue()).readings
    again = recorded.reading()
    assert again.classifier.by_stack_alone
    profile = live_profile(again.snapshot, 0, namer=identity_namer, classifier=RecordedClassifier())
    assert _told(classes_of(profile)) == {
        "activation": 1024, "gradient": 1024 + 4096, "unattributed": 2048
    }  # fmt: skip


def test_workspaces_are_one_or_two_of_their_size_and_never_a_dozen():
    def at(address, *, frames=FORWARD, stream=0):
        block = raw_form.block(512, frames, address=address)
        return raw_form.segment([block], address=address, stream=stream)

    alone = [at(0), at(4096, frames=()), at(8192, stream=7)]
    found = workspaces_in(alone, {512}, ())
    assert found == {0, 4096, 8192}
    more = [*alone, at(12288)]
    assert workspaces_in(more, {512}, ()) == {8192}
    assert workspaces_in(more, {512}, (), found) == found
    assert workspaces_in(more[1:], {512}, (), found) == {4096, 8192, 12288}
    assert workspaces_in(alone, {512}, {0}) == {4096, 8192}
    assert workspaces_in(alone, {1024}, ()) == set()


def _samples(count):
    classes = ("parameter", "activation", "gradient")
    return tuple(Sample((Frame(f"f{n}"), Frame(classes[n % 3])), 1, 1000 - n) for n in range(count))


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_budget_leaves_the_sum_of_each_class(count, limit):
    profile = HeapProfile(ProfileKind.LIVE, 0, _samples(count))
    cut = apply_budget(profile, max_samples=limit)
    assert len(cut.samples) <= limit
    assert cut.total_bytes == profile.total_bytes
    assert cut.total_objects == profile.total_objects
    if limit >= 3:
        assert classes_of(cut) == classes_of(profile)


def test_an_encoding_that_must_shrink_keeps_the_sum_of_each_class():
    profile = HeapProfile(ProfileKind.LIVE, 0, _samples(500))
    data = encode([profile], max_bytes=3000)
    assert len(data) <= 3000
    read = decode(data)
    at = [name for name, _ in read.sample_types].index("inuse_space")
    sums = dict.fromkeys(("parameter", "activation", "gradient"), 0)
    for sample in read.samples[:-1]:  # the last counts the snapshots
        sums[sample.frames[-1].name] += sample.values[at]
    assert sums == _told(classes_of(profile))
    others = [s for s in read.samples if s.frames == other_stack(s.frames)]
    assert len(others) == 3
