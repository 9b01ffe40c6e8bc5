"""Checks each request for the control listener first: Host, credentials, limits.

It finds the sender, once; each handler checks what the sender may do.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect

from gpumem_otel.serve import peers
from gpumem_otel.serve.guard import ALWAYS, CHALLENGE, CLOSE, RequestGuard, body_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.base.counters import Counters
    from gpumem_otel.serve.guard import App, HostNames, Refusal, Scope
    from gpumem_otel.serve.peers import Peer
    from gpumem_otel.serve.threads import RequestThreads
    from gpumem_otel.yielding.control.audit import Audit
    from gpumem_otel.yielding.control.roles import Principal

FULL: Final = "too many connections at once: again in 1 s"

MAX_COMMAND_BYTES: Final = 64 * 1024
"""Of a body; enough for every field a hundred times."""

ROUTES: Final = frozenset({"/v1/state", "/v1/yield", "/v1/restore", "/v1/openapi.json"})
"""Paths that the audit log names; another could contain anything, even a token."""

_SECRET_NAMES: Final = frozenset(
    {"access_token", "api_key", "apikey", "auth", "authorization", "bearer", "key", "token"}
)


_KIND: Final = b"application/problem+json"


class ControlGuard(RequestGuard):
    """ASGI middleware of the control listener.

    Args:
        authenticate: connection and Authorization header -> the sender, None where unknown.
    """

    stage = "control"
    hosts_variable = "GPUMEM_OTEL_CONTROL_ALLOWED_HOSTS"

    def __init__(
        self,
        app: App,
        *,
        hosts: HostNames,
        authenticate: Callable[[Peer, str], Principal | None],
        audit: Audit,
        workers: RequestThreads,
        counters: Counters,
    ) -> None:
        super().__init__(app, hosts=hosts, tokens=None, workers=workers, counters=counters)
        self._authenticate = authenticate
        self._audit = audit

    def _failed(self, exc: Exception) -> None:
        if not _is_the_clients(exc):
            super()._failed(exc)

    async def _refusal(self, scope: Scope) -> Refusal | None:
        refusal = await super()._refusal(scope)
        if refusal is not None:
            status, line, _ = refusal
            self._audit.refused(status, noted(scope, line))
        return refusal

    def _authorize(self, scope: Scope, headers: dict[bytes, bytes]) -> Refusal | None:
        if _holds_secret(scope["query_string"]):
            line = "credentials go into the Authorization header, never into the query"
            return 400, line, (CLOSE,)
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        peer = scope["state"]["peer"]
        principal = self._authenticate(peer, authorization)
        if principal is not None:
            scope["state"]["principal"] = principal
            # No path here needs an escape: one would be meant to mislead a proxy before us, or a
            # line end that a route overlooks.
            return (404, "nothing is served here", ()) if b"%" in scope["raw_path"] else None
        if peer.uid is not None:
            return 403, "this socket is for the user of the job and for root", (CLOSE,)
        line = "a bearer token, or a client certificate that has a role, is needed"
        return 401, line, (CHALLENGE, CLOSE)

    def _body_refusal(self, headers: dict[bytes, bytes]) -> Refusal | None:
        if b"transfer-encoding" in headers:
            return 411, "the length of the body is needed beforehand: Content-Length", (CLOSE,)
        if body_length(headers) > MAX_COMMAND_BYTES:
            return 413, f"a body has at most {MAX_COMMAND_BYTES} bytes", (CLOSE,)
        return None

    def _render(self, status: int, line: str) -> tuple[bytes, bytes]:
        return _KIND, problem(status, line)


def problem(status: int, line: str, operation: str = "") -> bytes:
    """An error as RFC 9457 has it.

    Args:
        status: of HTTP.
        line: what is wrong and what helps.
        operation: id of the operation that it is about.
    """
    value: dict[str, object] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": " ".join(line.split())[:1000],
    }
    if operation:
        value["operation"] = operation
    return json.dumps(value).encode() + b"\n"


def full_answer() -> bytes:
    """The whole answer to a connection above the limit."""
    status = HTTPStatus.SERVICE_UNAVAILABLE
    body = problem(status, FULL)
    headers = (
        (b"content-type", _KIND),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"1"),
        CLOSE,
        *ALWAYS,
    )
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    lines += [b"%s: %s" % header for header in headers]
    return b"\r\n".join([*lines, b"", body])


def noted(scope: Scope, line: str) -> dict[str, object]:
    """The audit log's values for a refused request."""
    path = scope["path"]
    who = scope["state"].get("principal")
    return {
        "request": f"{scope['method'][:10]} {path if path in ROUTES else 'other path'}",
        "who": "" if who is None else who.name,
        "from": origin_of(scope),
        "outcome": "refused",
        "reason": line,
    }


def origin_of(scope: Scope) -> str:
    """The address or user that a request comes from."""
    return peers.origin_of(scope["state"]["peer"], scope.get("client"))


def _is_the_clients(exc: BaseException) -> bool:
    """Whether a failure only says that the client has left; starlette may group several."""
    inner: tuple[BaseException, ...] = getattr(exc, "exceptions", ())
    if inner:
        return all(map(_is_the_clients, inner))
    return isinstance(exc, ClientDisconnect)


def _holds_secret(query: bytes) -> bool:
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=32)
    except ValueError:
        return True  # no real query has so many fields
    return any(name.lower().replace("-", "_") in _SECRET_NAMES for name, _ in pairs)
