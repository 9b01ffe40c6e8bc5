"""Why the driver would not bring this process back: asked before anything is locked.

Nothing here makes a context or starts a process. What can not be told from inside is said by the
pages for people: managed memory (`cudaMallocManaged`: every CUDA process has /dev/nvidia-uvm open
and mapped, so that shows nothing), CUDA IPC done by a library beside torch, and NCCL communicators
that were made without torch.distributed and without shared memory. libnccl in the list of mapped
files shows nothing either: torch itself is linked against it.

Sources: README and issues of NVIDIA's repository cuda-checkpoint (x86-64 only, UVM, IPC; MIG is
issue 42; permission is issues 6 and 25); CUDA Multi-Process Service manual (pipe directory, process
list); prctl(2) and the kernel's documentation of Yama; the two-rank NCCL failure was measured.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.yielding.driver.driver_api import DRIVER, NO_DRIVER, NOT_INSTALLED, has_driver

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_OLDEST_DRIVER: Final = 570
_MPS_FOLDER: Final = "/tmp/nvidia-mps"  # noqa: S108 - CUDA's own default
_PR_SET_PTRACER: Final = 0x59616D61
_CAP_SYS_PTRACE: Final = 19
_NOT_ALLOWED: Final = ("NOT_PERMITTED", "OPERATING_SYSTEM", "(800)", "(304)")


def refusal(
    *,
    environ: Mapping[str, str],
    communicators: int,
    foreign: str,
    uuids: tuple[str, ...],
    driver: str,
    nvml: str,
    root: Path = Path("/"),
) -> str:
    """The first reason found, with the way out; "" where there is none.

    Args:
        environ: the process's environment.
        communicators: NCCL communicators of this process that live.
        foreign: a clause about memory shared with others, "" for none.
        uuids: of the devices in use; () for all that NVML shows.
        driver: name of the module with the driver's functions.
        nvml: likewise of NVML, which may be missing.
        root: where /proc and the pipes of MPS are looked for.
    """
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "AMD64"}:
        return f"the driver does this on Linux on x86-64 only, not on {platform.machine()}"
    if not sys.executable:
        return "this Python has no executable that a helper process could be started with"
    if not _is_there(driver):
        return NOT_INSTALLED
    if driver == DRIVER and not has_driver():
        return NO_DRIVER
    if communicators:
        return (
            f"{communicators} NCCL communicator(s) live in this process, it would never come back;"
            " destroy the process groups first"
        )
    if foreign:
        return f"{foreign}, which the driver can not bring back; give it up first"
    asked = _Nvml(nvml, uuids)
    old = _too_old(asked.driver_version() or _version_in_proc(root))
    return old or _mig(environ, asked) or _mps(environ, asked, root) or _nccl_shared_memory(root)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # of the packages that it is in, which are imported for that
        return False


class _Nvml:
    """What NVML says; every answer may be missing."""

    def __init__(self, module: str, uuids: Iterable[str]) -> None:
        self._nvml: Any = None
        self._uuids = tuple(uuids)
        try:
            nvml = importlib.import_module(module)
            nvml.nvmlInit()
        except Exception:  # not installed, or without a driver
            return
        self._nvml = nvml

    def driver_version(self) -> str:
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except Exception:
            return ""
        return version.decode() if isinstance(version, bytes) else str(version)

    def has_mig(self) -> bool:
        """Whether one of the devices is divided."""
        return any(self._ask(device, "nvmlDeviceGetMigMode", 0) for device in self._devices())

    def has_mps(self) -> bool:
        """Whether this process is a client of MPS."""
        pid = os.getpid()
        for device in self._devices():
            try:
                clients = self._nvml.nvmlDeviceGetMPSComputeRunningProcesses(device)
            except Exception:  # noqa: S112 - not in every version
                continue
            if any(client.pid == pid for client in clients):
                return True
        return False

    def _ask(self, device: Any, name: str, place: int) -> int:
        try:
            return int(getattr(self._nvml, name)(device)[place])
        except Exception:  # NVMLError_NotSupported: a kind of device that can not
            return 0

    def _devices(self) -> list[Any]:
        nvml = self._nvml
        try:
            if self._uuids:
                return [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in self._uuids]
            return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        except Exception:
            return []


def _version_in_proc(root: Path) -> str:
    """Of `NVRM version: NVIDIA UNIX ... Kernel Module ...  580.159.03  ...`."""
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", _text(root / "proc/driver/nvidia/version"))
    return found[1] if found else ""


def _too_old(version: str) -> str:
    major = version.partition(".")[0]
    if not major.isdigit() or int(major) >= _OLDEST_DRIVER:
        return ""  # the keeper asks the driver itself before anything is locked
    return f"driver {version} can not bring processes back; it takes {_OLDEST_DRIVER} or newer"


def _mig(environ: Mapping[str, str], nvml: _Nvml) -> str:
    if "MIG-" in environ.get("CUDA_VISIBLE_DEVICES", "") or nvml.has_mig():
        return "the device is divided (MIG), which the driver does not support here"
    return ""


def _mps(environ: Mapping[str, str], nvml: _Nvml, root: Path) -> str:
    told = "this process uses the device through MPS, which the driver does not support here"
    if nvml.has_mps():
        return told
    folder = root / environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_FOLDER).lstrip("/")
    if not (folder / "control").exists():
        return ""
    number = _text(folder / "nvidia-cuda-mps-control.pid").strip()
    if number.isdigit() and not (root / "proc" / number).exists():
        return ""  # left behind by a daemon that has ended
    return told


def _nccl_shared_memory(root: Path) -> str:
    if "/dev/shm/nccl-" in _text(root / "proc/self/maps"):  # noqa: S108 - NCCL's own name
        return (
            "shared memory of a NCCL communicator is mapped, it would never come back; "
            "destroy the communicator first"
        )
    return ""


# permission


def yama_scope(root: Path = Path("/")) -> int:
    """Who may act on whom: 0 the same user, 1 ancestors, 2 with CAP_SYS_PTRACE, 3 nobody."""
    number = _text(root / "proc/sys/kernel/yama/ptrace_scope").strip()
    return int(number) if number.isdigit() else 0


def why_not_permitted(error: str, root: Path = Path("/")) -> str:
    """What to change where an error of the driver speaks of permission, "" where it does not."""
    if not any(sign in error for sign in _NOT_ALLOWED):
        return ""
    scope = yama_scope(root)
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(root / "proc/self/status"), re.MULTILINE)
    capable = bool(found and int(found[1], 16) >> _CAP_SYS_PTRACE & 1)
    told = f" (kernel.yama.ptrace_scope is {scope}, CAP_SYS_PTRACE is {'' if capable else 'not '}"
    return told + "there): give the container that capability, or set the scope to 0"


def allow_tracing(pid: int = 0) -> bool:
    """Let this process be acted on by that one, which is none of its ancestors; 0: nobody again.

    Takes the place of what the job itself may have allowed, so it is called only where Yama
    stands in the way.

    Returns:
        Whether the kernel has Yama.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return False
    return bool(prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
