"""What tools/docs.py makes of the settings."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gpumem_otel.settings.options import OPTIONS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools" / "docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_setting_has_a_row_with_its_meaning_and_variables(docs, option):
    (row,) = [line for line in docs.configuration().splitlines() if f"| `{option.name}` |" in line]
    _, variables, _, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
    assert [name.strip(" `") for name in variables.split(",")] == list(option.environ)
    assert meaning[0].isupper() or meaning[0] == "`"
    assert not any(f"`{name}`" in option.meaning for name in option.environ)
