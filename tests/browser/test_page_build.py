"""The page is in every form of the package, and an sdist builds it without npm."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.chromium import missing
from support.cli_process import clean_environ

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
PAGE = "gpumem_otel/web/page.html"


@pytest.fixture(autouse=True)
def built():
    problem = missing()
    if problem and not os.environ.get("GPUMEM_REQUIRE_BROWSER"):
        pytest.skip(problem)
    assert problem == ""


def hatchling(folder: Path, target: str, output: Path, **environ: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(output)],
        cwd=folder,
        env=clean_environ(**environ),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (made,) = output.iterdir()
    return made


def test_wheel_and_sdist_hold_the_page_and_the_sdist_needs_no_npm(tmp_path):
    current = (ROOT / PAGE).read_bytes()
    wheel = hatchling(ROOT, "wheel", tmp_path / "wheel", GPUMEM_OTEL_REQUIRE_PAGE="1")
    with zipfile.ZipFile(wheel) as opened:
        assert opened.read(PAGE) == current
        assert not [name for name in opened.namelist() if "node_modules" in name]
    sdist = hatchling(ROOT, "sdist", tmp_path / "sdist", GPUMEM_OTEL_REQUIRE_PAGE="1")
    with tarfile.open(sdist) as opened:
        names = opened.getnames()
        opened.extractall(tmp_path / "unpacked", filter="data")
    assert not [name for name in names if "node_modules" in name]
    (folder,) = (tmp_path / "unpacked").iterdir()
    assert (folder / "web" / "package-lock.json").is_file()
    nothing = tmp_path / "empty"
    nothing.mkdir()
    again = hatchling(
        folder,
        "wheel",
        tmp_path / "again",
        PATH=str(nothing),
        GPUMEM_OTEL_REQUIRE_PAGE="1",
    )
    with zipfile.ZipFile(again) as opened:
        assert opened.read(PAGE) == current
