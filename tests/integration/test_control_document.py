"""The OpenAPI document names what the listener answers: each status, with its headers."""

from __future__ import annotations

import pytest
from support.controlling import TOKEN, bearer, call, controlling
from support.yield_double import YieldDouble

from gpumem_otel.serve import event_loop
from gpumem_otel.yielding.control import app
from gpumem_otel.yielding.control.openapi import document

OF_EVERY_ANSWER = {
    "date", "cache-control", "x-content-type-options", "content-type", "content-length",
    "connection",
}  # fmt: skip
PATHS = document()["paths"]


def said_of(path, status):
    """Headers of a status in the document, by their names in small letters; of all its methods."""
    found = {}
    for operation in PATHS[path].values():
        headers = operation["responses"][str(status)].get("headers", {})
        found |= {name.lower(): one for name, one in headers.items()}
    return found


def check(path, answer, status):
    """The headers of an answer are those that the document names."""
    assert answer.status == status
    named = said_of(path, status)
    assert set(answer.headers) - OF_EVERY_ANSWER <= set(named)
    assert {name for name, one in named.items() if one["required"]} <= set(answer.headers)


@pytest.fixture
def listener(tokens, monkeypatch):
    monkeypatch.setattr(app, "MAX_WATCHERS", 0)
    options = {"host": "127.0.0.1", "token_file": tokens, "limits": (2, 0.001)}
    with controlling(YieldDouble(), **options) as made:
        yield made


@pytest.mark.parametrize("path", PATHS)
def test_of_every_path(listener, monkeypatch, path):
    where, real = listener.address, path.replace("{id}", "op-1")
    (method,) = (name.upper() for name in PATHS[path])
    for other in ("PUT", "DELETE", "GET" if method == "POST" else "POST"):
        answer = call(where, other, real, bearer(TOKEN))
        check(path, answer, 405)
        assert method in answer.headers["allow"]
    check(path, call(where, method, real), 401)
    monkeypatch.setattr(event_loop, "MAX_CONNECTIONS", 0)
    check(path, call(where, method, real), 503)


def test_of_commands(listener):
    where, shown = listener.address, bearer(TOKEN)
    begun = call(where, "POST", "/v1/yield", shown, body={})
    check("/v1/yield", begun, 202)
    assert call(where, "GET", begun.headers["location"], shown).json["state"] == "done"
    check("/v1/yield", call(where, "POST", "/v1/yield", shown, body={}), 200)
    limited = call(where, "POST", "/v1/yield", shown, body={})
    check("/v1/yield", limited, 429)
    assert limited.headers["retry-after"] == "1000"


def test_of_one_who_waits_where_others_do(listener):
    answer = call(listener.address, "GET", "/v1/state?wait_seconds=1", bearer(TOKEN))
    check("/v1/state", answer, 503)
    assert answer.headers["retry-after"] == "1"
