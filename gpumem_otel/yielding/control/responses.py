"""The responses of the control listener, and those to errors that no handler answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from gpumem_otel.yielding.control.guard import problem
from gpumem_otel.yielding.control.schema import as_json
from gpumem_otel.yielding.values import Operation, OperationState, YieldReport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

JSON: Final = "application/json"

EVENTS: Final = "text/event-stream"


class EventStream(StreamingResponse):
    """Server-sent events; `on_end` is called when they have ended, for whatever reason."""

    media_type = EVENTS

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(events)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def as_answer(operation: Operation) -> Operation:
    """The answer to a command; `already` where an earlier command led to the state.

    Args:
        operation: as it was submitted; one that has just begun is running.
    """
    if operation.state is OperationState.RUNNING:
        return operation
    if operation.state is not OperationState.DONE:
        # an earlier one failed, and the state is there all the same: no error of this command
        notes = ("nothing was away",) if operation.kind == "restore" else ()
        report = operation.report or YieldReport(notes=notes)
        operation = Operation(id="", kind=operation.kind, state=OperationState.DONE, report=report)
    return replace(operation, already=True)


def begun(operation: Operation) -> Response:
    """The answer to a command: 202 while it goes on, 200 once done, else a problem."""
    if operation.state in {OperationState.REFUSED, OperationState.FAILED}:
        status = 409 if operation.state is OperationState.REFUSED else 500
        return problem_answer(status, operation.error or operation.state.value, operation.id)
    status = 202 if operation.state is OperationState.RUNNING else 200
    response = json_answer(status, as_json(operation))
    if operation.id:  # "" where the state was there without an operation
        response.headers["location"] = f"/v1/operations/{operation.id}"
    return response


def json_answer(status: int, value: object) -> Response:
    """A response of JSON."""
    return Response(json.dumps(value) + "\n", status_code=status, media_type=JSON)


def problem_answer(
    status: int, line: str, operation: str = "", *, retry_after: int | None = None
) -> Response:
    """An error, see `guard.problem`."""
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    body = problem(status, line, operation)
    return Response(body, status, headers, media_type="application/problem+json")


async def internal_error(_request: Request, _exc: Exception) -> Response:
    """A fault in a handler."""
    return problem_answer(500, "internal error")  # the guard counts it and logs the first


async def stopping(_request: Request, exc: Exception) -> Response:
    """The process ends."""
    return problem_answer(503, str(exc))


def http_error(exc: Exception) -> Response:
    """No such path, or no such method of it."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    allowed = (getattr(exc, "headers", None) or {}).get("Allow", "")
    if status == 405:  # noqa: PLR2004  RFC 9110, 15.5.6
        response = problem_answer(405, f"this path takes {allowed}")
        response.headers["allow"] = allowed
        return response
    return problem_answer(status, "nothing is served here: /v1/openapi.json says what is")
