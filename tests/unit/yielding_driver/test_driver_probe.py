"""Why the driver level is refused, out of a /proc and an NVML made for it."""

from __future__ import annotations

import os
import sys

import pytest
from support import fake_driver
from support.fake_driver import FAKE, UUID, Device

from gpumem_otel.yielding.driver import driver_api, preflight
from gpumem_otel.yielding.driver.preflight import refusal, why_not_permitted, yama_scope

NEW = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (dvs)\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)


@pytest.fixture
def device(tmp_path, monkeypatch):
    path = tmp_path / "device.json"
    monkeypatch.setenv(fake_driver.VARIABLE, str(path))
    return Device(path)


@pytest.fixture
def root(tmp_path):
    """A root folder in which nothing stands in the way."""
    files = {
        "proc/driver/nvidia/version": NEW,
        "proc/self/maps": "7f00-7f01 r-xp 00000000 fe:01 12 /usr/lib/libnccl.so.2\n",
        "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
        "proc/sys/kernel/yama/ptrace_scope": "1\n",
    }
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    return tmp_path / "root"


@pytest.fixture
def ask(root, device):
    def call(**changes):
        known = {
            "environ": {},
            "communicators": 0,
            "foreign": "",
            "uuids": (),
            "driver": FAKE,
            "nvml": FAKE,
            "root": root,
        }
        return refusal(**{**known, **changes})

    return call


def test_nothing_stands_in_the_way(ask, device):
    assert ask() == ""
    assert ask(uuids=(UUID,)) == ""
    assert ask(nvml="no_such_module") == ""
    assert device.names == [], "it called the driver"


def test_it_is_not_installed(ask):
    for module in ("no_such_package.driver", "no_such_module"):
        assert ask(driver=module) == (
            "cuda-bindings is not installed: pip install 'cuda-bindings>=12.8' nvidia-ml-py"
        )


def test_its_package_is_broken(ask, tmp_path, monkeypatch):
    """Looking for a module imports the packages that it is in."""
    (tmp_path / "broken_bindings").mkdir()
    (tmp_path / "broken_bindings/__init__.py").write_text("raise OSError('no such symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert ask(driver="broken_bindings.driver").startswith("cuda-bindings is not installed: ")


def test_there_is_no_driver(ask, monkeypatch):
    """Asked of the real bindings alone, of which only the name is needed here."""
    monkeypatch.setattr(preflight, "_is_there", lambda _module: True)
    monkeypatch.setattr(driver_api, "_LIBRARY", "libc.so.6")
    assert ask(driver=driver_api.DRIVER) == ""
    monkeypatch.setattr(driver_api, "_LIBRARY", "libno-such-driver.so.1")
    assert ask(driver=driver_api.DRIVER) == (
        "there is no NVIDIA driver here (libcuda.so.1 cannot be loaded)"
    )


BINDINGS = """
def cuDriverGetVersion():
    raise RuntimeError('"cuda" is a driver library,\\nsee the insides of the binding')
"""


@pytest.mark.parametrize(
    ("library", "says"),
    [
        ("libno-such-driver.so.1", "there is no NVIDIA driver here (libcuda.so.1 cannot be"),
        ("libc.so.6", "cuDriverGetVersion is not available: the driver and cuda-bindings do not"),
    ],
)
def test_what_the_bindings_raise_is_not_told(tmp_path, monkeypatch, library, says):
    for name, text in (("__init__", ""), ("bindings/__init__", ""), ("bindings/driver", BINDINGS)):
        path = tmp_path / "cuda" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(driver_api, "_LIBRARY", library)
    for name in [one for one in sys.modules if one.partition(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    try:
        calls = driver_api.DriverCalls(os.getpid())
        with pytest.raises(driver_api.DriverError) as caught:
            calls._call("cuDriverGetVersion")
    finally:
        for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
            sys.modules.pop(name, None)
    assert str(caught.value).startswith(says)
    assert "insides" not in str(caught.value)


@pytest.mark.parametrize("text", ["raise OSError('no such symbol')", "import no_such_module"])
def test_bindings_that_can_not_be_imported(tmp_path, monkeypatch, text):
    (tmp_path / "broken_driver.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as caught:
        driver_api.DriverCalls(os.getpid(), driver="broken_driver")
    assert str(caught.value) == (
        "cuda-bindings cannot be imported: pip install 'cuda-bindings>=12.8' nvidia-ml-py"
    )


def test_what_the_caller_knows(ask):
    assert ask(communicators=3).startswith("3 NCCL communicator(s) live in this process")
    assert ask(foreign="1 GiB is shared by CUDA IPC") == (
        "1 GiB is shared by CUDA IPC, which the driver cannot restore; release it first"
    )


@pytest.mark.parametrize(
    ("version", "refused"), [("565.57.01", True), ("570.0", False), ("600.1.1", False), ("", False)]
)
def test_the_drivers_age(ask, device, root, version, refused):
    device.set(driver=version)
    (root / "proc/driver/nvidia/version").unlink()
    assert ask() == (
        f"driver {version} cannot restore processes; install 570 or newer" if refused else ""
    )
    text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed\nGCC version: 12.3.0\n"
    (root / "proc/driver/nvidia/version").write_text(text)
    assert bool(ask(nvml="no_such_module")) == refused


def test_a_device_that_is_divided(ask, device):
    assert "MIG" in ask(environ={"CUDA_VISIBLE_DEVICES": "MIG-0f1e"})
    device.set(mig=1)
    assert "MIG" in ask()
    assert "MIG" in ask(uuids=(UUID,))
    assert ask(uuids=("GPU-another",)) == ""


def test_mps(ask, device, root):
    device.set(mps=[os.getpid() + 1])
    assert ask() == ""
    device.set(mps=[os.getpid()])
    assert "MPS" in ask()
    device.set(mps=[])
    pipes = root / "somewhere"
    pipes.mkdir()
    environ = {"CUDA_MPS_PIPE_DIRECTORY": "/somewhere"}
    assert ask(environ=environ) == ""
    (pipes / "control").touch()
    assert "MPS" in ask(environ=environ)
    (pipes / "nvidia-cuda-mps-control.pid").write_text("4711\n")
    assert ask(environ=environ) == "", "its daemon has ended"
    (root / "proc/4711").mkdir()
    assert "MPS" in ask(environ=environ)


def test_shared_memory_of_nccl(ask, root):
    with (root / "proc/self/maps").open("a") as maps:
        maps.write("7f02-7f03 rw-s 00000000 00:1a 99 /dev/shm/nccl-Ab12Cd (deleted)\n")
    assert "NCCL communicator is mapped" in ask()


def test_another_machine(ask, monkeypatch):
    monkeypatch.setattr(preflight.platform, "machine", lambda: "aarch64")
    assert "aarch64" in ask()


def test_a_python_without_an_executable(ask, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    assert "no executable" in ask()


def test_permission_says_what_to_change(root):
    error = "cuCheckpointProcessGetState: CUDA_ERROR_NOT_PERMITTED (800)"
    assert why_not_permitted(error, root) == (
        " (kernel.yama.ptrace_scope is 1, CAP_SYS_PTRACE is not set): "
        "give the container that capability, or set the scope to 0"
    )
    (root / "proc/self/status").write_text("CapEff:\t0000000000080000\n")
    assert "CAP_SYS_PTRACE is set" in why_not_permitted(error, root)
    assert why_not_permitted("cuInit: CUDA_ERROR_NO_DEVICE (100)", root) == ""


def test_the_scope_of_yama(root):
    assert yama_scope(root) == 1
    (root / "proc/sys/kernel/yama/ptrace_scope").unlink()
    assert yama_scope(root) == 0
