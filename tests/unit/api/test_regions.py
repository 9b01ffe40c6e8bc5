"""Regions: a frame of their own, a label, and nothing else."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import traceback
from types import SimpleNamespace

import pytest

import gpumem_otel
from gpumem_otel.api import lifecycle
from gpumem_otel.capture.frame_names import QualifiedNamer
from gpumem_otel.errors import ConfigError
from gpumem_otel.snapshot.stacks import file_function_namer, is_python, why_dropped


class Marks:
    def __init__(self):
        self.log = []

    def enter(self, text):
        self.log.append(text)
        return text

    def exit(self, mark):
        self.log.append(f"/{mark}")


@pytest.fixture
def marks(monkeypatch):
    made = Marks()
    monkeypatch.setattr(lifecycle._STATE, "agent", SimpleNamespace(marks=made))
    return made


def frames_here():
    return [(f.name, f.filename) for f in traceback.extract_stack()]


def test_without_an_agent_nothing_happens():
    with gpumem_otel.region("x"):
        pass
    assert gpumem_otel.region("x")(lambda: 5)() == 5
    assert "torch" not in sys.modules or lifecycle.current() is None


def test_a_block_is_labelled_and_unlabelled(marks):
    with gpumem_otel.region(" loss "):
        assert marks.log == ["gpumem_otel.region=loss"]
    assert marks.log == ["gpumem_otel.region=loss", "/gpumem_otel.region=loss"]


def test_an_error_passes_through_and_ends_it(marks):
    with pytest.raises(ZeroDivisionError), gpumem_otel.region("x"):
        raise ZeroDivisionError
    assert marks.log[-1] == "/gpumem_otel.region=x"


def test_a_decorated_function_is_the_same_with_a_frame_of_that_name(marks):
    @gpumem_otel.region("forward pass")
    def work(a: int, *, b: int = 2) -> tuple:
        """What it does."""
        return a, b, frames_here()

    a, b, frames = work(1, b=5)
    assert (a, b) == (1, 5)
    assert (work.__name__, work.__doc__) == ("work", "What it does.")
    assert str(inspect.signature(work)) == "(a: 'int', *, b: 'int' = 2) -> 'tuple'"
    assert ("forward pass", "gpumem_otel.region") in frames
    assert len(marks.log) == 2
    work(1)
    assert len(marks.log) == 4


@pytest.mark.parametrize("namer", [file_function_namer, QualifiedNamer()])
def test_the_frame_is_named_alike_live_and_out_of_a_file(namer):
    assert namer("loss", "gpumem_otel.region", 9) == "gpumem_otel.region:loss"
    assert is_python("a:b", "gpumem_otel.region")
    assert why_dropped("loss", "gpumem_otel.region") == ""


def test_a_name_with_colons_is_no_symbol():
    @gpumem_otel.region("a::b")
    def work():
        return frames_here()

    assert ("a:b", "gpumem_otel.region") in work()


def test_two_decorators_have_a_frame_each():
    @gpumem_otel.region("outer")
    @gpumem_otel.region("inner")
    def work():
        return [name for name, file in frames_here() if file == "gpumem_otel.region"]

    assert work() == ["outer", "inner"]


def test_methods_and_recursion(marks):
    class Model:
        @gpumem_otel.region("f")
        def down(self, depth):
            return 0 if not depth else 1 + self.down(depth - 1)

    assert Model().down(3) == 3
    assert len(marks.log) == 8


def test_coroutines_and_generators_have_the_frame_and_no_label(marks):
    @gpumem_otel.region("c")
    async def fetch():
        await asyncio.sleep(0)
        return frames_here()

    @gpumem_otel.region("g")
    def items():
        got = yield 1
        yield got, frames_here()
        return 7

    assert ("c", "gpumem_otel.region") in asyncio.run(fetch())
    assert inspect.iscoroutinefunction(fetch)
    made = items()
    assert next(made) == 1
    got, frames = made.send("sent")
    assert got == "sent"
    assert ("g", "gpumem_otel.region") in frames
    with pytest.raises(StopIteration) as end:
        next(made)
    assert end.value.value == 7
    assert marks.log == []


def test_asynchronous_generators_stay_as_they_are():
    async def items():
        yield 1

    assert gpumem_otel.region("g")(items) is items


def test_while_torch_traces_nothing_is_set(marks, monkeypatch):
    torch = SimpleNamespace(compiler=SimpleNamespace(is_compiling=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with gpumem_otel.region("x"):
        pass
    assert marks.log == []


@pytest.mark.parametrize("name", ["", "  ", 7, None])
def test_a_name_is_a_text(name):
    with pytest.raises(ConfigError, match="region: its name must be a text"):
        gpumem_otel.region(name)


def test_a_region_in_a_script_keeps_its_name():
    """GIVEN functions of `__main__` WHEN their region's frame is named THEN not by that module."""
    script = (
        "import sys\n"
        "from gpumem_otel import region\n"
        "from gpumem_otel.capture.frame_names import QualifiedNamer\n"
        "@region('in a frame')\n"
        "def framed():\n"
        "    frame = sys._getframe(1)\n"
        "    return frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno\n"
        "print(QualifiedNamer()(*framed()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "gpumem_otel.region:in a frame\n"
