"""Labels, request bytes, headers, and what each answer means."""

from __future__ import annotations

import base64
import gzip
import json

import pytest

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import Identity, ProfileKind
from gpumem_otel.errors import PushError
from gpumem_otel.push.pyroscope import PyroscopeSink, push_request, refusal, series_labels
from gpumem_otel.push.transport import Answer
from gpumem_otel.settings.config import PyroscopeConfig, Secret

JOB = Identity(service_name="train", namespace="ml", run_id="r1", rank=3, world_size=8)


class Wire:
    """Keeps what would be sent, and gives one answer."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.sent: list[tuple] = []
        self.answer = answer or Answer(200, b"", {})

    def post(self, url, body, headers, deadline_seconds):
        self.sent.append((url, body, dict(headers), deadline_seconds))
        return self.answer


def sink(config: PyroscopeConfig, wire: Wire, identity: Identity = JOB, **more) -> PyroscopeSink:
    return PyroscopeSink(wire, config, lambda: identity, **more)


def push(config: PyroscopeConfig, wire: Wire, **more) -> None:
    sink(config, wire, **more).push(b"pprof", ProfileKind.LIVE, 1, 7.0)


def error_of(status: int, body: bytes = b"", **headers: str) -> PushError:
    error = refusal(Answer(status, body, headers))
    assert error is not None
    return error


def test_push_request_is_the_published_message():
    """Fields 1 and 2 of each level, as push.proto numbers them."""
    assert push_request(b"PP", [("a", "b"), ("c", "")]) == (
        b"\x0a\x15"  # series, 21 bytes
        b"\x0a\x06\x0a\x01a\x12\x01b"  # label a=b
        b"\x0a\x05\x0a\x01c\x12\x00"  # label c=""
        b"\x12\x04\x0a\x02PP"  # sample with its profile
    )


def test_labels_of_a_rank():
    assert series_labels(JOB, device=0) == (
        ("__name__", "gpu_memory"),
        ("__delta__", "false"),
        ("service_name", "train"),
        ("namespace", "ml"),
        ("run_id", "r1"),
        ("rank", "3"),
        ("device", "0"),
    )


def test_labels_of_a_job_that_knows_little():
    """What is empty is left out; the server names a service that has no name itself."""
    assert series_labels(Identity(service_name=""), device=2) == (
        ("__name__", "gpu_memory"),
        ("__delta__", "false"),
        ("rank", "0"),
        ("device", "2"),
    )


@pytest.mark.parametrize(
    ("tag", "label"),
    [
        (("team", "vision"), ("team", "vision")),
        (("service.instance.id", "x"), ("service_instance_id", "x")),
        ((" a b-c/d ", "x"), ("a_b_c_d", "x")),
        (("9lives", "x"), ("_9lives", "x")),
        (("__name__", "x"), ("name__", "x")),
        (("__0", "x"), ("_0", "x")),
        (("caf\xe9", "x"), ("caf_", "x")),
        (("x" * 2000, "y"), ("x" * 1024, "y")),
        (("v", "x" * 3000), ("v", "x" * 2048)),
        (("v", "\xe9" * 1025), ("v", "\xe9" * 1024)),
        (("v", "a" + "\xe9" * 1024), ("v", "a" + "\xe9" * 1023)),
        (("v", "bad \ud800"), ("v", "bad ?")),
        (("v", ""), None),
        (("", "v"), None),
        (("___", "v"), None),
        (("rank", "99"), None),
        (("__delta__", "true"), ("delta__", "true")),
    ],
)
def test_tags_become_labels_that_the_server_takes(tag, label):
    added = series_labels(Identity(service_name="s", tags=(tag,)), device=0)[5:]
    assert added == (() if label is None else (label,))


def test_labels_are_bounded_and_unique():
    tags = tuple((f"t{i}", "v") for i in range(40))
    labels = series_labels(
        Identity(service_name="s", tags=(("oom.id", "tag"), *tags)),
        device=0,
        extra=[("oom_id", "7")],
    )
    assert len(labels) == 30
    assert len({name for name, _ in labels}) == 30
    assert dict(labels)["oom_id"] == "7"
    assert ("t23", "v") in labels
    assert ("t24", "v") not in labels


def test_another_name():
    assert series_labels(JOB, device=0, name="gpu_memory_oom")[0] == ("__name__", "gpu_memory_oom")


def test_a_push_as_it_goes_out():
    wire, counters = Wire(), Counters()
    push(PyroscopeConfig(url="http://pyroscope:4040"), wire, counters=counters)
    url, body, headers, deadline = wire.sent[0]
    assert url == "http://pyroscope:4040/push.v1.PusherService/Push"
    assert deadline == 7.0
    assert gzip.decompress(body) == push_request(b"pprof", series_labels(JOB, device=1))
    assert headers.pop("User-Agent").startswith("gpumem-otel/")
    assert headers == {
        "Content-Type": "application/proto",
        "Content-Encoding": "gzip",
        "Connect-Protocol-Version": "1",
        "Accept-Encoding": "identity",
    }
    assert counters.get("exporter_pushed_bytes") == len(body)


@pytest.mark.parametrize(
    ("url", "posted"),
    [
        ("https://host/prefix/", "https://host/prefix/push.v1.PusherService/Push"),
        ("http://[::1]:4040", "http://[::1]:4040/push.v1.PusherService/Push"),
        (" http://h ", "http://h/push.v1.PusherService/Push"),
        ("http://h/p?x=1", "http://h/p/push.v1.PusherService/Push?x=1"),
        ("http://h/push.v1.PusherService/Push", "http://h/push.v1.PusherService/Push"),
    ],
)
def test_where_a_push_goes(url, posted):
    wire = Wire()
    push(PyroscopeConfig(url=url), wire)
    assert wire.sent[0][0] == posted


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"basic_auth_user": "12", "basic_auth_password": Secret("p\xe4ss")},
            {"Authorization": basic("12:p\xe4ss")},
        ),
        ({"bearer_token": Secret("tok")}, {"Authorization": "Bearer tok"}),
        (
            {"bearer_token": Secret("tok"), "basic_auth_user": "u"},
            {"Authorization": "Bearer tok"},
        ),
        ({"tenant_id": "team-a"}, {"X-Scope-OrgID": "team-a"}),
        ({"headers": (("X-Extra", Secret("1")),)}, {"X-Extra": "1"}),
        (
            {"headers": (("authorization", Secret("Own 1")),), "bearer_token": Secret("tok")},
            {"authorization": "Own 1"},
        ),
    ],
)
def test_credentials(config, expected):
    wire = Wire()
    push(PyroscopeConfig(**{"url": "http://h", **config}), wire)
    headers = wire.sent[0][2]
    assert {k: v for k, v in headers.items() if k in expected} == expected
    assert sum(name.lower() == "authorization" for name in headers) <= 1


def test_a_token_file_is_read_each_time(tmp_path):
    file, wire = tmp_path / "token", Wire()
    pushing = sink(PyroscopeConfig(url="http://h", bearer_token_file=str(file)), wire)
    for token in ("one", "two"):
        file.write_text(token + "\n")
        pushing.push(b"p", ProfileKind.LIVE, 0, 1.0)
    assert [sent[2]["Authorization"] for sent in wire.sent] == ["Bearer one", "Bearer two"]
    file.unlink()
    with pytest.raises(
        PushError, match=r"^token file .*/token: No such file or directory$"
    ) as caught:
        pushing.push(b"p", ProfileKind.LIVE, 0, 1.0)
    assert (caught.value.reason, caught.value.retryable) == ("config", False)


def test_the_rank_may_be_known_late():
    wire, identities = Wire(), iter([Identity(service_name="s"), JOB])
    pushing = PyroscopeSink(wire, PyroscopeConfig(url="http://h"), lambda: next(identities))
    for _ in range(2):
        pushing.push(b"p", ProfileKind.LIVE, 0, 1.0)
    assert [b"\x04rank\x12\x013" in gzip.decompress(sent[1]) for sent in wire.sent] == [False, True]


@pytest.mark.parametrize(
    ("status", "reason", "retryable"),
    [
        (400, "rejected", False),
        (401, "unauthorized", False),
        (403, "unauthorized", False),
        (404, "not_found", False),
        (408, "rejected", False),
        (413, "too_large", False),
        (415, "rejected", False),
        (422, "rejected", False),
        (429, "rate_limited", True),
        (500, "server_error", False),
        (501, "server_error", False),
        (502, "unavailable", True),
        (503, "unavailable", True),
        (504, "unavailable", True),
    ],
)
def test_what_is_tried_again(status, reason, retryable):
    error = error_of(status)
    assert (error.status, error.reason, error.retryable) == (status, reason, retryable)


@pytest.mark.parametrize("status", [200, 202, 204])
def test_stored(status):
    assert refusal(Answer(status, b"", {"content-type": "application/proto"})) is None


def test_a_web_page_is_no_success():
    assert error_of(200, b"<html>", **{"content-type": "text/html; charset=utf-8"}).reason == (
        "not_found"
    )


def test_redirects_are_named_and_not_followed():
    error = error_of(302, location="https://user:secret@login.example/x?token=secret")
    assert str(error) == "302: redirected to login.example; set the URL to that server"
    assert not error.retryable


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"code":"invalid_argument","message":"out of\\n window"}',
         "400 invalid_argument: out of window"),
        (gzip.compress(b'{"code":"x","message":"zipped"}', mtime=0), "400 x: zipped"),
        (b"<b>Bad\x00 Gateway</b>\r\n", "400 <b>Bad Gateway</b>"),
        (b"\xff\xfe", "400 \ufffd\ufffd"),
        (b"", "400"),
        (b"[" * 30_000, "400 " + "[" * 196),
        (b"x" * 500, "400 " + "x" * 196),
    ],
)  # fmt: skip
def test_the_message_of_the_server(body, text):
    headers = {"content-encoding": "gzip"} if body.startswith(b"\x1f\x8b") else {}
    assert str(error_of(400, body, **headers)) == text


def test_a_damaged_or_endless_gzip_answer():
    assert str(error_of(400, b"\x1f\x8bjunk", **{"content-encoding": "gzip"})) == (
        "400 (damaged answer)"
    )
    bomb = gzip.compress(b"z" * 50_000_000, mtime=0)
    assert len(str(error_of(400, bomb, **{"content-encoding": "gzip"}))) == 200


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "999999"}, 3600.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "soon"}, None),
        ({}, None),
        (
            {
                "retry-after": "Sun, 29 Nov 2026 10:00:30 GMT",
                "date": "Sun, 29 Nov 2026 10:00:10 GMT",
            },
            20.0,
        ),
        ({"retry-after": "Sun, 29 Nov 2026 10:00:30 GMT"}, None),
    ],
)
def test_retry_after(headers, seconds):
    assert error_of(503, **headers).retry_after_seconds == seconds
    assert error_of(400, **headers).retry_after_seconds is None


def test_no_message_shows_a_credential():
    """Some proxies repeat the request that they refuse."""
    secrets = ("token-1234", "password-1", "header-value")
    body = json.dumps({"code": "x", "message": " ".join((*secrets, "a" * 150, *secrets))})
    wire = Wire(Answer(401, body.encode(), {}))
    config = PyroscopeConfig(
        url="http://h",
        bearer_token=Secret(secrets[0]),
        headers=(("X-Key", Secret(secrets[2])),),
    )
    with pytest.raises(PushError) as caught:
        push(config, wire)
    assert str(caught.value).startswith("401 x: *** password-1 *** aaa")
    encoded = base64.b64encode(b"u:password-1").decode()
    wire.answer = Answer(401, f"bad {encoded} password-1".encode(), {})
    config = PyroscopeConfig(
        url="http://h", basic_auth_user="u", basic_auth_password=Secret("password-1")
    )
    with pytest.raises(PushError, match=r"401 bad \*\*\* \*\*\*$"):
        push(config, wire)
