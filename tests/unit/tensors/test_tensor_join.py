"""Tensors joined with blocks: closed books whatever is shared, unseen, imported or freed."""

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
    held = snap.books(0).allocated_bytes if allocated is None else allocated
    return Reading(
        snapshot=snap, time_ns=0, before=(stats(held, allocations=0 if moved else 1),),
        after=(stats(held),), classifier=classifier, stackless=stackless,
    )  # fmt: skip


def joined(found, taken, *, recorded=True, **more):
    return join(found, taken, namer=identity_namer, recorded=recorded, **more)


def device_of(found, taken, **more):
    return joined(found, taken, **more).devices[0]


def named(parts):
    return {part.name: part.size_bytes for part in parts}


def test_a_row_has_its_blocks_size_stack_and_class():
    taken = reading(
        [segment([block(2048, (LINEAR, CALL, MAIN), requested=1600)], address=4096)],
        classifier=Classifier({}),
    )
    one = device_of([tensor("x", 4096, 1600)], taken)
    (row,) = one.rows
    assert (row.used_bytes, row.block_bytes, row.requested_bytes) == (1600, 2048, 1600)
    assert row.tensor_class is TensorClass.ACTIVATION
    assert row.stack[-1] == Frame("train", "/job/train.py", 7)
    assert named(one.parts) == {
        "tensors above, as asked for": 1600,
        "rounding of their blocks": 448,
    }
    assert one.allocated_bytes == 2048
    assert named(one.classes) == {"activation": 2048}


def test_what_the_walk_knows_goes_before_what_a_stack_says():
    taken = reading(
        [segment([block(512, (LINEAR, CALL))], address=4096)], classifier=Classifier({})
    )
    (row,) = device_of([tensor("w", 4096, 512, tensor_class=TensorClass.PARAMETER)], taken).rows
    assert row.tensor_class is TensorClass.PARAMETER


def test_a_shared_storage_counts_once_and_says_with_whom():
    taken = reading([segment([block(512)], address=4096)])
    one = device_of([tensor("w", 4096, 400), tensor("v", 4096, 400)], taken)
    first, second = one.rows
    assert (first.used_bytes, first.shares, first.block_bytes) == (400, "", 512)
    assert (second.used_bytes, second.shares, second.block_bytes) == (0, "w", None)
    assert second.requested_bytes == 512
    assert one.used_bytes == 400
    assert sum(named(one.parts).values()) == one.allocated_bytes == 512


def test_what_autograd_alone_holds_is_a_part_of_its_own_by_name():
    blocks = [block(4 * MIB), block(2 * MIB, (LINEAR, CALL))]
    taken = reading([segment(blocks, address=4096)], classifier=Classifier({}))
    found = [
        tensor("weight", 4096, 4 * MIB),
        tensor("AddmmBackward0.mat1", 4096 + 4 * MIB, 2 * MIB, shape=(512, 1024), saved=True),
        tensor("AddmmBackward0.mat2", 4096, 4 * MIB, saved=True),
    ]
    one = device_of(found, taken)
    assert [row.name for row in one.rows] == ["weight"]
    assert [row.name for row in one.saved] == ["AddmmBackward0.mat1"]
    part = next(part for part in one.parts if part.name.startswith("saved"))
    assert part.size_bytes == 2 * MIB
    assert part.examples == ("AddmmBackward0.mat1 (512, 1024)",)
    assert one.used_bytes == 4 * MIB


def test_blocks_that_no_tensor_has_are_told_by_class_and_place():
    blocks = [block(512, (LINEAR, CALL, MAIN)), block(1024), block(4096, (MAIN,))]
    start = 8192
    classifier = Classifier({}, workspaces={start + 512 + 1024})
    one = device_of([], reading([segment(blocks, address=start)], classifier=classifier))
    assert named(one.parts) == {
        "workspace of cuBLAS (probable)": 4096,
        "in no Python object (C++, another library, or freed meanwhile)": 1024,
        "saved by autograd or held by C++, in no Python object": 512,
    }
    activations = next(part for part in one.parts if part.name.startswith("saved by"))
    assert activations.examples == ("train (train.py:7)",)


def test_memory_that_torch_did_not_allocate_is_taken_off_again():
    taken = reading([segment([block(512)], address=4096)])
    one = device_of([tensor("x", 4096, 512), tensor("imported", 1 << 40, 300)], taken)
    assert one.rows[1].block_bytes is None
    assert one.used_bytes == 812
    assert sum(part.size_bytes for part in one.parts) == 512
    assert [part.size_bytes for part in one.parts if part.size_bytes < 0] == [-300]


def test_a_storage_inside_of_a_block_is_found_there():
    taken = reading([segment([block(4096, (MAIN,))], address=8192)])
    one = device_of([tensor("a", 8192 + 512, 100), tensor("b", 8192 + 1024, 50)], taken)
    assert [row.block_bytes for row in one.rows] == [4096, 0]
    assert one.rows[1].stack[0].name == "train"
    assert sum(part.size_bytes for part in one.parts) == 4096


def test_freed_and_waiting_blocks_hold_no_tensor():
    blocks = [block(512, state="inactive"), block(512, state="active_pending_free")]
    one = device_of([tensor("x", 4096, 512)], reading([segment(blocks, address=4096)]))
    assert one.rows[0].block_bytes is None
    assert named(one.cached) == {"free segments": 0, "waiting for another stream": 512} or named(
        one.cached
    ) == {"split remainders": 512, "waiting for another stream": 512}
    assert one.reserved_bytes == 1024


def test_what_changed_meanwhile_is_named_and_noted():
    taken = reading([segment([block(512)], address=4096)], allocated=2048, moved=True)
    data = joined([tensor("x", 4096, 512)], taken)
    assert named(data.devices[0].parts)["allocated or freed while this was read"] == 1536
    assert any("another thread" in note for note in data.notes)


def test_without_recording_the_stack_says_so():
    taken = reading([segment([block(512)], address=4096)])
    (row,) = device_of([tensor("x", 4096, 512)], taken, recorded=False).rows
    assert [frame.name for frame in row.stack] == [NOT_INSTALLED]


def test_stacks_that_the_job_records_itself_are_shown_and_the_others_are_older():
    blocks = [block(512, (MAIN,)), block(512)]
    taken = reading([segment(blocks, address=4096)])
    first, second = device_of(
        [tensor("x", 4096, 512), tensor("y", 4608, 512)], taken, recorded=False
    ).rows
    assert first.stack[0].name == "train"
    assert second.stack[0].name == "[allocated before install]"


def test_devices_are_in_order_filtered_and_there_without_tensors():
    found = [tensor("c", 0, 0, device="cpu", storage=-1), tensor("x", 4096, 512)]
    taken = reading([segment([block(512)], address=4096)])
    assert [d.device for d in joined(found, taken).devices] == ["cuda:0", "cpu"]
    assert [d.device for d in joined(found, taken, devices=["cpu"]).devices] == ["cpu"]
    assert [d.device for d in joined([], taken).devices] == ["cuda:0"]
    assert joined([], None).devices == ()


def test_text_has_a_line_for_everything():
    taken = reading(
        [segment([block(2048, (LINEAR, CALL, MAIN), requested=1600), block(512)], address=4096)]
    )
    found = [
        tensor("w", 4096, 1600, shape=(400,), aliases=("tied",)),
        tensor("v", 4096, 1600, shape=(1, 2)),
    ]
    data = joined(found, taken, notes=["a note"])
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


def test_names_can_not_drive_a_terminal():
    data = joined([tensor("a\x1b[31mb", 0, 0, device="cpu", storage=-1)], None)
    assert "\x1b" not in report_text(data)


def test_json_and_columns_hold_the_same_rows():
    taken = reading([segment([block(512, (MAIN,))], address=4096)])
    found = [tensor("x", 4096, 500), tensor("s", 1, 4, saved=True, device="cpu")]
    data = joined(found, taken)
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
    raw, found, address = [], [], start
    for number, (size, state, views) in enumerate(blocks):
        raw.append(block(size, (MAIN,) if number % 2 else (), state=state, requested=size - 12))
        found += [
            tensor(f"t{number}.{view}", address + 100 * (view == 2), size - 12 - 400 * (view == 2),
                   saved=view == 1 and number % 3 == 0)
            for view in range(views)
        ]  # fmt: skip
        address += size
    found += [tensor(f"e{n}", (1 << 50) + n, size) for n, size in enumerate(extra)]
    held = sum(size for size, state, _ in blocks if state == "active_allocated")
    allocated = max(held + moved, 1)
    taken = reading([segment(raw, address=start)], allocated=allocated, classifier=Classifier({}))
    one = device_of(found, taken)
    assert sum(part.size_bytes for part in one.parts) == allocated
    assert sum(part.size_bytes for part in one.classes) == held
    counted = {(t.storage) for t in found if not t.saved}
    first = {t.storage: t.storage_bytes for t in reversed(found) if not t.saved}
    assert one.used_bytes == sum(first[storage] for storage in counted)
