"""Real files: what they add up to, in every form that they may come in."""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.recordings import make_recording

from gpumem_otel.errors import SnapshotError
from gpumem_otel.profiles.of_file import load_snapshot, parse_snapshot

if TYPE_CHECKING:
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

DATA = Path(__file__).parents[2] / "data"
FOLDER = os.environ.get("GPUMEM_SNAPSHOTS", "")

# segments, blocks, events of each device, reserved, active_allocated, requested (not inactive)
TOTALS = {
    "h200-torch2.11-train-python-stacks": (38, 222, [3223], 180355072, 121323520, 121323520),
    "h200-torch2.11-train-larger-batch": (61, 239, [4280], 893386752, 129712128, 129712128),
    "h200-torch2.11-train-cpp-stacks": (120, 671, [4000], 1140850688, 690192384, 675512320),
    "h200-torch2.11-oom": (71, 249, [4481], 2961178624, 129712128, 129712128),
    "torch2.0-history-oom": (176, 463, [1], 11844714496, 11840159744, 11840159744),
    "torch2.1-two-devices-no-trace": (370, 3019, [0, 0], 8143241216, 7626237952, 7575726912),
    "torch2.3-state-mode": (259, 868, [1], 17133731840, 16397578240, 16380108168),
    "torch2.5-notebook": (22, 97, [902], 9196011520, 1493379584, 1493235840),
    "torch2.5-inference-fp32": (29, 164, [2043], 610271232, 525286400, 523811840),
    "torch2.5-inference-bf16": (43, 178, [2811], 861929472, 525286400, 523811840),
    "torch2.5-private-pools": (127, 638, [0], 26189234176, 24916034560, 25483614352),
    "torch2.5-not-recorded": (12, 116, [0], 109051904, 90861056, 90861056),
    "torch2.9-python-stacks-23k-events": (61, 468, [23105], 1897922560, 1014430208, 1011485828),
    "torch2.11-windows": (216, 455, [5163], 14180941824, 1377753600, 1373919236),
    "torch2.11-expandable-segments": (2, 297, [5112], 13759414272, 13635803136, 13635803136),
    "torch2.11-training-19k-events": (377, 918, [19136], 7235174400, 6816891392, 6808535044),
    "h200-torch2.11-cuda-graph": (15, 68, [621, 0], 94371840, 84921344, 84920240),
    "h200-torch2.11-compiled-training": (41, 244, [3648, 0], 239075328, 126912512, 126912128),
    "h200-torch2.11-ddp-rank0-of-2": (29, 176, [2844, 0], 367001600, 288692224, 286312064),
    "h200-torch2.11-ddp-rank1-of-2": (37, 183, [0, 2852], 455081984, 288694272, 286314112),
    "h200-torch2.11-fsdp-rank0-of-2": (29, 184, [4145, 0], 318767104, 180339712, 177235776),
    "h200-torch2.11-fsdp-rank1-of-2": (36, 192, [0, 4152], 358612992, 179817472, 177237824),
}
OURS = sorted(path.name.removesuffix(".pickle.gz") for path in DATA.glob("h200-*.pickle.gz"))
PLAIN = gzip.decompress((DATA / "h200-torch2.11-cuda-graph.pickle.gz").read_bytes())


def totals(snapshot: TorchSnapshot, devices: int):
    totals = [snapshot.totals(device) for device in snapshot.devices()]
    return (
        sum(b.segments for b in totals),
        sum(b.blocks for b in totals),
        [sum(1 for _ in snapshot.events(device)) for device in range(devices)],
        sum(b.reserved_bytes for b in totals),
        sum(b.allocated_bytes for b in totals),
        sum(b.requested_bytes for b in totals),
    )


def check_identities(snapshot: TorchSnapshot):
    """What holds for every readable file."""
    for device in snapshot.devices():
        totals = snapshot.totals(device)
        free = (
            totals.free_segment_bytes
            + totals.split_remainder_bytes
            + totals.private_pool_free_bytes
        )
        assert totals.reserved_bytes == totals.active_bytes + free
        assert totals.active_bytes == totals.allocated_bytes + totals.pending_free_bytes
        assert sum(totals.pool_reserved_bytes.values()) == totals.reserved_bytes
        assert 0 <= totals.bytes_without_stack <= totals.allocated_bytes
        groups = snapshot.live_groups(device)
        assert sum(group.size_bytes for group in groups) == totals.allocated_bytes
        bare = sum(group.size_bytes for group in groups if not group.frames)
        assert bare == totals.bytes_without_stack
        allocs = [event for event in snapshot.events(device) if event.action == "alloc"]
        grouped = snapshot.event_groups(device)
        assert sum(group.objects for group in grouped) == len(allocs)
        assert sum(g.size_bytes for g in grouped) == sum(e.size_bytes for e in allocs)


def check_file(path: Path, name: str):
    snapshot = load_snapshot(path)
    assert totals(snapshot, len(TOTALS[name][2])) == TOTALS[name]
    check_identities(snapshot)
    for segment in snapshot.segments():
        assert sum(block.size_bytes for block in segment.blocks) == segment.size_bytes


@pytest.mark.parametrize("name", OURS)
def test_our_recordings_add_up_to_what_the_allocator_said(name):
    check_file(DATA / f"{name}.pickle.gz", name)


@pytest.mark.skipif(not FOLDER, reason="GPUMEM_SNAPSHOTS names no folder of recordings")
@pytest.mark.parametrize("name", TOTALS)
def test_all_recordings_add_up_to_the_table(name):
    check_file(Path(FOLDER) / f"{name}.pickle.gz", name)


@pytest.mark.skipif(not FOLDER, reason="GPUMEM_SNAPSHOTS names no folder of recordings")
def test_torch_2_0_takes_stacks_from_the_present_of_each_block():
    snapshot = load_snapshot(Path(FOLDER) / "torch2.0-history-oom.pickle.gz")
    blocks = [block for segment in snapshot.segments() for block in segment.blocks]
    assert {block.address for block in blocks} == {None}
    assert all(not block.frames for block in blocks if block.state == "inactive")
    totals = snapshot.totals(snapshot.devices()[0])
    assert totals.bytes_without_stack < totals.allocated_bytes
    assert totals.history


@pytest.mark.skipif(not FOLDER, reason="GPUMEM_SNAPSHOTS names no folder of recordings")
def test_a_dump_without_recording_has_its_totals_and_says_so():
    snapshot = load_snapshot(Path(FOLDER) / "torch2.5-not-recorded.pickle.gz")
    totals = snapshot.totals(0)
    assert totals.bytes_without_stack == totals.allocated_bytes == 90861056
    assert not totals.history
    assert [w.split(":")[0] for w in snapshot.warnings] == ["no history recorded"]


def test_a_private_pool_is_counted_apart():
    snapshot = load_snapshot(DATA / "h200-torch2.11-cuda-graph.pickle.gz")
    totals = snapshot.totals(0)
    assert set(totals.pool_reserved_bytes) == {(0, 0), (1, 0)}
    private = [s for s in snapshot.segments(0) if s.pool_id == (1, 0)]
    inactive = sum(b.size_bytes for s in private for b in s.blocks if b.state == "inactive")
    assert totals.private_pool_free_bytes == inactive
    assert totals.pool_reserved_bytes[1, 0] == sum(s.size_bytes for s in private)


def test_a_trace_that_began_late_is_named():
    snapshot = load_snapshot(DATA / "h200-torch2.11-oom.pickle.gz")
    assert [w.split(":")[:2] for w in snapshot.warnings] == [
        ["device 0", " 576 frees of memory whose allocation is not in the trace"]
    ]
    oom = next(event for event in snapshot.events(0) if event.action == "oom")
    assert oom.address is None
    assert oom.device_free_bytes > 0


def test_settings_and_annotations_are_there():
    snapshot = load_snapshot(DATA / "h200-torch2.11-train-python-stacks.pickle.gz")
    assert snapshot.settings["expandable_segments"] is False
    assert snapshot.settings["roundup_power2_divisions"]["1"] == 0
    assert {a.stage for a in snapshot.annotations} <= {"START", "END"}
    assert not snapshot.resolved


@functools.cache
def forms() -> dict[str, bytes]:
    raw = pickle.loads(PLAIN)
    return {
        "gzip": gzip.compress(PLAIN),
        "gzip of gzip": gzip.compress(gzip.compress(PLAIN)),
        "gzip in two members": gzip.compress(PLAIN[:9999]) + gzip.compress(PLAIN[9999:]),
        "gzip, padded": gzip.compress(PLAIN) + b"\0" * 512,
        "more after the end": PLAIN + b"junk",
        **{f"protocol {p}": pickle.dumps(raw, p) for p in (2, 3, 4, 5)},
        "unshared": pickle.dumps(json.loads(json.dumps(raw)), 4),
        "JSON": json.dumps(raw).encode(),
        "JSON, indented": b"\n\n " + json.dumps(raw, indent=1).encode(),
        "JSON with a byte order mark": json.dumps(raw).encode("utf-8-sig"),
        "JSON in UTF-16": json.dumps(raw).encode("utf-16"),
        "gzip of JSON": gzip.compress(json.dumps(raw).encode()),
    }


@pytest.mark.parametrize("form", forms())
def test_every_form_reads_the_same(form):
    snapshot = parse_snapshot(forms()[form], "file.txt")
    assert totals(snapshot, 2) == TOTALS["h200-torch2.11-cuda-graph"]
    check_identities(snapshot)
    assert list(snapshot.segments()) == list(parse_snapshot(PLAIN, "x").segments())
    assert list(snapshot.events(0)) == list(parse_snapshot(PLAIN, "x").events(0))


def test_the_bare_list_of_segments_reads():
    raw = pickle.loads(PLAIN)["segments"]
    for data in (pickle.dumps(raw, 2), json.dumps(raw).encode()):
        snapshot = parse_snapshot(data, "x")
        expected = TOTALS["h200-torch2.11-cuda-graph"]
        assert totals(snapshot, 2) == (*expected[:2], [0, 0], *expected[3:])


def test_json_shares_frames_again():
    raw = json.dumps(pickle.loads(PLAIN)).encode()
    groups = parse_snapshot(raw, "x").live_groups(0)
    assert len(groups) == len(parse_snapshot(PLAIN, "x").live_groups(0))


def test_of_a_recording_of_ours_the_last_snapshot_is_read():
    names = [f"h200-torch2.11-{name}.pickle.gz" for name in ("oom", "cuda-graph")]
    data = make_recording(*names)
    for form in (data, gzip.compress(data), gzip.decompress(data)):
        snapshot = parse_snapshot(form, "run.rec")
        assert (snapshot.source, snapshot.resolved) == ("run.rec", True)
        totals, expected = snapshot.totals(0), parse_snapshot(PLAIN, "x").totals(0)
        assert totals.allocated_bytes == expected.allocated_bytes
        assert totals.pool_reserved_bytes == expected.pool_reserved_bytes
        assert totals.bytes_without_stack == expected.bytes_without_stack
        groups = snapshot.live_groups(0)
        assert sum(group.size_bytes for group in groups) == expected.allocated_bytes


def test_a_recording_that_ends_early_gives_what_it_has_and_says_so():
    data = make_recording("h200-torch2.11-cuda-graph.pickle.gz", "h200-torch2.11-oom.pickle.gz")
    snapshot = parse_snapshot(data[:-100], "run.rec")
    assert snapshot.totals(0).segments == 15
    assert snapshot.warnings != ()
    assert snapshot.warnings == parse_snapshot(data[:-100], "run.rec").warnings


def test_a_recording_without_a_reading_is_no_snapshot():
    with pytest.raises(SnapshotError, match="without a single reading"):
        parse_snapshot(make_recording(), "run.rec")


def test_a_name_says_nothing_about_the_form(tmp_path):
    path = tmp_path / "snapshot.json.gz"
    path.write_bytes(PLAIN)
    assert load_snapshot(path).totals(0).segments == 15
    assert load_snapshot(str(path)).source == str(path)
    with path.open("rb") as file:
        assert load_snapshot(file).source == str(path)
        assert load_snapshot(io.BytesIO(PLAIN), name="upload").source == "upload"
    assert load_snapshot(io.BytesIO(PLAIN)).source == "<stream>"


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("percent", [0, 1, 50, 99])
def test_a_cut_file_is_refused(form, percent):
    data = forms()[form]
    if form in ("gzip, padded", "more after the end"):
        data = data[: len(data) - 512 - 100]
    with pytest.raises(SnapshotError) as caught:
        parse_snapshot(data[: len(data) * percent // 100], "cut.pickle")
    assert caught.value.source == "cut.pickle"
    assert caught.value.reason
    assert "\n" not in str(caught.value)


def test_a_file_that_can_not_be_read_is_named(tmp_path):
    (tmp_path / "empty.pickle").touch()
    for path, reason in [
        (tmp_path / "absent", "no such file or directory"),
        (tmp_path, "is a directory"),
        (tmp_path / "empty.pickle", "empty file"),
        ("/dev/zero", "neither a pickle nor JSON nor gzip of one"),
        (str(tmp_path) + "/a\0b", "embedded null byte"),
    ]:
        with pytest.raises(SnapshotError) as caught:
            load_snapshot(path)
        assert (caught.value.source, caught.value.reason) == (str(path), reason)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(PLAIN)
    path.chmod(0)
    with pytest.raises(SnapshotError, match="permission denied"):
        load_snapshot(path)


class _Broken(io.RawIOBase):
    def readable(self):
        return True

    def read(self, size=-1):
        raise OSError(5, "input/output error")


def test_a_stream_that_fails_is_named():
    closed = io.BytesIO(PLAIN)
    closed.close()
    for stream, reason in [
        (io.StringIO("{}"), "opened as text"),
        (closed, "closed file"),
        (_Broken(), "input/output error"),
    ]:
        with pytest.raises(SnapshotError, match=reason):
            load_snapshot(stream)
