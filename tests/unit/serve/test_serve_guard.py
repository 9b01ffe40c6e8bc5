"""The checks that every request passes first."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from support.asgi import call, get, scope

from gpumem_otel.base.counters import Counters
from gpumem_otel.serve import guard as guard_module
from gpumem_otel.serve.auth import Tokens
from gpumem_otel.serve.guard import MAX_REQUESTS, HostNames, RequestGuard
from gpumem_otel.serve.threads import RequestThreads
from gpumem_otel.settings.config import Secret


async def fine(_scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-app", b"1")]})
    await send({"type": "http.response.body", "body": b"fine"})


def guarded(app=fine, *, host="127.0.0.1", allowed=(), token="", counters=None, workers=None):
    return RequestGuard(
        app,
        hosts=HostNames(host, allowed),
        tokens=Tokens(Secret(token), ""),
        workers=workers or RequestThreads(),
        counters=counters or Counters(),
    )


def test_a_good_request_passes_with_the_headers_of_all_answers():
    answer = get(guarded(), "/")
    assert (answer.status, answer.body) == (200, b"fine")
    assert answer.headers["x-app"] == "1"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["date"].endswith(" GMT")


@pytest.fixture
def resolver(monkeypatch):
    """How often the resolver was asked; it knows one more name."""
    asked = []

    def names():
        asked.append(1)
        return frozenset({"node7.cluster.local"})

    monkeypatch.setattr(guard_module, "machine_names", names)
    return asked


def test_a_foreign_host_is_refused(resolver):
    app = guarded()
    for _ in range(3):
        answer = get(app, "/metrics", host="evil.example:9464")
        assert answer.status == 421
        assert "GPUMEM_OTEL_ALLOWED_HOSTS" in answer.line
    assert resolver == [1]


def test_the_full_name_of_this_machine_is_looked_up(resolver):
    assert get(guarded(), "/", host="node7.cluster.local:9464").status == 200
    assert resolver == [1]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9464", "[::1]:9464"])
def test_known_hosts_need_no_resolver(resolver, host):
    assert get(guarded(), "/", host=host).status == 200
    assert resolver == []


def test_a_broken_host_needs_no_resolver(resolver):
    assert get(guarded(), "/", host="a b").status == 421
    assert resolver == []


def test_a_slow_resolver_is_not_waited_for(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(guard_module, "_RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr(guard_module, "machine_names", lambda: release.wait() and frozenset())
    workers = RequestThreads()
    try:
        assert get(guarded(workers=workers), "/", host="evil.example").status == 421
    finally:
        release.set()
        assert workers.join(time.monotonic() + 30)


def test_the_address_of_the_connection_is_allowed(resolver):
    request = scope("/", headers={"host": "10.1.2.3:9464"}, server=("10.1.2.3", 9464))
    assert asyncio.run(call(guarded(host="0.0.0.0"), request)).status == 200
    assert resolver == []


def test_http_1_0_goes_without_a_host():
    request = scope("/")
    request["headers"] = []
    assert asyncio.run(call(guarded(), request)).status == 200


def test_a_token_is_asked_for_on_every_path():
    app = guarded(token="s3cret")
    for path in ("/", "/metrics", "/nope"):
        answer = get(app, path)
        assert (answer.status, answer.line) == (401, "a bearer token is needed")
        assert answer.headers["www-authenticate"] == 'Bearer realm="gpumem-otel"'
        assert get(app, path, authorization="Bearer other").status == 401
        assert get(app, path, authorization="Bearer s3cret").status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_length": "0"}, 200),
        ({"content_length": "4096"}, 200),
        ({"content_length": "4097"}, 413),
        ({"content_length": "9" * 20}, 413),
        ({"content_length": "x"}, 413),
        ({"transfer_encoding": "chunked"}, 413),
    ],
)
def test_bodies_are_bounded(headers, status):
    answer = get(guarded(), "/", method="POST", **headers)
    assert answer.status == status
    if status == 413:
        assert answer.headers["connection"] == "close"


def test_one_request_too_many_is_refused():
    async def scenario():
        release = asyncio.Event()

        async def slow(request, receive, send):
            await release.wait()
            await fine(request, receive, send)

        app = guarded(slow)
        running = [asyncio.ensure_future(call(app, scope("/"))) for _ in range(MAX_REQUESTS)]
        await asyncio.sleep(0)
        refused = await call(app, scope("/"))
        release.set()
        done = await asyncio.gather(*running)
        return refused, done, await call(app, scope("/"))

    refused, done, later = asyncio.run(scenario())
    assert (refused.status, refused.line) == (503, "too many requests at once")
    assert refused.headers["retry-after"] == "1"
    assert [answer.status for answer in done] == [200] * MAX_REQUESTS
    assert later.status == 200


def test_a_handler_that_raises_is_counted_and_logged_once(caplog):
    async def broken(_scope, _receive, _send):
        raise KeyError("secret detail")

    counters = Counters()
    app = guarded(broken, counters=counters)
    for _ in range(3):
        answer = get(app, "/")
        assert (answer.status, answer.line) == (500, "internal error")
    assert counters.get("exporter_errors", stage="scrape") == 3
    assert len(caplog.records) == 1


def test_head_of_a_refusal_has_no_body():
    answer = get(guarded(token="x"), "/", method="HEAD")
    assert (answer.status, answer.body) == (401, b"")
    assert answer.headers["content-length"] == "25"


def test_websockets_and_lifespan_are_not_served():
    async def never(_scope, _receive, _send):
        raise AssertionError

    for kind in ("websocket", "lifespan"):
        asyncio.run(guarded(never)({"type": kind}, None, None))


def test_a_request_that_comes_while_the_listener_stops_is_no_failure(caplog):
    """Watchers ask again as soon as they have an answer, also when the process ends."""
    counters, workers = Counters(), RequestThreads()
    workers.stop()

    async def late(_scope, _receive, _send):
        await workers.start(lambda: None)

    answer = get(guarded(late, counters=counters, workers=workers), "/v1/state")
    assert (answer.status, answer.line) == (503, "the listener stops")
    assert counters.get("exporter_errors", stage="scrape") == 0
    assert caplog.text == ""
