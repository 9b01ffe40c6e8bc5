"""The page: one HTML file with flame graphs, timeline and segments, which needs no network.

Its code is built from `web/` with the package; the data are inserted here.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from gpumem_otel._version import __version__
from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.errors import PageError
from gpumem_otel.page.payload import PageForm
from gpumem_otel.profiles.of_file import OpenedFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Traversable

    from gpumem_otel.base.profile import HeapProfile
    from gpumem_otel.snapshot.snapshot import TorchSnapshot

VIEWS = ("flamegraph", "timeline", "segments", "difference")

_PLACE = "@@payload@@"
_MADE_BY = f"gpumem-otel {__version__}"


def available() -> bool:
    """Whether the page was built into this installation."""
    return _built().is_file()


def require() -> None:
    """Check that the page was built into this installation.

    Raises:
        PageError: the page was not built into this installation.
    """
    if not available():
        _template()


def file_html(
    opened: OpenedFile,
    *,
    before: OpenedFile | None = None,
    device: int | None = None,
    view: str = "flamegraph",
    kind: ProfileKind = ProfileKind.LIVE,
    title: str = "",
) -> str:
    """A page about a file of either kind, or about what changed since another one.

    Args:
        opened: what to show.
        before: what to compare it with.
        device: only this one; None: all.
        view: where the page opens, one of `VIEWS`; the others are one click away.
        kind: of the flame graph that is shown first.
        title: by default the name of the file.

    Raises:
        PageError: the page was not built into this installation.
        SnapshotError: sizes in the trace are invalid.
    """
    template = _template()
    form = PageForm()
    if before is not None:
        form.add_before(before, device)
    recording = opened.recording
    if recording is None:
        form.add_snapshot(opened.snapshot, device)
    else:
        allocated = opened.profiles(ProfileKind.ALLOCATED) if recording.windows else ()
        form.add_recording(recording, device, allocated=allocated)
    return _put(template, form, title or opened.snapshot.source, view, kind, device)


def html(
    snapshot: TorchSnapshot,
    *,
    before: TorchSnapshot | None = None,
    device: int | None = None,
    view: str = "flamegraph",
    kind: ProfileKind = ProfileKind.LIVE,
    title: str = "",
) -> str:
    """`file_html` of a snapshot, or of what changed since another one."""
    return file_html(
        OpenedFile(snapshot),
        before=None if before is None else OpenedFile(before),
        device=device,
        view=view,
        kind=kind,
        title=title,
    )


def profiles_html(
    profiles: Sequence[HeapProfile],
    *,
    before: Sequence[HeapProfile] = (),
    title: str = "",
) -> str:
    """A page with flame graphs of profiles, one per kind and device.

    Args:
        profiles: what to show.
        before: what to compare them with.
        title: of the page.

    Raises:
        PageError: the page was not built into this installation.
    """
    template = _template()
    form = PageForm()
    for name, part in (("before", before), (title or "profile", profiles)):
        if part or name != "before":
            form.add_source(name, ())
            for profile in part:
                form.add_profile(profile)
    kind = profiles[0].kind if profiles else ProfileKind.LIVE
    view = "difference" if before else "flamegraph"
    return _put(template, form, title or "profile", view, kind, None)


def _put(  # noqa: PLR0917
    template: str, form: PageForm, title: str, view: str, kind: ProfileKind, device: int | None
) -> str:
    payload = form.packed(title=title, view=view, kind=kind, device=device, made_by=_MADE_BY)
    head, _, tail = template.partition(_PLACE)
    return f"{head}{payload}{tail}"


def _built() -> Traversable:
    return files("gpumem_otel") / "web" / "page.html"


def _template() -> str:
    try:
        return _built().read_text(encoding="utf-8")
    except OSError:
        raise PageError(
            "the page is not in this installation, since npm (Node.js 18 or newer) was missing or "
            "failed when it was built: install npm, then install gpumem-otel again, or install a "
            "released wheel"
        ) from None
