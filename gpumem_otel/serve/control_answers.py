"""Answers of the control listener, and the errors that no handler answers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from gpumem_otel.core.yields import Operation, OperationState, YieldReport
from gpumem_otel.serve.control_guard import problem
from gpumem_otel.serve.control_values import as_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

__all__ = [
    "EVENTS",
    "JSON",
    "EventStream",
    "as_answer",
    "begun",
    "http_error",
    "internal_error",
    "json_answer",
    "problem_answer",
    "stopping",
]

JSON: Final = "application/json"

EVENTS: Final = "text/event-stream"


class EventStream(StreamingResponse):
    """Events, and what is to be done when they have ended, however that comes."""

    media_type = EVENTS

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(events)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def as_answer(operation: Operation) -> Operation:
    """What a command came to, told apart from what an earlier one did.

    Args:
        operation: as it was submitted. One that was begun just now runs, whatever it comes to.
    """
    if operation.state is OperationState.RUNNING:
        return operation
    if operation.state is not OperationState.DONE:
        # it failed once, and what is asked for is so by now: no error of this command
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
    if operation.id:  # nothing was ever begun where the state is the one asked for
        response.headers["location"] = f"/v1/operations/{operation.id}"
    return response


def json_answer(status: int, value: object) -> Response:
    """JSON."""
    return Response(json.dumps(value) + "\n", status_code=status, media_type=JSON)


def problem_answer(
    status: int, line: str, operation: str = "", *, retry_after: int | None = None
) -> Response:
    """An error, see `control_guard.problem`."""
    headers = {} if retry_after is None else {"retry-after": str(retry_after)}
    body = problem(status, line, operation)
    return Response(body, status, headers, media_type="application/problem+json")


async def internal_error(_request: Request, _exc: Exception) -> Response:
    """A failure of ours."""
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
