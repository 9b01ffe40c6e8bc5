"""TLS and client certificates on the listener."""

from __future__ import annotations

import contextlib
import socket
import ssl

import pytest
from support import certs
from support.listening import EXPOSITION, WAIT, ask, connected, listening, until

from gpumem_otel.serve import event_loop


@pytest.fixture
def trust(ca):
    return ssl.create_default_context(cafile=str(ca.cert_file))


def test_metrics_over_tls(files, trust):
    with listening(**files) as listener:
        assert listener.scheme == "https"
        assert ask(listener.address, "/metrics", tls=trust)[::2] == (200, EXPOSITION)


def test_plain_http_is_refused_on_the_tls_port(files, trust):
    with listening(**files) as listener:
        with connected(listener.address) as client:
            client.request("/metrics")
            with contextlib.suppress(OSError):
                assert b"200" not in client.sock.recv(1000)
        assert ask(listener.address, "/metrics", tls=trust)[0] == 200


def test_old_tls_is_refused(files, trust):
    with listening(**files) as listener:
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            trust.minimum_version = ssl.TLSVersion.TLSv1_1
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            trust.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(OSError), connected(listener.address, trust):
            pass


def test_a_client_certificate_is_asked_for(files, trust, ca, tmp_path):
    untrusted = certs.issue(tmp_path, certs.make_ca(tmp_path, "another authority"), "stranger", [])
    reader = certs.issue(tmp_path, ca, "reader", [])
    with listening(**files, tls_client_ca_file=str(ca.cert_file)) as listener:
        # With TLS 1.3 a client learns of the refusal when it first reads.
        with pytest.raises(OSError):
            ask(listener.address, "/metrics", tls=trust)
        trust.load_cert_chain(untrusted.cert_file, untrusted.key_file)
        with pytest.raises(OSError):
            ask(listener.address, "/metrics", tls=trust)
        trust.load_cert_chain(reader.cert_file, reader.key_file)
        assert ask(listener.address, "/metrics", tls=trust)[::2] == (200, EXPOSITION)


def test_silent_clients_delay_no_others(files, trust, monkeypatch):
    """The silent ones are still waiting for when the others have been answered."""
    monkeypatch.setattr(event_loop, "HANDSHAKE_SECONDS", 10 * WAIT)
    with contextlib.ExitStack() as stack, listening(**files) as listener:
        silent = [
            stack.enter_context(socket.create_connection(listener.address)) for _ in range(20)
        ]
        for _ in range(3):
            assert ask(listener.address, "/metrics", tls=trust)[0] == 200
        for sock in silent:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)


def test_a_silent_client_is_cut_off(files, monkeypatch):
    monkeypatch.setattr(event_loop, "HANDSHAKE_SECONDS", 0.2)
    with listening(**files) as listener, connected(listener.address) as client:
        assert client.closed()
        until(lambda: not listener._loop._clients)


def test_handshakes_count_as_connections(files, monkeypatch):
    monkeypatch.setattr(event_loop, "MAX_CONNECTIONS", 1)
    with listening(**files) as listener, connected(listener.address):
        until(lambda: len(listener._loop._clients) == 1)
        with connected(listener.address) as second:
            assert second.closed()


def test_stop_with_handshakes_and_connections_open(files, trust):
    with (
        listening(**files) as listener,
        connected(listener.address) as silent,
        connected(listener.address, trust) as idle,
    ):
        idle.request("/metrics")
        idle.answer()
        listener.stop(timeout=WAIT)
        assert silent.closed()
        with contextlib.suppress(ssl.SSLError):
            assert idle.closed()
