"""What is reported of a failed allocation, to the letter."""

from __future__ import annotations

import json

from gpumem_otel.base.profile import DeviceTotals, Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.oom.report import Account, OutOfMemory, class_totals, holders, json_line, log_block

MIB = 1 << 20
OOM = OutOfMemory(
    oom_id="20261129T101112Z-9f2c1a7b33", device=1, asked_bytes=2048 * MIB, limit_bytes=8192 * MIB,
    free_bytes=512 * MIB, time_ns=1_700_000_000_500_000_000, thread="MainThread",
)  # fmt: skip
STEP = Frame("Adam._init_group", "/x/torch/optim/adam.py", 120)
FORWARD = Frame("torch.nn.modules.linear.Linear.forward", "/x/torch/nn/modules/linear.py", 134)
TRAIN = Frame("train", "/job/train.py", 66)
BOOKS = DeviceTotals(
    device=1, reserved_bytes=7000 * MIB, allocated_bytes=6000 * MIB, active_bytes=6100 * MIB,
    requested_bytes=6000 * MIB, segments=3, blocks=9, free_segment_bytes=500 * MIB,
    split_remainder_bytes=400 * MIB, pending_free_bytes=100 * MIB, private_pool_free_bytes=0,
    bytes_without_stack=0, history=True,
)  # fmt: skip


def profile(*samples):
    return HeapProfile(ProfileKind.LIVE, 1, tuple(samples))


WITH_CLASSES = profile(
    Sample((STEP, TRAIN, Frame("optimizer_state")), 200, 4000 * MIB),
    Sample((FORWARD, TRAIN, Frame("activation")), 6, 1500 * MIB),
    Sample((Frame("[backward]"), Frame("gradient")), 1, 500 * MIB),
)


def test_the_block_in_the_log():
    account = Account(oom=OOM, rank=3, profile=WITH_CLASSES, totals=BOOKS, steps=12)
    assert log_block(account) == (
        "out of memory on device 1 of rank 3: asked for 2.0 GiB, 512.0 MiB of the device are free, "
        "the job may take 8.0 GiB\n"
        "  oom_id 20261129T101112Z-9f2c1a7b33, after step 12, thread MainThread\n"
        "  allocated 5.9 GiB, cached 1000.0 MiB (waiting_for_stream 100.0 MiB, "
        "split_remainders 400.0 MiB, free_segments 500.0 MiB)\n"
        "  by class: optimizer_state 3.9 GiB, activation 1.5 GiB, gradient 500.0 MiB\n"
        "       held  share  count  class            stack, innermost first\n"
        "    3.9 GiB  66.7%    200  optimizer_state  Adam._init_group (adam.py:120), "
        "from train (train.py:66)\n"
        "    1.5 GiB  25.0%      6  activation       torch.nn.modules.linear.Linear.forward "
        "(linear.py:134), from train (train.py:66)\n"
        "  500.0 MiB   8.3%      1  gradient         [backward]"
    )


def test_only_the_largest_are_shown_and_the_rest_is_counted():
    many = profile(*(Sample((Frame(f"f{n}"),), 1, n * MIB) for n in range(1, 9)))
    block = log_block(Account(oom=OOM, rank=0, profile=many))
    assert block.splitlines()[-1] == "  ... 3 more stacks"
    assert [holder.size_bytes for holder in holders(many)] == [n * MIB for n in (8, 7, 6, 5, 4)]


def test_without_a_profile_the_numbers_are_still_reported():
    account = Account(oom=OOM, rank=0, note="the profile could not be made: no")
    assert log_block(account).splitlines()[2:] == [
        "  no profile: the profile could not be made: no"
    ]
    line = json.loads(json_line(account))
    assert (line["asked_bytes"], line["cached_bytes"], line["top"]) == (2048 * MIB, None, [])


def test_the_line_of_json():
    line = json_line(Account(oom=OOM, rank=3, profile=WITH_CLASSES, totals=BOOKS))
    assert "\n" not in line
    line = json.loads(line)
    top = line.pop("top")
    assert line == {
        "event": "gpumem_oom", "rank": 3, "device": 1, "oom_id": "20261129T101112Z-9f2c1a7b33",
        "time": 1_700_000_000.5, "asked_bytes": 2048 * MIB, "free_bytes": 512 * MIB,
        "limit_bytes": 8192 * MIB, "allocated_bytes": 6000 * MIB, "cached_bytes": 1000 * MIB,
        "cached": {"waiting_for_stream": 100 * MIB, "split_remainders": 400 * MIB,
                   "free_segments": 500 * MIB},
        "classes": {"optimizer_state": 4000 * MIB, "activation": 1500 * MIB,
                    "gradient": 500 * MIB},
    }  # fmt: skip
    assert top[0] == {
        "bytes": 4000 * MIB, "objects": 200, "class": "optimizer_state",
        "stack": ["Adam._init_group (adam.py:120)", "train (train.py:66)"],
    }  # fmt: skip
    assert len(top) == 3


def test_a_class_is_found_as_label_too_and_a_function_of_that_name_is_none():
    labelled = profile(
        Sample((TRAIN,), 1, 5, (("tensor_class", "buffer"),)),
        Sample((FORWARD, Frame("buffer", "/job/ring.py", 3)), 1, 7),
        Sample((Frame("gradient"),), 1, 9),
    )
    assert class_totals(labelled) == {"buffer": 5}
    assert [holder.stack for holder in holders(labelled)][2] == (TRAIN,)


def test_names_that_a_terminal_would_act_on_are_shown_harmless():
    evil = profile(Sample((Frame("f\x1b[2J\n"),), 1, 5))
    block = log_block(Account(oom=OOM, rank=0, profile=evil))
    assert "\x1b" not in block
    assert block.count("\n") == 3
