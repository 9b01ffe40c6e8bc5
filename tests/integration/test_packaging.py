"""What is in the wheel, the bounds of requirements, and that installing changes no packages.

pip's dry runs need the package index. Without one they are skipped; in CI (`CI` is set) they fail.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.cli_process import clean_environ

ROOT = Path(__file__).parents[2]

OLD = ("protobuf==4.25.8", "opentelemetry-sdk==1.26.0", "opentelemetry-api==1.26.0")

TORCH_METADATA = "Metadata-Version: 2.1\nName: torch\nVersion: 2.3.0\n"


def pip(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=clean_environ(), timeout=300
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Our wheel, built with the build backend that is installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    done = pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def old_environment(tmp_path_factory):
    """A virtual environment, without a pip of its own, that pins older packages."""
    folder = tmp_path_factory.mktemp("old")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    done = pip("--python", python, "install", "--quiet", "--retries", 1, *OLD)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"no package index here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    done = pip("--python", python, "install", "--quiet", "--no-index", fake_torch(folder))
    assert done.returncode == 0, done.stderr
    return python


def fake_torch(folder: Path) -> Path:
    """An empty wheel with the metadata of torch 2.3.0."""
    path = folder / "torch-2.3.0-py3-none-any.whl"
    info = "torch-2.3.0.dist-info"
    members = {
        "METADATA": TORCH_METADATA,
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as made:
        for name, text in members.items():
            made.writestr(f"{info}/{name}", text)
    return path


def would_install(python: Path, *what: object) -> dict[str, str]:
    """Name -> version of what pip would install."""
    done = pip("--python", python, "install", "--quiet", "--dry-run", "--report", "-", *what)
    assert done.returncode == 0, done.stderr
    metadata = [entry["metadata"] for entry in json.loads(done.stdout)["install"]]
    return {canonical(entry["name"]): entry["version"] for entry in metadata}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_wheel_holds_what_runs_and_no_tests(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gpumem_otel"}
    assert {
        "gpumem_otel/py.typed",
        "gpumem_otel/data/demo-recording.gpumem",
        "gpumem_otel/cli/site_hook/sitecustomize.py",
    } <= names
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "gpumem_otel").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == shipped
    assert not [name for name in names if "test" in name or "__pycache__" in name]
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def docstrings() -> list[str]:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "gpumem_otel").rglob("*.py")]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, documented)]
    return [ast.get_docstring(node) or "" for node in nodes]


def test_the_pages_that_docstrings_name_are_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    pages = {page for text in docstrings() for page in re.findall(r"docs/[\w/-]+\.md", text)}
    assert "docs/configuration.md" in pages
    assert {f"gpumem_otel/{page}" for page in pages} <= names
    assert not [name for name in names if name.startswith("gpumem_otel/docs/internals")]


def test_an_older_environment_stays_as_it_is(wheel, old_environment):
    """GIVEN older torch, protobuf, opentelemetry WHEN we are installed THEN none changes."""
    added = would_install(old_environment, wheel)
    assert added.pop("gpumem-otel")
    moved = [n for n in added if n in {"torch", "protobuf"} or n.startswith("opentelemetry")]
    assert moved == []
    assert {"click", "prometheus-client", "pyroscope-io", "rich", "urllib3", "uvicorn"} <= set(
        added
    )


def test_the_torch_extra_takes_the_torch_that_is_there(wheel, old_environment):
    added = would_install(old_environment, f"{wheel}[torch]")
    assert "torch" not in added
    assert not [name for name in added if name.startswith(("nvidia", "opentelemetry"))]


def lower_bounds() -> dict[str, str]:
    """Name -> lower bound, of every requirement in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    tables = text[text.index("\ndependencies = [") : text.index("[project.scripts]")]
    found = re.findall(r'"([\w.-]+)>=([\w.]+)', tables)
    assert len(found) > 15
    return {canonical(name): bound for name, bound in found}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    found = [re.match(r"([\w.-]+)==([\w.]+)", line) for line in lines if line[:1] not in {"#", ""}]
    return {canonical(match[1]): match[2] for match in found}


def test_the_oldest_that_is_tested_is_the_lower_bound():
    # not for `make test-oldest`
    tools = {
        "torch", "mypy", "playwright", "pytest-xdist", "ruff", "schemathesis", "types-protobuf",
    }  # fmt: skip
    promised = {name: bound for name, bound in lower_bounds().items() if name not in tools}
    oldest = pins("constraints-oldest.txt")
    assert set(promised) <= set(oldest)
    for name, bound in promised.items():
        assert re.sub(r"(\.0)+$", "", oldest[name]) == re.sub(r"(\.0)+$", "", bound), name


def test_every_requirement_is_pinned_for_ci():
    assert set(lower_bounds()) <= set(pins("constraints.txt"))
