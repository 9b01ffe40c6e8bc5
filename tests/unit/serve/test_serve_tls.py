"""The TLS context."""

from __future__ import annotations

import ssl

import pytest
from cryptography.hazmat.primitives import serialization
from support import certs

from gpumem_otel.errors import ServeError
from gpumem_otel.serve.auth import server_context
from gpumem_otel.settings.config import ControlConfig, ServeConfig


@pytest.fixture
def pair(tmp_path):
    return certs.issue(tmp_path, certs.make_ca(tmp_path), "server", ["localhost"])


def config(pair, **changes):
    files = {"tls_cert_file": str(pair.cert_file), "tls_key_file": str(pair.key_file)}
    return ServeConfig(**{**files, **{name: str(path) for name, path in changes.items()}})


def test_without_a_certificate_it_is_plain_http():
    assert server_context(ServeConfig()) is None


def test_a_certificate_asks_no_client_for_one(pair):
    context = server_context(config(pair))
    assert context.verify_mode is ssl.CERT_NONE
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_client_ca_asks_every_client_for_one(pair, tmp_path):
    context = server_context(config(pair, tls_client_ca_file=tmp_path / "test-authority.pem"))
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_certificate_and_key_may_share_a_file(pair, tmp_path):
    both = tmp_path / "both.pem"
    both.write_bytes(pair.cert_file.read_bytes() + pair.key_file.read_bytes())
    assert server_context(ServeConfig(tls_cert_file=str(both))) is not None


@pytest.mark.parametrize("name", ["tls_key_file", "tls_client_ca_file"])
def test_other_files_need_a_certificate(name):
    with pytest.raises(ServeError, match=f"^{name} is set without tls_cert_file"):
        server_context(ServeConfig(**{name: "x.pem"}))


def test_settings_of_control_are_called_by_their_own_names(pair):
    """`tls_cert_file` is a setting too, of the metrics' listener."""
    with pytest.raises(ServeError, match="control_tls_key_file is set without control_tls_cert_fi"):
        server_context(ControlConfig(tls_key_file="x.pem"))
    hint = ": there is no private key in it: control_tls_key_file names the file that has it"
    with pytest.raises(ServeError, match=f"{hint}$"):
        server_context(ControlConfig(tls_cert_file=str(pair.cert_file)))


@pytest.mark.parametrize("name", ["tls_cert_file", "tls_key_file", "tls_client_ca_file"])
def test_a_missing_file_is_named(pair, tmp_path, name):
    missing = tmp_path / "missing.pem"
    with pytest.raises(ServeError) as caught:
        server_context(config(pair, **{name: missing}))
    assert str(missing) in str(caught.value)
    assert str(caught.value).endswith(": No such file or directory")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tls_cert_file", "tls_key_file", "tls_client_ca_file"])
def test_a_file_that_is_no_pem_is_named(pair, tmp_path, name):
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    with pytest.raises(ServeError) as caught:
        server_context(config(pair, **{name: junk}))
    assert str(junk) in str(caught.value)
    assert str(caught.value).endswith(f"{junk}: is no PEM file")


def test_a_key_of_another_certificate_is_refused(pair, tmp_path):
    other = certs.issue(tmp_path, certs.make_ca(tmp_path), "other", [])
    with pytest.raises(ServeError, match="the key is another certificate's"):
        server_context(config(pair, tls_key_file=other.key_file))


def test_an_encrypted_key_does_not_ask_the_terminal(pair, tmp_path):
    key = serialization.load_pem_private_key(pair.key_file.read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"pass"),
        )
    )
    with pytest.raises(ServeError, match="the key is encrypted"):
        server_context(config(pair, tls_key_file=locked))
