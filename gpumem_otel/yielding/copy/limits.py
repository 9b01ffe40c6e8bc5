"""How much host memory this process can still take: the least of its cgroups and the machine.

Formats: `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst` of Linux, proc(5).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNLIMITED: Final = 1 << 60
"""cgroup version 1 writes a number near 2**63 for no limit."""
_MARGIN_BYTES: Final = 1 << 30
_MARGIN_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Group:
    """The text of one cgroup's files, "" for a missing file.

    Attributes:
        name: its path, for messages.
        limit: `memory.max` or `memory.limit_in_bytes`.
        high: `memory.high`, above which the kernel slows the process down drastically.
        usage: `memory.current` or `memory.usage_in_bytes`.
        stat: `memory.stat`.
    """

    name: str
    limit: str
    usage: str
    stat: str = ""
    high: str = ""


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Host memory that can be taken, without the margin.

    Attributes:
        by: what limits it, for messages.
    """

    free_bytes: int
    by: str


def room(meminfo: str, groups: Iterable[Group], margin_bytes: int | None = None) -> HostRoom:
    """The host memory that can be taken, from the contents of files.

    Unused page cache of a group (`inactive_file`) counts as free, as in kubelet; `MemAvailable`
    does the same for the machine.

    Args:
        meminfo: `/proc/meminfo`.
        groups: this process's cgroups and their parents.
        margin_bytes: left to other processes; None for the larger of 1 GiB and 2 % of a limit.
    """
    fields = _fields(meminfo)
    rooms: list[HostRoom] = []
    if "MemAvailable" in fields:
        free, total = fields["MemAvailable"] * 1024, fields.get("MemTotal", 0) * 1024
        rooms.append(HostRoom(free - _margin(total, margin_bytes), "the machine"))
    for group in groups:
        limits = [_number(text) for text in (group.limit, group.high)]
        limit = min((number for number in limits if number is not None), default=_UNLIMITED)
        usage = _number(group.usage)
        if usage is None or limit >= _UNLIMITED:
            continue
        stat = _fields(group.stat)
        idle = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        free = limit - max(usage - idle, 0) - _margin(limit, margin_bytes)
        rooms.append(HostRoom(free, f"cgroup {group.name}"))
    if not rooms:
        return HostRoom(0, "no /proc/meminfo")
    least = min(rooms, key=lambda room: room.free_bytes)
    return HostRoom(max(least.free_bytes, 0), least.by)


def read_room(margin_bytes: int | None = None, root: str = "/") -> HostRoom:
    """`room` of this process now; `root` is that of the file system, for tests."""
    base = Path(root)
    meminfo = _read(base / "proc/meminfo")
    return room(meminfo, _groups(base), margin_bytes)


def _groups(base: Path) -> list[Group]:
    groups: dict[str, Group] = {}
    for line in _read(base / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            top, names = base / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top = base / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        # in a container the path may be the host's and not exist; the top always does
        for depth in range(len(parts), -1, -1):
            folder = top.joinpath(*parts[:depth])
            limit = _read(folder / names[0])
            if limit:
                name = "/" + "/".join(parts[:depth])
                usage, stat, high = (
                    _read(folder / file) for file in (names[1], "memory.stat", "memory.high")
                )
                groups[str(folder)] = Group(name, limit, usage, stat, high)
    return list(groups.values())


def _margin(of_bytes: int, margin_bytes: int | None) -> int:
    if margin_bytes is not None:
        return margin_bytes
    return max(_MARGIN_BYTES, int(of_bytes * _MARGIN_SHARE))


def _fields(text: str) -> dict[str, int]:
    """Parse lines of `name value` or `name: value kB`."""
    values = {}
    for line in text.splitlines():
        parts = line.replace(":", " ").split()
        if len(parts) >= 2 and parts[1].isdigit():  # noqa: PLR2004
            values[parts[0]] = int(parts[1])
    return values


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
