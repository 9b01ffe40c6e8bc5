"""Run files: one small JSON file per listening process, and Prometheus file_sd made of them.

Control sockets lie beside them, named likewise.

The directory may lie in /tmp, where others can write: it must be ours, no symlink, and writable
by nobody else, and nothing in it is followed or trusted beyond its form. It may be shared by
containers and by machines: whether a process lives can be told only where it runs, so the name of
a file says where that is, and only files of this place are ever deleted.
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
    from collections.abc import Iterable

    from gpumem_otel.base.profile import Identity

_NAME: Final = re.compile(
    r"(?P<temporary>\.?)(?P<pid>[1-9]\d{0,9})-(?P<ticks>\d{1,20})(?:-(?P<place>[0-9a-f]{8}))?"
    r"\.(?P<kind>json|control-(?P<local_rank>\d{1,5})\.sock)"
)

_WHAT: Final = "run directory"

_MAX_FILE_BYTES: Final = 64 * 1024

_MAX_FILES: Final = 4096

_ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One listening process.

    Attributes:
        start_ticks: start of the process in clock ticks since boot (/proc/PID/stat, field 22),
            so that a recycled pid is told apart; 0 where there is no /proc.
        pid_namespace: of the pid, as /proc says it: who runs in another one can not tell whether
            the process lives.
        boot_id: of the machine since it was started, proc(5); "" where there is no /proc.
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
        service_name=identity.service_name,
        namespace=identity.namespace,
        rank=identity.rank,
        local_rank=identity.local_rank,
        world_size=identity.world_size,
        run_id=identity.run_id,
        node=identity.node,
        version=__version__,
    )


def register(run_dir: str, entry: RunEntry) -> RunFile:
    """Write the file of a process, at once or not at all; files of dead processes are dropped.

    Raises:
        ServeError: the directory is not safe to use, or can not be written.
    """
    name = entry.file_name
    data = json.dumps(asdict(entry), sort_keys=True).encode() + b"\n"
    try:
        with _opened(run_dir, make=True) as folder:
            _drop_dead(folder)
            files.write_whole(folder, name, data)
    except OSError as exc:
        raise ServeError(f"run directory {run_dir}: {exc.strerror}") from exc
    return RunFile(run_dir, name)


def socket_name(local_rank: int) -> str:
    """The name of this process's control socket; no other living process has the same."""
    pid = os.getpid()
    place = _place(_boot_id(), _machine(), _pid_namespace())
    return f"{pid}-{_start_ticks(pid) or 0}-{place}.control-{local_rank}.sock"


def bind_socket(run_dir: str, name: str, listening: socket.socket, backlog: int) -> RunFile:
    """Bind a Unix socket of mode 0600, listen, and only then give it its name.

    Bound through a descriptor of the directory: nobody can put another in its place, and its path
    may be longer than the 108 bytes of an address, unix(7).

    Raises:
        ServeError: the directory is not safe to use.
        OSError: it can not be written.
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

    One of another container counts while somebody listens there: its pid says nothing here. Root
    may read the directory of another user.

    Raises:
        ServeError: the directory is not safe to read.
    """
    try:
        with files.opened(run_dir, _WHAT, ServeError, root_sees_all=True) as folder:
            here = _place(_boot_id(), _machine(), _pid_namespace())
            names = [
                name
                for name in _drop_dead(folder)
                if name.endswith(".sock")
                and _is_socket(folder, name)
                and (f"-{here}." in name or _listened(folder, name))
            ]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise ServeError(f"run directory {run_dir}: {exc.strerror}") from exc
    return [str(Path(run_dir) / name) for name in sorted(names, key=_by_local_rank)]


def _is_socket(folder: int, name: str) -> bool:
    """No link to elsewhere: root would follow one that another user made."""
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    return False


def _listened(folder: int, name: str) -> bool:
    """Whether somebody on this machine takes connections at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"/proc/self/fd/{folder}/{name}")
        except BlockingIOError:  # more wait there than are taken
            return True
        except OSError:
            return False
    return True


def _by_local_rank(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    return (int(match["local_rank"] or 0), int(match["pid"])) if match else (0, 0)


def targets(run_dir: str) -> list[RunEntry]:
    """Every listening process that is alive, in a fixed order; files of dead ones are deleted.

    Those of other containers and machines that share the directory are listed as long as their
    files are there, if they can be reached from here.

    Raises:
        ServeError: the directory is not safe to read.
    """
    found = []
    try:
        with _opened(run_dir) as folder:
            for name in _drop_dead(folder):
                if not name.endswith(".json"):
                    continue
                entry = _read(folder, name)
                if entry is not None and _reachable(entry):
                    found.append(entry)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise ServeError(f"run directory {run_dir}: {exc.strerror}") from exc
    return sorted(found, key=lambda e: (e.service_name, e.namespace, e.run_id, e.rank, e.pid))


def file_sd(run_dir: str) -> str:
    """Prometheus file_sd JSON of the processes in a directory, see `as_file_sd`.

    Raises:
        ServeError: the directory is not safe to read.
    """
    return as_file_sd(targets(run_dir))


def as_file_sd(entries: Iterable[RunEntry]) -> str:
    """Prometheus file_sd JSON, one group per process.

    What is known about a process comes as `__meta_gpumem_*`, which Prometheus drops unless a
    relabel rule keeps it: the labels of a series stay the scraper's business. `__scheme__` is set
    for TLS. A process bound to all addresses is listed by its loopback address, or by the name of
    the machine where that is another one.

    https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
    """
    groups = []
    for entry in entries:
        known = {
            "service_name": entry.service_name,
            "namespace": entry.namespace,
            "run_id": entry.run_id,
            "rank": str(entry.rank),
            "local_rank": str(entry.local_rank),
            "world_size": str(entry.world_size),
            "node": entry.node,
            "pid": str(entry.pid),
        }
        labels = {f"__meta_gpumem_{name}": value for name, value in known.items() if value}
        if entry.scheme != "http":
            labels["__scheme__"] = entry.scheme
        groups.append({"labels": labels, "targets": [entry.target]})
    return json.dumps(groups, indent=2, sort_keys=True) + "\n"


def _opened(run_dir: str, *, make: bool = False) -> contextlib.AbstractContextManager[int]:
    """A descriptor of the directory, after a look at what was really opened."""
    return files.opened(run_dir, _WHAT, ServeError, make=make)


def _drop_dead(folder: int) -> list[str]:
    """Delete the files of this place's dead; the names of the others, bounded in number.

    In the directory of another user, which root may read, nothing is deleted.
    """
    living = []
    ours = os.fstat(folder).st_uid == os.geteuid()
    here = _place(_boot_id(), _machine(), _pid_namespace())
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
    """Values of the right type; unknown keys, of a newer version, are left out."""
    known = {field.name: str(field.type) for field in fields(RunEntry)}
    values = {name: value for name, value in raw.items() if name in known}
    for name, value in values.items():
        if type(value).__name__ != known[name]:
            return None
    try:
        entry = RunEntry(**values)
    except TypeError:
        return None
    right = entry.port in range(1, 65536) and entry.scheme in {"http", "https"} and entry.host
    return entry if right else None


def _alive(pid: int, start_ticks: int) -> bool:
    if not os.path.isdir("/proc/self"):  # noqa: PTH112
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return True
        return False
    return _start_ticks(pid) == start_ticks


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
