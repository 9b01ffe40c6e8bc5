"""`%load_ext gpumem_otel`, `%gpumem` and `%%gpumem` in a real IPython shell."""

from __future__ import annotations

import sys

import pytest
from support.line_memory import Memory

from gpumem_otel.api import lifecycle, line_profiler
from gpumem_otel.api.line_profiler import LineProfiler
from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.errors import CaptureError, ConfigError

pytest.importorskip("IPython", reason="IPython is not installed: the magics are not tested")
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

KIB = 1024


@pytest.fixture
def memory(monkeypatch):
    found = Memory(devices=2)
    torch = found.torch()
    torch.cuda.mem_get_info = lambda device: (1 << 30, 2 << 30)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(line_profiler, "_STATE", line_profiler._State())
    return found


@pytest.fixture
def shell(memory, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    hooks = sys.displayhook, sys.excepthook
    made = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))
    made.user_ns["memory"] = memory
    made.run_line_magic("load_ext", "gpumem_otel")
    yield made
    made.run_line_magic("unload_ext", "gpumem_otel")
    assert "gpumem" not in made.magics_manager.magics["line"]
    assert "gpumem" not in made.magics_manager.magics["cell"]
    made.restore_sys_module_state()
    sys.displayhook, sys.excepthook = hooks


def rows(report):
    """code -> (hits, bytes allocated on device 0) of the only function."""
    (function,) = report.to_dict()["functions"]
    return {
        line["code"]: (line["hits"], line["devices"].get("0", {}).get("allocation_bytes", 0))
        for line in function["lines"]
    }


def test_a_cell_is_run_in_the_notebook_and_its_lines_are_profiled(shell):
    report = shell.run_cell_magic(
        "gpumem", "", "a = memory.alloc(4096)\nfor _ in range(2):\n    b = memory.alloc(512)\n"
    )
    assert rows(report) == {
        "a = memory.alloc(4096)": (1, 4096),
        "for _ in range(2):": (3, 0),
        "    b = memory.alloc(512)": (2, 1024),
    }
    assert shell.user_ns["a"].sizes == (4096, 4096)
    assert "a = memory.alloc(4096)" in str(report)
    assert sys.gettrace() is None or "gpumem" not in repr(sys.gettrace())


def test_the_value_of_the_last_expression_is_shown(shell):
    with capture_output() as shown:
        report = shell.run_cell_magic("gpumem", "", "a = memory.alloc(512)\n6 * 7\n")
    assert "42" in shown.stdout
    assert rows(report)["6 * 7"][0] == 1


def test_magics_inside_the_cell_work(shell):
    with capture_output() as shown:
        shell.run_cell_magic("gpumem", "", "%who_ls int\nx = memory.alloc(512)\n")
    assert shell.user_ns["x"].sizes == (512, 512)
    assert shown.stderr == ""


def test_a_function_that_the_cell_itself_defines(shell):
    cell = "def func(n):\n    return memory.alloc(n)\nkept = func(1024)\n"
    report = shell.run_cell_magic("gpumem", "-f func", cell)
    names = {function.name: function for function in report.functions}
    assert set(names) == {"cell", "func"}
    assert names["func"].rows[-1].devices[0].allocation_bytes == 1024
    assert names["func"].source == ("def func(n):", "    return memory.alloc(n)")


def test_one_statement_and_a_function_that_is_there(shell):
    shell.run_cell("def func(n):\n    return memory.alloc(n)\n")
    report = shell.run_line_magic("gpumem", "-f func kept = func(2048)")
    assert rows(report)["    return memory.alloc(n)"] == (1, 2048)
    assert shell.user_ns["kept"].sizes == (2048, 2048)


def test_options(shell, tmp_path):
    file = tmp_path / "lines.txt"
    column = "requested_bytes.all.current"
    report = shell.run_cell_magic("gpumem", f"-c {column} -T {file}", "a = memory.alloc(1000)")
    assert column in str(report)
    assert file.read_text() == str(report)
    assert shell.run_cell_magic("gpumem", "-q", "a = memory.alloc(1000)") is None
    profiler = shell.run_cell_magic("gpumem", "-r -g 1", "b = memory.alloc(512, device=1)")
    assert isinstance(profiler, LineProfiler)
    assert " 512 B" in str(profiler.display())


def test_a_cell_that_raises_shows_its_lines_and_its_error(shell):
    with capture_output() as shown, pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("gpumem", "", "a = memory.alloc(512)\n1 / 0\n")
    assert "a = memory.alloc(512)" in shown.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-f nothing_here pass", "there is no such function"),
        ("-f len", "give a statement to run"),
        ("-z", "unrecognized arguments"),
        ("-g x pass", "invalid int value"),
    ],
)
def test_mistakes_are_one_line(shell, line, message):
    with pytest.raises(ConfigError, match=message) as caught:
        shell.run_line_magic("gpumem", line)
    assert "\n" not in str(caught.value)


def test_help_is_shown_and_nothing_run(shell):
    with capture_output() as shown:
        assert shell.run_line_magic("gpumem", "-h") is None
    assert "--function" in shown.stdout


def test_now_without_cuda_and_without_install(shell, memory):
    sys.modules["torch"].cuda.is_initialized = lambda: False
    assert "CUDA is not initialised" in str(shell.run_line_magic("gpumem", ""))
    assert memory.reads == 0
    sys.modules["torch"].cuda.is_initialized = lambda: True
    kept = memory.alloc(4096)
    text = str(shell.run_line_magic("gpumem", ""))
    assert "4.0 KiB" in text
    assert "gpumem_otel.install()" in text
    kept.free()


class Installed:
    """An agent as far as `%gpumem` looks at it."""

    def __init__(self, live):
        self.reader = self
        self.live = live


def test_now_with_what_holds_most(shell, memory, monkeypatch):
    sample = Sample((Frame("model.forward", "/src/model.py", 3),), 2, 4096)
    profile = HeapProfile(ProfileKind.LIVE, 0, (sample,))
    monkeypatch.setattr(lifecycle, "current", lambda: Installed(lambda: (profile,)))
    memory.alloc(4096)
    shown = shell.run_line_magic("gpumem", "")
    assert "model.forward (model.py:3)" in str(shown)
    bundle = shown._repr_mimebundle_()
    assert "4.0 KiB" in bundle["text/html"]
    assert bundle["text/plain"] == str(shown)

    def fails():
        raise CaptureError("read: the driver is gone")

    monkeypatch.setattr(lifecycle, "current", lambda: Installed(fails))
    assert "the driver is gone" in str(shell.run_line_magic("gpumem", ""))
