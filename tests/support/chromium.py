"""What the tests with a browser need, and whether it is here."""

from __future__ import annotations

import shutil

from gpumem_otel.page import html

__all__ = ["chromium", "missing"]


def missing() -> str:
    try:
        import playwright.sync_api  # noqa: F401, PLC0415
    except ImportError:
        return "playwright is not installed: pip install -e '.[browser]'"
    if chromium() is None:
        return "no chromium here: apt-get install chromium"
    if not html.available():
        return "the page is not built: npm is missing, or was when gpumem-otel was installed"
    return ""


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")
