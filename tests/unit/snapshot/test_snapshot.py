"""Snapshots made by hand: each version's keys, odd values, groups and totals."""

from __future__ import annotations

import json
import pickle

import pytest
from support.raw_snapshots import alloc, block, frame, segment, snapshot

from gpumem_otel.base.profile import AllocEvent, Annotation, BlockState, Frame
from gpumem_otel.errors import SnapshotError
from gpumem_otel.profiles.of_file import parse_snapshot
from gpumem_otel.snapshot.grouping import EventGroup, LiveGroup
from gpumem_otel.snapshot.snapshot import from_torch

UINT64_MAX = 2**64 - 1
LEAF, CALLER, OTHER = frame("leaf"), frame("caller"), frame("other")


class Anything:
    """What no reader can use; named alike in each process that collects tests."""

    def __repr__(self) -> str:
        return "Anything()"


def read(raw):
    return parse_snapshot(pickle.dumps(raw, 4), "made.pickle")


def test_an_empty_snapshot_has_nothing():
    for raw in ([], {"segments": []}, snapshot([]), {"device_traces": [[], []]}):
        found = read(raw)
        assert found.devices() == ()
        assert found.warnings == ()
        assert found.totals(0).reserved_bytes == 0
        assert found.live_groups(0) == []
        assert found.event_groups(0) == []
        assert list(found.segments()) == list(found.events(0)) == []
        assert found.settings == {}
        assert found.annotations == ()


def test_devices_are_those_with_segments_or_events():
    raw = snapshot([segment([block(1)], device=2)], [[], [], [], [alloc(1, 1)]])
    assert read(raw).devices() == (2, 3)


def test_groups_and_totals_of_blocks():
    stack, same, other = [LEAF, CALLER], [LEAF, CALLER], [OTHER, CALLER]
    found = read(
        snapshot(
            [
                segment(
                    [
                        block(512, stack, requested=500),
                        block(1024, same, requested=1000),
                        block(512, other, requested=1, state="inactive"),
                        block(256, other, requested=200, state="active_pending_free"),
                        block(128, [], requested=100),
                    ],
                    address=4096,
                ),
                segment([block(2048, state="inactive", requested=9999)]),
                segment(
                    [block(64, other), block(32, state="inactive")],
                    pool=(0, 1),
                    address=8192,
                ),
            ]
        )
    )
    totals = found.totals(0)
    assert totals.reserved_bytes == 512 + 1024 + 512 + 256 + 128 + 2048 + 64 + 32
    assert totals.allocated_bytes == 512 + 1024 + 128 + 64
    assert totals.active_bytes == totals.allocated_bytes + 256
    assert totals.pending_free_bytes == 256
    assert totals.requested_bytes == 500 + 1000 + 200 + 100 + 64
    assert totals.split_remainder_bytes == 512
    assert totals.free_segment_bytes == 2048
    assert totals.private_pool_free_bytes == 32
    assert totals.pool_reserved_bytes == {(0, 0): 2432 + 2048, (0, 1): 96}
    assert totals.bytes_without_stack == 128
    assert (totals.segments, totals.blocks, totals.history) == (3, 8, True)
    assert sorted(found.live_groups(0), key=lambda group: group.size_bytes) == [
        LiveGroup([OTHER, CALLER], 1, 64, 8192),
        LiveGroup((), 1, 128, 4096 + 512 + 1024 + 512 + 256, has_event=False),
        LiveGroup([LEAF, CALLER], 2, 1536, 4096),
    ]


def test_a_block_without_a_stack_knows_whether_its_allocation_was_seen():
    raw = snapshot([segment([block(8), block(16)], address=64)], [[alloc(72, 16)]])
    assert read(raw).live_groups(0) == [
        LiveGroup((), 1, 8, 64, has_event=False),
        LiveGroup((), 1, 16, 72, has_event=True),
    ]


@pytest.mark.parametrize("trusted", [True, False])
def test_stacks_that_look_alike_stay_apart(trusted):
    """More stacks than are compared one by one, same length, same first and middle frame."""
    stacks = [[LEAF, CALLER, CALLER, frame(f"f{i}")] for i in range(100)]
    raw = snapshot([segment([block(i + 1, stacks[i % 100]) for i in range(1000)])])
    found = from_torch(raw) if trusted else read(raw)
    groups = found.live_groups(0)
    assert len(groups) == 100
    assert {g.frames[3]["name"]: (g.objects, g.size_bytes) for g in groups} == {
        f"f{i}": (10, sum(i + 1 + 100 * k for k in range(10))) for i in range(100)
    }


def test_pause_is_called_every_32_entries():
    calls = []
    raw = snapshot(
        [segment([block(1, [LEAF]) for _ in range(25)]) for _ in range(4)],
        [[alloc(i, 1, [LEAF]) for i in range(70)]],
    )
    found = from_torch(raw)
    for use in (found.live_groups, found.event_groups, found.totals):
        calls.clear()
        use(0, pause=lambda: calls.append(1))
        assert len(calls) == {100: 3, 70: 2}[70 if use == found.event_groups else 100]
    calls.clear()
    found.totals(0, pause=lambda: calls.append(1))
    assert calls == []  # added up once


def test_events_are_grouped_within_a_time():
    events = [
        {**alloc(1, 10, [LEAF]), "time_us": 100},
        {**alloc(2, 20, [LEAF]), "time_us": 200},
        {**alloc(3, 40, [OTHER]), "time_us": 300},
        {"action": "alloc", "addr": 4, "size": 80, "stream": 0},
        {"action": "alloc", "addr": 5, "stream": 0, "frames": [], "time_us": 200},
        {"action": "free_requested", "addr": 1, "size": 10, "stream": 0, "time_us": 250},
        {"action": "snapshot", "addr": 0, "size": 7784960, "stream": 0, "time_us": 260},
    ]
    found = read(snapshot([], [events]))
    assert found.event_groups(0) == [
        EventGroup([LEAF], 2, 30, 1),
        EventGroup([OTHER], 1, 40, 3),
        EventGroup((), 2, 80, 4),
    ]
    assert found.event_groups(0, since_us=200, until_us=300) == [
        EventGroup([LEAF], 1, 20, 2),
        EventGroup((), 2, 80, 4),
    ]
    assert found.event_groups(0, until_us=200) == [
        EventGroup([LEAF], 1, 10, 1),
        EventGroup((), 1, 80, 4),
    ]
    assert found.event_groups(0, since_us=301) == [EventGroup((), 1, 80, 4)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_oom_entry_has_no_address(place):
    events = [alloc(1, 10, [LEAF]), alloc(2, 20, [LEAF])]
    events.insert(place, {"action": "oom", "device_free": 7, "size": 99, "stream": 0, "frames": []})
    found = read(snapshot([], [events]))
    assert list(found.events(0))[place] == AllocEvent("oom", None, 99, 0, device_free_bytes=7)
    assert sum(group.size_bytes for group in found.event_groups(0)) == 30


def test_an_event_of_torch_2_12_keeps_everything():
    event = {
        **alloc(1, 10, [LEAF]),
        "compile_context": "N/A",
        "user_metadata": "step 1",
        "pool_id": (0, 3),
        "forward_frames": ["text"],
        "internal_metadata": {"a": 1},
    }
    assert list(read(snapshot([], [[event]])).events(0)) == [
        AllocEvent(
            action="alloc",
            address=1,
            size_bytes=10,
            stream=0,
            time_us=1,
            frames=(Frame("leaf", "train.py", 1),),
            compile_context="N/A",
            user_metadata="step 1",
            pool_id=(0, 3),
        )
    ]


def test_torch_1_13_has_a_list_and_a_history():
    blocks = [
        {
            "size": 512,
            "state": "active_allocated",
            "history": [
                {"addr": 64, "real_size": 500, "frames": [LEAF]},
                {"addr": 64, "real_size": 9, "frames": [OTHER]},
            ],
        },
        {"size": 256, "state": "inactive", "history": [{"real_size": 9, "frames": [OTHER]}]},
        {"size": 128, "state": "active_allocated"},
    ]
    raw = [
        {
            "device": 0,
            "address": 64,
            "total_size": 896,
            "allocated_size": 640,
            "active_size": 640,
            "stream": 0,
            "segment_type": "small",
            "blocks": blocks,
        }
    ]
    found = read(raw)
    assert found.live_groups(0) == [LiveGroup([LEAF], 1, 512, None), LiveGroup((), 1, 128, None)]
    totals = found.totals(0)
    assert (totals.requested_bytes, totals.bytes_without_stack) == (500 + 128, 128)
    made = [b for s in found.segments() for b in s.blocks]
    assert [(b.state, b.requested_bytes, len(b.frames)) for b in made] == [
        (BlockState.ACTIVE_ALLOCATED, 500, 1),
        (BlockState.INACTIVE, 9, 0),
        (BlockState.ACTIVE_ALLOCATED, 128, 0),
    ]


def test_the_documented_word_for_pending_is_understood():
    states = ("active_awaiting_free", "active_pending_free", "active_new_word", "strange")
    found = read(snapshot([segment([block(1, state=state) for state in states])]))
    totals = found.totals(0)
    assert (totals.pending_free_bytes, totals.split_remainder_bytes) == (3, 1)
    assert totals.requested_bytes == 3
    assert found.warnings[1:] == (
        "block state 'active_new_word' is read as active_pending_free",
        "block state 'strange' is read as inactive",
    )


def test_expandable_segments_that_are_wholly_inactive_are_free():
    raw = snapshot(
        [
            segment([block(4, [LEAF])], is_expandable=True),
            segment([block(2, state="inactive")], is_expandable=True),
        ]
    )
    found = read(raw)
    assert (found.totals(0).free_segment_bytes, found.totals(0).split_remainder_bytes) == (2, 0)
    assert [s.is_expandable for s in found.segments()] == [True, True]


def test_a_pool_with_less_in_its_blocks_than_mapped():
    found = read(snapshot([segment([block(1, [LEAF])], pool=(0, 1), total=4)]))
    totals = found.totals(0)
    assert (totals.reserved_bytes, totals.active_bytes, totals.private_pool_free_bytes) == (4, 1, 3)
    (warning,) = found.warnings
    assert warning.startswith("1 of 1 segments differ in size from the sum of their blocks")


def test_a_segment_smaller_than_its_blocks_never_makes_a_negative():
    totals = read(snapshot([segment([block(8), block(8, state="inactive")], total=1)])).totals(0)
    assert (totals.reserved_bytes, totals.split_remainder_bytes) == (16, 8)


def test_numbers_of_nine_bytes_do_not_stop_the_reader():
    raw = snapshot(
        [
            segment(
                [block(1, [frame("f", line=UINT64_MAX), frame("g", line=-1)])],
                address=UINT64_MAX,
            )
        ],
        [[{**alloc(UINT64_MAX, 1, []), "stream": UINT64_MAX, "time_us": 2**63}]],
    )
    raw["segments"][0]["stream"] = UINT64_MAX
    for found in (read(raw), parse_snapshot(json.dumps(raw).encode(), "x")):
        made = next(found.segments())
        assert (made.address, made.stream) == (UINT64_MAX, UINT64_MAX)
        assert [f.line for f in made.blocks[0].frames] == [0, 0]
        event = next(found.events(0))
        assert (event.address, event.stream, event.time_us) == (UINT64_MAX, UINT64_MAX, 2**63)


ODD = [None, 7, 1.5, float("nan"), True, "text", "\ud800", [], {}, [1], {"a": [{}]}, (), ((1,),)]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_unknown_keys_are_ignored_everywhere(odd):
    unknown = {"unknown": odd, "x": odd}
    raw = {
        "segments": [
            {
                **segment([{**block(1, [{**LEAF, **unknown}]), **unknown}]),
                **unknown,
            }
        ],
        "device_traces": [[{**alloc(1, 1, [{**LEAF, **unknown}]), **unknown}]],
        "allocator_settings": {"max_split_size": -1, **unknown},
        "external_annotations": [
            {"name": "n", "stage": "START", "device": 0, "time_us": 5, **unknown}
        ],
        "host_segments": odd,
        **unknown,
    }
    found = read(raw)
    assert found.totals(0).allocated_bytes == 1
    assert found.live_groups(0)[0].objects == 1
    assert found.event_groups(0)[0].objects == 1
    assert found.annotations == (Annotation("n", "START", 0, 5),)
    assert found.settings["max_split_size"] == -1


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize("key", ["name", "filename", "line", "stream", "stage", "segment_type"])
def test_odd_values_of_what_only_describes_are_tolerated(key, odd):
    raw = {
        "segments": [{**segment([block(1, [{**LEAF, key: odd}])]), key: odd}],
        "device_traces": [[{**alloc(1, 1, [{**LEAF, key: odd}]), key: odd}]],
        "external_annotations": [{key: odd}],
        "allocator_settings": {key: odd},
    }
    found = read(raw)
    made = next(found.segments())
    shown = made.blocks[0].frames[0]
    assert type(shown.name) is type(shown.filename) is type(made.kind) is str
    shown.name.encode()
    assert isinstance(shown.line, int)
    assert isinstance(made.stream, int)
    assert len(list(found.events(0))) == len(found.annotations) == 1


MISSING = Anything()
READABLE = {
    ("segment", "total_size"): {None, MISSING},
    ("segment", "segment_pool_id"): {None, MISSING},
    ("segment", "frames"): {None, MISSING},
    ("block", "requested_size"): {None, MISSING},
    ("block", "address"): {None, MISSING},
    ("block", "frames"): {None, MISSING},
    ("event", "action"): {None, MISSING, "text"},
    ("event", "size"): {None, MISSING},
    ("event", "addr"): {None, MISSING},
    ("event", "time_us"): {None, MISSING},
    ("event", "frames"): {None, MISSING},
    ("block", "state"): {"text"},
}
KEYS = [
    *(("segment", k) for k in ("device", "blocks", "total_size", "segment_pool_id", "frames")),
    *(("block", k) for k in ("size", "state", "requested_size", "address", "frames")),
    *(("event", k) for k in ("action", "size", "addr", "time_us", "frames")),
]


@pytest.mark.parametrize("value", [*ODD, MISSING, -1, 2**63, 1e400, "12"], ids=repr)
@pytest.mark.parametrize(("level", "key"), KEYS)
def test_what_is_counted_must_be_what_it_should(level, key, value):
    """Each key that numbers come from: read as documented, or refused with its name."""
    raw = snapshot([segment([block(1, [LEAF])])], [[alloc(1, 1, [LEAF])]])
    entry = {
        "segment": raw["segments"][0],
        "block": raw["segments"][0]["blocks"][0],
        "event": raw["device_traces"][0][0],
    }[level]
    if value is MISSING:
        del entry[key]
    else:
        entry[key] = value
    try:
        found = read(raw)
    except SnapshotError:
        assert not any(value is allowed for allowed in READABLE.get((level, key), ()))
    else:
        totals = found.totals(0)
        assert totals.reserved_bytes >= totals.allocated_bytes >= 0
        found.live_groups(0)
        found.event_groups(0, since_us=0)
        list(found.segments())
        list(found.events(0))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({}, "it has neither 'segments' nor 'device_traces'"),
        ({"a": 1}, "it has neither 'segments' nor 'device_traces'"),
        (7, "its root is a int"),
        ("text", "its root is a str"),
        (None, "its root is a NoneType"),
        ((), "its root is a tuple"),
        ([1], "entry of segments 0 is a int"),
        ([{}], "device of segment 0 is missing"),
        ([{"device": 0}], "blocks of segment 0 is missing"),
        ([{"device": 0, "blocks": [[]]}], "block 0 is a list"),
        ([{"device": -1, "blocks": []}], "a device that is not between 0 and 4095"),
        ([{"device": 0, "blocks": [], "segment_pool_id": (1, 2, 3)}], "a segment_pool_id that is"),
        ({"segments": {}}, "segments is a dict"),
        ({"segments": "x"}, "segments is a str"),
        ({"device_traces": {}}, "device_traces is a dict"),
        ({"device_traces": [None]}, "a trace is a NoneType"),
        ({"device_traces": [[None]]}, "event 0 is a NoneType"),
        ({"device_traces": [[{"frames": [1]}]]}, "a frame that is no dict"),
        ({"device_traces": [[{"frames": {}}]]}, "frames of event 0 is a dict"),
        ({"segments": [], "external_annotations": [1]}, "entry of external_annotations 0 is a int"),
        ({"segments": [], "allocator_settings": []}, "allocator_settings is a list"),
        (snapshot([segment([block(-1)], total=0)]), "size of one block is negative"),
        (snapshot([segment([block(2**62)]), segment([block(2**62)])]), "the sum of total_size"),
        (snapshot([segment([{**block(1), "history": [1]}])]), "history entry 0 is a int"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_the_reason(raw, reason):
    for data in (pickle.dumps(raw, 4), json.dumps(raw).encode()):
        if isinstance(raw, tuple) and data[:1] == b"[":
            continue  # JSON has no tuples
        with pytest.raises(SnapshotError) as caught:
            parse_snapshot(data, "x")
        if data[:1] in b"\x80{[":
            assert reason in caught.value.reason


def test_live_objects_are_wrapped_not_copied():
    raw = snapshot([segment([block(1, [LEAF])])])
    found = from_torch(raw, resolved=True)
    assert found.raw_segments() is raw["segments"]
    assert (found.source, found.resolved) == ("torch", True)
    assert found.live_groups(0)[0].frames is raw["segments"][0]["blocks"][0]["frames"]
    assert from_torch(raw["segments"]).totals(0) == found.totals(0)
    for wrong in (None, {}, "text", 7):
        with pytest.raises(SnapshotError, match="not a memory snapshot"):
            from_torch(wrong)


def test_late_traces_are_told_from_those_of_state_mode():
    free = {"action": "free_completed", "addr": 9, "size": 1, "stream": 0}
    assert read(snapshot([], [[free]])).warnings == ()
    assert "device 1: 2 frees" in read(snapshot([], [[], [free, free]])).warnings[0]
    both = [alloc(9, 1), {**free, "action": "free_requested"}, free]
    assert read(snapshot([], [both])).warnings == ()
    assert "device 0: 1 frees" in read(snapshot([], [[*both, both[1], both[2]]])).warnings[0]
    assert "1 frees" in read(snapshot([], [[alloc(8, 1), free]])).warnings[0]


class Walked(list):
    """A list that counts how many of its elements were walked through."""

    elements = 0

    def __iter__(self):
        for one in list.__iter__(self):
            Walked.elements += 1
            yield one


def test_what_belongs_to_a_device_is_found_without_walking_all_for_each():
    """GIVEN 200 devices WHEN each is asked for its own THEN all are walked through once."""
    raw = snapshot([segment([block(1)], device=n) for n in range(200)])
    raw["segments"] = Walked(raw["segments"])
    raw["external_annotations"] = Walked(
        {"name": str(n), "stage": "START", "device": n, "time_us": n} for n in range(200)
    )
    found = from_torch(raw)
    for device in range(200):
        assert [one["device"] for one in found.raw_segments(device)] == [device]
        assert [one.name for one in found.annotations_of(device)] == [str(device)]
    assert found.raw_segments(200) == found.annotations_of(200) == ()
    assert Walked.elements == 400


def test_long_text_is_cut_and_made_once():
    long = "\u00e9" * 100_000
    said = {"compile_context": long, "user_metadata": long}
    events = [{**alloc(number, 1, [frame(long, long)]), **said} for number in range(3)]
    first, *others = read(snapshot([], [events])).events(0)
    assert len(first.compile_context) == 4096
    assert first.compile_context.startswith("\u00e9" * 2000)
    for one in (first, *others):
        assert one.user_metadata is one.compile_context is first.compile_context
        assert one.frames[0].name is one.frames[0].filename is first.compile_context


def test_long_texts_that_differ_in_their_middle_stay_apart():
    texts = ["x" * 5_000 + letter + "x" * 5_000 for letter in "ab\ud800"]
    found = read(snapshot([], [[{**alloc(1, 1), "user_metadata": text} for text in texts]]))
    said = [event.user_metadata for event in found.events(0)]
    assert len(set(said)) == 3
    assert {len(text.encode()) for text in said} == {4096}


def test_blocks_with_the_same_stack_share_its_frames():
    stack = [LEAF, CALLER]
    (one,) = read(snapshot([segment([block(1, stack), block(2, stack)])])).segments()
    assert one.blocks[0].frames is one.blocks[1].frames
    assert [f.name for f in one.blocks[0].frames] == ["leaf", "caller"]
