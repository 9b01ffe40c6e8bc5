"""What tools/docs.py makes of the field docs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gpumem_otel.settings import config as config_module
from gpumem_otel.settings.options import OPTIONS, resolve

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Said. `A_B`.", ("Said", ("A_B",))),
        ("Said of `X`: on. `A`, else `B_C`.", ("Said of `X`: on", ("A", "B_C"))),
        ("On when `X` is set.", ("On when `X` is set", ())),
        ("`A`.", ("", ("A",))),
    ],
)
def test_the_last_sentence_names_the_variables(docs, text, expected):
    assert docs.meaning(text) == expected


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_setting_has_a_meaning_and_names_its_variables(docs, option):
    defaults = resolve({})
    section = getattr(defaults, option.section) if option.section else defaults
    fields = docs.field_docs(Path(config_module.__file__))
    text, variables = docs.meaning(fields[type(section).__name__, option.field])
    assert variables == option.environ
    assert text[0].isupper() or text[0] == "`"
    assert not any(f"`{name}`" in text for name in option.environ)
