"""What users annotate with: the types of public calls come from `gpumem_otel` itself."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gpumem_otel
from gpumem_otel.settings.options import OPTIONS, resolve

PACKAGE = Path(gpumem_otel.__file__).parent
TYPES = [
    name
    for name in gpumem_otel.__all__
    if isinstance(getattr(gpumem_otel, name), type)
    and not issubclass(getattr(gpumem_otel, name), Exception)
]
CLASSES = {
    node.name
    for path in PACKAGE.rglob("*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.ClassDef)
}
OF_THE_PACKAGE = {"CounterReader", "TorchSnapshot"}
"""Public types with methods that the package itself calls, whose values are its own."""


def annotations(item):
    """The annotations of a function, or of a class's fields and public methods."""
    texts = []
    if isinstance(item, type):
        texts += [str(text) for text in vars(item).get("__annotations__", {}).values()]
        for name, member in vars(item).items():
            function = getattr(member, "fget", member)
            if inspect.isfunction(function) and not name.startswith("_"):
                texts += [str(text) for text in function.__annotations__.values()]
    elif inspect.isfunction(item):
        texts += [str(text) for text in item.__annotations__.values()]
    return texts


def test_every_class_that_a_public_signature_names_is_public():
    missing = {
        (name, word)
        for name in set(gpumem_otel.__all__) - OF_THE_PACKAGE
        for text in annotations(getattr(gpumem_otel, name))
        for word in re.findall(r"\w+", text)
        if word in CLASSES and word not in gpumem_otel.__all__
    }
    assert not missing


@pytest.mark.parametrize("name", TYPES)
def test_every_public_type_says_what_it_is(name):
    item = getattr(gpumem_otel, name)
    assert item.__doc__
    assert not item.__doc__.startswith(f"{name}("), "made by dataclass, not written"


def test_dir_shows_the_public_names_alone():
    assert gpumem_otel.api is gpumem_otel.__dict__["api"], "submodules are there all the same"
    assert dir(gpumem_otel) == sorted(gpumem_otel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Snapshots'"):
        gpumem_otel.Snapshots  # noqa: B018


def test_types_are_imported_when_they_are_asked_for():
    script = """
import sys, gpumem_otel
assert "gpumem_otel.tensors.holders" not in sys.modules
from gpumem_otel import Holders
assert Holders is sys.modules["gpumem_otel.tensors.holders"].Holders
assert Holders is gpumem_otel.Holders
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CONSUMER = """
    from typing_extensions import assert_type

    import gpumem_otel
    from gpumem_otel import (
        Difference, Frame, Holder, Holders, LineReport, Profile, Report, Sample, Snapshot, TopRow,
        YieldReport,
    )

    def grown(now: Snapshot, before: Snapshot) -> Difference:
        return now.diff(before, "peak")

    def names(profile: Profile) -> list[str]:
        samples: tuple[Sample, ...] = profile.samples
        frames: list[Frame] = [sample.frames[0] for sample in samples]
        rows: list[TopRow] = profile.top(3, by="line")
        return [frame.name for frame in frames] + [row.name for row in rows]

    def held(x: object) -> tuple[Holder, ...]:
        found: Holders = gpumem_otel.holders(x)
        return found.held_by

    def all_tensors() -> Report:
        return gpumem_otel.report(verbose=True)

    def lines() -> LineReport:
        return gpumem_otel.line_profiler().display()

    def away(options: gpumem_otel.YieldOptions) -> YieldReport:
        with gpumem_otel.yielded(lease_seconds=60.0) as report:
            assert_type(report, gpumem_otel.YieldReport)
        return gpumem_otel.yield_memory(**options)

    def start(options: gpumem_otel.InstallOptions) -> None:
        gpumem_otel.install(**options)
        gpumem_otel.install(interval_seconds=30, serve=True, profiles=("live", "peak"))

    snapshot = gpumem_otel.load_snapshot("x")
    assert_type(snapshot.profile("peak", 0, label="pool"), gpumem_otel.Profile)
    sizes: list[int] = [entry.size_bytes for entry in grown(snapshot, snapshot).entries]
    page: str = snapshot.html()
"""

WRONG = """
    import gpumem_otel

    gpumem_otel.install(interval_second=30)
    gpumem_otel.install(serve="yes")
    gpumem_otel.yield_memory(lease=3)
    gpumem_otel.load_snapshot("x").profile("dead")
    gpumem_otel.Snapshots
"""


def mypy(script):
    api = pytest.importorskip("mypy.api")
    options = ["--config-file=", "--strict", "--follow-imports=silent", "--no-error-summary"]
    return api.run([*options, "-c", textwrap.dedent(script)])


@pytest.mark.timeout(300)
def test_a_users_script_with_these_types_passes_mypy_strict():
    """Type checkers see every type, and know each keyword of the public calls."""
    assert mypy(CONSUMER) == ("", "", 0)
    out, _, _ = mypy(WRONG)
    assert re.findall(r"<string>:(\d+): .*\[([a-z-]+)\]", out) == [
        ("4", "call-arg"),
        ("5", "arg-type"),
        ("6", "call-arg"),
        ("7", "arg-type"),
        ("8", "attr-defined"),
    ], out


def test_help_shows_each_keyword_of_install_with_type_default_meaning_and_variable():
    keywords = inspect.signature(gpumem_otel.install).parameters
    assert list(keywords) == ["enabled", *(option.name for option in OPTIONS)]
    assert keywords["interval_seconds"].default == 60.0
    assert keywords["interval_seconds"].annotation == "float"
    assert keywords["token"].annotation == "str"
    text = pydoc.render_doc(gpumem_otel.install, renderer=pydoc.plaintext)
    assert max(len(line) for line in text.splitlines()[4:]) < 125
    words = " ".join(text.split())
    for option in OPTIONS:
        variables = ", else ".join(f"`{name}`" for name in option.environ)
        meaning = " ".join(option.meaning.split())
        assert f" {option.name}: {meaning} Variable: {variables}." in words


def test_install_takes_what_its_signature_says():
    defaults = {
        name: keyword.default
        for name, keyword in inspect.signature(gpumem_otel.install).parameters.items()
        if name != "run_dir"  # depends on the environment
    }
    assert resolve({}, **defaults) == resolve({})
