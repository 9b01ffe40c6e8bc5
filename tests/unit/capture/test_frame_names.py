"""Qualified names from loaded modules; torch's own modules are named in tests/torch."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import types
import weakref

import pytest

from gpumem_otel.capture import frame_names
from gpumem_otel.capture.frame_names import QualifiedNamer

SOURCE = """
import functools

def plain():
    return sys._getframe()

class Linear:
    def forward(self):
        return sys._getframe()

    @property
    def shape(self):
        return sys._getframe()

    @staticmethod
    def build():
        return sys._getframe()

    @classmethod
    def make(cls):
        return sys._getframe()

    @functools.cached_property
    def once(self):
        return sys._getframe()

    class Inner:
        def forward(self):
            return sys._getframe()

class Identity:
    def forward(self):
        return sys._getframe()

def outer():
    def helper():
        return sys._getframe()
    class Local:
        def forward(self):
            return helper()
    return Local()

def listed():
    return [sys._getframe() for _ in (1,)][0]

def generated():
    return next(sys._getframe() for _ in (1,))

square = lambda: sys._getframe()

@functools.lru_cache
def cached():
    return sys._getframe()

part = functools.partial(plain)
import sys
"""

DECORATED = """
import functools, sys, decorators_of_test

@decorators_of_test.noisy
def wrapped():
    return sys._getframe()

@decorators_of_test.silent
def hidden():
    return sys._getframe()

class Tensor:
    @decorators_of_test.noisy
    def backward(self):
        return sys._getframe()
    def plain(self):
        return sys._getframe()
Tensor.__module__ = "elsewhere"
"""

DECORATORS = """
import functools
def noisy(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper
def silent(function):
    return lambda *args: function(*args)
"""

WRAPPED_IN_A_CELL = """@noisy
def wrapped():
    pass
class Model:
    @noisy
    def method(self):
        pass
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def build(name, source):
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield build
    for name in made:
        sys.modules.pop(name, None)


def named(namer, frame):
    return namer(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)


def test_every_kind_of_function(load):
    m = load("kinds_of_test", SOURCE)
    namer = QualifiedNamer()
    listed = "listed" if sys.version_info >= (3, 12) else "listed.<locals>.<listcomp>"
    expected = {
        "plain": m.plain(),
        "Linear.forward": m.Linear().forward(),
        "Linear.shape": m.Linear().shape,
        "Linear.build": m.Linear.build(),
        "Linear.make": m.Linear.make(),
        "Linear.once": m.Linear().once,
        "Linear.Inner.forward": m.Linear.Inner().forward(),
        "Identity.forward": m.Identity().forward(),
        "outer.<locals>.helper": m.outer().forward(),
        listed: m.listed(),
        "generated.<locals>.<genexpr>": m.generated(),
        "<lambda>": m.square(),
        "cached": m.cached(),
    }
    assert {named(namer, frame): name for name, frame in expected.items()} == {
        f"kinds_of_test.{name}": name for name in expected
    }


def test_a_method_of_a_class_in_a_function(load):
    m = load(
        "locals_of_test",
        "import sys\n" + SOURCE.replace("helper()\n    return", "sys._getframe()\n    return"),
    )
    frame = m.outer().forward()
    assert named(QualifiedNamer(), frame) == "locals_of_test.outer.<locals>.Local.forward"


def test_what_decorators_wrap_is_found(load):
    load("decorators_of_test", DECORATORS)
    m = load("decorated_of_test", DECORATED)
    namer = QualifiedNamer()
    assert named(namer, m.wrapped()) == "decorated_of_test.wrapped"
    assert named(namer, m.hidden()) == "decorated_of_test.hidden"
    file = sys.modules["decorators_of_test"].__file__
    assert namer("wrapper", file, 6) == "decorators_of_test.noisy.<locals>.wrapper"


def test_a_class_that_says_it_is_from_elsewhere(load):
    load("decorators_of_test", DECORATORS)
    m = load("pretends_of_test", DECORATED)
    namer = QualifiedNamer()
    assert named(namer, m.Tensor().plain()) == "pretends_of_test.Tensor.plain"


def test_module_code_and_names_that_nothing_holds(load):
    m = load("gone_of_test", SOURCE)
    namer = QualifiedNamer()
    assert namer("<module>", m.__file__, 2) == "gone_of_test.<module>"
    assert namer("deleted", m.__file__, 2) == "gone_of_test.deleted"
    # a line that the function does not have: another function of that name was there once
    assert namer("plain", m.__file__, 999) == "gone_of_test.plain"


@pytest.mark.parametrize(
    ("name", "filename", "expected"),
    [
        ("call", "/tmp/torchinductor_u/ab/cab.py", "cab.py:call"),
        ("at::_ops::mm::call", "??", "??:at::_ops::mm::call"),
        ("<eval>", "<string>", "<string>:<eval>"),
        ("<module>", "/job/not_imported.py", "not_imported.py:<module>"),
        ("f", "", "f"),
        ("", "", ""),
    ],
)
def test_files_of_no_module(name, filename, expected):
    assert QualifiedNamer()(name, filename, 1) == expected


def test_a_cell_of_a_notebook_is_main(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    namer = QualifiedNamer()
    exec(compile("def train():\n    pass\n", "/tmp/ipykernel_1/2.py", "exec"), main.__dict__)
    assert namer("train", "/tmp/ipykernel_1/2.py", 2) == "__main__.train"
    # a function that is defined while the script runs is found as well
    exec(compile("\n\n\ndef later():\n    pass\n", "/tmp/ipykernel_1/2.py", "exec"), main.__dict__)
    assert namer("later", "/tmp/ipykernel_1/2.py", 5) == "__main__.later"


def test_files_of_no_module_share_one_walk_of_main(monkeypatch):
    main = types.ModuleType("__main__")
    main.__dict__.update({f"f{i}": functools.partial(len) for i in range(100)})
    monkeypatch.setitem(sys.modules, "__main__", main)
    looks = []
    namer = QualifiedNamer()
    step = namer._step
    namer._step = lambda: (looks.append(1), step())
    assert namer("forward", "<eval_with_key>.0", 5) == "<eval_with_key>.0:forward"
    assert len(looks) >= 100
    looks.clear()
    for i in range(1, 500):
        assert namer("forward", f"<eval_with_key>.{i}", 5) == f"<eval_with_key>.{i}:forward"
    assert looks == []
    code = compile("def later():\n    pass", "<cell-3>", "exec")
    exec(code, main.__dict__)
    assert namer("later", "<cell-3>", 1) == "__main__.later"
    assert len(looks) >= 100


def test_a_cell_that_decorates_with_what_another_cell_defines(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for cell, source in (("<cell-1>", DECORATORS), ("<cell-2>", WRAPPED_IN_A_CELL)):
        exec(compile(source, cell, "exec"), main.__dict__)
    namer = QualifiedNamer()
    assert namer("wrapped", "<cell-2>", 2) == "__main__.wrapped"
    assert namer("method", "<cell-2>", 6) == "__main__.Model.method"
    # one wrapper serves them all, and has a name of its own
    assert namer("wrapper", "<cell-1>", 6) == "__main__.noisy.<locals>.wrapper"


def test_files_that_are_remembered_are_bounded(load, monkeypatch):
    monkeypatch.setattr(frame_names, "_MAX_FILES", 2)
    modules = [load(f"file{i}_of_test", SOURCE) for i in range(4)]
    namer = QualifiedNamer()
    for module in modules:
        assert named(namer, module.plain()) == f"{module.__name__}.plain"
    assert list(namer._files) == [modules[2].__file__, modules[3].__file__]
    first = named(namer, modules[0].Linear().forward())
    assert first == "file0_of_test.Linear.forward"
    assert list(namer._files) == [modules[3].__file__, modules[0].__file__]


def test_a_module_that_comes_later(load):
    namer = QualifiedNamer()
    assert namer("plain", "/nowhere/late.py", 1) == "late.py:plain"
    m = load("late_of_test", SOURCE)
    assert named(namer, m.plain()) == "late_of_test.plain"


def test_names_are_stable_once_given(load, tmp_path):
    namer = QualifiedNamer()
    file = str(tmp_path / "stable_of_test.py")
    first = namer("plain", file, 5)
    load("stable_of_test", SOURCE)
    assert namer("plain", file, 5) == first == "stable_of_test.py:plain"


def test_no_code_of_the_job_runs(load, tmp_path):
    """Lazy modules stay lazy, properties and metaclasses are not asked."""

    def refuse(*args):
        raise AssertionError("code of the job ran")

    class Meta(type):
        __hash__ = __eq__ = refuse
        __instancecheck__ = __subclasscheck__ = refuse

        def __getattribute__(cls, name):
            refuse()

    class Lazy(types.ModuleType):
        armed = False

        def __getattribute__(self, name):
            if object.__getattribute__(self, "armed"):
                refuse()
            return object.__getattribute__(self, name)

        __getattr__ = refuse

    m = load("hostile_of_test", SOURCE)

    class Value:
        __getattr__ = __eq__ = __hash__ = refuse
        __class__ = property(refuse)

    m.hostile_class = Meta("Hostile", (), {"f": lambda self: None})
    m.hostile_instance = object.__new__(Value)
    m.instance_of_hostile = type.__call__(m.hostile_class)
    lazy = Lazy("lazy_of_test")
    lazy.__file__ = str(tmp_path / "lazy_of_test.py")
    lazy.armed = True
    sys.modules["lazy_of_test"] = lazy
    sys.modules["odd_of_test"] = None
    sys.modules["odder_of_test"] = object.__new__(Value)
    try:
        namer = QualifiedNamer()
        assert named(namer, m.plain()) == "hostile_of_test.plain"
        assert namer("f", str(tmp_path / "lazy_of_test.py"), 1) == "lazy_of_test.f"
    finally:
        for name in ("lazy_of_test", "odd_of_test", "odder_of_test"):
            del sys.modules[name]


def test_nothing_is_imported(load):
    m = load("quiet_of_test", SOURCE)
    before = set(sys.modules)
    named(QualifiedNamer(), m.plain())
    assert set(sys.modules) == before


def test_the_work_is_done_in_slices(load):
    functions = "".join(f"def f{i}():\n    pass\n" for i in range(1000))
    m = load("large_of_test", functions)
    pauses = []
    namer = QualifiedNamer(pause=lambda: pauses.append(1))
    assert namer("f999", m.__file__, 2000) == "large_of_test.f999"
    assert len(pauses) >= 2000 // 32
    pauses.clear()
    assert namer("f998", m.__file__, 1998) == "large_of_test.f998"
    assert pauses == []


def test_the_job_s_objects_are_not_kept(load):
    m = load("freed_of_test", SOURCE)
    namer = QualifiedNamer()
    named(namer, m.plain())
    alive = weakref.ref(m.Linear)
    m.__dict__.clear()
    sys.modules.pop("freed_of_test")
    del m
    gc.collect()
    assert alive() is None


def test_cycles_of_wrappers_end(load):
    m = load("cycle_of_test", SOURCE)

    def around():
        return around

    around.__wrapped__ = around
    m.part = functools.partial(around)
    m.around = around
    assert QualifiedNamer()("nowhere", m.__file__, 1) == "cycle_of_test.nowhere"
