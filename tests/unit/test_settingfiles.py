"""Files that settings name: read without waiting, refused in one clause."""

from __future__ import annotations

import os
import pty
import socket
import ssl
import threading

import pytest
from cryptography.hazmat.primitives import serialization
from support import certs

from gpumem_otel.config import ControlConfig, PyroscopeConfig, Secret, ServeConfig
from gpumem_otel.errors import ConfigError, PushError, ServeError
from gpumem_otel.export.pyroscope import bearer_token
from gpumem_otel.export.transport import Transport
from gpumem_otel.serve.roles import Gatekeeper
from gpumem_otel.serve.tls import server_context
from gpumem_otel.serve.tokens import Tokens
from gpumem_otel.settingfiles import (
    client_context,
    contents,
    load_authorities,
    load_certificate,
    require_regular,
)

pytestmark = pytest.mark.timeout(60)  # to open a FIFO takes for ever


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Files by their names: what is good, and one of each kind that is not."""
    monkeypatch.chdir(tmp_path)
    authority = certs.make_ca(tmp_path)
    for name in ("a", "b"):
        made = certs.issue(tmp_path, authority, name, ["localhost"])
        made.cert_file.rename(f"{name}.pem")
        made.key_file.rename(f"{name}.key")
    authority.cert_file.rename("ca.pem")
    key = serialization.load_pem_private_key((tmp_path / "a.key").read_bytes(), None)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    locked = key.private_bytes(*form, serialization.BestAvailableEncryption(b"pass"))
    (tmp_path / "locked.key").write_bytes(locked)
    (tmp_path / "half.pem").write_bytes((tmp_path / "a.pem").read_bytes()[:200])
    (tmp_path / "empty").touch()
    (tmp_path / "token").write_text("0123456789abcdef\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo("fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    return tmp_path


NOT_REGULAR = ["fifo", "folder", "/dev/null"]


def test_what_a_file_holds_up_to_a_size():
    assert contents("token", 100) == b"0123456789abcdef\n"
    assert contents("token", 4) == b"0123"


@pytest.mark.parametrize("path", NOT_REGULAR)
def test_what_is_no_regular_file_is_neither_read_nor_waited_for(path):
    for call in (require_regular, lambda path: contents(path, 1)):
        with pytest.raises(ConfigError) as caught:
            call(path)
        assert str(caught.value) == f"{path}: is no regular file"


@pytest.mark.parametrize(
    ("path", "reason"),
    [("none", "No such file or directory"), ("nul\0", "embedded null")],
)
def test_what_is_not_there(path, reason):
    for call in (require_regular, lambda path: contents(path, 1)):
        with pytest.raises(ConfigError) as caught:
            call(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert reason in str(caught.value)


def test_no_path_is_none():
    require_regular("", "token", "")


def test_of_a_socket_nothing_is_read():
    with pytest.raises(ConfigError, match=r"^socket: "):
        contents("socket", 1)


@pytest.mark.parametrize(
    ("cert_file", "key_file", "said"),
    [
        ("a.pem", "b.key", "a.pem and b.key: the key is another certificate's"),
        ("a.pem", "", "a.pem: is no PEM file, or not a whole one"),
        ("half.pem", "a.key", "half.pem and a.key: is no PEM file, or not a whole one"),
        ("a.pem", "none", "a.pem and none: No such file or directory"),
        (
            "a.pem",
            "locked.key",
            "a.pem and locked.key: the key is encrypted: give one without a pass phrase",
        ),
    ],
)
def test_a_certificate_that_can_not_be_shown(cert_file, key_file, said):
    with pytest.raises(ConfigError) as caught:
        load_certificate(client_context(""), cert_file, key_file)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("ca_file", "said"),
    [
        ("empty", "empty: there is no certificate in it"),
        ("a.key", "a.key: there is no certificate in it"),
        ("half.pem", "half.pem: is no PEM file, or not a whole one"),
        ("none", "none: No such file or directory"),
    ],
)
def test_authorities_that_can_not_be_trusted(ca_file, said):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for call in (client_context, lambda path: load_authorities(context, path)):
        with pytest.raises(ConfigError) as caught:
            call(ca_file)
        assert str(caught.value) == said


def test_what_fits_is_taken():
    context = client_context("ca.pem")
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.cert_store_stats()["x509_ca"] == 1
    load_certificate(context, "a.pem", "a.key")


# whoever reads one within a job


@pytest.mark.parametrize("path", NOT_REGULAR)
def test_tokens_of_a_listener(path):
    with pytest.raises(ServeError, match=f"^token file {path}: is no regular file$"):
        Tokens(Secret(""), path)
    with pytest.raises(ServeError, match=f"^control token file {path}: is no regular file$"):
        Gatekeeper(ControlConfig(token_file=path))


def test_a_token_file_that_becomes_a_fifo_leaves_the_last_token(folder, caplog):
    tokens = Tokens(Secret(""), "token")
    (folder / "fifo").rename("token")
    assert tokens.accept("Bearer 0123456789abcdef")
    assert tokens.accept("Bearer 0123456789abcdef")
    assert [record.getMessage() for record in caplog.records] == [
        "token file token: is no regular file: the last token stays"
    ]


@pytest.mark.parametrize("name", ["tls_cert_file", "tls_key_file", "tls_client_ca_file"])
@pytest.mark.parametrize("path", NOT_REGULAR)
def test_tls_of_a_listener(name, path):
    files = {"tls_cert_file": "a.pem", "tls_key_file": "a.key", name: path}
    with pytest.raises(ServeError, match=f"^TLS .*{path}: is no regular file$"):
        server_context(ServeConfig(**files))


@pytest.mark.parametrize("name", ["ca_file", "client_cert_file", "client_key_file"])
@pytest.mark.parametrize("path", NOT_REGULAR)
def test_tls_of_pushes(name, path):
    files = {"client_cert_file": "a.pem", "client_key_file": "a.key", name: path}
    with pytest.raises(PushError) as caught:
        Transport(PyroscopeConfig(**files)).post("https://127.0.0.1:9", b"", {}, 5.0)
    assert str(caught.value) == f"127.0.0.1:9: certificate file {path}: is no regular file"
    assert caught.value.reason == "tls"


def test_a_key_of_pushes_that_has_a_pass_phrase_asks_no_terminal():
    """OpenSSL asks the controlling terminal, whatever standard input is."""
    pid, terminal = pty.fork()
    if pid == 0:
        code = 1
        try:
            files = {"client_cert_file": "a.pem", "client_key_file": "locked.key"}
            try:
                Transport(PyroscopeConfig(**files)).post("https://127.0.0.1:9", b"", {}, 5.0)
            except PushError as error:
                code = 0 if str(error).endswith("give one without a pass phrase") else 2
        finally:
            os._exit(code)
    ended = threading.Timer(20.0, os.kill, (pid, 9))  # where it waits for an answer
    ended.start()
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        ended.cancel()
        os.close(terminal)


@pytest.mark.parametrize("path", NOT_REGULAR)
def test_the_token_of_pushes(path):
    with pytest.raises(PushError) as caught:
        bearer_token(PyroscopeConfig(bearer_token_file=path))
    assert (str(caught.value), caught.value.reason) == (
        f"token file {path}: is no regular file",
        "config",
    )
