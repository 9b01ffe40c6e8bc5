"""What tools/docs.py makes of the field docs and finds in pages."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

from gpumem_otel.settings.options import OPTIONS
from gpumem_otel.yielding.values import YieldRequest

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


def test_the_table_of_folders_has_each_folder(docs):
    rows = [line.split("`")[1].rstrip("/") for line in docs.folders()[2:]]
    package = ROOT / "gpumem_otel"
    assert set(rows) == {path.parent.name for path in package.glob("*/__init__.py")}


def test_a_name_that_does_not_exist_is_a_fault(docs, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "`base/gone.py` `base/text.py` `gpumem-otel gone` `gpumem-otel top` "
        "`test_that_is_gone` [x](gone.md) [y](page.md)"
    )
    monkeypatch.setattr(docs, "PAGES", [page])
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "PACKAGE", ROOT / "gpumem_otel")
    (tmp_path / "tests").mkdir()
    assert docs.faults() == [
        "page.md: link to gone.md leads nowhere",
        "page.md: there is no verb gone",
        "page.md: there is no test test_that_is_gone",
        "page.md: there is no file base/gone.py",
    ]


def test_no_hazard_has_the_number_of_another():
    text = (ROOT / "docs" / "internals" / "hazards.md").read_text()
    numbers = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert len(numbers) > 70
    assert len(set(numbers)) == len(numbers)


def test_the_yield_page_has_a_row_for_each_field_of_a_request():
    page = (ROOT / "docs" / "yield.md").read_text()
    for field in fields(YieldRequest):
        assert f"| `{field.name}` |" in page, field.name
