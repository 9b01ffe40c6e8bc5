"""Connections beyond the maximum: told so in one answer that is ready beforehand, and closed.

None has a thread, a parser or a buffer, and only a few are held for a moment, so that a flood of
them costs what it costs to accept them.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from typing import TypeAlias

    Told: TypeAlias = Callable[[socket.socket, Any], None]
    """(the connection, its address)."""

__all__ = ["LINGER_SECONDS", "MAX_LEAVING", "Overflow"]

LINGER_SECONDS: Final = 1.0
"""For a client to take the answer and close."""

MAX_LEAVING: Final = 16
"""Held at once until they have the answer; of further ones it may be lost."""

_MAX_PIECES: Final = 32
"""Of `_PIECE_BYTES`: as much as the largest request that is taken, head and body."""

_PIECE_BYTES: Final = 4096


@dataclass(slots=True)
class _Leaving:
    """One that has its answer."""

    timer: asyncio.TimerHandle
    pieces_left: int = _MAX_PIECES


class Overflow:
    """Owns the connections that are turned away; everything but `abandon` on the loop's thread.

    Args:
        loop: that watches them.
        answer: bytes of the whole answer, which says that the connection is closed. b"" closes
            without one. So it is over TLS: only a handshake would make it readable, and that costs
            more than most requests, which is the very thing that a full listener must not spend on
            whoever comes. A client takes the close for what it is, an error that may pass.
        on_refused: told of each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, answer: bytes, on_refused: Told) -> None:
        self._loop = loop
        self._answer = answer
        self._on_refused = on_refused
        self._leaving: dict[socket.socket, _Leaving] = {}

    def refuse(self, client: socket.socket, address: Any) -> None:
        """Answer one connection that was accepted just now; it is closed a moment later."""
        with contextlib.suppress(Exception):  # a log's handlers and filters are the job's
            self._on_refused(client, address)
        if not self._tell(client) or len(self._leaving) >= MAX_LEAVING:
            client.close()
            return
        # Closed with something unread it would be reset, and the answer lost on its way.
        timer = self._loop.call_later(LINGER_SECONDS, self._drop, client)
        self._leaving[client] = _Leaving(timer)
        self._loop.add_reader(client, self._discard, client)

    def close(self) -> None:
        """Close what is left."""
        for client in list(self._leaving):
            self._drop(client)

    def abandon(self) -> None:
        """In a forked child: close the descriptors and leave the loop alone."""
        for client in list(self._leaving):
            client.close()

    def _tell(self, client: socket.socket) -> bool:
        """Whether the answer is on its way: it fits the empty buffer of a new connection."""
        if not self._answer:
            return False
        try:
            client.setblocking(False)
            client.send(self._answer)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    def _discard(self, client: socket.socket) -> None:
        """Read on until it closes too."""
        leaving = self._leaving[client]
        leaving.pieces_left -= 1
        ended = leaving.pieces_left <= 0
        with contextlib.suppress(BlockingIOError):
            try:
                ended = not client.recv(_PIECE_BYTES) or ended
            except ConnectionError:
                ended = True
        if ended:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._leaving.pop(client).timer.cancel()
        self._loop.remove_reader(client)
        client.close()
