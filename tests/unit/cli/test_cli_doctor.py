"""`doctor`: its checks with stand-ins of torch that a child process imports."""

from __future__ import annotations

import importlib.util
import json
import socket

import pytest

from gpumem_otel.cli import checks
from gpumem_otel.cli.main import main

TORCH = """
import types
__version__ = {version!r}
version = types.SimpleNamespace(cuda={cuda!r}, hip=None)
class _C: _cuda_record_memory_history = print
class cuda:
    _lazy_call = print
    is_available = staticmethod(lambda: {devices} > 0)
    device_count = staticmethod(lambda: {devices})
    get_device_properties = staticmethod(
        lambda index: types.SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000))
    get_allocator_backend = staticmethod(lambda: {backend!r})
"""


@pytest.fixture
def with_torch(tmp_path, monkeypatch):
    """Make `import torch` of a child process find the given text."""

    def put(text: str) -> dict[str, str]:
        (tmp_path / "torch.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        return {"PYTHONPATH": str(tmp_path), "GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run")}

    return put


def torch_text(version="2.11.0+cu129", cuda="12.9", devices=1, backend="native") -> str:
    return TORCH.format(version=version, cuda=cuda, devices=devices, backend=backend)


def named(environ, name, **options):
    options = {"torch_timeout_seconds": 30.0, "require_gpu": False, **options}
    return [check for check in checks.run_all(environ, **options) if check.name == name]


def test_a_gpu_that_works(with_torch):
    environ = with_torch(torch_text())
    found = checks.run_all(environ, torch_timeout_seconds=30.0, require_gpu=True)
    assert [c for c in found if c.status == checks.PROBLEM] == []
    details = {c.name: c.detail for c in found}
    assert details["torch"] == "2.11.0+cu129, built for CUDA 12.9"
    assert details["cuda device 0"] == "NVIDIA H200, 139.7 GiB"
    assert details["allocator"] == "native caching allocator"
    assert details["recording"] == "this torch's recorder is known"


def test_cuda_build_without_a_gpu_says_why_nothing_records(with_torch):
    environ = with_torch(torch_text(devices=0))
    (check,) = named(environ, "cuda")
    assert check.status == checks.MISSING
    assert check.detail.startswith("torch is built for CUDA 12.9 but sees no device")
    assert check.detail.endswith("so nothing is recorded")
    (check,) = named(environ, "cuda", require_gpu=True)
    assert check.status == checks.PROBLEM


def test_cpu_build(with_torch):
    (check,) = named(with_torch(torch_text(version="2.11.0+cpu", cuda=None, devices=0)), "cuda")
    assert (check.status, "built without CUDA" in check.detail) == (checks.MISSING, True)


def test_other_allocators(with_torch):
    environ = with_torch(torch_text(backend="cudaMallocAsync"))
    (check,) = named(environ, "allocator")
    assert (check.status, check.detail) == (checks.PROBLEM, "allocator backend cudaMallocAsync")
    (check,) = named({**environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "allocator")
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in check.detail


def test_old_torch(with_torch):
    (check,) = named(with_torch(torch_text(version="2.0.1")), "torch")
    assert (check.status, "2.3 or newer" in check.advice) == (checks.MISSING, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ImportError('libcudart.so.12: no such file')", "libcudart.so.12: no such file"),
        ("import os; os.write(2, b'crash\\n'); os._exit(134)", "ended with 134: crash"),
        ("import os; os.write(1, b'not JSON'); os._exit(0)", "ended with 0"),
    ],
)
def test_broken_torch_is_a_problem(with_torch, text, words):
    (check,) = named(with_torch(text), "torch")
    assert check.status == checks.PROBLEM
    assert words in check.detail


def test_torch_that_prints_is_still_read(with_torch):
    (check,) = named(with_torch("print('hello from a driver')\n" + torch_text()), "torch")
    assert check.status == checks.OK


def test_torch_that_hangs_is_given_up(with_torch):
    environ = with_torch("import threading; threading.Event().wait()")
    (check,) = named(environ, "torch", torch_timeout_seconds=1.0)
    assert (check.status, "over 1 s" in check.detail) == (checks.PROBLEM, True)


@pytest.fixture
def no_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    return {"GPUMEM_OTEL_RUN_DIR": str(tmp_path / "run")}


def test_no_torch_is_fine_on_a_laptop(no_torch):
    (check,) = named(no_torch, "torch")
    assert (check.status, "fine on a laptop" in check.detail) == (checks.MISSING, True)
    (check,) = named(no_torch, "torch", require_gpu=True)
    assert check == checks.Check("torch", checks.PROBLEM, "not installed", "pip install torch")


def test_bad_variables_and_disabled(no_torch):
    found = named({**no_torch, "GPUMEM_OTEL_PORT": "x", "GPUMEM_OTEL_DISABLED": "1"}, "settings")
    assert [c.status for c in found] == [checks.PROBLEM] * 2
    assert found[0].detail.startswith("GPUMEM_OTEL_PORT must be")
    assert "GPUMEM_OTEL_DISABLED" in found[1].detail


@pytest.fixture
def taken():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_port(no_torch, taken):
    environ = {**no_torch, "GPUMEM_OTEL_PORT": str(taken)}
    (check,) = named(environ, "port")
    assert check.status == checks.MISSING
    (check,) = named({**environ, "GPUMEM_OTEL_SERVE": "1"}, "port")
    assert (check.status, "in use" in check.detail) == (checks.PROBLEM, True)


@pytest.mark.parametrize("name", ["TOKEN_FILE", "TLS_CERT_FILE", "TLS_KEY_FILE"])
def test_files_that_the_listener_would_refuse(no_torch, name):
    given = {**no_torch, f"GPUMEM_OTEL_{name}": "/nowhere"}
    (check,) = named({**given, "GPUMEM_OTEL_SERVE": "1"}, "port")
    assert check.status == checks.PROBLEM
    assert check.detail.startswith("nothing would listen, because: ")
    assert ("/nowhere" in check.detail) is (name != "TLS_KEY_FILE")
    (check,) = named({**given, "GPUMEM_OTEL_PORT": "0"}, "port")
    assert check.status == checks.OK, "it was not asked for"


def test_otlp_endpoint(no_torch, taken):
    up = {**no_torch, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{taken}"}
    (check,) = named(up, "otlp")
    assert check.status == checks.OK
    (check,) = named({**no_torch, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, "otlp")
    assert (check.status, "refused" in check.detail) == (checks.PROBLEM, True)
    (check,) = named({**no_torch, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://:x"}, "otlp")
    assert (check.status, "no host" in check.detail) == (checks.PROBLEM, True)


def test_json_and_exit_code(capsys, monkeypatch, no_torch):
    for name, value in no_torch.items():
        monkeypatch.setenv(name, value)
    for name in ("PYROSCOPE_SERVER_ADDRESS", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--json"]) == 0
    form = json.loads(capsys.readouterr().out)
    assert list(form) == ["ok", "checks"]
    assert form["ok"] is True
    assert all(list(c) == ["name", "status", "detail", "advice"] for c in form["checks"])
    assert {c["status"] for c in form["checks"]} <= {"ok", "missing"}
    assert main(["doctor", "--json", "--require-gpu"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["doctor", "--require-gpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("problem  torch ") for line in lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import pyroscope_native", "ModuleNotFoundError: No module named 'pyroscope_native'"),
        ("import os; os._exit(3)", "its import ended with 3"),
    ],
)
@pytest.mark.parametrize("asked", [True, False])
def test_host_profiles_whose_binary_does_not_fit(tmp_path, monkeypatch, text, reason, asked):
    pytest.importorskip("pyroscope")
    (tmp_path / "pyroscope.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environ = {"GPUMEM_OTEL_RUN_DIR": str(tmp_path), "GPUMEM_OTEL_HOST_PROFILES": str(int(asked))}
    (check,) = named(environ, "host profiles")
    assert check.status == (checks.PROBLEM if asked else checks.MISSING)
    assert check.detail.startswith("pyroscope-io ")
    assert check.detail.endswith(f" does not work here: {reason}")


def test_host_profiles_that_can_be_had(tmp_path):
    pytest.importorskip("pyroscope")
    (check,) = named({"GPUMEM_OTEL_RUN_DIR": str(tmp_path)}, "host profiles")
    assert check.status == checks.OK


def test_control_is_off_unless_asked_for(no_torch):
    (check,) = named(no_torch, "control")
    assert check.status == checks.MISSING
    assert check.detail.startswith("off")


@pytest.fixture
def any_port_is_free(monkeypatch):
    monkeypatch.setattr("gpumem_otel.cli.checks.why_not_free", lambda host, port: "")


@pytest.mark.usefixtures("any_port_is_free")
def test_control_says_where_commands_are_taken(no_torch, tmp_path):
    asked = {**no_torch, "GPUMEM_OTEL_CONTROL": "1"}
    where = f"takes commands at a socket in {no_torch['GPUMEM_OTEL_RUN_DIR']}"
    (check,) = named(asked, "control")
    assert check == checks.Check("control", checks.OK, where)
    assert not (tmp_path / "run").exists()
    asked["GPUMEM_OTEL_CONTROL_HOST"] = "::1"
    asked["GPUMEM_OTEL_CONTROL_TOKEN"] = "token-of-the-environment"
    (check,) = named(asked, "control")
    assert (check.status, check.detail) == (checks.OK, f"{where} and http://[::1]:9564")
    assert "inherited by every child" in check.advice
    assert "token-of-the-environment" not in repr(check)
    (check,) = named({**asked, "GPUMEM_OTEL_DISABLED": "1"}, "control")
    said = "GPUMEM_OTEL_DISABLED is set: no commands are taken"
    assert check == checks.Check("control", checks.MISSING, said)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"HOST": "0.0.0.0"}, ["needs credentials"]),
        ({"HOST": "0.0.0.0", "TOKEN": "0123456789abcdef"}, ["needs TLS"]),
        ({"TOKEN_FILE": "/nowhere"}, ["control token file /nowhere: No such file"]),
        ({"TOKEN": "short"}, ["at least 16 characters"]),
        (
            {"HOST": "::1", "TOKEN": "short", "TLS_CERT_FILE": "/nowhere"},
            ["at least 16 characters", "/nowhere"],
        ),
    ],
)
def test_control_settings_that_the_listener_refuses(no_torch, settings, words):
    given = {f"GPUMEM_OTEL_CONTROL_{name}": value for name, value in settings.items()}
    found = named({**no_torch, "GPUMEM_OTEL_CONTROL": "1", **given}, "control")
    assert [check.status for check in found] == [checks.PROBLEM] * len(found)
    assert len(found) == len(words)
    for check, word in zip(found, words, strict=True):
        assert check.detail.startswith("over TCP would not start, because: ")
        assert word in check.detail
        assert check.advice == "the socket still takes commands"


def test_a_port_of_control_that_another_has(no_torch):
    """The port of this rank, which the listener would use."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = {
            **no_torch,
            "LOCAL_RANK": "1",
            "GPUMEM_OTEL_CONTROL": "1",
            "GPUMEM_OTEL_CONTROL_HOST": "127.0.0.1",
            "GPUMEM_OTEL_CONTROL_TOKEN": "0123456789abcdef",
            "GPUMEM_OTEL_CONTROL_PORT": str(port - 1),
        }
        (check,) = named(asked, "control")
    why = f"over TCP would not start, because: 127.0.0.1:{port}: Address already in use"
    assert (check.status, check.detail) == (checks.PROBLEM, why)
    assert check.advice == "the socket still takes commands"


@pytest.mark.usefixtures("any_port_is_free")
def test_control_in_a_folder_that_others_can_write(no_torch, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    asked = {**no_torch, "GPUMEM_OTEL_CONTROL": "1"}
    (check,) = named(asked, "control")
    assert check.detail.startswith("would not start, because: ")
    assert "is writable by others" in check.detail
    assert check.advice == "no commands are taken"
    asked |= {"GPUMEM_OTEL_CONTROL_HOST": "::1", "GPUMEM_OTEL_CONTROL_TOKEN": "0123456789abcdef"}
    (check,) = named(asked, "control")
    assert check.advice == "the port still takes commands"
    asked["GPUMEM_OTEL_CONTROL_TOKEN"] = "short"
    assert [check.advice for check in named(asked, "control")] == ["no commands are taken"] * 2


def test_hints_name_packages_that_can_be_installed(no_torch, monkeypatch):
    def none(name):
        raise checks.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.metadata, "version", none)
    found = checks.run_all(no_torch, torch_timeout_seconds=60.0, require_gpu=False)
    advice = {check.name: check.advice for check in found}
    assert "pip install 'cuda-bindings>=12.8' nvidia-ml-py" in advice["cuda-bindings"]
    assert not [line for line in advice.values() if "install 'gpumem-otel" in line]


def test_a_run_folder_that_cannot_be_created(tmp_path):
    (check,) = named({"GPUMEM_OTEL_RUN_DIR": "/proc/nowhere/run"}, "run folder")
    assert (check.status, check.detail) == (
        checks.PROBLEM, "/proc/nowhere/run cannot be created in /proc"
    )  # fmt: skip
    assert check.advice == "set GPUMEM_OTEL_RUN_DIR"
    (check,) = named({"GPUMEM_OTEL_RUN_DIR": str(tmp_path / "a" / "b")}, "run folder")
    assert check.status == checks.OK
