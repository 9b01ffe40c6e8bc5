"""The layer table as a test: who may import whom, and which library lives in which file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gpumem_otel"

MAY_IMPORT = {
    "errors": set(),
    "logs": set(),
    "folders": {"errors"},
    "settingfiles": {"errors"},
    "_version": set(),
    "core": {"errors"},
    "config": {"errors"},
    "options": {"config", "core", "errors", "parsers"},
    "parsers": {"config", "core"},
    "ranks": {"core", "errors"},
    "capture": {"core", "config", "errors", "logs"},
    "export": {"core", "config", "errors", "folders", "logs", "settingfiles", "_version"},
    "serve": {"core", "config", "errors", "folders", "logs", "settingfiles", "_version"},
    "yielding": {"core", "config", "errors", "folders", "logs"},
    "yields": {
        "agent", "capture", "config", "core", "errors", "export", "lifecycle", "logs", "options",
        "yielding", "yieldparts",
    },
    "yieldparts": {"capture", "config", "core", "export", "ranks", "yielding"},
    "answers": {"capture", "config", "core", "errors", "ranks", "serve"},
    "ooms": {"answers", "capture", "config", "core", "errors", "export", "logs", "serve"},
    "undoing": {"core", "errors", "logs"},
    "readparts": {"answers", "capture", "config", "core", "errors", "export", "undoing"},
    "serveparts": {
        "answers", "capture", "config", "core", "export", "ranks", "serve", "undoing",
    },
    "exportparts": {"answers", "capture", "config", "core", "export", "readparts", "undoing"},
    "agent": {
        "answers", "capture", "config", "core", "errors", "exportparts", "logs", "ooms",
        "readparts", "serveparts", "undoing", "yielding",
    },
    "lifecycle": {"agent", "config", "core", "errors", "logs", "options"},
    "page": {"core", "errors", "_version"},
    "offline": {"core", "errors", "page"},
    "inspection": {"capture", "config", "core", "errors", "lifecycle"},
    "regions": {"capture", "core", "errors", "lifecycle"},
    "linereport": {"core", "errors"},
    "profiling": {"capture", "core", "errors", "linereport"},
    "notebook": {"magics"},
    "magics": {"capture", "core", "errors", "lifecycle", "linereport", "offline", "profiling"},
    "__init__": {
        "inspection", "lifecycle", "core", "errors", "notebook", "offline", "profiling", "regions",
        "yields", "_version",
    },
    "instrumentor": {"lifecycle", "errors", "logs", "_version"},
    "__main__": {"cli"},
    "cli": {
        "agent", "capture", "config", "core", "errors", "export", "instrumentor", "lifecycle",
        "options", "page", "ranks", "serve", "settingfiles", "_version",
    },
}  # fmt: skip
"""Top-level module or folder -> what it may import besides itself."""

HOMES = {
    "torch": ("capture/", "yielding/"),
    "opentelemetry": ("export/otel", "instrumentor.py"),
    "prometheus_client": ("export/prometheus.py",),
    "urllib3": ("export/transport.py",),
    "pyroscope": ("export/hostprofiles.py",),
    "starlette": ("serve/",),
    "uvicorn": ("serve/",),
    "click": ("cli/",),
    "rich": ("cli/",),
    "pandas": ("inspection.py", "linereport.py", "offline.py"),
}
"""Library -> the only files that may import it."""

STANDARD_LIBRARY_OF_CORE_MAY_NOT_INCLUDE = {
    "logging", "signal", "socket", "ssl", "subprocess", "tempfile", "time", "datetime",
}  # fmt: skip

FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """Imported modules of one file, and whether the import stands under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", id(node) in typing_only))
            if node.module == "gpumem_otel":
                found += [(f"gpumem_otel.{a.name}", id(node) in typing_only) for a in node.names]
    return found


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_layer_table(path: Path) -> None:
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module, _ in imports(path):
        if module.split(".")[0] == "gpumem_otel" and module != "gpumem_otel":
            assert room(module) in MAY_IMPORT[name] | {name}, f"{path} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    where = str(path.relative_to(PACKAGE))
    for module, typing_only in imports(path):
        library = module.split(".")[0]
        if library in HOMES and not typing_only:
            assert where.startswith(HOMES[library]), f"{where} imports {module}"
        if where.startswith("core/"):
            assert library in sys.stdlib_module_names | {"gpumem_otel"}, f"{where}: {module}"
            assert typing_only or library not in STANDARD_LIBRARY_OF_CORE_MAY_NOT_INCLUDE, (
                f"{where}: {module}"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_environment_is_read_in_config_alone(path: Path) -> None:
    if path.name == "config.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}:
            assert not (isinstance(node.value, ast.Name) and node.value.id == "os"), (
                f"{path}:{node.lineno} reads the environment"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_all_is_sorted_and_true(path: Path) -> None:
    """`__all__` lists exactly the public names that a module defines."""
    tree = ast.parse(path.read_text())
    listed: list[str] | None = None
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            defined.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                if target.id == "__all__":
                    listed = ast.literal_eval(node.value)
                else:
                    defined.add(target.id)
    if path.name == "__init__.py" or path.name.startswith("_"):
        return
    assert listed is not None, "no __all__"
    assert sorted(listed, key=lambda n: (not n.isupper(), not n[0].isupper(), n)) == listed
    public = {name for name in defined if not name.startswith("_")}
    assert {n for n in listed if n in defined} == set(listed), "lists what it does not define"
    functions = {n for n in public if not n.isupper()}
    assert functions <= set(listed), f"not listed: {functions - set(listed)}"


def test_import_has_no_effect() -> None:
    """Importing the package starts nothing, reads no setting and loads no heavy library."""
    script = """
import sys, threading, os, signal, atexit, logging
before = dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGTERM)
hooks = sys.excepthook, list(sys.meta_path), atexit._ncallbacks()
import gpumem_otel
after = dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGTERM)
assert before == after
assert hooks == (sys.excepthook, list(sys.meta_path), atexit._ncallbacks())
heavy = {"torch", "opentelemetry", "prometheus_client", "uvicorn", "starlette", "urllib3",
         "click", "rich", "pyroscope", "asyncio", "ssl"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
