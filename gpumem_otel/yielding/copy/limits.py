"""How much host memory this process can still take: the tightest of its cgroups and the machine.

Formats: `Documentation/admin-guide/cgroup-v2.rst` and `cgroup-v1/memory.rst` of Linux, proc(5).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNLIMITED: Final = 1 << 60
"""Version 1 writes a number near 2**63 for none."""
_MARGIN_BYTES: Final = 1 << 30
_MARGIN_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Group:
    """The text of one cgroup's files, "" for what is not there.

    Attributes:
        name: its path, for messages.
        limit: `memory.max` or `memory.limit_in_bytes`.
        high: `memory.high`, from which on the kernel slows a process down to a crawl.
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
    """What can be taken, the margin left out.

    Attributes:
        by: what sets it, for messages.
    """

    free_bytes: int
    by: str


def room(meminfo: str, groups: Iterable[Group], margin_bytes: int | None = None) -> HostRoom:
    """Of the contents of files.

    A group's page cache that nobody uses (`inactive_file`) gives way, as kubelet reckons too; the
    kernel reckons the same for the machine in `MemAvailable`.

    Args:
        meminfo: `/proc/meminfo`.
        groups: this process's cgroups and those above.
        margin_bytes: left to others; None for 1 GiB or 2 % of each limit, the larger.
    """
    fields = _fields(meminfo)
    found: list[HostRoom] = []
    if "MemAvailable" in fields:
        free, total = fields["MemAvailable"] * 1024, fields.get("MemTotal", 0) * 1024
        found.append(HostRoom(free - _margin(total, margin_bytes), "the machine"))
    for group in groups:
        limits = [_number(text) for text in (group.limit, group.high)]
        limit = min((one for one in limits if one is not None), default=_UNLIMITED)
        usage = _number(group.usage)
        if usage is None or limit >= _UNLIMITED:
            continue
        stat = _fields(group.stat)
        idle = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        free = limit - max(usage - idle, 0) - _margin(limit, margin_bytes)
        found.append(HostRoom(free, f"cgroup {group.name}"))
    if not found:
        return HostRoom(0, "no /proc/meminfo")
    least = min(found, key=lambda one: one.free_bytes)
    return HostRoom(max(least.free_bytes, 0), least.by)


def read_room(margin_bytes: int | None = None, root: str = "/") -> HostRoom:
    """`room` of this process now.

    Args:
        margin_bytes: see `room`.
        root: of the file system, for tests.
    """
    base = Path(root)
    meminfo = _read(base / "proc/meminfo")
    return room(meminfo, _groups(base), margin_bytes)


def _groups(base: Path) -> list[Group]:
    found: dict[str, Group] = {}
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
        # from the inside the path may be that of the host, and not be there: the top is always
        for depth in range(len(parts), -1, -1):
            folder = top.joinpath(*parts[:depth])
            limit = _read(folder / names[0])
            if limit:
                name = "/" + "/".join(parts[:depth])
                usage, stat, high = (
                    _read(folder / file) for file in (names[1], "memory.stat", "memory.high")
                )
                found[str(folder)] = Group(name, limit, usage, stat, high)
    return list(found.values())


def _margin(of_bytes: int, margin_bytes: int | None) -> int:
    if margin_bytes is not None:
        return margin_bytes
    return max(_MARGIN_BYTES, int(of_bytes * _MARGIN_SHARE))


def _fields(text: str) -> dict[str, int]:
    """`name value`, or `name: value kB`."""
    found = {}
    for line in text.splitlines():
        parts = line.replace(":", " ").split()
        if len(parts) >= 2 and parts[1].isdigit():  # noqa: PLR2004
            found[parts[0]] = int(parts[1])
    return found


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
