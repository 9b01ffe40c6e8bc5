"""uvicorn's HTTP protocol with the limits that it leaves open.

uvicorn closes an idle kept-alive connection, but waits forever for the rest of a request that
has begun, and for a reader that never reads. Imported when the listener starts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from gpumem_otel.serve.peers import Peer, origin_of, peer_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    OnCut: TypeAlias = Callable[[str, str], None]
    """(where it came from, why)."""

IDLE_SECONDS: Final = 5
"""A kept-alive connection without a request is closed after this."""

REQUEST_SECONDS: Final = 5.0
"""From the connection, or the first byte, to the last byte of a request."""

DRAIN_SECONDS: Final = 10.0
"""For a client to take an answer (of a stream each part), or to agree to a close."""

MAX_HEADER_BYTES: Final = 16 * 1024
"""Request line and headers together; more is answered 400."""

_SILENT: Final = logging.Logger("gpumem_otel.http", logging.CRITICAL + 1)  # noqa: LOG001
"""Keeps faults of clients out of the job's log; `uvicorn.error` may be the job's own."""


class LimitedProtocol(H11Protocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[], None],
        on_cut: OnCut,
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={}, _loop=loop)
        self.logger = _SILENT
        self.access_log = False
        self._on_lost = on_lost
        self._on_cut = on_cut
        self._peer = Peer()
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is connected (and its TLS handshake done)."""
        super().connection_made(transport)
        self._peer = peer_of(transport)
        self.app_state = {"peer": self._peer}  # each request's scope has it as its state
        self._arm("request", REQUEST_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._arm("", 0)
        super().connection_lost(exc)
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request have come, perhaps not all of them."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """The answer is written, but perhaps not yet taken."""
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # a bad chunk: this is the answer, no other can follow
        super().send_400_response(msg)
        self._report("it is no HTTP, or its head is too long")

    def pause_writing(self) -> None:
        """The client takes an answer, or a part of it, more slowly than it is written."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """It has taken nearly all of that: the next part of a stream has the whole time again."""
        super().resume_writing()
        self._arm("", 0)
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        """No further request came."""
        super().timeout_keep_alive_handler()
        self._watch()

    def _watch(self) -> None:
        """Set the one deadline that the state of the connection calls for."""
        answering = self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY)
        body_missing = self.conn.their_state is h11.SEND_BODY
        if self.transport.is_closing():
            self._arm("close", DRAIN_SECONDS)
        elif self.transport.get_write_buffer_size():
            # First: a client that asks again without reading waits forever in uvicorn's drain().
            self._arm("reader", DRAIN_SECONDS)
        elif body_missing or (self.conn.trailing_data[0] and not answering):
            self._arm("request", REQUEST_SECONDS)
        else:
            self._arm("", 0)  # we answer, or uvicorn's keep-alive timer runs

    def _arm(self, waits_for: str, seconds: float) -> None:
        # A wait that already runs goes on: a client that sends single bytes gains nothing.
        if waits_for == self._waits_for:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waits_for = waits_for
        if waits_for:
            self._timer = self.loop.call_later(seconds, self._expired)

    def _expired(self) -> None:
        waited_for, self._waits_for, self._timer = self._waits_for, "", None
        if waited_for == "reader" and not self.transport.get_write_buffer_size():
            self._watch()  # the answer was taken meanwhile
            return
        if waited_for == "request":
            self._report("the request did not come in time")
        self.transport.abort()

    def _report(self, reason: str) -> None:
        self._on_cut(origin_of(self._peer, self.client), reason)


def protocol_factory(
    app: Any, loop: asyncio.AbstractEventLoop, on_cut: OnCut
) -> Callable[[Callable[[], None]], LimitedProtocol]:
    """Makes the protocol of each connection, given what to call when it is lost.

    By default uvicorn's Config configures logging, reads the environment and trusts forwarded
    addresses. Here it does none of that, since the job may run a uvicorn of its own.

    Args:
        app: ASGI.
        loop: that serves it.
        on_cut: called for each connection that never comes to a whole request.
    """
    config = Config(
        app,
        loop="none",
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level=None,
        access_log=True,  # False would take the handlers off the job's own `uvicorn.access`
        workers=1,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        forwarded_allow_ips="",
        timeout_keep_alive=IDLE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    config.load()
    state = ServerState()
    return lambda on_lost: LimitedProtocol(config, state, loop, on_lost, on_cut)
