"""Calls an ASGI app in this process, without a server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def line(self) -> str:
        """The body as the one line that an error is."""
        text = self.body.decode()
        assert text.endswith("\n")
        assert text.count("\n") == 1
        return text[:-1]


def scope(
    path: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    server: tuple[str, int] = ("127.0.0.1", 9464),
) -> dict[str, Any]:
    """What a server hands an app for one request."""
    path, _, query = path.partition("?")
    sent = {"host": "localhost:9464", **(headers or {})}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": server,
        "client": ("127.0.0.1", 40000),
        "scheme": "http",
        "method": method,
        "root_path": "",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
        "state": {},
    }


async def call(app: Any, request: dict[str, Any], gone: asyncio.Event | None = None) -> Answer:
    """One request; `gone` is when the client closes the connection (default: never)."""
    messages: list[dict[str, Any]] = []
    received = False

    async def receive() -> dict[str, Any]:
        nonlocal received
        if not received:
            received = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    await app(request, receive, send)
    start, *bodies = messages
    assert start["type"] == "http.response.start"
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], headers, b"".join(part.get("body", b"") for part in bodies))


def get(app: Any, path: str, method: str = "GET", **headers: str) -> Answer:
    """One request on a loop of its own; header names with underscores for dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(call(app, scope(path, method, named)))
