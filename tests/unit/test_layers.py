"""The layers: which folder may import which, where each library belongs, and no import cycle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gpumem_otel"

MAY_IMPORT = {
    "errors": set(),
    "_version": set(),
    "base": set(),
    "settings": {"base", "errors"},
    "snapshot": {"base", "errors"},
    "recording": {"base", "errors", "snapshot"},
    "profiles": {"base", "errors", "recording", "snapshot"},
    "page": {"_version", "base", "errors", "profiles", "recording", "snapshot"},
    "capture": {"base", "errors", "profiles", "settings", "snapshot"},
    "tensors": {"base", "capture", "errors", "profiles", "snapshot"},
    "line_profiling": {"base", "capture", "errors", "profiles", "snapshot"},
    "serve": {"_version", "base", "errors", "settings"},
    "push": {"_version", "base", "errors", "profiles", "settings"},
    "yielding": {
        "_version", "base", "capture", "errors", "serve", "settings", "snapshot", "tensors",
    },
    "metrics": {"_version", "base", "settings", "snapshot", "yielding"},
    "oom": {
        "base", "capture", "errors", "metrics", "profiles", "push", "recording", "serve",
        "settings", "snapshot",
    },
    "runtime": {
        "base", "capture", "errors", "line_profiling", "metrics", "oom", "profiles", "push",
        "recording", "serve", "settings", "snapshot", "yielding",
    },
    "api": {
        "base", "capture", "errors", "line_profiling", "metrics", "page", "profiles", "runtime",
        "settings", "snapshot", "tensors", "yielding",
    },
    "__init__": {"_version", "api", "errors"},
    "cli": {
        "_version", "api", "base", "errors", "metrics", "oom", "page", "profiles", "push",
        "recording", "runtime", "serve", "settings", "snapshot", "yielding",
    },
    "__main__": {"cli"},
}  # fmt: skip
"""Folder or top-level module -> what it may import besides itself: only rows above its own."""

HOMES = {
    "torch": ("capture/", "yielding/", "cli/demo/demo_model.py"),
    "opentelemetry": ("metrics/otlp", "metrics/spans.py", "api/auto.py"),
    "prometheus_client": ("metrics/prometheus.py",),
    "urllib3": ("push/transport.py",),
    "pyroscope": ("push/host_profiles.py",),
    "starlette": ("serve/", "yielding/control/"),
    "uvicorn": ("serve/",),
    "click": ("cli/",),
    "rich": ("cli/",),
    "pandas": ("api/", "line_profiling/render.py"),
}
"""Library -> the only files that may import it; by the start of their paths."""

PURE = ("base/", "snapshot/", "profiles/", "recording/", "page/", "yielding/values.py")
NOT_PURE = (
    "base/clock.py", "base/gate.py", "base/logs.py", "base/threads.py", "recording/file.py",
    "recording/source.py", "page/html.py",
)  # fmt: skip
"""Pure code imports the standard library alone, and none of its modules that have effects."""

EFFECTS = {
    "logging", "signal", "socket", "ssl", "subprocess", "tempfile", "time", "datetime",
}  # fmt: skip

MAY_IMPORT_BY_NAME = {"cli/main.py", "cli/demo/demo_train.py"}
"""Files that import a module of ours by a computed name: the table of verbs."""

MOST_FILES = 25

FILES = sorted(PACKAGE.rglob("*.py"))


def where(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_name(path: Path) -> str:
    parts = ("gpumem_otel", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports(path: Path) -> list[tuple[str, bool]]:
    """Imported modules of one file, and whether the import stands under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [(alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module or "" for name in names]
            modules += [(name, id(node) in typing_only) for name in dict.fromkeys(names)]
    return modules


def folder(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("path", FILES, ids=where)
def test_layer_table(path: Path) -> None:
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module, _ in imports(path):
        if module.split(".")[0] == "gpumem_otel" and module != "gpumem_otel":
            assert folder(module) in MAY_IMPORT[name] | {name}, f"{path} imports {module}"


def test_each_row_of_the_table_names_only_rows_above_it() -> None:
    above: set[str] = set()
    for name, may_import in MAY_IMPORT.items():
        assert may_import <= above, f"{name} may import what stands below it"
        above.add(name)


def test_no_import_cycle() -> None:
    """Imports for type checkers count: no file of a cycle can be read alone."""
    edges = {
        name: {module for module, _ in imports(path) if module in MODULES and module != name}
        for name, path in MODULES.items()
    }
    left = dict(edges)
    while free := {name for name, needed in left.items() if not needed & left.keys()}:
        left = {name: needed for name, needed in left.items() if name not in free}
    assert not left, f"in a cycle or above one: {sorted(left)}"


@pytest.mark.parametrize("path", FILES, ids=where)
def test_no_import_by_name(path: Path) -> None:
    """The table cannot see an import by a string."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func).split(".")[-1]
        if called in {"import_module", "__import__"} and where(path) not in MAY_IMPORT_BY_NAME:
            assert "gpumem_otel" not in ast.unparse(node), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=where)
def test_libraries_stay_in_their_folders(path: Path) -> None:
    name = where(path)
    pure = name.startswith(PURE) and name not in NOT_PURE
    for module, typing_only in imports(path):
        library = module.split(".")[0]
        if library in HOMES and not typing_only:
            assert name.startswith(HOMES[library]), f"{name} imports {module}"
        if pure:
            assert library in sys.stdlib_module_names | {"gpumem_otel"}, f"{name}: {module}"
            assert typing_only or library not in EFFECTS, f"{name}: {module}"


@pytest.mark.parametrize("path", FILES, ids=where)
def test_environment_is_read_in_config_alone(path: Path) -> None:
    if where(path) == "settings/config.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}:
            assert not (isinstance(node.value, ast.Name) and node.value.id == "os"), (
                f"{path}:{node.lineno} reads the environment"
            )


def test_folders_are_small_and_documented() -> None:
    files = Counter(path.parent for path in FILES)
    for inside, count in files.items():
        assert count <= MOST_FILES, f"{inside} has {count} files"
        docstring = ast.get_docstring(ast.parse((inside / "__init__.py").read_text()))
        assert docstring, f"{inside}/__init__.py has no docstring"


def test_no_public_class_name_twice() -> None:
    names = Counter(
        node.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_all_is_for_packages() -> None:
    """A module's public names are those without an underscore; only a façade needs a list."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        lists = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
        if path.name != "__init__.py":
            assert not any(line.startswith("__all__ =") for line in lists), path


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
