"""How much host memory can still be taken, from the contents of files."""

from __future__ import annotations

import pytest

from gpumem_otel.yielding.copy.limits import Group, HostRoom, read_room, room

GIB = 1 << 30
MEMINFO = f"""MemTotal:       {100 * GIB // 1024} kB
MemFree:        {10 * GIB // 1024} kB
MemAvailable:   {60 * GIB // 1024} kB
SwapTotal:             0 kB
"""


def test_the_machine_alone():
    assert room(MEMINFO, [], 0) == HostRoom(60 * GIB, "the machine")


def test_the_margin_is_two_percent_and_at_least_one_gib():
    assert room(MEMINFO, []).free_bytes == 58 * GIB
    small = MEMINFO.replace(str(100 * GIB // 1024), str(10 * GIB // 1024))
    assert room(small, []).free_bytes == 59 * GIB


@pytest.mark.parametrize(
    "stat",
    [f"anon 5\ninactive_file {4 * GIB}\nactive_file 7\n", f"total_inactive_file {4 * GIB}\n"],
    ids=["version 2", "version 1"],
)
def test_the_tightest_group_counts_without_its_idle_page_cache(stat):
    groups = [
        Group("/a/b", f"{40 * GIB}\n", f"{14 * GIB}\n", stat),
        Group("/a", "max\n", f"{90 * GIB}\n"),
        Group("/", f"{200 * GIB}", "0"),
    ]
    assert room(MEMINFO, groups, 0) == HostRoom(30 * GIB, "cgroup /a/b")


def test_cache_of_version_1_with_children_is_preferred():
    stat = f"inactive_file {GIB}\ntotal_inactive_file {3 * GIB}\n"
    assert room(MEMINFO, [Group("/x", f"{9 * GIB}", f"{8 * GIB}", stat)], 0).free_bytes == 4 * GIB


def test_no_limit_is_no_limit_however_it_is_written():
    groups = [
        Group("/v2", "max", f"{GIB}"),
        Group("/v1", "9223372036854771712", f"{GIB}"),
        Group("/broken", "", ""),
        Group("/odd", "lots", "some"),
    ]
    assert room(MEMINFO, groups, 0) == HostRoom(60 * GIB, "the machine")


def test_a_group_that_is_slowed_down_sooner_counts_from_there():
    groups = [
        Group("/slow", f"{50 * GIB}\n", f"{GIB}\n", "", f"{9 * GIB}\n"),
        Group("/max", "max\n", f"{GIB}\n", "", "max\n"),
    ]
    assert room(MEMINFO, groups, 0) == HostRoom(8 * GIB, "cgroup /slow")
    only = Group("/high", "max\n", f"{GIB}\n", "", f"{3 * GIB}\n")
    assert room(MEMINFO, [only], 0) == HostRoom(2 * GIB, "cgroup /high")


def test_a_full_group_has_nothing_and_never_less():
    assert room(MEMINFO, [Group("/full", f"{GIB}", f"{2 * GIB}")], 0) == HostRoom(0, "cgroup /full")


def test_nothing_known_is_nothing_free():
    assert room("", []).free_bytes == 0


def put(base, files):
    for name, text in files.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_files_of_version_2_up_to_the_top(tmp_path):
    put(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/jobs/one\n",
            "sys/fs/cgroup/jobs/one/memory.max": "max\n",
            "sys/fs/cgroup/jobs/one/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/jobs/one/memory.high": f"{30 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.max": f"{20 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.current": f"{5 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.stat": f"inactive_file {GIB}\n",
        },
    )
    assert read_room(0, str(tmp_path)) == HostRoom(16 * GIB, "cgroup /jobs")


def test_the_file_of_the_slow_down_is_read(tmp_path):
    put(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.high": f"{7 * GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
        },
    )
    assert read_room(0, str(tmp_path)) == HostRoom(2 * GIB, "cgroup /job")


def test_files_of_version_1_seen_from_inside_a_container(tmp_path):
    put(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:cpu,memory:/docker/abc\n3:cpuset:/docker/abc\n0::/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
        },
    )
    assert read_room(0, str(tmp_path)) == HostRoom(5 * GIB, "cgroup /")


def test_this_machine_has_room():
    found = read_room(0)
    assert found.free_bytes > 0
    assert found.by == "the machine" or found.by.startswith("cgroup /")
