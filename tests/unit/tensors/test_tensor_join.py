"""Tensors joined with blocks: the parts add up whatever is shared, imported, freed or not found."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from support.raw_snapshots import block, frame, segment, snapshot

from gpumem_otel.base.profile import DeviceStats, Frame
from gpumem_otel.snapshot.reading import Reading
from gpumem_otel.snapshot.snapshot import from_torch
from gpumem_otel.snapshot.stacks import identity_namer
from gpumem_otel.snapshot.tensor_classes import Classifier, TensorClass
from gpumem_otel.tensors.join import NOT_INSTALLED, join
from gpumem_otel.tensors.report import FoundTensor, columns, place_of, report_text, to_json

MIB = 1 << 20
MAIN = frame("train", "/job/train.py", 7)
CALL = frame("_call_impl", "/site/torch/nn/modules/module.py", 1)
LINEAR = frame("forward", "/site/torch/nn/modules/linear.py", 3)


def tensor(name, address, size, *, shape=(2, 2), storage=None, device="cuda:0", **more):
    return FoundTensor(
        name=name, device=device, shape=shape, dtype="float32", kind="Tensor",
        elements=size // 4, tensor_bytes=size, storage_bytes=size,
        storage=address if storage is None else storage, address=address, **more,
    )  # fmt: skip


def stats(allocated, *, allocations=1, device=0):
    return DeviceStats(
        device=device, allocated_bytes=allocated, requested_bytes=0, active_bytes=0,
        reserved_bytes=0, allocations=allocations,
    )  # fmt: skip


def reading(segments, *, allocated=None, classifier=None, moved=False, stackless=None):
    snap = from_torch(snapshot(segments))
    held = snap.totals(0).allocated_bytes if allocated is None else allocated
    return Reading(
        snapshot=snap, time_ns=0, before=(stats(held, allocations=0 if moved else 1),),
        after=(stats(held),), classifier=classifier, stackless=stackless,
    )  # fmt: skip


def joined(tensors, state, *, recorded=True, **more):
    return join(tensors, state, namer=identity_namer, recorded=recorded, **more)


def device_of(tensors, state, **more):
    return joined(tensors, state, **more).devices[0]


def named(parts):
    return {part.name: part.size_bytes for part in parts}


def test_a_row_has_its_blocks_size_stack_and_class():
    state = reading(
        [segment([block(2048, (LINEAR, CALL, MAIN), requested=1600)], address=4096)],
        classifier=Classifier({}),
    )
    device = device_of([tensor("x", 4096, 1600)], state)
    (row,) = device.rows
    assert (row.used_bytes, row.block_bytes, row.requested_bytes) == (1600, 2048, 1600)
    assert row.tensor_class is TensorClass.ACTIVATION
    assert row.stack[-1] == Frame("train", "/job/train.py", 7)
    assert named(device.parts) == {
        "tensors above, as asked for": 1600,
        "rounding of their blocks": 448,
    }
    assert device.allocated_bytes == 2048
    assert named(device.classes) == {"activation": 2048}


def test_the_class_of_the_walk_goes_before_that_of_the_stack():
    state = reading(
        [segment([block(512, (LINEAR, CALL))], address=4096)], classifier=Classifier({})
    )
    (row,) = device_of([tensor("w", 4096, 512, tensor_class=TensorClass.PARAMETER)], state).rows
    assert row.tensor_class is TensorClass.PARAMETER


def test_a_shared_storage_counts_once_and_names_its_first_row():
    state = reading([segment([block(512)], address=4096)])
    device = device_of([tensor("w", 4096, 400), tensor("v", 4096, 400)], state)
    first, second = device.rows
    assert (first.used_bytes, first.shares, first.block_bytes) == (400, "", 512)
    assert (second.used_bytes, second.shares, second.block_bytes) == (0, "w", None)
    assert second.requested_bytes == 512
    assert device.used_bytes == 400
    assert sum(named(device.parts).values()) == device.allocated_bytes == 512


def test_what_only_autograd_holds_is_a_part_of_its_own():
    blocks = [block(4 * MIB), block(2 * MIB, (LINEAR, CALL))]
    state = reading([segment(blocks, address=4096)], classifier=Classifier({}))
    tensors = [
        tensor("weight", 4096, 4 * MIB),
        tensor("AddmmBackward0.mat1", 4096 + 4 * MIB, 2 * MIB, shape=(512, 1024), saved=True),
        tensor("AddmmBackward0.mat2", 4096, 4 * MIB, saved=True),
    ]
    device = device_of(tensors, state)
    assert [row.name for row in device.rows] == ["weight"]
    assert [row.name for row in device.saved] == ["AddmmBackward0.mat1"]
    part = next(part for part in device.parts if part.name.startswith("saved"))
    assert part.size_bytes == 2 * MIB
    assert part.examples == ("AddmmBackward0.mat1 (512, 1024)",)
    assert device.used_bytes == 4 * MIB


def test_blocks_without_a_tensor_are_listed_by_class_and_place():
    blocks = [block(512, (LINEAR, CALL, MAIN)), block(1024), block(4096, (MAIN,))]
    start = 8192
    classifier = Classifier({}, workspaces={start + 512 + 1024})
    device = device_of([], reading([segment(blocks, address=start)], classifier=classifier))
    assert named(device.parts) == {
        "workspace of cuBLAS (probable)": 4096,
        "in no Python object (C++, another library, or freed meanwhile)": 1024,
        "saved by autograd or held by C++, in no Python object": 512,
    }
    activations = next(part for part in device.parts if part.name.startswith("saved by"))
    assert activations.examples == ("train (train.py:7)",)


def test_memory_that_torch_did_not_allocate_is_subtracted():
    state = reading([segment([block(512)], address=4096)])
    device = device_of([tensor("x", 4096, 512), tensor("imported", 1 << 40, 300)], state)
    assert device.rows[1].block_bytes is None
    assert device.used_bytes == 812
    assert sum(part.size_bytes for part in device.parts) == 512
    assert [part.size_bytes for part in device.parts if part.size_bytes < 0] == [-300]


def test_a_storage_inside_of_a_block_is_found_there():
    state = reading([segment([block(4096, (MAIN,))], address=8192)])
    device = device_of([tensor("a", 8192 + 512, 100), tensor("b", 8192 + 1024, 50)], state)
    assert [row.block_bytes for row in device.rows] == [4096, 0]
    assert device.rows[1].stack[0].name == "train"
    assert sum(part.size_bytes for part in device.parts) == 4096


def test_freed_and_waiting_blocks_hold_no_tensor():
    blocks = [block(512, state="inactive"), block(512, state="active_pending_free")]
    device = device_of([tensor("x", 4096, 512)], reading([segment(blocks, address=4096)]))
    assert device.rows[0].block_bytes is None
    assert named(device.cached) == {"free segments": 0, "waiting for another stream": 512} or named(
        device.cached
    ) == {"split remainders": 512, "waiting for another stream": 512}
    assert device.reserved_bytes == 1024


def test_what_changed_meanwhile_is_named_and_noted():
    state = reading([segment([block(512)], address=4096)], allocated=2048, moved=True)
    data = joined([tensor("x", 4096, 512)], state)
    assert named(data.devices[0].parts)["allocated or freed while this was read"] == 1536
    assert any("another thread" in note for note in data.notes)


def test_without_recording_the_stack_says_so():
    state = reading([segment([block(512)], address=4096)])
    (row,) = device_of([tensor("x", 4096, 512)], state, recorded=False).rows
    assert [frame.name for frame in row.stack] == [NOT_INSTALLED]


def test_stacks_that_the_job_records_itself_are_shown_and_the_others_are_older():
    blocks = [block(512, (MAIN,)), block(512)]
    state = reading([segment(blocks, address=4096)])
    first, second = device_of(
        [tensor("x", 4096, 512), tensor("y", 4608, 512)], state, recorded=False
    ).rows
    assert first.stack[0].name == "train"
    assert second.stack[0].name == "[allocated before install]"


def test_devices_are_in_order_filtered_and_there_without_tensors():
    tensors = [tensor("c", 0, 0, device="cpu", storage=-1), tensor("x", 4096, 512)]
    state = reading([segment([block(512)], address=4096)])
    assert [d.device for d in joined(tensors, state).devices] == ["cuda:0", "cpu"]
    assert [d.device for d in joined(tensors, state, devices=["cpu"]).devices] == ["cpu"]
    assert [d.device for d in joined([], state).devices] == ["cuda:0"]
    assert joined([], None).devices == ()


def test_text_has_a_line_for_everything():
    state = reading(
        [segment([block(2048, (LINEAR, CALL, MAIN), requested=1600), block(512)], address=4096)]
    )
    tensors = [
        tensor("w", 4096, 1600, shape=(400,), aliases=("tied",)),
        tensor("v", 4096, 1600, shape=(1, 2)),
    ]
    data = joined(tensors, state, notes=["a note"])
    assert report_text(data) == (
        "Element type    Size  Used MEM    Block  Class         dtype    Allocated by\n"
        + "-" * 79
        + "\nStorage on cuda:0\n"
        "w             (400,)   1.6 KiB  2.0 KiB  unattributed  float32  train (train.py:7)\n"
        "v(->w)        (1, 2)       0 B        -  unattributed  float32  train (train.py:7)\n"
        + "-"
        * 79
        + "\nTotal Tensors: 800 elements of 2 tensors   Used Memory: 1.6 KiB (1600 bytes)\n"
        "The allocated memory on cuda:0: 2.5 KiB (2560 bytes), which is\n"
        "     1.6 KiB  tensors above, as asked for (1)\n"
        "       448 B  rounding of their blocks\n"
        "       512 B  in no Python object (C++, another library, or freed meanwhile) (1): "
        "[allocated before install]\n"
        "Reserved on cuda:0: 2.5 KiB (2560 bytes); cached: nothing\n"
        "By class: unattributed 2.5 KiB\n" + "-" * 79 + "\nnote: a note\n"
    )
    verbose = report_text(data, verbose=True)
    assert "tied(->w)" in verbose
    assert "    forward (linear.py:3)\n" in verbose
    assert report_text(joined([], None)).splitlines()[2] == "No tensors"


def test_names_cannot_control_a_terminal():
    data = joined([tensor("a\x1b[31mb", 0, 0, device="cpu", storage=-1)], None)
    assert "\x1b" not in report_text(data)


def test_json_and_columns_hold_the_same_rows():
    state = reading([segment([block(512, (MAIN,))], address=4096)])
    tensors = [tensor("x", 4096, 500), tensor("s", 1, 4, saved=True, device="cpu")]
    data = joined(tensors, state)
    plain = json.loads(json.dumps(to_json(data)))
    row = plain["devices"][0]["tensors"][0]
    assert row["stack"] == [["train", "/job/train.py", 7]]
    assert (row["shape"], row["tensor_class"]) == ([2, 2], "unattributed")
    assert plain["devices"][0]["allocated_bytes"] == 512
    table = columns(data)
    assert table["name"] == ["x", "s"]
    assert table["saved"] == [False, True]
    assert {len(column) for column in table.values()} == {2}


def test_place_is_the_innermost_frame_that_is_not_torchs():
    torch_frame = Frame("torch.nn.modules.linear.Linear.forward", "/x/torch/linear.py", 1)
    native = Frame("at::empty", "??", 0)
    assert place_of((native, torch_frame, Frame("job.f", "/a/b.py", 3))) == "job.f (b.py:3)"
    assert place_of((torch_frame,)) == "torch.nn.modules.linear.Linear.forward (linear.py:1)"
    assert place_of((Frame("[backward]"),)) == "[backward]"
    assert place_of(()) == ""


@given(
    blocks=st.lists(
        st.tuples(
            st.integers(1, 9).map(lambda n: n * 512),
            st.sampled_from(["active_allocated", "inactive", "active_pending_free"]),
            st.integers(0, 3),
        ),
        max_size=12,
    ),
    extra=st.lists(st.integers(1, 5000), max_size=3),
    moved=st.integers(-4096, 4096),
)
def test_the_parts_always_add_up(blocks, extra, moved):
    """However tensors lie on blocks: parts = allocated, classes = what the snapshot holds."""
    start = 1 << 20
    raw, tensors, address = [], [], start
    for number, (size, state, views) in enumerate(blocks):
        raw.append(block(size, (MAIN,) if number % 2 else (), state=state, requested=size - 12))
        tensors += [
            tensor(f"t{number}.{view}", address + 100 * (view == 2), size - 12 - 400 * (view == 2),
                   saved=view == 1 and number % 3 == 0)
            for view in range(views)
        ]  # fmt: skip
        address += size
    tensors += [tensor(f"e{n}", (1 << 50) + n, size) for n, size in enumerate(extra)]
    held = sum(size for size, state, _ in blocks if state == "active_allocated")
    allocated = max(held + moved, 1)
    state = reading([segment(raw, address=start)], allocated=allocated, classifier=Classifier({}))
    device = device_of(tensors, state)
    assert sum(part.size_bytes for part in device.parts) == allocated
    assert sum(part.size_bytes for part in device.classes) == held
    counted = {(t.storage) for t in tensors if not t.saved}
    first = {t.storage: t.storage_bytes for t in reversed(tensors) if not t.saved}
    assert device.used_bytes == sum(first[storage] for storage in counted)
