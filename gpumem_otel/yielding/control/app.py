"""The routes of the control listener; handlers are request -> response functions.

    POST /v1/yield             begin a yield: 202 with Location, 200 with the report of a dry run
    POST /v1/restore           begin a restore
    GET  /v1/state             ?version=N&wait_seconds=S: once the version is another; a stream of
                               server-sent events for clients that accept text/event-stream
    GET  /v1/operations/{id}   one of the last hundred
    GET  /v1/openapi.json      all of this as OpenAPI 3.1

Errors are RFC 9457 problems. Blocking calls run on `workers`. Nothing here calls torch or CUDA: the
driver may have checkpointed the process.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from gpumem_otel.errors import ConfigError, YieldFailedError, YieldRefusedError
from gpumem_otel.serve.rate_limit import Buckets
from gpumem_otel.serve.threads import StoppedError
from gpumem_otel.yielding.control.guard import noted, origin_of
from gpumem_otel.yielding.control.idempotency import KeyReusedError, Keys, is_key
from gpumem_otel.yielding.control.openapi import document
from gpumem_otel.yielding.control.responses import (
    EVENTS,
    JSON,
    EventStream,
    as_answer,
    begun,
    http_error,
    internal_error,
    json_answer,
    problem_answer,
    stopping,
)
from gpumem_otel.yielding.control.roles import Role
from gpumem_otel.yielding.control.schema import (
    ControlState,
    ForbiddenError,
    InvalidError,
    MalformedError,
    as_json,
    read_restore,
    read_yield,
    state_query,
)
from gpumem_otel.yielding.values import Operation, OperationState, YieldRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from gpumem_otel.serve.threads import RequestThreads
    from gpumem_otel.yielding.control.audit import Audit
    from gpumem_otel.yielding.control.roles import Principal
    from gpumem_otel.yielding.control.schema import Process
    from gpumem_otel.yielding.protocols import YieldControl
    from gpumem_otel.yielding.values import RestoreRequest, YieldStatus

COMMAND_BURST: Final = 10
COMMANDS_PER_SECOND: Final = 0.5
"""Limits of one sender: at once, and in the long run."""

MAX_WATCHERS: Final = 8
"""Requests that may wait for a change at once; fewer than all requests, so that commands pass."""

_SLICE_SECONDS: Final = 0.5
"""How soon a wait ends after its client has gone or the listener stops."""

_BEAT_SECONDS: Final = 15.0
"""How often a stream without changes sends a comment."""

_DRY_RUN_SECONDS: Final = 30.0
"""For a dry run's scan, after the wait for a safe point; then the answer is 202."""


def build_control_app(
    control: YieldControl,
    *,
    process: Callable[[], Process],
    workers: RequestThreads,
    audit: Audit,
    disk_dirs: tuple[str, ...] = (),
    burst: int = COMMAND_BURST,
    per_second: float = COMMANDS_PER_SECOND,
) -> ASGIApp:
    """The routes, without the checks of `ControlGuard`.

    Args:
        control: executes commands.
        process: this process; must touch neither torch nor CUDA.
        workers: run blocking calls.
        audit: logs commands.
        disk_dirs: folders that a command may name.
        burst: commands of one sender at once.
        per_second: commands of one sender in the long run.
    """
    api = _Api(
        control,
        process=process,
        workers=workers,
        audit=audit,
        disk_dirs=disk_dirs,
        buckets=Buckets(burst, per_second),
    )
    app = Starlette(
        routes=[
            Route("/v1/yield", api.begin_yield, methods=["POST"]),
            Route("/v1/restore", api.begin_restore, methods=["POST"]),
            Route("/v1/state", api.state, methods=["GET"]),
            Route("/v1/operations/{id}", api.operation, methods=["GET"]),
            Route("/v1/openapi.json", api.openapi, methods=["GET"]),
        ],
        exception_handlers={
            HTTPException: api.no_route,
            StoppedError: stopping,
            Exception: internal_error,
        },
    )
    app.router.redirect_slashes = False
    return app


class _Api:
    """The handlers; only the event loop's thread uses them."""

    def __init__(
        self,
        control: YieldControl,
        *,
        process: Callable[[], Process],
        workers: RequestThreads,
        audit: Audit,
        disk_dirs: tuple[str, ...],
        buckets: Buckets,
    ) -> None:
        self._control = control
        self._process = process
        self._workers = workers
        self._audit = audit
        self._disk_dirs = disk_dirs
        self._buckets = buckets
        self._keys = Keys()
        self._one_at_a_time = asyncio.Lock()
        self._watchers = 0

    # commands -------------------------------------------------------------------------------

    async def begin_yield(self, request: Request) -> Response:
        """Begin a yield."""
        return await self._command(
            request, Role.YIELD, partial(read_yield, disk_dirs=self._disk_dirs)
        )

    async def begin_restore(self, request: Request) -> Response:
        """Begin a restore."""
        return await self._command(request, Role.RESTORE, read_restore)

    async def _command(
        self,
        request: Request,
        role: Role,
        read: Callable[[bytes], YieldRequest | RestoreRequest],
    ) -> Response:
        who: Principal = request.state.principal
        noted: dict[str, object] = {
            "command": role.value,
            "who": who.name,
            "role": "+".join(sorted(one.value for one in who.roles)),
            "from": origin_of(request.scope),
        }
        try:
            self._may(who, role)
            self._slow_down(who, role)
            key = _key_of(request)
            body = await _body_of(request)
            # on a worker: a folder that it names may be on a file system that hangs
            wanted = await self._workers.start(partial(read, body))
        except _TurnedAwayError as exc:
            return self._turned_away(noted, exc)
        except InvalidError as exc:
            status = _STATUSES.get(type(exc), 422)
            return self._turned_away(noted, _TurnedAwayError(status, str(exc)))
        noted["request"] = _request_of(wanted)
        return await self._begin(request, who, key, wanted, noted)

    async def _begin(
        self,
        request: Request,
        who: Principal,
        key: str,
        wanted: YieldRequest | RestoreRequest,
        noted: dict[str, object],
    ) -> Response:
        replayed = False
        try:
            # the same key, sent twice at once, begins one operation
            async with self._one_at_a_time:
                operation = self._keys.find(who.name, key, wanted) if key else None
                replayed = operation is not None
                if operation is None:
                    submit = partial(self._control.submit, wanted, who.name)
                    operation = as_answer(await self._workers.start(submit))
                    if key:
                        self._keys.keep(who.name, key, wanted, operation)
        except KeyReusedError:
            line = "this Idempotency-Key came with another command: take a new one"
            return self._turned_away(noted, _TurnedAwayError(422, line))
        except (YieldRefusedError, YieldFailedError, ConfigError, ValueError) as exc:
            failed = isinstance(exc, YieldFailedError)
            status = 500 if failed else 409 if isinstance(exc, YieldRefusedError) else 422
            outcome = "failed" if failed else "refused"
            self._audit.command({**noted, "operation": "", "outcome": outcome, "reason": str(exc)})
            return problem_answer(status, str(exc))
        except Exception as exc:
            self._audit.command({**noted, "operation": "", "outcome": "failed", "reason": str(exc)})
            raise
        if replayed:
            current = self._control.operation(operation.id) or operation
            operation = replace(current, already=operation.already)
        outcome = "sent again" if replayed else _outcome_of(operation)
        self._audit.command(
            {**noted, "operation": operation.id, "outcome": outcome, "reason": operation.error}
        )
        dry_run = isinstance(wanted, YieldRequest) and wanted.dry_run
        if dry_run and self._watchers < MAX_WATCHERS:  # else the answer is 202
            operation = await self._ended(request, operation, wanted.wait_seconds)
        return begun(operation)

    async def _ended(
        self, request: Request, operation: Operation, wait_seconds: float
    ) -> Operation:
        """The operation when it has ended, or as it is after some time."""

        def wait(stop: threading.Event) -> Operation:
            version, left = -1, wait_seconds + _DRY_RUN_SECONDS
            while True:
                current = self._control.operation(operation.id) or operation
                if current.state is not OperationState.RUNNING or left <= 0 or stop.is_set():
                    return current
                version = self._control.wait(version, min(left, _SLICE_SECONDS)).version
                left -= _SLICE_SECONDS

        return await self._waiting(request, wait) or operation

    # questions ------------------------------------------------------------------------------

    async def state(self, request: Request) -> Response:
        """The status, at once or when its version is another."""
        if (refusal := self._reader_refusal(request)) is not None:
            return refusal
        try:
            version, seconds = state_query(request.query_params.multi_items())
        except InvalidError as exc:
            return problem_answer(400, str(exc))
        streams = EVENTS in request.headers.get("accept", "")
        if (seconds or streams) and self._watchers >= MAX_WATCHERS:
            return problem_answer(
                503, "others wait already: ask without wait_seconds", retry_after=1
            )
        if request.method == "HEAD":
            return Response(b"", media_type=EVENTS if streams else JSON)
        if streams:
            self._watchers += 1
            return EventStream(self._changes(version), self._stream_ended)
        if not seconds:
            status: YieldStatus | None = await self._workers.start(
                partial(self._control.wait, -1, 0.0)
            )
        else:
            status = await self._waiting(request, partial(self._changed, version, seconds))
        if status is None:
            return problem_answer(503, "the client has gone, or the listener stops", retry_after=1)
        return json_answer(200, as_json(ControlState(process=self._process(), status=status)))

    async def operation(self, request: Request) -> Response:
        """One operation."""
        if (refusal := self._reader_refusal(request)) is not None:
            return refusal
        if request.query_params:
            return problem_answer(400, "no query is read here")
        call = partial(self._control.operation, request.path_params["id"][:200])
        operation = await self._workers.start(call)
        if operation is None:
            return problem_answer(404, "no such operation: the last hundred are kept")
        return json_answer(200, as_json(operation))

    async def openapi(self, request: Request) -> Response:
        """The document."""
        if (refusal := self._reader_refusal(request)) is not None:
            return refusal
        if request.query_params:
            return problem_answer(400, "no query is read here")
        return json_answer(200, document())

    async def no_route(self, request: Request, exc: Exception) -> Response:
        """No such path, or no such method of it."""
        response = http_error(exc)
        self._audit.refused(response.status_code, noted(request.scope, "no such route"))
        return response

    def _reader_refusal(self, request: Request) -> Response | None:
        who: Principal = request.state.principal
        try:
            self._may(who, Role.READ)
        except _TurnedAwayError as exc:
            noted: dict[str, object] = {
                "command": "read",
                "who": who.name,
                "from": origin_of(request.scope),
            }
            return self._turned_away(noted, exc)
        return None

    # waiting --------------------------------------------------------------------------------

    def _changed(self, version: int, seconds: float, stop: threading.Event) -> YieldStatus | None:
        """On a worker: the status when its version is another, or after so long; None: stopped."""
        left = seconds
        while not stop.is_set():
            status = self._control.wait(version, min(left, _SLICE_SECONDS))
            left -= _SLICE_SECONDS
            if status.version != version or left <= 0:
                return status
        return None

    async def _waiting(self, request: Request, call: Callable[[threading.Event], Any]) -> Any:
        """The result of a call that waits; it is stopped when the client goes."""
        stop = threading.Event()
        waiting = self._workers.start(partial(call, stop), stop)
        gone = asyncio.ensure_future(_gone(request))
        self._watchers += 1
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else None
        finally:
            self._watchers -= 1
            gone.cancel()
            stop.set()
            waiting.add_done_callback(_retrieve)

    async def _changes(self, version: int) -> AsyncIterator[bytes]:
        """Server-sent events, one for each change, until the client goes."""
        stop = threading.Event()
        try:
            while True:
                status: YieldStatus | None = await self._workers.start(
                    partial(self._changed, version, _BEAT_SECONDS, stop), stop
                )
                if status is None:
                    return
                if status.version == version:
                    yield b": still here\n\n"
                    continue
                version = status.version
                state = ControlState(process=self._process(), status=status)
                data = json.dumps(as_json(state))
                yield f"id: {version}\nevent: state\ndata: {data}\n\n".encode()
        finally:
            stop.set()

    def _stream_ended(self) -> None:
        self._watchers -= 1

    # refusals -------------------------------------------------------------------------------

    def _may(self, who: Principal, role: Role) -> None:
        if not who.may(role):
            way = (
                "add it to the job's GPUMEM_OTEL_CONTROL_CLIENT_ROLES"
                if who.name.startswith("certificate ")
                else "add it to that line of the job's token file, or show a token that has it"
            )
            line = f"{who.name} does not have the role {role.value}: {way}"
            raise _TurnedAwayError(403, line)

    def _slow_down(self, who: Principal, role: Role) -> None:
        # each kind on its own: refused yields do not block a restore
        wait = self._buckets.take(f"{role.value} {who.name}")
        if wait:
            why = f"too many commands of this sender: again in {wait} s"
            raise _TurnedAwayError(429, why, wait)

    def _turned_away(self, noted: dict[str, object], exc: _TurnedAwayError) -> Response:
        self._audit.refused(exc.status, {**noted, "outcome": "refused", "reason": str(exc)})
        return problem_answer(exc.status, str(exc), retry_after=exc.retry_after)


_STATUSES: Final[dict[type, int]] = {MalformedError: 400, ForbiddenError: 403}


_OUTCOMES: Final = {
    OperationState.RUNNING: "begun",
    OperationState.DONE: "done",
    OperationState.REFUSED: "refused",
    OperationState.FAILED: "failed",
}


def _outcome_of(operation: Operation) -> str:
    done = operation.state is OperationState.DONE
    return "nothing to do" if operation.already and done else _OUTCOMES[operation.state]


class _TurnedAwayError(Exception):
    """A command that is refused before it reaches the engine."""

    def __init__(self, status: int, line: str, retry_after: int | None = None) -> None:
        super().__init__(line)
        self.status = status
        self.retry_after = retry_after


def _key_of(request: Request) -> str:
    """The Idempotency-Key, "" where there is none."""
    keys = request.headers.getlist("idempotency-key")
    if not keys:
        return ""
    if len(keys) > 1 or not is_key(keys[0]):
        raise _TurnedAwayError(400, "Idempotency-Key must be 1 to 128 visible ASCII characters")
    return str(keys[0])


def _request_of(wanted: YieldRequest | RestoreRequest) -> dict[str, object]:
    """The fields that differ from the defaults, for the audit log."""
    defaults = as_json(type(wanted)())
    return {name: value for name, value in as_json(wanted).items() if value != defaults[name]}


async def _body_of(request: Request) -> bytes:
    if request.query_params:
        raise _TurnedAwayError(400, "no query is read here: fields go into the body")
    try:
        body = await request.body()  # the guard has checked its length
    except ClientDisconnect:
        raise _TurnedAwayError(400, "the client went away") from None
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON and (body or kind):
        raise _TurnedAwayError(415, f"the body must be {JSON}")
    return body


async def _gone(request: Request) -> None:
    """Return once the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _retrieve(waiting: asyncio.Future[Any]) -> None:
    if not waiting.cancelled():
        waiting.exception()  # or asyncio complains about it
