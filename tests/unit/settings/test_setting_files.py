"""Files that settings name: read without waiting, refused in one clause."""

from __future__ import annotations

import os
import pty
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support import certs

from gpumem_otel.errors import ConfigError, PushError, ServeError
from gpumem_otel.push.pyroscope import bearer_token
from gpumem_otel.push.transport import Transport
from gpumem_otel.serve.auth import Tokens, server_context
from gpumem_otel.settings.config import ControlConfig, PyroscopeConfig, Secret, ServeConfig
from gpumem_otel.settings.files import (
    client_context,
    contents,
    load_authorities,
    load_certificate,
    read_once,
)
from gpumem_otel.yielding.control.roles import Gatekeeper

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
    Path("to fifo").symlink_to("fifo")
    Path("loop").symlink_to("loop")
    elliptic = ec.generate_private_key(ec.SECP256R1())
    Path("elliptic.key").write_bytes(elliptic.private_bytes(*form, serialization.NoEncryption()))
    certificate = x509.load_pem_x509_certificate(Path("a.pem").read_bytes())
    Path("a.der").write_bytes(certificate.public_bytes(serialization.Encoding.DER))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    return tmp_path


NOT_REGULAR = ["fifo", "folder", "socket", "/dev/null", "to fifo"]

CALLS = {
    "contents": lambda path: contents(path, 1 << 20),
    "client_context": client_context,
    "load_authorities": lambda path: load_authorities(client_context(""), path),
    "load_certificate": lambda path: load_certificate(
        client_context(""), path, "", key_setting="key_file"
    ),
    "load_certificate's key": lambda path: load_certificate(
        client_context(""), "a.pem", path, key_setting="key_file"
    ),
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def message_of(call, *arguments, **how):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **how)
    return str(caught.value)


def test_what_a_file_holds_up_to_a_size():
    assert contents("token", 17) == b"0123456789abcdef\n"
    assert message_of(contents, "token", 16) == "token: is larger than 16 bytes"


@pytest.mark.parametrize("path", NOT_REGULAR)
def test_what_is_no_regular_file_is_neither_read_nor_waited_for(call, path):
    assert message_of(call, path) == f"{path}: is no regular file"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("none", "No such file or directory"),
        ("nul\0", "embedded null"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_what_can_not_be_opened(call, path, reason):
    line = message_of(call, path)
    assert line.startswith(f"{path}: ")
    assert reason in line


def test_a_fifo_that_takes_a_files_place_meanwhile_is_not_opened(folder, monkeypatch):
    """What was looked at is what is read."""
    looked = os.fstat

    def swapped(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink() == folder / "a.key":
            (folder / "a.key").unlink()
            os.mkfifo("a.key")
        return looked(descriptor)

    monkeypatch.setattr(os, "fstat", swapped)
    load_certificate(client_context(""), "a.pem", "a.key", key_setting="key_file")
    assert (folder / "a.key").is_fifo()


@pytest.mark.parametrize(
    ("cert_file", "key_file", "reason"),
    [
        ("a.pem", "b.key", "a.pem and b.key: the key is another certificate's"),
        (
            "a.pem",
            "elliptic.key",
            "a.pem and elliptic.key: the key is another certificate's",
        ),
        ("a.pem", "", "a.pem: there is no private key in it: key_file names the file that has it"),
        ("a.pem", "ca.pem", "ca.pem: there is no private key in it"),
        ("a.key", "a.key", "a.key: there is no certificate in it"),
        ("half.pem", "a.key", "half.pem and a.key: damaged"),
        ("a.der", "a.key", "a.der: is no PEM file"),
        ("a.pem", "empty", "empty: is no PEM file"),
        ("a.pem", "none", "none: No such file or directory"),
        (
            "a.pem",
            "locked.key",
            "a.pem and locked.key: the key is encrypted: give one without a pass phrase",
        ),
    ],
)
def test_a_certificate_that_can_not_be_shown(cert_file, key_file, reason):
    context = client_context("")
    assert (
        message_of(load_certificate, context, cert_file, key_file, key_setting="key_file") == reason
    )


@pytest.mark.parametrize(
    ("ca_file", "reason"),
    [
        ("empty", "empty: is no PEM file"),
        ("a.der", "a.der: is no PEM file"),
        ("a.key", "a.key: there is no certificate in it"),
        ("half.pem", "half.pem: damaged"),
    ],
)
def test_authorities_that_can_not_be_trusted(ca_file, reason):
    assert message_of(client_context, ca_file) == reason
    assert message_of(load_authorities, client_context(""), ca_file) == reason


def test_what_fits_is_taken(folder):
    context = client_context("ca.pem")
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.cert_store_stats()["x509_ca"] == 1
    load_certificate(context, "a.pem", "a.key", key_setting="key_file")
    both = (folder / "a.key").read_bytes() + (folder / "a.pem").read_bytes()
    (folder / "both.pem").write_bytes(b"# a comment\n" + both)
    load_certificate(context, "both.pem", "", key_setting="key_file")


def test_no_descriptor_is_left():
    before = list(Path("/proc/self/fd").iterdir())
    for path in (*NOT_REGULAR, "a.pem", "half.pem", "none", "a.key", "token"):
        for call in CALLS.values():
            with suppress(ConfigError):
                call(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)


@pytest.fixture
def piped(folder):
    """Has a file come out of a pipe; the pipe's name, as `<(cat file)` of a shell."""
    with ExitStack() as ends:

        def pipe(*names):
            command = ["cat", *(str(folder / name) for name in names)]
            writer = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            return f"/proc/self/fd/{writer.stdout.fileno()}"

        yield pipe


@pytest.fixture
def kept():
    with ExitStack() as copies:
        yield copies


def test_what_is_in_a_pipe_can_be_read_as_often_as_a_file(piped, kept):
    assert message_of(contents, piped("token"), 17).endswith(": is no regular file")
    names = [read_once(piped(*names), kept) for names in (["token"], ["ca.pem"], ["a.pem"])]
    names.append(read_once(piped("a.pem", "a.key"), kept))
    token, authority, alone, both = names
    for _ in range(2):
        assert contents(token, 17) == b"0123456789abcdef\n"
        assert client_context(authority).cert_store_stats()["x509_ca"] == 1
        load_authorities(client_context(""), authority)
        load_certificate(client_context(""), alone, "a.key", key_setting="key_file")
        load_certificate(client_context(""), both, "", key_setting="key_file")
    lacking = message_of(load_certificate, client_context(""), alone, "", key_setting="--key-file")
    assert (
        lacking == f"{alone}: there is no private key in it: --key-file names the file that has it"
    )
    kept.close()
    assert not any(Path(name).exists() for name in names)


def test_a_fifo_whose_writer_has_gone_is_read_once(folder, kept):
    writer = threading.Thread(target=lambda: (folder / "fifo").write_text("a token"))
    writer.start()
    name = read_once("fifo", kept)
    writer.join()
    assert [contents(name, 7) for _ in range(2)] == [b"a token"] * 2


def test_what_need_not_be_read_once_stays_what_it_is(folder, kept):
    for path in ("", "token", "none", "folder", "loop", "socket", "nul\0"):
        assert read_once(path, kept) == path
    name = read_once("/dev/null", kept)
    assert (name != "/dev/null", contents(name, 0)) == (True, b"")
    assert message_of(read_once, "/dev/zero", kept) == "/dev/zero: is larger than 4194304 bytes"


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


PUSH = """
from gpumem_otel.settings.config import PyroscopeConfig
from gpumem_otel.push.transport import Transport
files = {"client_cert_file": "a.pem", "client_key_file": "locked.key"}
Transport(PyroscopeConfig(**files)).post("https://127.0.0.1:9", b"", {}, 5.0)
"""


def test_a_key_of_pushes_that_has_a_pass_phrase_asks_no_terminal():
    """OpenSSL asks the controlling terminal, whatever standard input is."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", PUSH])
    written = b""
    with suppress(OSError):  # EIO: all of the other side is closed
        while b"pass phrase" not in written and (some := os.read(terminal, 4096)):
            written += some
    os.close(terminal)  # ends a reader that waits for an answer
    os.waitpid(pid, 0)
    assert b"the key is encrypted: give one without a pass phrase" in written


@pytest.mark.parametrize("path", NOT_REGULAR)
def test_the_token_of_pushes(path):
    with pytest.raises(PushError) as caught:
        bearer_token(PyroscopeConfig(bearer_token_file=path))
    assert (str(caught.value), caught.value.reason) == (
        f"token file {path}: is no regular file",
        "config",
    )
