"""Checks, before anything is locked, whether the driver could bring this process back.

Nothing here makes a context or starts a process. Not detectable from inside, and documented for
people: managed memory (`cudaMallocManaged`; every CUDA process has /dev/nvidia-uvm open and
mapped), CUDA IPC by a library other than torch, and NCCL communicators made without
torch.distributed and without shared memory (libnccl is always mapped: torch is linked against it).

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
    """The first reason against it, with the way out; "" if there is none.

    Args:
        environ: the process's environment.
        communicators: number of living NCCL communicators of this process.
        foreign: a clause about memory shared with others, "" for none.
        uuids: of the devices in use; () for all of NVML.
        driver: name of the module with the driver's functions.
        nvml: name of the NVML module, which may be missing.
        root: of /proc and the pipes of MPS.
    """
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "AMD64"}:
        return f"the driver supports this only on Linux on x86-64, not on {platform.machine()}"
    if not sys.executable:
        return "this Python has no executable to start a helper process with"
    if not _is_there(driver):
        return NOT_INSTALLED
    if driver == DRIVER and not has_driver():
        return NO_DRIVER
    if communicators:
        return (
            f"{communicators} NCCL communicator(s) live in this process, which could not be "
            "restored; destroy the process groups first"
        )
    if foreign:
        return f"{foreign}, which the driver cannot restore; release it first"
    queries = _Nvml(nvml, uuids)
    return (
        _too_old(queries.driver_version() or _version_in_proc(root))
        or _mig(environ, queries)
        or _mps(environ, queries, root)
        or _nccl_shared_memory(root)
    )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # raised by a parent package, which this imports
        return False


class _Nvml:
    """Queries of NVML; each may fail."""

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
        """Whether one of the devices uses MIG."""
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
        except Exception:  # NVMLError_NotSupported
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
    """From `NVRM version: NVIDIA UNIX ... Kernel Module ...  580.159.03  ...`."""
    match = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", _text(root / "proc/driver/nvidia/version"))
    return match[1] if match else ""


def _too_old(version: str) -> str:
    major = version.partition(".")[0]
    if not major.isdigit() or int(major) >= _OLDEST_DRIVER:
        return ""  # the helper asks the driver itself before anything is locked
    return f"driver {version} cannot restore processes; install {_OLDEST_DRIVER} or newer"


def _mig(environ: Mapping[str, str], nvml: _Nvml) -> str:
    if "MIG-" in environ.get("CUDA_VISIBLE_DEVICES", "") or nvml.has_mig():
        return "the device is partitioned (MIG), which the driver does not support here"
    return ""


def _mps(environ: Mapping[str, str], nvml: _Nvml, root: Path) -> str:
    why = "this process uses the device through MPS, which the driver does not support here"
    if nvml.has_mps():
        return why
    folder = root / environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_FOLDER).lstrip("/")
    if not (folder / "control").exists():
        return ""
    number = _text(folder / "nvidia-cuda-mps-control.pid").strip()
    if number.isdigit() and not (root / "proc" / number).exists():
        return ""  # left by a daemon that has ended
    return why


def _nccl_shared_memory(root: Path) -> str:
    if "/dev/shm/nccl-" in _text(root / "proc/self/maps"):  # noqa: S108 - NCCL's own name
        return (
            "shared memory of a NCCL communicator is mapped, so the process could not be restored; "
            "destroy the communicator first"
        )
    return ""


def yama_scope(root: Path = Path("/")) -> int:
    """Which processes may trace: 0 the same user's, 1 ancestors, 2 with CAP_SYS_PTRACE, 3 none."""
    number = _text(root / "proc/sys/kernel/yama/ptrace_scope").strip()
    return int(number) if number.isdigit() else 0


def why_not_permitted(error: str, root: Path = Path("/")) -> str:
    """What to change after a permission error of the driver; "" for other errors."""
    if not any(sign in error for sign in _NOT_ALLOWED):
        return ""
    scope = yama_scope(root)
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(root / "proc/self/status"), re.MULTILINE)
    capable = bool(match and int(match[1], 16) >> _CAP_SYS_PTRACE & 1)
    state = f" (kernel.yama.ptrace_scope is {scope}, CAP_SYS_PTRACE is {'' if capable else 'not '}"
    return state + "set): give the container that capability, or set the scope to 0"


def allow_tracing(pid: int = 0) -> bool:
    """Allow a process that is no ancestor to trace this one; 0 withdraws that.

    Overwrites what the job itself may have allowed, so it is called only if Yama is the obstacle.

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
