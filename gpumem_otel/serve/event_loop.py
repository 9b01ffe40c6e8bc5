"""One life of the listener: event loop, listening socket, connections; imported when it starts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import selectors
import socket
import ssl
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from gpumem_otel.base.logs import named_logger
from gpumem_otel.serve.binding import BACKLOG, Binding
from gpumem_otel.serve.peers import Peer, origin_of, process_of
from gpumem_otel.serve.protocol import protocol_factory

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_otel.serve.guard import App
    from gpumem_otel.serve.protocol import LimitedProtocol
    from gpumem_otel.serve.threads import RequestThreads

_log = named_logger("gpumem_otel.serve")

MAX_CONNECTIONS: Final = 64
"""Open at once, handshakes included; further ones are turned away by `Overflow`."""

HANDSHAKE_SECONDS: Final = 2.0
"""For a TLS handshake; handshakes run in parallel."""

LINGER_SECONDS: Final = 1.0
"""For a client that was turned away to take the answer and close."""

MAX_LEAVING: Final = 16
"""Clients held at once until they have that answer; further ones may lose it."""

_PIECE_BYTES: Final = 4096
_MAX_PIECES: Final = 32
"""Read from such a client: as much as the largest request that is taken, head and body."""

_CLOSE_SECONDS: Final = 1.0
"""For a TLS client to agree to a close."""

_FIRST_RETRY_SECONDS: Final = 0.25
_LAST_RETRY_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 1.0

_NO_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Overflow:
    """Connections beyond the maximum: each gets one prepared answer and is closed.

    None has a thread, a parser or a buffer, and only a few are held for a moment, so that a flood
    costs no more than accepting it. All methods but `abandon` belong to the thread of the loop.

    Args:
        loop: that watches them.
        answer: the whole answer, which announces the close; b"" closes without one. So it is over
            TLS, where only a handshake would make it readable, which costs more than most requests.
        on_refused: called with each connection and its address.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: bytes,
        on_refused: Callable[[socket.socket, Any], None],
    ) -> None:
        self._loop = loop
        self._answer = answer
        self._on_refused = on_refused
        self._leaving: dict[socket.socket, asyncio.TimerHandle] = {}

    def refuse(self, client: socket.socket, address: Any) -> None:
        """Answer one connection that was just accepted; it is closed a moment later."""
        with contextlib.suppress(Exception):  # a log's handlers and filters are the job's
            self._on_refused(client, address)
        if not self._send_answer(client) or len(self._leaving) >= MAX_LEAVING:
            client.close()
            return
        # Closed while something is unread it would be reset, and the answer lost on its way.
        self._leaving[client] = self._loop.call_later(LINGER_SECONDS, self._drop, client)
        self._loop.add_reader(client, self._discard, client, _MAX_PIECES)

    def close(self) -> None:
        """Close what is left."""
        for client in list(self._leaving):
            self._drop(client)

    def abandon(self) -> None:
        """In a forked child: close the descriptors and leave the loop alone."""
        for client in list(self._leaving):
            client.close()

    def _send_answer(self, client: socket.socket) -> bool:
        """Whether the answer is on its way: it fits the empty buffer of a new connection."""
        try:
            client.setblocking(False)
            if self._answer:
                client.send(self._answer)
                client.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return bool(self._answer)

    def _discard(self, client: socket.socket, pieces_left: int) -> None:
        """Read on until the client closes too."""
        try:
            ended = not client.recv(_PIECE_BYTES)
        except OSError as error:
            ended = not isinstance(error, BlockingIOError)
        if ended or pieces_left <= 1:
            self._drop(client)
        else:
            self._loop.add_reader(client, self._discard, client, pieces_left - 1)

    def _drop(self, client: socket.socket) -> None:
        self._leaving.pop(client).cancel()
        self._loop.remove_reader(client)
        client.close()


class ListenerLoop:
    """The thread and everything that it opens. Not reusable: one start, one stop."""

    def __init__(
        self,
        app: App,
        *,
        binding: Binding,
        tls: ssl.SSLContext | None,
        workers: RequestThreads,
        on_bound: Callable[[ListenerLoop], None],
        on_taken: Callable[[OSError], None],
        on_cut: Callable[[str, str], None] = lambda _origin, _reason: None,
        full: bytes = b"",
        on_full: Callable[[str], None] = lambda _origin: None,
    ) -> None:
        self._binding = binding
        self._tls = tls
        self._workers = workers
        self._on_bound = on_bound
        self._on_taken = on_taken
        self._on_cut = on_cut
        self._selector = selectors.DefaultSelector()
        # Never the loop policy: the job may have put uvloop there.
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._loop.set_debug(False)  # it would log into the job under -X dev
        self._loop.set_exception_handler(_quiet)
        self._overflow = Overflow(
            self._loop,
            b"" if tls is not None else full,
            lambda client, address: on_full(origin_of(process_of(client), address)),
        )
        self._connect = protocol_factory(app, self._loop, on_cut)
        self._stopping = asyncio.Event()
        self._socket: socket.socket | None = None
        self._clients: dict[socket.socket, LimitedProtocol | None] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        self._left: list[Any] = []
        self._thread = threading.Thread(target=self._run, name="gpumem-otel-listener", daemon=True)
        self.address = ("", 0)

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the process cannot have another thread.
        """
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            raise

    def stop(self, deadline: float) -> None:
        """Close everything; wait for the threads until `deadline` of `time.monotonic()`."""
        self._workers.stop()
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            self._workers.join(deadline)

    def abandon(self) -> None:
        """In a forked child: close the inherited descriptors and leave the loop alone.

        The epoll instance is shared with the parent: unregistering anything here would stop the
        parent from serving it. Closing our descriptor of it changes nothing there.
        """
        # Kept alive, since the finalizers of transports warn about what is still open.
        self._left = [key.data for key in self._selector.get_map().values()]
        if self._socket is not None:
            self._socket.close()
        for client in list(self._clients):
            client.close()
        self._overflow.abandon()
        self._selector.close()

    # Everything below runs on the thread.

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            _log.warning("the listener ended", exc_info=True)
        finally:
            if self._socket is not None:
                self._socket.close()
            self._loop.close()

    async def _serve(self) -> None:
        listening = await self._listen()
        if listening is None:
            return
        self._loop.add_reader(listening, self._accept, listening)
        self._on_bound(self)
        try:
            await self._stopping.wait()
        finally:
            self._loop.remove_reader(listening)
            listening.close()
            await self._close_connections()

    async def _listen(self) -> socket.socket | None:
        """Bind, again and again until it works; None once stopped."""
        delay = _FIRST_RETRY_SECONDS
        while not self._stopping.is_set():
            try:
                return self._open()
            except OSError as exc:
                self._on_taken(exc)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            delay = min(2 * delay, _LAST_RETRY_SECONDS)
        return None

    def _open(self) -> socket.socket:
        # Stored before it is bound, so that a child forked meanwhile closes it.
        self._socket = listening = self._binding.create()
        try:
            listening.setblocking(False)
            self.address = self._binding.bind(listening)
        except BaseException:
            listening.close()
            raise
        return listening

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(BACKLOG):
            try:
                client, address = listening.accept()
            except OSError as exc:
                if exc.errno in _NO_DESCRIPTORS:
                    # The job has used up its descriptors: pause instead of spinning.
                    self._loop.remove_reader(listening)
                    self._loop.call_later(_PAUSE_SECONDS, self._accept_again, listening)
                return
            if len(self._clients) >= MAX_CONNECTIONS:
                self._overflow.refuse(client, address)
                continue
            self._clients[client] = None
            client.setblocking(False)
            task = self._loop.create_task(self._admit(client, address))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def _accept_again(self, listening: socket.socket) -> None:
        if not self._stopping.is_set():
            self._loop.add_reader(listening, self._accept, listening)

    async def _admit(self, client: socket.socket, address: Any) -> None:
        """Hand one connection to the protocol, after its TLS handshake."""
        limits: dict[str, Any] = {}
        if self._tls is not None:
            limits = {"ssl": self._tls, "ssl_handshake_timeout": HANDSHAKE_SECONDS}
            if sys.version_info >= (3, 11):
                limits["ssl_shutdown_timeout"] = _CLOSE_SECONDS

        def lost() -> None:
            self._clients.pop(client, None)

        def connected() -> LimitedProtocol:
            self._clients[client] = protocol = self._connect(lost)
            return protocol

        try:
            await self._loop.connect_accepted_socket(connected, client, **limits)
        except BaseException as exc:
            lost()
            # asyncio closes it in the next round of the loop, unless it never took it over.
            self._loop.call_soon(client.close)
            # One that only left is not reported: probes of load balancers do that.
            if isinstance(exc, (ssl.SSLError, ConnectionAbortedError)):
                reason = getattr(exc, "reason", None) or "the handshake did not end in time"
                self._on_cut(origin_of(Peer(), address), f"TLS: {reason.replace('_', ' ').lower()}")
            if not isinstance(exc, Exception):
                raise

    async def _close_connections(self) -> None:
        self._overflow.close()
        for task in list(self._handshakes):
            task.cancel()
        for protocol in list(self._clients.values()):
            if protocol is not None and protocol.transport is not None:
                protocol.transport.abort()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        # Transports report their end a few rounds later; requests wake up when they do.
        for _ in range(16):
            await asyncio.sleep(0)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0)
        for client in list(self._clients):
            client.close()


def _quiet(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Keep what clients do to their connections out of the job's log."""
    _log.debug("%s", context.get("message"), exc_info=context.get("exception"))
