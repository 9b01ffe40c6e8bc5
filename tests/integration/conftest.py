"""Certificates of a CA of our own, for listeners that speak TLS."""

from __future__ import annotations

import pytest
from support import certs


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return certs.make_ca(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def files(tmp_path_factory, ca):
    """Settings of a listener with a certificate for this machine."""
    pair = certs.issue(tmp_path_factory.mktemp("server"), ca, "server", ["localhost", "127.0.0.1"])
    return {"tls_cert_file": str(pair.cert_file), "tls_key_file": str(pair.key_file)}
