"""The OpenAPI 3.1 document of the control API, made from the dataclasses and their checks."""

from __future__ import annotations

from typing import Any, Final

from gpumem_otel._version import __version__
from gpumem_otel.yielding.control.idempotency import KEY_PATTERN
from gpumem_otel.yielding.control.schema import (
    ControlState,
    Process,
    object_schema,
    query_parameters,
    request_schema,
    schema_of,
)
from gpumem_otel.yielding.values import (
    Operation,
    PhaseTime,
    RestoreRequest,
    YieldReport,
    YieldRequest,
    YieldStatus,
)

_ANSWERS: Final = (Operation, PhaseTime, YieldReport, YieldStatus, ControlState, Process)

_REFUSALS: Final = {
    400: "The request is malformed, or holds credentials in its query.",
    401: "No credential that is known here.",
    403: "The sender does not have the role that this needs, or the job does not allow it.",
    404: "No such operation.",
    405: "Another method than this path takes; Allow names those.",
    409: "The state of the job does not allow it; the detail says what helps.",
    411: "The body's length is not said beforehand.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    421: "The Host header names another machine.",
    422: "A field cannot be used, or the Idempotency-Key came with another command.",
    429: "Too many commands of this sender; Retry-After says when.",
    500: "The command ended in a state that it should not have; the detail says which.",
    503: "Too many requests or connections at once, Retry-After says when; or the listener stops.",
}

_ALWAYS: Final = (400, 401, 403, 405, 411, 413, 421, 503)
"""Every request may get these."""


def _header(meaning: str, kind: str = "string", *, always: bool = True) -> dict[str, Any]:
    return {"description": meaning, "required": always, "schema": {"type": kind}}


_SOON: Final = "Seconds to wait before it is asked again."

_HEADERS: Final = {
    401: {"WWW-Authenticate": _header("The scheme, Bearer.")},
    405: {"Allow": _header("Methods of this path.")},
    429: {"Retry-After": _header(_SOON, "integer")},
    503: {"Retry-After": _header(_SOON, "integer", always=False)},
}

_LOCATION: Final = "Path of the operation."


def document() -> dict[str, Any]:
    """The document, as it is served."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gpumem_otel control",
            "version": __version__,
            "description": "Ask a job to give its GPU memory back, and to take it again.",
        },
        "paths": {
            "/v1/yield": {"post": _command("yield", "Give GPU memory back.", "YieldRequest")},
            "/v1/restore": {"post": _command("restore", "Take it again.", "RestoreRequest")},
            "/v1/state": {"get": _state()},
            "/v1/operations/{id}": {"get": _operation()},
            "/v1/openapi.json": {"get": _document()},
        },
        "components": {
            "schemas": {
                "YieldRequest": request_schema(YieldRequest),
                "RestoreRequest": request_schema(RestoreRequest),
                **{kind.__name__: object_schema(kind) for kind in _ANSWERS},
                "Problem": _PROBLEM,
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


_PROBLEM: Final = {
    "type": "object",
    "description": "RFC 9457.",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "operation": {"type": "string"},
    },
    "required": ["type", "title", "status", "detail"],
    "additionalProperties": False,
}


def _command(name: str, summary: str, body: str) -> dict[str, Any]:
    key = {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "The same key and body again give the same operation.",
        "schema": {"type": "string", "pattern": KEY_PATTERN, "maxLength": 128},
    }
    operation = schema_of(Operation)
    return {
        "operationId": name,
        "summary": summary,
        "description": f"Needs the role {name}.",
        "parameters": [key],
        "requestBody": {"content": {"application/json": {"schema": _ref(body)}}},
        "responses": {
            "200": {
                **_json(
                    "It has ended; of a dry run, its report. Where `already` is true nothing was "
                    "begun: the state that is asked for was there, and the rest is of the "
                    "operation that led to it.",
                    operation,
                ),
                # none where the state was already the one that is asked for
                "headers": {"Location": _header(_LOCATION, always=False)},
            },
            "202": {
                **_json("It has begun.", operation),
                "headers": {"Location": _header(_LOCATION)},
            },
            **_refusals(*_ALWAYS, 409, 415, 422, 429, 500),
        },
    }


def _state() -> dict[str, Any]:
    answer = _json("The status.", schema_of(ControlState))
    answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "operationId": "state",
        "summary": "Where the job stands; a long poll with version and wait_seconds.",
        "description": "With `Accept: text/event-stream`, every change as an event.",
        "parameters": query_parameters(),
        "responses": {"200": answer, **_refusals(*_ALWAYS)},
    }


def _operation() -> dict[str, Any]:
    schema = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}
    identifier = {"name": "id", "in": "path", "required": True, "schema": schema}
    return {
        "operationId": "operation",
        "summary": "How far an operation is, and what it did.",
        "parameters": [identifier],
        "responses": {
            "200": _json("The operation.", schema_of(Operation)),
            **_refusals(*_ALWAYS, 404),
        },
    }


def _document() -> dict[str, Any]:
    return {
        "operationId": "openapi",
        "summary": "This document.",
        "responses": {
            "200": _json("OpenAPI 3.1.", {"type": "object"}),
            **_refusals(*_ALWAYS),
        },
    }


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusals(*statuses: int) -> dict[str, Any]:
    return {
        str(status): {
            "description": _REFUSALS[status],
            **({"headers": _HEADERS[status]} if status in _HEADERS else {}),
            "content": {"application/problem+json": {"schema": _ref("Problem")}},
        }
        for status in sorted(statuses)
    }


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
