"""Certificates, tokens and the audit log of listeners; `gpumem-otel ctl` against them."""

from __future__ import annotations

import logging
import os

import pytest
from support import certs
from support.controlling import READER, TOKEN

from gpumem_otel.cli.main import main


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return certs.make_ca(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def files(tmp_path_factory, ca):
    """Settings of a listener with a certificate for this machine."""
    pair = certs.issue(tmp_path_factory.mktemp("server"), ca, "server", ["localhost", "127.0.0.1"])
    return {"tls_cert_file": str(pair.cert_file), "tls_key_file": str(pair.key_file)}


@pytest.fixture
def tokens(tmp_path):
    """File with the tokens of an operator and of one who may only look."""
    path = tmp_path / "tokens"
    path.write_text(f"read,yield,restore {TOKEN} operator\nread {READER} dashboard\n")
    return str(path)


@pytest.fixture
def audit(caplog):
    """Lines of the audit log so far."""
    caplog.set_level(logging.WARNING, logger="gpumem_otel.audit")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "gpumem_otel.audit"]


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """Folder where jobs register, and nothing else of ours in the environment."""
    for name in os.environ:
        if name.startswith(("GPUMEM_OTEL_", "OTEL_")):
            monkeypatch.delenv(name)
    folder = tmp_path / "run"
    monkeypatch.setenv("GPUMEM_OTEL_RUN_DIR", str(folder))
    return folder


@pytest.fixture
def ctl(run_dir, capsys):
    """Run a verb of `gpumem-otel ctl`: (exit code, stdout, stderr)."""
    del run_dir

    def run(*arguments):
        code = main(["ctl", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
