"""Strangers at the control listener: refused, logged, and nothing moved."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import threading

import pytest
from support import certs
from support.controlling import TOKEN, bearer, call, controlling, reaching
from support.listening import WAIT, connected, until
from support.yield_double import YieldDouble

from gpumem_otel.serve import protocol


@pytest.fixture
def audit(caplog):
    caplog.set_level(logging.DEBUG)
    return lambda: [r.getMessage() for r in caplog.records if r.name == "gpumem_otel.audit"]


@pytest.fixture
def double():
    """Whatever a test sends it: nothing may arrive."""
    made = YieldDouble()
    yield made
    assert made.submitted == []
    assert made.moves == 0


@pytest.fixture
def where(double, tokens):
    with controlling(double, host="127.0.0.1", token_file=tokens) as listener:
        yield listener.address


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (bearer("wrong"),),
        (bearer(""),),
        (bearer(TOKEN[:-1]),),
        (bearer(TOKEN + "0"),),
        (bearer(TOKEN.upper()),),
        (f"Authorization: Basic {TOKEN}",),
        (f"Authorization: {TOKEN}",),
        (f"Cookie: token={TOKEN}",),
        (f"X-Api-Key: {TOKEN}",),
        (bearer(TOKEN), bearer("wrong")),
    ],
)
def test_without_the_right_token(where, lines, audit, caplog):
    for method, path in (("POST", "/v1/yield"), ("GET", "/v1/state"), ("GET", "/v1/openapi.json"),
                         ("GET", "/nowhere"), ("POST", f"/{TOKEN}")):  # fmt: skip
        answer = call(where, method, path, *lines, body={} if method == "POST" else None)
        assert answer.status == 401
        assert answer.detail.startswith("a bearer token")
        assert answer.headers["www-authenticate"] == 'Bearer realm="gpumem-otel"'
    assert len(audit()) == 5
    assert all('outcome="refused"' in line and "status=401" in line for line in audit())
    assert audit()[0].startswith('control: request="POST /v1/yield" who="" from="127.0.0.1 port ')
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    "query",
    [
        f"token={TOKEN}",
        f"access_token={TOKEN}",
        f"a=1&Token={TOKEN}",
        f"api-key={TOKEN}",
        f"%74oken={TOKEN}",
        f"authorization=Bearer%20{TOKEN}",
        "&".join(f"x{i}=1" for i in range(100)),
    ],
)
def test_a_token_in_the_query(where, query, audit, caplog):
    for lines in ((), (bearer(TOKEN),)):
        for method, path in (("POST", "/v1/yield"), ("GET", "/v1/state")):
            answer = call(where, method, f"{path}?{query}", *lines)
            assert answer.status == 400
            assert "never into the query" in answer.detail
    assert len(audit()) == 4
    assert TOKEN not in caplog.text


BODIES = {
    "malformed": (b"{", 400),
    "not utf-8": (b"\xff\xfe", 400),
    "deep lists": (b"[" * 30_000, 400),
    "deep objects": (b'{"a":' * 10_000, 400),
    "deep in a field": (b'{"keep":' + b"[" * 30_000 + b"]" * 30_000 + b"}", 400),
    "a name twice": (b'{"verify":false,"verify":true}', 400),
    "NaN": (b'{"lease_seconds":NaN}', 400),
    "Infinity": (b'{"lease_seconds":Infinity}', 400),
    "a number too large": (b'{"lease_seconds":1e400}', 400),
    "a number too long": (b'{"devices":[' + b"9" * 10_000 + b"]}", 400),
    "a list": (b"[]", 422),
    "null": (b"null", 422),
    "an unknown field": (b'{"command":"rm -rf"}', 422),
    "an unknown device": (b'{"devices":[-1]}', 422),
    "a folder outside": (b'{"disk_dir":"/etc"}', 403),
    "a folder above": (b'{"disk_dir":"/scratch/../etc"}', 403),
    "a folder with a null": (b'{"disk_dir":"/scratch/\\u0000"}', 422),
    "a lone surrogate": (b'{"disk_dir":"/scratch/\\ud800"}', 422),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies(double, tokens, name, audit):
    body, status = BODIES[name]
    options = {"host": "127.0.0.1", "token_file": tokens, "disk_dirs": ("/scratch",)}
    with controlling(double, **options) as listener:
        answer = call(listener.address, "POST", "/v1/yield", bearer(TOKEN), body=body)
        assert answer.status == status
        assert answer.detail
        assert call(listener.address, "GET", "/v1/state", bearer(TOKEN)).status == 200
    (line,) = audit()
    assert f"status={status}" in line
    assert 'who="token operator"' in line


def test_a_hundred_megabytes_are_not_read(where, audit):
    """The head is enough to refuse; the client is cut while it sends."""
    size = 100 << 20
    with connected(where) as client:
        head = (bearer(TOKEN), "Content-Type: application/json", f"Content-Length: {size}")
        client.request("/v1/yield", *head, method="POST")
        status, headers, body = client.answer()
        assert (status, headers["connection"]) == (413, "close")
        assert json.loads(body)["detail"] == "a body has at most 65536 bytes"
        sent, piece = 0, b"x" * (1 << 20)
        with contextlib.suppress(OSError):
            while sent < size:
                client.send(piece)
                sent += len(piece)
        assert sent < size
    for wrong in ("1e3", "-1", "0x10", "9" * 40):
        with connected(where) as client:
            client.request("/v1/yield", bearer(TOKEN), f"Content-Length: {wrong}", method="POST")
            assert client.answer()[0] in {400, 413}
    assert "status=413" in audit()[0]


def test_two_lengths_are_no_request(where):
    """What a proxy before it may read in another way."""
    for lines in (
        ("Content-Length: 2", "Content-Length: 3"),
        ("Content-Length: 2", "Transfer-Encoding: chunked"),
    ):
        with connected(where) as client:
            client.request("/v1/yield", bearer(TOKEN), *lines, method="POST")
            client.send(b"{}")
            assert client.answer()[0] in {400, 411}
            with contextlib.suppress(ConnectionError):
                while client.sock.recv(1000):  # until it is closed
                    pass


def test_a_slow_client_is_cut(double, tokens, monkeypatch, audit):
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.2)
    with controlling(double, host="127.0.0.1", token_file=tokens) as listener:
        whole = (
            "POST /v1/yield HTTP/1.1",
            "Host: localhost",
            bearer(TOKEN),
            "Content-Type: application/json",
            "Content-Length: 20",
            "",
            '{"verify"',
        )
        half = "POST /v1/yield HTTP/1.1\r\nHost: a"
        for data in ("", "POST /v1/y", half, "\r\n".join(whole)):
            with connected(listener.address) as client:
                client.send(data.encode())
                # it never comes to an answer that something moved
                with contextlib.suppress(ConnectionError):
                    assert client.answer()[0] >= 400
    slow = [line for line in audit() if line.endswith('"the request did not come in time"')]
    assert len(slow) == 4


def test_a_client_that_leaves_in_the_middle_of_a_body(where, double):
    for _ in range(5):
        with connected(where) as client:
            client.request(
                "/v1/yield", bearer(TOKEN), "Content-Type: application/json", "Content-Length: 9",
                method="POST",
            )  # fmt: skip
            client.send(b"{}")
    assert call(where, "GET", "/v1/state", bearer(TOKEN)).json["status"]["state"] == "running"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:9564@evil"])
def test_a_foreign_host(where, host, audit):
    answer = call(where, "POST", "/v1/yield", bearer(TOKEN), host=host, body={})
    assert answer.status == 421
    assert "GPUMEM_OTEL_CONTROL_ALLOWED_HOSTS lists" in answer.detail
    assert all("evil" not in line for line in audit())


def test_path_tricks_reach_nothing(where, audit):
    tricks = ("/v1/yield%0a", "/v1/yield%0d%0aX: y", "/v1/./yield", "/v1/state/../yield",
                 "/v1%2fyield", "//v1/yield", "/v1/yield;x=1", "/v1/yield/", "/V1/yield",
                 "http://other/v1/state/../yield", "/..%2f..%2fetc/passwd", "*")  # fmt: skip
    for path in tricks:
        answer = call(where, "POST", path, bearer(TOKEN), body={})
        assert answer.status in {400, 404, 405}, path
    assert call(where, "DELETE", "/v1/yield", bearer(TOKEN)).status == 405
    until(lambda: len(audit()) == len(tricks) + 1)
    assert all("passwd" not in line for line in audit())
    assert 'request="DELETE /v1/yield" who="token operator"' in audit()[-1]
    assert audit()[-1].endswith("status=405")


def test_bytes_that_are_no_http(where, audit):
    unusable = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"\x00" * 1000,
        b"A" * 100_000 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    )
    for data in unusable:
        with connected(where) as client, contextlib.suppress(ConnectionError):
            client.send(data)
            assert client.answer()[0] >= 400
    assert call(where, "GET", "/v1/state", bearer(TOKEN)).status == 200
    lines = audit()
    assert len(lines) == len(unusable)
    assert all('from="127.0.0.1 port ' in line for line in lines)
    *no_http, of_another_version = lines
    assert all(line.endswith('reason="it is no HTTP, or its head is too long"') for line in no_http)
    assert of_another_version.endswith("status=401")


def test_a_flood_of_guesses_is_a_few_lines(where, audit):
    def guess():
        for i in range(60):
            with contextlib.suppress(OSError):
                assert call(where, "POST", "/v1/yield", bearer(f"guess-{i:020}")).status >= 400

    threads = [threading.Thread(target=guess) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    lines = [line for line in audit() if "status=401" in line]
    # 20 at once and one a second; 300 were sent
    assert 20 <= len(lines) < 100
    assert call(where, "GET", "/v1/state", bearer(TOKEN)).status == 200


def test_a_flood_of_connections_does_not_reach_the_socket(double, tokens, tmp_path):
    """Who holds all places of the port keeps nobody from the socket."""
    options = {"host": "127.0.0.1", "token_file": tokens}
    with controlling(double, tmp_path / "run", **options) as listener, contextlib.ExitStack() as s:
        held = [s.enter_context(socket.create_connection(listener.address)) for _ in range(80)]
        assert call(listener.socket_path, "GET", "/v1/state").status == 200
        assert len(held) == 80


def test_a_flood_of_commands_moves_once(tokens, audit):
    double = YieldDouble(by_hand=True)
    options = {"host": "127.0.0.1", "token_file": tokens, "limits": (10, 0.001)}
    with controlling(double, **options) as listener:
        statuses = []

        def flood():
            for _ in range(20):
                answer = call(listener.address, "POST", "/v1/yield", bearer(TOKEN), body={})
                statuses.append(answer.status)

        threads = [threading.Thread(target=flood) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        double.finish()
    assert sorted(set(statuses)) == [202, 429] or sorted(set(statuses)) == [202, 429, 503]
    assert statuses.count(202) == 10
    assert double.moves == 1
    assert len([line for line in audit() if 'outcome="begun"' in line]) == 10


# TLS ------------------------------------------------------------------------------------------


@pytest.fixture
def secured(double, files, ca):
    options = {"tls_client_ca_file": str(ca.cert_file), "client_roles": ("ops=yield",), **files}
    with controlling(double, host="127.0.0.1", **options) as listener:
        yield listener.address


def shown(ca, issued=None):
    context = ssl.create_default_context(cafile=str(ca.cert_file))
    if issued is not None:
        context.load_cert_chain(issued.cert_file, issued.key_file)
    return context


def test_plain_http_to_tls(secured, audit):
    with connected(secured) as client:
        client.request("/v1/yield", method="POST")
        with contextlib.suppress(ConnectionError):
            assert client.sock.recv(1000)[:4] != b"HTTP"
    until(lambda: len(audit()) == 1)
    assert audit()[0].endswith('outcome="refused" reason="TLS: http request"')


def test_certificates_that_open_nothing(secured, ca, tmp_path, audit):
    other_ca = certs.make_ca(tmp_path, "another authority")
    for issued in (
        None,
        certs.issue(tmp_path, ca, "ops", [], expired=True),
        certs.issue(tmp_path, other_ca, "ops", []),
    ):
        with pytest.raises(OSError):
            call(secured, "POST", "/v1/yield", tls=shown(ca, issued))
    until(lambda: len(audit()) == 3)
    assert [line.partition("reason=")[2] for line in audit()] == [
        '"TLS: peer did not return a certificate"',
        '"TLS: certificate verify failed"',
        '"TLS: certificate verify failed"',
    ]


def test_certificates_without_the_role(secured, ca, tmp_path, audit):
    stranger = certs.issue(tmp_path, ca, "stranger", [])
    answer = call(secured, "POST", "/v1/yield", tls=shown(ca, stranger))
    assert answer.status == 401
    ops = certs.issue(tmp_path, ca, "ops", [])
    answer = call(secured, "POST", "/v1/restore", tls=shown(ca, ops))
    assert (answer.status, answer.detail) == (
        403,
        (
            "certificate ops does not have the role restore: add it to the job's "
            "GPUMEM_OTEL_CONTROL_CLIENT_ROLES"
        ),
    )
    assert [line.rpartition(" ")[2] for line in audit()] == ["status=401", "status=403"]


def test_a_name_that_would_forge_a_line(double, files, ca, tmp_path, audit):
    name = 'ops\n2026-01-01 control: command="yield"'
    forged = certs.issue(tmp_path, ca, "forged", [], common_name=name)
    options = {"tls_client_ca_file": str(ca.cert_file), "client_roles": ("read",), **files}
    with controlling(double, host="127.0.0.1", **options) as listener:
        assert call(listener.address, "POST", "/v1/yield", tls=shown(ca, forged)).status == 403
    (line,) = audit()
    assert "\n" not in line
    assert line.startswith('control: command="yield" who="certificate ops\\\\u000a2026')


def test_headers_that_claim_another_sender(tmp_path, audit):
    """Who comes is what the kernel says, not what a header says."""
    made = YieldDouble()
    with controlling(made, tmp_path) as listener, reaching(listener.socket_path) as client:
        client.request("/v1/yield", "X-Forwarded-For: 10.1.1.1", "Forwarded: for=root",
                       "Remote-User: root", "Content-Length: 0", method="POST")  # fmt: skip
        assert client.answer()[0] == 202
    until(lambda: len(audit()) == 1)
    assert "10.1.1.1" not in audit()[0]
