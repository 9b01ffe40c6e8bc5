"""The routes, called without a server."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading

import pytest
from support.asgi import call, get, scope
from support.listening import EXPOSITION, PPROF, WAIT, some_deps

from gpumem_otel.base.profile import ProfileKind
from gpumem_otel.errors import BusyError, CaptureError, ConfigError, EncodeError
from gpumem_otel.serve.dependencies import Health
from gpumem_otel.serve.guard import MAX_REQUESTS
from gpumem_otel.serve.read_api import accepts_gzip, build_app

PATH = "/debug/pprof/gpumem"


def test_metrics_hand_the_accept_header_on():
    seen = []

    def metrics(accept):
        seen.append(accept)
        return "application/openmetrics-text; version=1.0.0", EXPOSITION

    answer = get(build_app(some_deps(metrics=metrics)), "/metrics", accept="text/plain;q=0.5")
    assert (answer.status, answer.body) == (200, EXPOSITION)
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0"
    assert answer.headers["content-length"] == str(len(EXPOSITION))
    assert "content-encoding" not in answer.headers
    assert seen == ["text/plain;q=0.5"]


def test_metrics_are_gzipped_where_the_client_takes_that():
    long = EXPOSITION * 100
    app = build_app(some_deps(metrics=lambda _: ("text/plain", long)))
    answer = get(app, "/metrics", accept_encoding="gzip, deflate")
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    assert gzip.decompress(answer.body) == long
    assert answer.body == gzip.compress(long, 5, mtime=0)
    assert get(app, "/metrics").body == long


def test_a_short_exposition_stays_as_it_is():
    answer = get(build_app(some_deps()), "/metrics", accept_encoding="gzip")
    assert (answer.body, answer.headers.get("content-encoding")) == (EXPOSITION, None)


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("GZIP", True),
        ("deflate, gzip;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0, *", False),
        ("*;q=0", False),
        ("identity", False),
        ("gzip;q=high", False),
        ("xgzip", False),
        ("", False),
    ],
)
def test_accept_encoding(header, accepted):
    assert accepts_gzip(header) is accepted


@pytest.mark.parametrize(
    ("query", "arguments", "name"),
    [
        ("", (ProfileKind.LIVE, None, None), "trainer-live.pb.gz"),
        ("?device=3", (ProfileKind.LIVE, 3, None), "trainer-live-device3.pb.gz"),
        ("?seconds=4", (ProfileKind.ALLOCATED, None, 4.0), "trainer-allocated.pb.gz"),
        ("?kind=allocated", (ProfileKind.ALLOCATED, None, None), "trainer-allocated.pb.gz"),
    ],
)
def test_a_profile_is_a_gzip_file(query, arguments, name):
    seen = []

    def profile(*given):
        seen.append(given)
        return PPROF

    answer = get(build_app(some_deps(profile=profile)), PATH + query, accept_encoding="gzip")
    assert (answer.status, answer.body) == (200, PPROF)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'
    assert "content-encoding" not in answer.headers
    (given,) = seen
    assert given[:3] == arguments
    assert isinstance(given[3], threading.Event)


def test_a_strange_service_name_makes_a_plain_file_name():
    answer = get(build_app(some_deps(service_name='a"b\r\nc/\u00e9')), PATH)
    assert answer.headers["content-disposition"] == 'attachment; filename="a_b__c__-live.pb.gz"'
    answer = get(build_app(some_deps(service_name="")), PATH)
    assert answer.headers["content-disposition"] == 'attachment; filename="gpumem-live.pb.gz"'


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (CaptureError("another window\nis open"), 503, "another window is open"),
        (EncodeError("does not fit"), 503, "does not fit"),
        (ValueError("no device 7"), 400, "no device 7"),
        (ConfigError("allocated is off"), 400, "allocated is off"),
    ],
)
def test_errors_of_a_profile_are_one_line(error, status, line):
    def profile(*_):
        raise error

    answer = get(build_app(some_deps(profile=profile)), PATH)
    assert (answer.status, answer.line) == (status, line)
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers.get("retry-after") == ("5" if status == 503 else None)


def test_a_bad_query_is_one_line():
    answer = get(build_app(some_deps()), PATH + "?seconds=301")
    assert (answer.status, answer.line) == (
        400,
        "seconds must be a number above 0 and at most 300",
    )


def test_head_of_a_profile_makes_none():
    def profile(*_):
        raise AssertionError

    answer = get(build_app(some_deps(profile=profile)), PATH + "?seconds=60", method="HEAD")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "content-length" not in answer.headers
    assert get(build_app(some_deps()), PATH + "?seconds=x", method="HEAD").status == 400


def test_two_profiles_at_once_and_no_third():
    entered = threading.Semaphore(0)
    release = threading.Event()

    def profile(*_):
        entered.release()
        assert release.wait(WAIT)
        return PPROF

    async def scenario():
        app = build_app(some_deps(profile=profile))
        running = [asyncio.ensure_future(call(app, scope(PATH))) for _ in range(2)]
        for _ in range(2):
            await asyncio.to_thread(entered.acquire, timeout=WAIT)
        refused = await call(app, scope(PATH))
        release.set()
        done = await asyncio.gather(*running)
        return refused, done, await call(app, scope(PATH))

    refused, done, later = asyncio.run(scenario())
    assert (refused.status, refused.line) == (503, "other profiles are being made")
    assert refused.headers["retry-after"] == "5"
    assert [answer.status for answer in done] == [200, 200]
    assert later.status == 200


def test_windows_leave_room_for_profiles_of_a_moment():
    entered = threading.Semaphore(0)
    release = threading.Event()

    def profile(_kind, _device, seconds, _stop):
        if seconds is not None:
            entered.release()
            assert release.wait(WAIT)
        return PPROF

    async def scenario():
        app = build_app(some_deps(profile=profile))
        window = scope(PATH + "?seconds=10")
        running = [asyncio.ensure_future(call(app, window)) for _ in range(4)]
        for _ in range(4):
            await asyncio.to_thread(entered.acquire, timeout=WAIT)
        refused = await call(app, window)
        live = await call(app, scope(PATH))
        release.set()
        done = await asyncio.gather(*running)
        return refused, live, done, await call(app, window)

    refused, live, done, later = asyncio.run(scenario())
    assert (refused.status, refused.line) == (503, "other profiles are being made")
    assert refused.headers["retry-after"] == "5"
    assert [answer.status for answer in (live, *done, later)] == [200] * 6
    assert MAX_REQUESTS > 4 + 2  # the others are for scrapes


@pytest.mark.parametrize(("seconds", "header"), [(None, "5"), (17, "17"), (0.2, "1")])
def test_a_busy_answer_has_a_retry_after(seconds, header):
    def profile(*_):
        raise BusyError("window: others come first", retry_after_seconds=seconds)

    answer = get(build_app(some_deps(profile=profile)), PATH + "?seconds=1")
    assert (answer.status, answer.headers["retry-after"]) == (503, header)


def test_a_client_that_goes_away_ends_its_window():
    stops = []
    entered = threading.Event()

    def profile(_kind, _device, _seconds, stop):
        stops.append(stop)
        entered.set()
        assert stop.wait(WAIT)
        return PPROF

    async def scenario():
        gone = asyncio.Event()
        request = scope(PATH + "?seconds=300")
        running = asyncio.ensure_future(call(build_app(some_deps(profile=profile)), request, gone))
        assert await asyncio.to_thread(entered.wait, WAIT)
        assert not stops[0].is_set()
        gone.set()
        await running

    asyncio.run(scenario())
    assert stops[0].is_set()


def test_health_lists_what_is_wrong():
    health = Health(ok=False, reasons=("no push for 300 s",), ages={"read": 1.23456, "push": 300})
    answer = get(build_app(some_deps(health=lambda: health)), "/healthz")
    assert answer.status == 503
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.body) == {
        "ok": False,
        "reasons": ["no push for 300 s"],
        "ages_seconds": {"push": 300, "read": 1.235},
    }
    assert get(build_app(some_deps()), "/healthz").status == 200


def test_the_page_links_to_the_rest_and_escapes_the_name():
    answer = get(build_app(some_deps(service_name="<script>")), "/")
    page = answer.body.decode()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    for link in ("metrics", "metrics/lines", "debug/pprof/gpumem", "healthz"):
        assert f'href="{link}"' in page


def test_lines_have_a_path_of_their_own_and_are_nothing_by_default():
    empty = get(build_app(some_deps()), "/metrics/lines")
    assert (empty.status, empty.body) == (200, b"")
    assert empty.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"

    text = "gpumem_line_hits_total 1\n" * 100
    app = build_app(some_deps(lines=lambda: text))
    assert get(app, "/metrics/lines").body.decode() == text
    zipped = get(app, "/metrics/lines", accept_encoding="gzip")
    assert zipped.headers["content-encoding"] == "gzip"
    assert gzip.decompress(zipped.body).decode() == text


@pytest.mark.parametrize("path", ["/", "/metrics", "/metrics/lines", PATH, "/healthz"])
def test_head_and_other_methods(path):
    app = build_app(some_deps())
    assert get(app, path, method="HEAD").status == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        answer = get(app, path, method=method)
        assert (answer.status, answer.line) == (405, "GET and HEAD only")
        assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/nope", "/metrics/", "//metrics", "/debug/pprof/", "/v1/yield"])
def test_other_paths_are_not_found_and_never_redirected(path):
    answer = get(build_app(some_deps()), path)
    assert answer.status == 404
    assert answer.line == (
        "nothing is served here, only /metrics, /metrics/lines, /debug/pprof/gpumem, /healthz"
    )
