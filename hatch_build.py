"""Builds the page (web/) with npm, and puts the docs into the wheel.

The page is built whenever the package is built or installed. Without npm, or if it fails, the
package is built without the page, and the verbs that write one say so. An older page is removed
then, in a checkout too, since it would not fit the code. With GPUMEM_OTEL_REQUIRE_PAGE=1, for CI
and releases, a failure is an error. If the page is current, nothing is done, so an sdist, which has
the page, needs no npm.

A wheel has the pages for users in gpumem_otel/docs/, where docstrings point to.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = "gpumem_otel/web/page.html"
_STAMP = ".gpumem-lock"
_LIMIT_SECONDS = 300
_INSTALL = (
    "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error",
    "--fetch-retries=1", "--fetch-timeout=30000",
)  # fmt: skip


class CustomBuildHook(BuildHookInterface[Any]):
    """Hatchling calls it before it builds a wheel, an sdist or an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the page if needed and possible, and name the docs that go into a wheel."""
        if self.target_name == "wheel" and version != "editable":
            build_data.setdefault("force_include", {}).update(docs(Path(self.root)))
        problem = build(Path(self.root))
        if not problem:
            return
        if os.environ.get("GPUMEM_OTEL_REQUIRE_PAGE", "") not in {"", "0"}:
            raise RuntimeError(f"the page could not be built: {problem}")
        self.app.display_warning(
            f"gpumem-otel is built without its page (flamegraph, timeline): {problem}"
        )


def docs(root: Path) -> dict[str, str]:
    """The pages for users and the runbooks: file -> its place in a wheel."""
    folder = root / "docs"
    pages = [*folder.glob("*.md"), *folder.glob("runbooks/*.md")]
    return {
        str(page): f"gpumem_otel/docs/{page.relative_to(folder).as_posix()}"
        for page in sorted(pages)
    }


def build(root: Path) -> str:
    """Build the page; the obstacle, or "" if there is none.

    Afterwards the page is current, or it is not there.

    Raises:
        OSError: an older page is there and cannot be removed.
    """
    root = root.resolve()
    web = root / "web"
    page = root / PAGE
    if not (web / "build.mjs").is_file():
        return "" if page.is_file() else "its sources are not here"
    sources = sources_hash(web)
    if _is_current(page, sources):
        return ""
    problem = _build(web, page, sources)
    if not problem and not _is_current(page, sources):
        problem = "its build made no page of these sources"
    if problem:
        page.unlink(missing_ok=True)
    return problem


def _is_current(page: Path, sources: str) -> bool:
    return page.is_file() and f'content="{sources}"'.encode() in page.read_bytes()


def _build(web: Path, page: Path, sources: str) -> str:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        return "npm (Node.js 18 or newer) is not installed"
    try:
        _install(npm, web)
        _run([node, "build.mjs", str(page), "--sources", sources], web)
    except subprocess.TimeoutExpired:
        return f"npm took longer than {_LIMIT_SECONDS} s"
    except subprocess.CalledProcessError as error:
        output = (error.stderr or error.stdout or "").strip().splitlines()
        return f"npm failed: {output[0] if output else error}"
    except OSError as error:
        return f"npm failed: {error}"
    return ""


def sources_hash(web: Path) -> str:
    """The hash of everything that the page is built from."""
    digest = hashlib.sha256()
    names = ["build.mjs", "package.json", "package-lock.json"]
    parts = [web / name for name in names] + sorted((web / "src").rglob("*"))
    for path in parts:
        if path.is_file():
            digest.update(f"{path.relative_to(web).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _install(npm: str, web: Path) -> None:
    """Install what package-lock.json names, unless it is installed already."""
    lock = hashlib.sha256((web / "package-lock.json").read_bytes()).hexdigest()
    stamp = web / "node_modules" / _STAMP
    if stamp.is_file() and stamp.read_text() == lock:
        return
    _run([npm, *_INSTALL], web)
    stamp.write_text(lock)


def _run(command: Sequence[str], folder: Path) -> None:
    subprocess.run(  # noqa: S603 (npm and node, as found on the path)
        command,
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=_LIMIT_SECONDS,
    )
