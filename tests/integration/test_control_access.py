"""Whom the control API knows over TCP, and what would open a door to strangers."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest
from support import certs
from support.controlling import IDENTITY, READER, TOKEN, bearer, call, controlling
from support.yield_double import YieldDouble

from gpumem_otel.base.profile import Identity
from gpumem_otel.errors import ServeError
from gpumem_otel.settings.config import ControlConfig, Secret
from gpumem_otel.yielding.control.listener import ControlListener
from gpumem_otel.yielding.values import YieldRequest


def test_roles_of_tokens(tmp_path, tokens, audit):
    double = YieldDouble()
    with controlling(double, host="127.0.0.1", token_file=tokens) as listener:
        where = listener.address
        assert listener.socket_path is None
        for path in ("/v1/state", "/v1/openapi.json"):
            assert call(where, "GET", path, bearer(READER)).status == 200
        for path, role in (("/v1/yield", "yield"), ("/v1/restore", "restore")):
            refused = call(where, "POST", path, bearer(READER))
            assert refused.status == 403
            assert refused.detail == (
                f"token dashboard does not have the role {role}: add it to that line of the job's "
                "token file, or show a token that has it"
            )
        assert double.submitted == []
        assert call(where, "POST", "/v1/yield", bearer(TOKEN)).status == 202
        assert call(where, "GET", "/v1/operations/op-1", bearer(READER)).json["who"] == (
            "token operator"
        )
        # read again when it changes
        Path(tokens).write_text(f"read {TOKEN}\n")
        assert call(where, "POST", "/v1/restore", bearer(TOKEN)).status == 403
        assert call(where, "GET", "/v1/state", bearer(READER)).status == 401
    text = "\n".join(audit())
    assert TOKEN not in text
    assert READER not in text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_log_says_where_commands_are_taken(tmp_path, tokens, host, caplog):
    caplog.set_level(logging.INFO, logger="gpumem_otel.serve")
    with controlling(YieldDouble(), tmp_path, host=host, token_file=tokens) as listener:
        shown = f"[{host}]" if ":" in host else host
        expected = {f"unix://{listener.socket_path}", f"http://{shown}:{listener.address[1]}"}
    said = {m.rpartition(" ")[2] for m in caplog.messages if "commands are taken at" in m}
    assert said == expected


def test_a_token_of_a_setting_is_warned_of(caplog):
    with controlling(YieldDouble(), host="127.0.0.1", token=Secret(TOKEN)) as listener:
        assert call(listener.address, "POST", "/v1/yield", bearer(TOKEN)).status == 202
    (line,) = [r.getMessage() for r in caplog.records if r.name == "gpumem_otel.serve"]
    assert "GPUMEM_OTEL_CONTROL_TOKEN_FILE" in line
    assert TOKEN not in caplog.text


def shown(ca, issued=None):
    context = ssl.create_default_context(cafile=str(ca.cert_file))
    if issued is not None:
        context.load_cert_chain(issued.cert_file, issued.key_file)
    return context


def test_roles_of_client_certificates(tmp_path, files, ca, audit):
    ops, other = (certs.issue(tmp_path, ca, name, []) for name in ("ops", "someone"))
    double = YieldDouble()
    options = {
        **files,
        "host": "127.0.0.1",
        "tls_client_ca_file": str(ca.cert_file),
        "client_roles": ("read", "ops=yield"),
    }
    with controlling(double, **options) as listener:
        where = listener.address
        assert call(where, "GET", "/v1/state", tls=shown(ca, other)).status == 200
        assert call(where, "POST", "/v1/yield", tls=shown(ca, other)).status == 403
        assert call(where, "POST", "/v1/yield", tls=shown(ca, ops)).status == 202
        assert call(where, "POST", "/v1/restore", tls=shown(ca, ops)).status == 403
        with pytest.raises(OSError):
            call(where, "GET", "/v1/state", tls=shown(ca))
    assert double.submitted == [(YieldRequest(), "certificate ops")]
    assert 'who="certificate someone" role="read"' in audit()[0]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "needs credentials"),
        ({"host": "0.0.0.0", "token": Secret(TOKEN)}, "needs TLS"),
        ({"host": "node7.example", "token": Secret(TOKEN)}, "needs TLS"),
        ({"client_roles": ("read",)}, "needs control_tls_client_ca_file"),
        ({"client_roles": ("read",), "token": Secret(TOKEN)}, "needs control_tls_client_ca_file"),
        ({"tls_client_ca_file": "ca.pem", "token": Secret(TOKEN)}, "without control_tls_cert_file"),
        ({"tls_cert_file": "/nowhere.pem", "token": Secret(TOKEN)}, "No such file"),
        ({"port": 65535, "token": Secret(TOKEN)}, "take a lower base port"),
        ({"token_file": "/nowhere"}, "control token file /nowhere: No such file"),
    ],
)
def test_what_would_open_a_door_is_refused(config, reason):
    given = ControlConfig(**{"enabled": True, "host": "127.0.0.1", **config})
    identity = Identity(service_name="x", local_rank=1)
    with pytest.raises(ServeError, match=reason) as caught:
        ControlListener(YieldDouble(), given, run_dir="", identity=identity)
    assert "\n" not in str(caught.value)


def test_a_certificate_without_roles_opens_nothing(files, ca):
    given = ControlConfig(
        enabled=True, host="127.0.0.1", tls_client_ca_file=str(ca.cert_file), **files
    )
    with pytest.raises(ServeError, match="needs credentials"):
        ControlListener(YieldDouble(), given, run_dir="", identity=IDENTITY)


def test_without_tls_on_another_address_only_when_said(tokens):
    options = {"host": "0.0.0.0", "token_file": tokens, "insecure": True}
    with controlling(YieldDouble(), **options) as listener:
        where = ("127.0.0.1", listener.address[1])
        assert call(where, "GET", "/v1/state", bearer(READER)).status == 200
