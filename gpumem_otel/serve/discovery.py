"""Run files: one JSON file per listening process, from which `gpumem-otel sd` makes file_sd.

Control sockets are in the same directory and have names of the same form.

The directory may be in /tmp, where others can write: it must be ours, not a symlink, and writable
by us alone; no link in it is followed, and a file counts only if its form is right. It may be
shared by containers and machines. Whether a process lives is known only where it runs, so names of
files contain that place, and only files of this place are ever deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel._version import __version__
from gpumem_otel.errors import ServeError
from gpumem_otel.serve.guard import host_port
from gpumem_otel.settings import files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpumem_otel.base.profile import Identity

_NAME: Final = re.compile(
    r"(?P<temporary>\.?)(?P<pid>[1-9]\d{0,9})-(?P<ticks>\d{1,20})(?:-(?P<place>[0-9a-f]{8}))?"
    r"\.(?P<kind>json|control-(?P<local_rank>\d{1,5})\.sock)"
)

_MAX_FILE_BYTES: Final = 64 * 1024

_MAX_FILES: Final = 4096

_ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared, not bound

_OF_IDENTITY: Final = (
    "service_name", "namespace", "rank", "local_rank", "world_size", "run_id", "node",
)  # fmt: skip
"""Fields that an entry takes from the identity of its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One listening process.

    Attributes:
        start_ticks: start of the process in clock ticks since boot (/proc/PID/stat, field 22),
            which tells it from a later process of the same pid; 0 without /proc.
        pid_namespace: of the pid; from another one it cannot be seen whether the process lives.
        boot_id: of this start of the machine, proc(5); "" without /proc.
        machine: its network name, uname(2).
        host: bound address.
        version: of this package.
    """

    pid: int
    start_ticks: int
    pid_namespace: str = ""
    boot_id: str = ""
    machine: str = ""
    host: str
    port: int
    scheme: str = "http"
    service_name: str = ""
    namespace: str = ""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    run_id: str = ""
    node: str = ""
    version: str = ""

    @property
    def file_name(self) -> str:
        """Of its run file; a process of another place never has the same."""
        place = _place(self.boot_id, self.machine, self.pid_namespace)
        return f"{self.pid}-{self.start_ticks}-{place}.json"

    @property
    def target(self) -> str:
        """`host:port` to connect to from this machine."""
        host = self.host
        if host in _ANY_ADDRESS:
            host = (_elsewhere(self) and self.machine) or _ANY_ADDRESS[host]
        return host_port(host, self.port)


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file that was written for this process."""

    directory: str
    name: str

    def remove(self) -> None:
        """Remove it, unless it is gone already or this is a forked child of its process."""
        if not self.name.startswith(f"{os.getpid()}-"):
            return
        with contextlib.suppress(OSError, ServeError), _opened(self.directory) as folder:
            os.unlink(self.name, dir_fd=folder)


def entry_for(identity: Identity, address: tuple[str, int], scheme: str = "http") -> RunEntry:
    """The entry of this process."""
    pid = os.getpid()
    return RunEntry(
        pid=pid,
        start_ticks=_start_ticks(pid) or 0,
        pid_namespace=_pid_namespace(),
        boot_id=_boot_id(),
        machine=_machine(),
        host=address[0],
        port=address[1],
        scheme=scheme,
        version=__version__,
        **{name: getattr(identity, name) for name in _OF_IDENTITY},
    )


def register(run_dir: str, entry: RunEntry) -> RunFile:
    """Write the file of a process, whole or not at all; files of dead processes are deleted.

    Raises:
        ServeError: the directory is not safe to use, or cannot be written.
    """
    data = json.dumps(asdict(entry), sort_keys=True).encode() + b"\n"
    with _named(run_dir), _opened(run_dir, make=True) as folder:
        _drop_dead(folder)
        files.write_whole(folder, entry.file_name, data)
    return RunFile(run_dir, entry.file_name)


def socket_name(local_rank: int) -> str:
    """The name of this process's control socket; no other living process has the same."""
    pid = os.getpid()
    return f"{pid}-{_start_ticks(pid) or 0}-{_this_place()}.control-{local_rank}.sock"


def bind_socket(run_dir: str, name: str, listening: socket.socket, backlog: int) -> RunFile:
    """Bind a Unix socket of mode 0600, listen, and only then give it its name.

    Bound through a descriptor of the directory: no other directory can take its place, and its path
    may be longer than the 108 bytes of an address, unix(7).

    Raises:
        ServeError: the directory is not safe to use.
        OSError: it cannot be written.
    """
    with _opened(run_dir, make=True) as folder:
        _drop_dead(folder)
        temporary = f".{name}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        # Linux gives the file the mode of the socket: no umask to change, which all threads share.
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(f"/proc/self/fd/{folder}/{temporary}")
        try:
            listening.listen(backlog)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
    return RunFile(run_dir, name)


def control_sockets(run_dir: str) -> list[str]:
    """Paths of the control sockets of living processes, by local rank; dead ones are deleted.

    One of another container counts while something listens there, since its pid means nothing
    here. Root may read the directory of another user.

    Raises:
        ServeError: the directory is not safe to read.
    """
    names = []
    with (
        _named(run_dir),
        contextlib.suppress(FileNotFoundError),
        _opened(run_dir, root_sees_all=True) as folder,
    ):
        here = f"-{_this_place()}."
        names = [
            name
            for name in _drop_dead(folder)
            if name.endswith(".sock")
            and _is_socket(folder, name)
            and (here in name or _is_listening(folder, name))
        ]
    return [str(Path(run_dir) / name) for name in sorted(names, key=_by_local_rank)]


def _is_socket(folder: int, name: str) -> bool:
    """Whether it is a socket itself: root would follow a link that another user made."""
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _is_listening(folder: int, name: str) -> bool:
    """Whether a process on this machine accepts connections at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"/proc/self/fd/{folder}/{name}")
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
    return True


def _by_local_rank(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    return (int(match["local_rank"] or 0), int(match["pid"])) if match else (0, 0)


def targets(run_dir: str) -> list[RunEntry]:
    """Every listening process that is alive, in a fixed order; files of dead ones are deleted.

    Processes of other containers and machines that share the directory are listed while their
    files exist, if they can be reached from here.

    Raises:
        ServeError: the directory is not safe to read.
    """
    entries: list[RunEntry] = []
    with _named(run_dir), contextlib.suppress(FileNotFoundError), _opened(run_dir) as folder:
        names = [name for name in _drop_dead(folder) if name.endswith(".json")]
        entries = [entry for name in names if (entry := _read(folder, name)) and _reachable(entry)]
    return sorted(entries, key=lambda e: (e.service_name, e.namespace, e.run_id, e.rank, e.pid))


def as_file_sd(entries: Iterable[RunEntry]) -> str:
    """Prometheus file_sd JSON, one group per process.

    The labels are `__meta_gpumem_*`, which Prometheus drops unless a relabel rule keeps them, so
    the scraper decides on the labels of its series. `__scheme__` is set for TLS. A process bound
    to all addresses is listed by its loopback address, on another machine by that machine's name.

    https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
    """
    groups = []
    for entry in entries:
        values = {name: str(getattr(entry, name)) for name in (*_OF_IDENTITY, "pid")}
        labels = {f"__meta_gpumem_{name}": value for name, value in values.items() if value}
        if entry.scheme != "http":
            labels["__scheme__"] = entry.scheme
        groups.append({"labels": labels, "targets": [entry.target]})
    return json.dumps(groups, indent=2, sort_keys=True) + "\n"


def _opened(
    run_dir: str, *, make: bool = False, root_sees_all: bool = False
) -> contextlib.AbstractContextManager[int]:
    """A descriptor of the directory, checked after it was opened."""
    return files.opened(
        run_dir, "run directory", ServeError, make=make, root_sees_all=root_sees_all
    )


@contextlib.contextmanager
def _named(run_dir: str) -> Iterator[None]:
    """Make an OSError a ServeError that names the directory."""
    try:
        yield
    except OSError as exc:
        raise ServeError(f"run directory {run_dir}: {exc.strerror}") from exc


def _drop_dead(folder: int) -> list[str]:
    """Delete the files of this place's dead processes; return the other names, bounded in number.

    In the directory of another user, which root may read, nothing is deleted.
    """
    living = []
    ours = os.fstat(folder).st_uid == os.geteuid()
    here = _this_place()
    for name in sorted(os.listdir(folder)):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        if match["place"] == here and not _alive(int(match["pid"]), int(match["ticks"])):
            if ours:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
        elif not match["temporary"]:
            living.append(name)
    return living[:_MAX_FILES]


def _read(folder: int, name: str) -> RunEntry | None:
    """The entry in a file, None where it is not one of ours."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            data = file.read(_MAX_FILE_BYTES + 1)
        raw = json.loads(data) if len(data) <= _MAX_FILE_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return _entry(raw) if isinstance(raw, dict) else None


def _entry(raw: dict[str, Any]) -> RunEntry | None:
    """The entry, None where a value has the wrong type; keys of a newer version are ignored."""
    types = {field.name: str(field.type) for field in fields(RunEntry)}
    values = {name: value for name, value in raw.items() if name in types}
    if any(type(value).__name__ != types[name] for name, value in values.items()):
        return None
    try:
        entry = RunEntry(**values)
    except TypeError:
        return None
    valid = entry.port in range(1, 65536) and entry.scheme in {"http", "https"} and entry.host
    return entry if valid else None


def _alive(pid: int, start_ticks: int) -> bool:
    if os.path.isdir("/proc/self"):  # noqa: PTH112
        return _start_ticks(pid) == start_ticks
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def _start_ticks(pid: int) -> int | None:
    """When a process started, None where it is gone (or a zombie), proc(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    except OSError:
        return None
    # The command name, field 2, may hold anything, blanks and brackets included.
    state, *rest = text[text.rindex(")") + 1 :].split()
    return None if state in {"Z", "X"} else int(rest[18])


def _place(boot_id: str, machine: str, pid_namespace: str) -> str:
    """Where a pid means one process, as eight hexadecimal digits."""
    return hashlib.sha256(f"{boot_id or machine} {pid_namespace}".encode()).hexdigest()[:8]


def _this_place() -> str:
    return _place(_boot_id(), _machine(), _pid_namespace())


def _elsewhere(entry: RunEntry) -> bool:
    """Whether it runs on another machine, or ran on this one before its last start."""
    return (entry.boot_id or entry.machine) != (_boot_id() or _machine())


def _reachable(entry: RunEntry) -> bool:
    if not _elsewhere(entry):
        return True
    before_our_start = entry.machine == _machine()
    return not before_our_start and not entry.host.startswith("127.") and entry.host != "::1"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _machine() -> str:
    return os.uname().nodename


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return ""
