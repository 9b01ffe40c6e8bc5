"""The socket side: one deadline, one attempt, no redirect, proxies, forks."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time

import pytest
from support.fake_pyroscope import FakePyroscope

from gpumem_otel.errors import PushError
from gpumem_otel.push import transport as transport_module
from gpumem_otel.push.transport import MAX_ANSWER_BYTES, Transport, proxy_for
from gpumem_otel.settings.config import PyroscopeConfig, Secret

PATH = "/push.v1.PusherService/Push"
HEADERS = {"Content-Type": "application/proto", "Accept-Encoding": "identity"}


@pytest.fixture
def fake():
    with FakePyroscope() as server:
        yield server


@pytest.fixture
def transport():
    made = Transport(PyroscopeConfig())
    yield made
    made.close()


def failure(transport: Transport, url: str, body: bytes = b"", seconds: float = 5.0) -> PushError:
    with pytest.raises(PushError) as caught:
        transport.post(url + PATH, body, HEADERS, seconds)
    assert caught.value.__cause__ is None
    return caught.value


class Scripted:
    """A server that handles its connections one by one, each by a script."""

    def __init__(self, *scripts) -> None:
        self.scripts = scripts
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.seen: list[bytes] = []
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        for script in self.scripts:
            connection, _ = self.socket.accept()
            with connection, contextlib.suppress(ConnectionError):
                script(self, connection)

    def read(self, connection: socket.socket) -> None:
        """One whole request."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(1 << 16)
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(re.search(rb"Content-Length: (\d+)", head)[1])
        while len(body) < length:
            body += connection.recv(1 << 16)
        self.seen.append(body)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.thread.join(timeout=5)
        self.socket.close()


def test_an_answer(fake, transport):
    answer = transport.post(fake.url + PATH, b"\xff\xff", HEADERS, 5.0)
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert b"invalid_argument" in answer.body
    request = fake.requests[0]
    assert request.body == b"\xff\xff"
    assert request.headers["accept-encoding"] == "identity"
    assert request.headers["content-length"] == "2"


def test_a_connection_is_kept(fake, transport):
    for _ in range(3):
        transport.post(fake.url + PATH, b"", HEADERS, 5.0)
    assert fake.connections == 1
    transport.close()
    transport.post(fake.url + PATH, b"", HEADERS, 5.0)
    assert fake.connections == 2


def test_an_idle_connection_is_not_trusted(fake, transport, monkeypatch):
    transport.post(fake.url + PATH, b"", HEADERS, 5.0)
    monkeypatch.setattr(transport_module, "MAX_IDLE_SECONDS", 0.0)
    transport.post(fake.url + PATH, b"", HEADERS, 5.0)
    assert fake.connections == 2


def test_a_kept_connection_that_was_closed_meanwhile(fake, transport):
    """Seen before anything is sent: a new one takes the request, once."""
    transport.post(fake.url + PATH, b"", HEADERS, 5.0)
    fake.down()
    fake.up()
    assert transport.post(fake.url + PATH, b"", HEADERS, 5.0).status == 200
    assert len(fake.requests) == 2


def test_a_request_that_may_have_arrived_is_not_repeated(transport):
    """A kept connection ends after it took the whole request: whether it was stored is unknown."""

    def two(server: Scripted, connection: socket.socket) -> None:
        server.read(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        server.read(connection)

    with Scripted(two) as server:
        assert transport.post(server.url + PATH, b"a", HEADERS, 5.0).status == 200
        error = failure(transport, server.url, b"b")
    assert (error.reason, error.retryable) == ("cut", False)
    assert server.seen == [b"a", b"b"]


def test_a_request_that_did_not_get_through_is_repeated_at_once(transport):
    """A kept connection ends in the middle of a request: the rest was not taken."""
    body = b"x" * 20_000_000  # more than any socket buffer

    def first(server: Scripted, connection: socket.socket) -> None:
        server.read(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        connection.recv(1)

    def second(server: Scripted, connection: socket.socket) -> None:
        got = 0
        while got < len(body):
            got += len(connection.recv(1 << 20))
        connection.sendall(b"HTTP/1.1 202 OK\r\nContent-Length: 0\r\n\r\n")

    with Scripted(first, second) as server:
        assert transport.post(server.url + PATH, b"a", HEADERS, 5.0).status == 200
        assert transport.post(server.url + PATH, body, HEADERS, 20.0).status == 202


def test_a_first_request_is_never_repeated(transport):
    with Scripted(lambda server, connection: connection.recv(1)) as server:
        error = failure(transport, server.url, b"x" * 20_000_000, 20.0)
    assert (error.reason, error.retryable) == ("cut", False)


@pytest.mark.parametrize("fault", ["hang", "silent", "trickle", "trickle_body"])
def test_one_deadline_holds_for_everything(fake, transport, fault):
    """Also for a server that sends a byte now and then, or never reads."""
    fake.fault = fault
    begin = time.monotonic()
    error = failure(transport, fake.url, b"x" * 20_000_000, 1.0)
    assert time.monotonic() - begin < 8.0  # trickling alone would take 200 s
    assert (error.reason, error.retryable, error.status) == ("timeout", False, None)


def test_the_deadline_holds_for_a_proxy_that_sends_a_byte_now_and_then():
    gone = threading.Event()

    def trickle(_server: Scripted, connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
        while not gone.wait(0.05):
            connection.sendall(b"y")

    with Scripted(trickle) as proxy:
        begin = time.monotonic()
        with contextlib.closing(Transport(PyroscopeConfig(proxy=Secret(proxy.url)))) as transport:
            error = failure(transport, "https://pyroscope.test", seconds=0.5)
        gone.set()
    assert time.monotonic() - begin < 5.0
    assert (error.reason, error.retryable) == ("connect", True)


@pytest.mark.parametrize("fault", ["cut", "cut_body"])
def test_a_cut_connection(fake, transport, fault):
    fake.fault = fault
    error = failure(transport, fake.url)
    assert (error.reason, error.retryable) == ("cut", False)
    assert str(error).startswith(f"127.0.0.1:{fake.port}: the connection was cut: ")


def test_a_port_where_nothing_listens(fake, transport):
    fake.down()
    error = failure(transport, fake.url)
    assert str(error) == f"127.0.0.1:{fake.port}: connect: Connection refused"
    assert (error.reason, error.retryable) == ("connect", True)
    fake.up()


def test_a_listener_that_does_not_accept(transport):
    """The handshake of TCP never ends: nothing was sent."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        fill = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(address)
            fill.append(filler)
        error = failure(transport, f"http://127.0.0.1:{address[1]}", seconds=0.3)
        for filler in fill:
            filler.close()
    assert str(error).endswith("connect: time-out")
    assert (error.reason, error.retryable) == ("connect", True)


def test_a_name_that_does_not_exist(transport, monkeypatch):
    def unknown(*_arguments, **_options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    error = failure(transport, "http://nowhere.test:4040")
    assert str(error) == (
        "nowhere.test:4040: connect: the name cannot be resolved (Name or service not known)"
    )
    assert error.retryable


def test_all_addresses_of_a_name_are_tried_within_one_deadline(fake, transport, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = other.getsockname()
    both = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", closed),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", fake.port)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert transport.post("http://two.test" + PATH, b"", HEADERS, 5.0).status == 200


def test_redirects_are_answers(fake, transport):
    fake.fault = "redirect"
    answer = transport.post(fake.url + PATH, b"", {**HEADERS, "Authorization": "Bearer x"}, 5.0)
    assert answer.status == 307
    assert len(fake.requests) == 1


def test_an_endless_answer_is_cut_off(transport):
    def long(server: Scripted, connection: socket.socket) -> None:
        server.read(connection)
        connection.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 100000000\r\n\r\n" + b"z" * 200_000)
        connection.recv(1)  # until the client goes

    with Scripted(long) as server:
        answer = transport.post(server.url + PATH, b"", HEADERS, 5.0)
    assert answer.body == b"z" * MAX_ANSWER_BYTES


def test_no_http_at_all(transport):
    def ssh(server: Scripted, connection: socket.socket) -> None:
        server.read(connection)
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    with Scripted(ssh) as server:
        error = failure(transport, server.url)
    assert str(error).endswith("the connection was cut: BadStatusLine")


def test_headers_that_cannot_be_sent_are_not_shown(fake, transport):
    for value in ("two\nlines", "\u2026"):
        with pytest.raises(PushError) as caught:
            transport.post(fake.url + PATH, b"", {"Authorization": f"Bearer {value}"}, 5.0)
        assert str(caught.value).endswith("a header holds characters that cannot be sent")
        assert caught.value.reason == "config"


def test_a_missing_authority_file(tmp_path):
    transport = Transport(PyroscopeConfig(ca_file=str(tmp_path / "none.pem")))
    error = failure(transport, "https://127.0.0.1:9")
    assert str(error) == (
        f"127.0.0.1:9: certificate file {tmp_path / 'none.pem'}: No such file or directory"
    )
    (tmp_path / "none.pem").write_text("no certificate")
    assert failure(transport, "https://127.0.0.1:9").reason == "tls"


def test_a_request_waits_for_the_one_before_it_no_longer_than_its_deadline(fake, transport):
    fake.fault = "hang"
    caught: list[PushError] = []
    first = threading.Thread(target=lambda: caught.append(failure(transport, fake.url, b"", 2.0)))
    first.start()
    fake.wait_for_pushes(1)
    error = failure(transport, fake.url, b"", 0.05)
    assert (error.reason, error.retryable) == ("connect", True)
    first.join()
    assert caught[0].reason == "timeout"
    assert len(fake.requests) == 1


def test_a_forked_child_has_sockets_of_its_own(fake, transport):
    """Even while a request of the parent is under way, whose lock the child inherits."""
    transport.post(fake.url + PATH, b"", HEADERS, 5.0)
    with transport._lock:
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(transport.post(fake.url + PATH, b"", HEADERS, 5.0).status != 200)
            except BaseException:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
    transport.post(fake.url + PATH, b"", HEADERS, 5.0)
    peers = [request.peer for request in fake.requests]
    assert peers[0] == peers[2] != peers[1]


def test_progress_has_nothing_left_after_its_deadline():
    progress = transport_module.SendProgress()
    progress.begin(60.0)
    assert 0 < progress.left() <= 60.0
    progress.begin(0.0)
    with pytest.raises(TimeoutError):
        progress.left()


ENVIRON = {"HTTPS_PROXY": "secure:1", "http_proxy": "http://lower:2", "HTTP_PROXY": "http://up:3"}


@pytest.mark.parametrize(
    ("url", "explicit", "excluded", "proxy"),
    [
        ("https://a.test", "", "", "http://secure:1"),
        ("http://a.test", "", "", "http://lower:2"),
        ("http://a.test", "mine:9", "*", "http://mine:9"),
        ("http://127.0.0.1:4040", "mine:9", "", "http://mine:9"),
        ("http://127.0.0.1:4040", "", "", ""),
        ("http://[::1]:4040", "", "", ""),
        ("http://localhost", "", "", ""),
        ("http://a.test", "", "*", ""),
        ("http://a.test", "", "b.test, A.Test", ""),
        ("http://a.test.", "", "a.test", ""),
        ("http://x.a.test", "", "a.test", ""),
        ("http://x.a.test", "", ".a.test", ""),
        ("http://x.a.test", "", "*.a.test", ""),
        ("http://xa.test", "", "a.test", "http://lower:2"),
        ("http://a.test:81", "", "a.test:81", ""),
        ("http://a.test:82", "", "a.test:81", "http://lower:2"),
        ("http://10.1.2.3", "", "10.0.0.0/8", ""),
        ("http://10.1.2.3", "", "10.1.2.3", ""),
        ("http://10.1.2.3:80", "", "10.1.2.3:80", ""),
        ("http://10.1.2.3", "", "11.0.0.0/8,2.3", "http://lower:2"),
        ("http://[fd00::1]", "", "fd00::/8", ""),
    ],
)
def test_which_proxy(url, explicit, excluded, proxy):
    assert proxy_for(url, explicit, {**ENVIRON, "NO_PROXY": excluded}) == proxy


def test_no_proxy_is_known():
    assert proxy_for("http://a.test", "", {}) == ""


def test_a_port_that_does_not_exist_is_an_error_of_the_push(transport):
    with pytest.raises(PushError) as caught:
        transport.post("http://127.0.0.1:99999/x", b"", HEADERS, 5.0)
    assert caught.value.reason == "connect"
