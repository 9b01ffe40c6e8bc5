"""The routes of the read listener; handlers are request -> response functions.

    GET /                       links, for people
    GET /metrics                Prometheus exposition
    GET /metrics/lines          the same of profiled lines of code, bounded
    GET /debug/pprof/gpumem     gzipped pprof; ?device=N ?seconds=N
                                ?kind=live|allocated|peak|pinned|growth
    GET /healthz                JSON about the exporter

HEAD works on each. What may block runs on a daemon thread of ours, never in the pool that
starlette uses for a plain function: its threads are joined when the job ends.
"""

from __future__ import annotations

import asyncio
import gzip
import html
import json
import math
import re
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.errors import BusyError, ConfigError, GpumemError
from gpumem_otel.serve.threads import RequestThreads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from gpumem_otel.serve.dependencies import AppDeps

MAX_SECONDS: Final = 300.0
"""Longest window that `?seconds=` may ask for."""

_MAX_DEVICE: Final = 1023

_OF_A_MOMENT: Final = frozenset({ProfileKind.LIVE, ProfileKind.PINNED, ProfileKind.GROWTH})


@dataclass(frozen=True, slots=True)
class ProfileQuery:
    """The query of `/debug/pprof/gpumem`.

    Attributes:
        device: index, None for all devices.
        seconds: length of the window, None where the query does not say.
    """

    kind: ProfileKind
    device: int | None
    seconds: float | None

    @property
    def of_a_window(self) -> bool:
        """Whether events are recorded for it during a window."""
        return self.kind not in _OF_A_MOMENT


def profile_query(items: Iterable[tuple[str, str]]) -> ProfileQuery:
    """Read `kind`, `device` and `seconds`; other names are ignored, as by Go's handlers.

    `seconds` without a kind asks for the allocations of that window, which is Go's convention.

    Raises:
        ValueError: a value that cannot be used; one line names those that can.
    """
    values: dict[str, str] = {}
    for name, value in items:
        if name in {"kind", "device", "seconds"}:
            if name in values:
                raise ValueError(f"{name} is given twice")
            values[name] = value
    seconds = _seconds(values["seconds"]) if "seconds" in values else None
    default = ProfileKind.LIVE if seconds is None else ProfileKind.ALLOCATED
    kind = _kind(values["kind"]) if "kind" in values else default
    if kind in _OF_A_MOMENT and seconds is not None:
        raise ValueError(
            "seconds goes with kind=allocated and kind=peak: "
            f"a profile of kind {kind.value} is of one moment"
        )
    device = _device(values["device"]) if "device" in values else None
    return ProfileQuery(kind, device, seconds)


def _kind(text: str) -> ProfileKind:
    try:
        return ProfileKind(text)
    except ValueError:
        kinds = ", ".join(kind.value for kind in ProfileKind)
        raise ValueError(f"kind must be one of {kinds}") from None


def _device(text: str) -> int:
    # No int() first: it takes signs, spaces, underscores and digits of other scripts.
    short = text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_DEVICE))
    if not short or int(text) > _MAX_DEVICE:
        raise ValueError(f"device must be a number from 0 to {_MAX_DEVICE}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"seconds must be a number above 0 and at most {MAX_SECONDS:g}")
    return seconds


MAX_PROFILES: Final = 2
"""Profiles of a moment made at once: each holds the interpreter lock for a while."""

MAX_WINDOWS: Final = 4
"""Profiles of windows at once: one records, the others wait. `guard.MAX_REQUESTS` leaves room for
scrapes."""

_RETRY_SECONDS: Final = 5

_GZIP_FROM_BYTES: Final = 512

_GZIP_LEVEL: Final = 5

_PAGE: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>gpumem-otel {name}</title></head>
<body><h1>GPU memory of {name}</h1><ul>
<li><a href="metrics">/metrics</a>: Prometheus exposition</li>
<li><a href="metrics/lines">/metrics/lines</a>: the same of lines under
<code>@gpumem_otel.profile</code></li>
<li><a href="debug/pprof/gpumem">/debug/pprof/gpumem</a>: what is alive now, gzipped pprof</li>
<li><a href="debug/pprof/gpumem?seconds=5">/debug/pprof/gpumem?seconds=5</a>: allocations of the
next five seconds; <code>kind=peak</code> for their highest moment, <code>device=N</code> for one
device</li>
<li><a href="healthz">/healthz</a>: state of the exporter, not for a liveness probe</li>
</ul></body></html>
"""


def build_app(deps: AppDeps, workers: RequestThreads | None = None) -> ASGIApp:
    """The routes, without the checks of `RequestGuard`.

    Args:
        deps: where the answers come from.
        workers: runs blocking calls; the listener stops and joins it.
    """
    api = _Api(deps, workers or RequestThreads())
    app = Starlette(
        routes=[
            Route("/", api.index),
            Route("/metrics", api.metrics),
            Route("/metrics/lines", api.lines),
            Route("/debug/pprof/gpumem", api.profile),
            Route("/healthz", api.healthz),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    # A redirect would repeat the Host header in its Location.
    app.router.redirect_slashes = False
    return app


class _Api:
    """The handlers, used only by the thread of the event loop."""

    def __init__(self, deps: AppDeps, workers: RequestThreads) -> None:
        self._deps = deps
        self._workers = workers
        self._running = {False: 0, True: 0}  # profiles of a moment, and of a window

    async def index(self, _request: Request) -> Response:
        """Links to the rest."""
        name = html.escape(self._deps.service_name or "this process")
        policy = {"content-security-policy": "default-src 'none'"}
        return Response(_PAGE.format(name=name), media_type="text/html", headers=policy)

    async def metrics(self, request: Request) -> Response:
        """The exposition, gzipped where the client takes that."""
        accept = request.headers.get("accept", "")
        zipped = accepts_gzip(request.headers.get("accept-encoding", ""))
        try:
            kind, body, is_zipped = await self._workers.start(
                partial(self._exposition, accept, zipped)
            )
        except GpumemError as exc:
            return _line(503, str(exc))  # no answer, so that a scraper keeps no old values
        return _scraped(kind, body, is_zipped)

    def _exposition(self, accept: str, zipped: bool) -> tuple[str, bytes, bool]:
        kind, body = self._deps.metrics(accept)
        return kind, *_zipped(body, zipped)

    async def lines(self, request: Request) -> Response:
        """Profiled lines of code; a path of its own, since these series come and go."""
        zipped = accepts_gzip(request.headers.get("accept-encoding", ""))
        body, is_zipped = await self._workers.start(
            lambda: _zipped(self._deps.lines().encode("utf-8", "backslashreplace"), zipped)
        )
        return _scraped("text/plain; version=0.0.4; charset=utf-8", body, is_zipped)

    async def healthz(self, _request: Request) -> Response:
        """State of the exporter: 200 where nothing is wrong, else 503 and the reasons.

        Not for a liveness probe: a job must not be restarted for a problem of its exporter.
        """
        health = await self._workers.start(self._deps.health)
        body = {
            "ok": health.ok,
            "reasons": list(health.reasons),
            "ages_seconds": {name: round(age, 3) for name, age in sorted(health.ages.items())},
        }
        status = 200 if health.ok else 503
        return Response(json.dumps(body) + "\n", status_code=status, media_type="application/json")

    async def profile(self, request: Request) -> Response:
        """One gzipped pprof; never 204, which scrapers take for an error."""
        try:
            query = profile_query(request.query_params.multi_items())
        except ValueError as exc:
            return _line(400, str(exc))
        if request.method == "HEAD":
            return self._pprof(b"", query)  # a profile made for this would not be read
        if self._running[query.of_a_window] >= (MAX_WINDOWS if query.of_a_window else MAX_PROFILES):
            return _line(503, "other profiles are being made", retry_after=_RETRY_SECONDS)
        stop = threading.Event()
        call = partial(self._deps.profile, query.kind, query.device, query.seconds, stop)
        making = self._workers.start(call, stop)
        self._running[query.of_a_window] += 1
        making.add_done_callback(partial(self._profile_done, query.of_a_window))
        gone = asyncio.ensure_future(_gone(request))
        first: set[asyncio.Future[Any]] = {making, gone}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            # Ends the window of a client that went away; its place is free when the call ends.
            stop.set()
        if not making.done():
            return _line(503, "the client went away")
        error = making.exception()
        if error is None:
            return self._pprof(making.result(), query)
        if isinstance(error, (ValueError, ConfigError)):
            return _line(400, str(error))
        if isinstance(error, GpumemError):
            return _line(503, str(error), retry_after=_retry_seconds(error))
        raise error

    def _profile_done(self, of_a_window: bool, making: asyncio.Future[bytes]) -> None:
        self._running[of_a_window] -= 1
        if not making.cancelled():
            making.exception()  # retrieved, so that asyncio does not log it

    def _pprof(self, body: bytes, query: ProfileQuery) -> Response:
        service = re.sub(r"[^A-Za-z0-9._-]", "_", self._deps.service_name)[:64] or "gpumem"
        device = "" if query.device is None else f"-device{query.device}"
        name = f"{service}-{query.kind.value}{device}.pb.gz"
        # The body is a gzip file, not a gzipped transfer: no Content-Encoding.
        response = Response(
            body,
            media_type="application/octet-stream",
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )
        if not body:
            del response.headers["content-length"]  # HEAD must not promise an empty profile
        return response


def _retry_seconds(error: GpumemError) -> int:
    seconds = error.retry_after_seconds if isinstance(error, BusyError) else None
    return _RETRY_SECONDS if seconds is None else math.ceil(seconds)


async def _gone(request: Request) -> None:
    """Return once the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(_request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    if status == 405:  # noqa: PLR2004  RFC 9110, 15.5.6
        return _line(405, "GET and HEAD only", allow="GET, HEAD")
    paths = "/metrics, /metrics/lines, /debug/pprof/gpumem, /healthz"
    return _line(status, f"nothing is served here, only {paths}")


def _zipped(body: bytes, zipped: bool) -> tuple[bytes, bool]:
    """The body, gzipped where that is wanted and worth it, and whether it is."""
    if not zipped or len(body) < _GZIP_FROM_BYTES:
        return body, False
    return gzip.compress(body, _GZIP_LEVEL, mtime=0), True


def _scraped(kind: str, body: bytes, is_zipped: bool) -> Response:
    headers = {"content-type": kind, "vary": "Accept, Accept-Encoding"}
    if is_zipped:
        headers["content-encoding"] = "gzip"
    return Response(body, headers=headers)


def _line(status: int, text: str, *, retry_after: int | None = None, allow: str = "") -> Response:
    """An error as one line of plain text."""
    headers = {"allow": allow} if allow else {}
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
    line = " ".join(text.split())[:500] + "\n"
    return Response(line, status_code=status, media_type="text/plain", headers=headers)


def accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header takes gzip (RFC 9110, 12.5.3)."""
    weights: dict[str, float] = {}
    for part in header.lower().split(","):
        coding, _, parameters = part.partition(";")
        name, _, value = parameters.strip().partition("=")
        try:
            weights[coding.strip()] = float(value) if name.strip() == "q" else 1.0
        except ValueError:
            weights[coding.strip()] = 0.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0
