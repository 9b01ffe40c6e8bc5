"""Who may command: token files, client certificates, this user's processes."""

from __future__ import annotations

import json
import logging
import os

import pytest

from gpumem_otel.errors import ServeError
from gpumem_otel.serve.peers import Peer
from gpumem_otel.serve.rate_limit import Buckets
from gpumem_otel.settings.config import ControlConfig, Secret
from gpumem_otel.yielding.control.audit import Audit
from gpumem_otel.yielding.control.idempotency import MAX_KEYS, KeyReusedError, Keys, is_key
from gpumem_otel.yielding.control.roles import (
    Gatekeeper,
    Principal,
    Role,
    client_roles,
    parse_tokens,
)
from gpumem_otel.yielding.values import Operation, OperationState, RestoreRequest, YieldRequest

READER, OPERATOR = "reader-token-0123456789", "operator-token-0123456789"
FILE = f"""
# who watches
read  {READER}   dashboard

yield,restore {OPERATOR}
"""


def gate(path=None, **config):
    if path is not None:
        config["token_file"] = str(path)
    return Gatekeeper(ControlConfig(**config))


def bearer(gatekeeper, token, scheme="Bearer"):
    return gatekeeper.remote(Peer(), f"{scheme} {token}")


def test_a_file_of_tokens():
    (reader, dashboard), (operator, unnamed) = parse_tokens(FILE.encode())
    assert (reader, operator) == (READER.encode(), OPERATOR.encode())
    assert dashboard == Principal("token dashboard", frozenset({Role.READ}))
    assert unnamed == Principal("token line 5", frozenset({Role.YIELD, Role.RESTORE}))
    assert [dashboard.may(role) for role in Role] == [True, False, False]
    assert [unnamed.may(role) for role in Role] == [True, True, True]
    assert not Principal("nobody", frozenset()).may(Role.READ)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "holds no token"),
        (b"# only words\n", "holds no token"),
        (b"secret-without-a-role-123456", "line 1 is not ROLE[,ROLE] TOKEN [NAME]"),
        (b"read a b c\n", "line 1 is not ROLE[,ROLE] TOKEN [NAME]"),
        (b"\nadmin " + b"x" * 20, "line 2: a role is one of read, yield, restore"),
        (b"read, " + b"x" * 20, "line 1: a role is one of read, yield, restore"),
        (b"read short", "line 1: a token has 16 to 4096 characters"),
        (b"read " + b"x" * 20 + b"\nyield " + b"x" * 20, "line 2: this token is also on"),
        (b"read \xff" + b"x" * 20, "is not ASCII"),
        (b"\n".join(b"read token-%016d" % i for i in range(65)), "holds more than 64 tokens"),
    ],
)
def test_a_file_that_can_not_be_used(data, reason, tmp_path):
    with pytest.raises(ValueError) as caught:
        parse_tokens(data)
    assert str(caught.value).startswith(reason)
    assert "xxx" not in str(caught.value)
    (tmp_path / "tokens").write_bytes(data)
    with pytest.raises(ServeError, match=r"^control token file .*tokens: "):
        gate(tmp_path / "tokens")


def test_a_file_that_is_too_large(tmp_path):
    (tmp_path / "tokens").write_bytes(b"#" * 65_537)
    with pytest.raises(ServeError, match=r"tokens: is larger than 65536 bytes$"):
        gate(tmp_path / "tokens")
    (tmp_path / "tokens").write_bytes(b"read " + b"x" * 20 + b"\n" + b"#" * 65_510)
    gate(tmp_path / "tokens")


def test_who_a_token_belongs_to(tmp_path):
    (tmp_path / "tokens").write_text(FILE)
    gatekeeper = gate(tmp_path / "tokens", token=Secret("environment-0123456789"))
    assert bearer(gatekeeper, READER).name == "token dashboard"
    assert bearer(gatekeeper, OPERATOR, "bearer").name == "token line 5"
    assert bearer(gatekeeper, "environment-0123456789").roles == frozenset(Role)
    for wrong in (READER[:-1], READER + "x", "", f"{READER} {OPERATOR}", "\udcff"):
        assert bearer(gatekeeper, wrong) is None
    assert bearer(gatekeeper, READER, "Basic") is None
    assert gatekeeper.remote(Peer(), READER) is None
    assert gatekeeper.remote(Peer(), "") is None


def test_rotation_and_a_file_that_breaks(tmp_path, caplog):
    path = tmp_path / "tokens"
    path.write_text(FILE)
    gatekeeper = gate(path)
    new = "rotated-token-0123456789"
    path.write_text(f"read {new} dashboard\n")
    assert bearer(gatekeeper, new).name == "token dashboard"
    assert bearer(gatekeeper, OPERATOR) is None
    path.write_text("")
    with caplog.at_level(logging.WARNING, logger="gpumem_otel.serve"):
        for _ in range(3):
            assert bearer(gatekeeper, new) is not None
            assert bearer(gatekeeper, "") is None
        path.unlink()
        assert bearer(gatekeeper, new) is not None
    assert [record.getMessage() for record in caplog.records] == [
        f"control token file {path}: holds no token: the last tokens stay"
    ]


def test_roles_of_certificates():
    everyone, named = client_roles(["read", "ops=yield", "ops=restore", "a=b=yield"])
    assert everyone == {Role.READ}
    assert named == {"ops": {Role.YIELD, Role.RESTORE}, "a=b": {Role.YIELD}}
    gatekeeper = gate(client_roles=("read", "ops=yield"))
    assert gatekeeper.remote(Peer(common_name="someone"), "").roles == {Role.READ}
    assert gatekeeper.remote(Peer(common_name="ops"), "") == Principal(
        "certificate ops", frozenset({Role.READ, Role.YIELD})
    )
    only_ops = gate(client_roles=("ops=yield",))
    assert only_ops.remote(Peer(common_name="someone"), "") is None
    assert only_ops.remote(Peer(common_name=""), "") is None
    assert only_ops.remote(Peer(), "") is None


def test_no_token_is_in_what_a_debugger_prints(tmp_path):
    (tmp_path / "tokens").write_text(FILE)
    gatekeeper = gate(token=Secret("of-the-environment-0123"), token_file=str(tmp_path / "tokens"))
    words = repr(vars(gatekeeper))
    assert "token of the environment" in words
    assert "of-the-environment-0123" not in words
    for line in FILE.splitlines():
        if line and not line.startswith("#"):
            assert line.split()[1] not in words


def test_a_name_stands_in_logs_as_it_is():
    """Others log it too: who asked for an operation."""
    gatekeeper = gate(client_roles=("ops\n2026=yield",))
    found = gatekeeper.remote(Peer(common_name="ops\n2026"), "")
    assert found == Principal("certificate ops\\u000a2026", frozenset({Role.YIELD}))


def test_a_token_that_is_shown_decides_beside_a_certificate(tmp_path):
    (tmp_path / "tokens").write_text(FILE)
    gatekeeper = gate(tmp_path / "tokens", client_roles=("yield",))
    peer = Peer(common_name="ops")
    assert gatekeeper.remote(peer, f"Bearer {READER}").roles == {Role.READ}
    assert gatekeeper.remote(peer, "Bearer wrong") is None


@pytest.mark.parametrize("word", ["admin", "ops=admin", "=yield", "ops="])
def test_roles_that_can_not_be_used(word):
    with pytest.raises(ServeError, match=r"^control_client_roles: "):
        gate(client_roles=(word,))


def test_a_token_of_the_environment_must_be_long():
    with pytest.raises(ServeError, match="at least 16"):
        gate(token=Secret("hunter2"))
    with pytest.raises(ServeError, match="one word"):
        gate(token=Secret("two words of a token"))


def test_this_user_and_root_come_through_the_socket(monkeypatch):
    gatekeeper = gate()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for uid in (1000, 0):
        found = gatekeeper.local(Peer(uid=uid, pid=5))
        assert found == Principal(f"uid {uid}", frozenset(Role))
    assert gatekeeper.local(Peer(uid=1001, pid=5)) is None
    assert gatekeeper.local(Peer()) is None


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_bucket_gives_a_burst_and_then_a_rate():
    clock = Clock()
    buckets = Buckets(3, 0.5, clock)
    assert [buckets.take("a") for _ in range(5)] == [0, 0, 0, 2, 2]
    assert buckets.take("b") == 0
    clock.now += 2
    assert [buckets.take("a") for _ in range(2)] == [0, 2]
    clock.now += 1000
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 2]


def test_buckets_are_bounded():
    buckets = Buckets(1, 0.001, Clock())
    for i in range(300):
        buckets.take(str(i))
    assert len(buckets._left) == 256
    assert buckets.take("299") > 0
    assert buckets.take("0") == 0


def test_keys_give_the_same_operation_for_the_same_command():
    keys, operation = Keys(), Operation(id="a", kind="yield", state=OperationState.RUNNING)
    asked = YieldRequest(lease_seconds=60.0)
    assert keys.find("x", "k", asked) is None
    keys.keep("x", "k", asked, operation)
    assert keys.find("x", "k", YieldRequest(lease_seconds=60.0)) is operation
    assert keys.find("y", "k", asked) is None
    for other in (YieldRequest(lease_seconds=61.0), RestoreRequest()):
        with pytest.raises(KeyReusedError):
            keys.find("x", "k", other)
    for i in range(MAX_KEYS):
        keys.keep("x", f"k{i}", asked, operation)
    assert keys.find("x", "k", asked) is None
    assert len(keys._known) == MAX_KEYS


@pytest.mark.parametrize(
    ("text", "right"),
    [("a", True), ("~" * 128, True), ("", False), ("~" * 129, False), ("a b", False),
     ("a\n", False), ("\u00e9", False)],
)  # fmt: skip
def test_what_a_key_may_be(text, right):
    assert is_key(text) is right


def test_a_flood_of_refusals_is_a_few_lines_and_hides_no_command(caplog):
    clock = Clock()
    audit = Audit(clock)
    with caplog.at_level(logging.WARNING, logger="gpumem_otel.audit"):
        for _ in range(1000):
            audit.refused(401, {"from": "10.0.0.1"})
        audit.refused(403, {"who": "token a"})
        audit.command({"command": "yield"})
        clock.now += 1
        audit.refused(401, {"from": "10.0.0.1"})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 23
    assert lines[20:] == [
        'control: who="token a" status=403',
        'control: command="yield"',
        'control: from="10.0.0.1" status=401 not_logged=980',
    ]


def test_nothing_in_a_value_ends_a_line(caplog):
    with caplog.at_level(logging.WARNING, logger="gpumem_otel.audit"):
        Audit().command({"who": 'certificate x"\n\u2028control: forged', "request": {"a": [1]}})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.isprintable()
    assert line.isascii()
    shown = line.removeprefix("control: who=").removesuffix(' request={"a": [1]}')
    assert json.loads(shown) == 'certificate x"\n\u2028control: forged'
