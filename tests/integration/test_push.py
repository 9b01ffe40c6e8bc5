"""Profiles over real sockets: from our encoder to what a query finds.

`PYROSCOPE_URL` runs those tests that need no fault against a real server.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import certs
from support.fake_pyroscope import FAULTS, FakePyroscope
from support.pushes import unique
from support.pyroscope_query import INUSE_SPACE, SNAPSHOTS, total
from support.tiny_proxy import TinyProxy

from gpumem_otel.base.counters import Counters
from gpumem_otel.base.profile import Frame, HeapProfile, Identity, ProfileKind, Sample, SourceStatus
from gpumem_otel.errors import CaptureError, PushError
from gpumem_otel.profiles.pprof import encode
from gpumem_otel.push.interfaces import PushDependencies
from gpumem_otel.push.pusher import THREAD_NAME, Pusher
from gpumem_otel.push.pyroscope import PyroscopeSink
from gpumem_otel.push.transport import Transport
from gpumem_otel.settings.config import ProfileConfig, PyroscopeConfig, Secret

ARMED = SourceStatus(armed=True, supported=True, devices=(0, 1))
OBJECTS = "gpu_memory:inuse_objects:count:space:bytes"
ALLOC = "gpu_memory:alloc_space:bytes:space:bytes"


class Job:
    """A reader of made-up profiles: two devices of 1000 and 2000 bytes."""

    def __init__(self) -> None:
        self.reads = 0
        self.error: Exception | None = None

    def live(self) -> tuple[HeapProfile, ...]:
        self.reads += 1
        if self.error:
            raise self.error
        return tuple(heap(1000 * (device + 1), device) for device in (0, 1))

    def derived(self, kind: ProfileKind, live: tuple[HeapProfile, ...]) -> tuple[HeapProfile, ...]:
        raise AssertionError((kind, live))

    def windowed(self, kinds, limit_seconds: float, stop: threading.Event):
        del limit_seconds, stop
        assert list(kinds) == [ProfileKind.ALLOCATED]
        return {ProfileKind.ALLOCATED: (heap(77, 0, ProfileKind.ALLOCATED),)}


def heap(size: int, device: int = 0, kind: ProfileKind = ProfileKind.LIVE) -> HeapProfile:
    frames = (
        Frame("torch.nn.Linear.forward", "/t/linear.py", 7),
        Frame("main", "/job/train.py", 3),
    )
    samples = (Sample(frames, 2, size - 1), Sample((Frame("[backward]"),), 1, 1))
    return HeapProfile(kind, device, samples, time_ns=time.time_ns(), comments=("by a test",))


class Client:
    """One rank with everything between a profile and the network."""

    def __init__(self, url: str, *, environ=None, profiles: ProfileConfig | None = None, **config):
        self.counters = Counters()
        self.identity = Identity(service_name=unique("push"), namespace="ml", run_id="r7", rank=5)
        self.config = PyroscopeConfig(url=url, **config)
        self.transport = Transport(self.config, environ=environ or {})
        self.sink = PyroscopeSink(self.transport, self.config, lambda: self.identity, self.counters)
        self.job = Job()
        dependencies = PushDependencies(
            reader=self.job,
            sink=self.sink,
            config=profiles or ProfileConfig(interval_seconds=3600),
            identity=lambda: self.identity,
            status=lambda: ARMED,
            encode=lambda profile: encode([profile]),
            counters=self.counters,
            push_timeout_seconds=self.config.timeout_seconds,
        )
        self.pusher = Pusher(dependencies)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.pusher.stop()
        self.transport.close()

    def push(self, seconds: float = 10.0) -> None:
        made = encode([heap(1000)])
        self.sink.push(made, ProfileKind.LIVE, 0, seconds)

    def refused(self, seconds: float = 10.0) -> PushError:
        with pytest.raises(PushError) as caught:
            self.push(seconds)
        return caught.value

    def dropped(self, reason: str) -> float:
        return self.counters.get("exporter_dropped", reason=reason)


@pytest.fixture
def url():
    real = os.environ.get("PYROSCOPE_URL")
    if real:
        yield real.rstrip("/")
        return
    with FakePyroscope() as fake:
        yield fake.url


@pytest.fixture
def fake():
    with FakePyroscope() as server:
        yield server


def test_totals_are_read_back(url):
    with Client(url) as client:
        client.push()
        service = client.identity.service_name
        assert total(url, service) == 1000
        assert total(url, service, OBJECTS) == 3
        assert total(url, service, SNAPSHOTS) == 1
        for selector in (
            ',rank="5"', ',run_id="r7"', ',namespace="ml"', ',device="0"',
        ):  # fmt: skip
            assert total(url, service, selector=selector) == 1000
        assert total(url, service, selector=',device="1"') == 0
        assert client.counters.get("exporter_pushed_bytes") > 100


def test_tags_arrive(url):
    with Client(url) as client:
        client.identity = Identity(
            service_name=client.identity.service_name,
            tags=(("team.name", "vision \u00fc"), *((f"t{i}", "v") for i in range(50))),
        )
        client.push()
        pushed = total(url, client.identity.service_name, selector=',team_name="vision \u00fc"')
        assert pushed == 1000


def test_the_pusher_delivers_all_devices(url):
    with Client(url) as client:
        client.pusher.start()
        assert client.pusher.flush(20.0)
        service = client.identity.service_name
        assert total(url, service) == 3000
        assert total(url, service, selector=',device="1"') == 2000
        assert client.pusher.flush(20.0)
        assert total(url, service) == 6000
        assert total(url, service, SNAPSHOTS) == 4
        assert client.counters.get("exporter_runs", stage="push") == 4
        age = time.time() - client.counters.get("last_push_timestamp_seconds", kind="live")
        assert 0 <= age < 60


def test_the_end_delivers_once_more(url):
    with Client(url) as client:
        client.pusher.start()
        assert client.pusher.stop(20.0)
        assert total(url, client.identity.service_name) == 3000


def test_the_cadence_delivers_both_kinds(url):
    # a real server answers once its segment is written, half a second or more for each profile
    interval = 6.0 if os.environ.get("PYROSCOPE_URL") else 1.5
    profiles = ProfileConfig(interval_seconds=interval, kinds=("live", "allocated"))
    with Client(url, profiles=profiles) as client:
        seen, both = set(), threading.Event()
        push = client.sink.push

        def watched(profile, kind, device, deadline):
            push(profile, kind, device, deadline)
            seen.add((kind.value, device))
            if len(seen) == 3:
                both.set()

        client.sink.push = watched
        client.pusher.start()
        assert both.wait(30)
        assert client.pusher.stop(20.0)
        service = client.identity.service_name
        assert total(url, service) % 3000 == 0
        assert total(url, service, ALLOC) % 77 == 0
        assert total(url, service, ALLOC) > 0


# faults ------------------------------------------------------------------------------------------

REASONS = {
    "hang": "timeout", "silent": "timeout", "trickle": "timeout", "trickle_body": "timeout",
    "cut": "cut", "cut_body": "cut", "redirect": "redirect", "down": "connect",
    "400": "rejected", "401": "unauthorized", "403": "unauthorized", "404": "not_found",
    "413": "too_large", "429": "rate_limited", "500": "server_error",
    "502": "unavailable", "503": "unavailable", "504": "unavailable",
}  # fmt: skip


def bring_about(fake: FakePyroscope, fault: str) -> None:
    if fault == "down":
        fake.down()
    else:
        fake.fault = fault


def test_every_fault_has_its_reason():
    assert set(REASONS) == {*FAULTS, "down"}


@pytest.mark.parametrize("fault", REASONS)
def test_a_fault_is_an_error_with_its_reason(fake, fault):
    bring_about(fake, fault)
    with Client(fake.url) as client:
        error = client.refused(1.0)
    assert error.reason == REASONS[fault]
    assert error.retryable == (REASONS[fault] in {"connect", "rate_limited", "unavailable"})
    assert len(str(error)) <= 200
    if fault == "down":
        fake.up()


@pytest.mark.parametrize("fault", REASONS)
def test_the_job_is_not_held_up(fake, fault):
    """Each call returns within its bound, everything lost is counted, and it recovers."""
    bring_about(fake, fault)
    with Client(fake.url, timeout_seconds=0.5) as client:
        client.pusher.start()
        begin = time.monotonic()
        assert not client.pusher.flush(2.0)
        assert time.monotonic() - begin < 10.0
        assert client.pusher._rounds.waiting <= 2
        assert client.counters.get("exporter_errors", stage="push") >= 1
        if fault == "down":
            fake.up()
        fake.fault = ""
        fake.released.set()
        # A flush that met the fault may still be under way; the one after it is not.
        assert client.pusher.flush(20.0) or client.pusher.flush(20.0)
        assert client.pusher.stop(20.0)
        stored = total(fake.url, client.identity.service_name, SNAPSHOTS)
        assert stored >= 4
        lost = sum(
            value
            for (name, _), value in client.counters.snapshot().items()
            if name == "exporter_dropped"
        )
        assert stored + lost == 2 * client.job.reads


@pytest.mark.parametrize("fault", ["hang", "silent", "trickle", "down"])
def test_the_end_of_a_job_is_bounded(fake, fault):
    bring_about(fake, fault)
    with Client(fake.url) as client:
        client.pusher.start()
        begin = time.monotonic()
        assert client.pusher.stop(0.5) or client.pusher.stop(10.0)
        assert time.monotonic() - begin < 8.0
        assert client.dropped(REASONS[fault]) + client.dropped("shutdown") == 2
    if fault == "down":
        fake.up()


def test_memory_stays_bounded_while_the_server_is_away(fake):
    fake.down()
    profiles = ProfileConfig(interval_seconds=0.2)
    with Client(fake.url, profiles=profiles) as client:
        enough = threading.Event()
        live = client.job.live

        def watched():
            assert client.pusher._rounds.waiting <= 2
            if client.job.reads > 10:
                enough.set()
            return live()

        client.job.live = watched
        client.pusher.start()
        assert enough.wait(30)
        assert client.pusher._rounds.waiting <= 2
        client.pusher.stop(5.0)
        assert client.counters.get("exporter_errors", stage="read") == 0
        lost = sum(
            value
            for (name, _), value in client.counters.snapshot().items()
            if name == "exporter_dropped"
        )
        assert lost == 2 * client.job.reads
    fake.up()


def test_a_reader_that_fails_is_no_push(fake):
    with Client(fake.url) as client:
        client.job.error = CaptureError("no allocator")
        client.pusher.start()
        assert not client.pusher.flush(5.0)
        assert client.counters.get("exporter_errors", stage="read") == 1
        assert fake.requests == []


def test_the_limiter_never_takes_what_is_too_large(fake):
    with Client(fake.url) as client:
        samples = tuple(Sample((Frame(f"f{i:06}" + "x" * 600),), 1, 1) for i in range(4500))
        made = encode([HeapProfile(ProfileKind.LIVE, 0, samples, time_ns=time.time_ns())])
        with pytest.raises(PushError) as caught:
            client.sink.push(made, ProfileKind.LIVE, 0, 10.0)
        assert caught.value.reason == "rate_limited"
        assert "push rate limit" in str(caught.value)
        small = encode(
            [HeapProfile(ProfileKind.LIVE, 0, samples, time_ns=time.time_ns())],
            max_bytes=ProfileConfig().max_bytes,
        )
        client.sink.push(small, ProfileKind.LIVE, 0, 10.0)
        assert total(fake.url, client.identity.service_name) == 4500


# credentials, TLS, proxies -----------------------------------------------------------------------


def test_credentials(fake):
    fake.authorization = "Bearer right"
    with Client(fake.url, bearer_token=Secret("right")) as client:
        client.push()
    with Client(fake.url, bearer_token=Secret("wrong-token")) as client:
        error = client.refused()
    assert (error.status, error.reason) == (401, "unauthorized")
    assert "wrong-token" not in str(error)
    with Client(fake.url, headers=(("Authorization", Secret("Bearer right")),)) as client:
        client.push()
    assert len(fake.requests) == 3


def test_a_path_before_the_servers_own():
    with FakePyroscope(prefix="/pyro/scope") as fake:
        with Client(fake.url + "/") as client:
            client.push()
            assert total(fake.url, client.identity.service_name) == 1000
        with Client(fake.url + "/other") as client:
            assert client.refused().reason == "not_found"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    return folder, certs.make_ca(folder, "our authority")


def tls_context(issued: certs.Issued, client_ca: certs.Authority | None = None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.cert_file, issued.key_file)
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca.cert_file)
    return context


@pytest.fixture
def secure(authority):
    """A TLS server that demands a client certificate of our authority."""
    folder, ca = authority
    issued = certs.issue(folder, ca, "pyroscope", ["127.0.0.1", "pyroscope.test"])
    with FakePyroscope(tls=tls_context(issued, ca)) as fake:
        yield fake


def identified(url, ca, mine):
    """A client that trusts only our authority and has its own certificate."""
    return Client(
        url,
        ca_file=str(ca.cert_file),
        client_cert_file=str(mine.cert_file),
        client_key_file=str(mine.key_file),
    )


def test_tls_with_our_own_authority_and_a_client_certificate(authority, secure):
    folder, ca = authority
    mine = certs.issue(folder, ca, "job", [])
    with identified(secure.url, ca, mine) as client:
        client.push()
        client.push()
    assert secure.connections == 1
    assert (("commonName", "job"),) in secure.requests[0].certificate["subject"]
    assert sum(row.total for row in secure.store.rows if row.profile_type == INUSE_SPACE) == 2000


def test_a_rotated_client_certificate_is_taken(authority, secure):
    folder, ca = authority
    mine = certs.issue(folder, ca, "rotated", [])
    with identified(secure.url, ca, mine) as client:
        client.push()
        certs.issue(folder, ca, "rotated", [])
        os.utime(mine.cert_file, (1, 1))
        client.push()
    serials = {request.certificate["serialNumber"] for request in secure.requests}
    assert len(serials) == 2


def test_tls_that_cannot_be_trusted(authority, secure, tmp_path):
    _, ca = authority
    with Client(secure.url) as client:
        error = client.refused()
    assert error.reason == "tls"
    assert "self-signed certificate" in str(error)
    assert not error.retryable
    untrusted = certs.make_ca(tmp_path, "stranger")
    with Client(secure.url, ca_file=str(untrusted.cert_file)) as client:
        assert client.refused().reason == "tls"
    named = secure.url.replace("127.0.0.1", "localhost")
    with Client(named, ca_file=str(ca.cert_file)) as client:
        error = client.refused()
    assert "Hostname mismatch" in str(error)
    with Client(secure.url, ca_file=str(ca.cert_file)) as client:
        error = client.refused()  # without the certificate that it asks for
    assert error.reason in {"tls", "cut"}
    assert not error.retryable
    assert secure.requests == []


def test_plain_http_to_a_tls_port_and_back(authority, secure, fake):
    _, ca = authority
    with Client(secure.url.replace("https", "http")) as client:
        assert client.refused().reason == "cut"
    with Client(fake.url.replace("http", "https"), ca_file=str(ca.cert_file)) as client:
        assert client.refused().reason in {"tls", "connect"}


@pytest.mark.parametrize("fault", ["hang", "silent", "trickle"])
def test_the_deadline_holds_over_tls(authority, fault):
    folder, ca = authority
    issued = certs.issue(folder, ca, "slow", ["127.0.0.1"])
    with FakePyroscope(tls=tls_context(issued)) as fake:
        fake.fault = fault
        with Client(fake.url, ca_file=str(ca.cert_file)) as client:
            begin = time.monotonic()
            error = client.refused(1.0)
            assert time.monotonic() - begin < 8.0
    assert (error.reason, error.retryable) == ("timeout", False)


def test_a_handshake_that_never_ends():
    """The deadline holds there, too; and nothing was sent."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with Client(f"https://127.0.0.1:{port}") as client:
            error = client.refused(0.5)
    assert (error.reason, error.retryable) == ("connect", True)
    assert str(error) == f"127.0.0.1:{port}: connect: time-out"


def test_a_proxy_of_the_environment(fake):
    """Made-up names, so that nothing but the proxy can find the server."""
    with TinyProxy() as proxy:
        proxy.targets["pyroscope.test"] = fake.port
        environ = {"HTTP_PROXY": f"http://us%40er:pass@{proxy.address}"}
        with Client("http://pyroscope.test:4040", environ=environ) as client:
            client.push()
        assert proxy.seen == [
            (
                "POST",
                "http://pyroscope.test:4040/push.v1.PusherService/Push",
                "Basic dXNAZXI6cGFzcw==",
            )
        ]
        environ["NO_PROXY"] = ".test"
        with Client("http://pyroscope.test:4040", environ=environ) as client:
            assert client.refused(2.0).reason == "connect"
        assert len(proxy.seen) == 1
    assert "proxy-authorization" not in fake.requests[0].headers
    assert len(fake.store.rows) == 3


def test_a_tunnel_for_tls(authority):
    folder, ca = authority
    issued = certs.issue(folder, ca, "behind", ["pyroscope.test"])
    with FakePyroscope(tls=tls_context(issued)) as fake, TinyProxy() as proxy:
        proxy.targets["pyroscope.test"] = fake.port
        with Client(
            "https://pyroscope.test", proxy=Secret(proxy.address), ca_file=str(ca.cert_file)
        ) as client:
            client.push()
            client.push()
        assert proxy.seen == [("CONNECT", "pyroscope.test:443", "")]
        assert len(fake.requests) == 2


def test_a_tunnel_through_a_proxy_of_tls(authority):
    """TLS to the server inside TLS to the proxy."""
    folder, ca = authority
    inner = certs.issue(folder, ca, "inside", ["pyroscope.test"])
    outer = certs.issue(folder, ca, "proxy", ["127.0.0.1"])
    with FakePyroscope(tls=tls_context(inner)) as fake, TinyProxy() as proxy:
        proxy.targets["pyroscope.test"] = fake.port
        proxy.require_tls(tls_context(outer))
        with Client(
            "https://pyroscope.test",
            proxy=Secret(f"https://{proxy.address}"),
            ca_file=str(ca.cert_file),
        ) as client:
            client.push()
            fake.fault = "trickle"
            assert client.refused(0.5).reason == "timeout"
        assert len(fake.requests) == 2


def test_a_proxy_that_refuses_or_is_not_there(authority, fake):
    _, ca = authority
    with TinyProxy(status=407) as proxy:
        options = {"proxy": Secret(f"u:secret@{proxy.address}"), "ca_file": str(ca.cert_file)}
        with Client("https://pyroscope.test", **options) as client:
            error = client.refused()
    assert (error.reason, error.retryable) == ("proxy", False)
    assert "407" in str(error)
    assert "secret" not in str(error)
    for scheme in ("http", "https"):
        with Client(f"{scheme}://pyroscope.test", **options) as client:
            error = client.refused(2.0)
        assert (error.reason, error.retryable) == ("proxy", True)


# a whole process ---------------------------------------------------------------------------------

SCRIPT = """
import atexit, sys, threading
sys.path.insert(0, {tests!r})
from integration.test_push import Client
client = Client({url!r})
print(client.identity.service_name)
client.pusher.start()
atexit.register(client.pusher.stop, {timeout})
"""


HANGS = (
    "gpumem_otel: push failed: HOST: no whole answer before the deadline "
    "(more like it are only counted)\n"
)


@pytest.mark.parametrize(("fault", "timeout"), [("", 20.0), ("hang", 0.5)])
def test_a_process_ends_with_its_last_profile_and_in_time(fake, fault, timeout):
    """From an exit handler, with the daemon thread still alive.

    A server that hangs may be noticed, and logged once, before the time to stop is over.
    """
    fake.fault = fault
    tests = str(Path(__file__).parents[1])
    script = SCRIPT.format(tests=tests, url=fake.url, timeout=timeout)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    logged = re.sub(r"127\.0\.0\.1:\d+", "HOST", done.stderr)
    assert logged in ({"", HANGS} if fault else {""})
    assert total(fake.url, done.stdout.strip()) == (0 if fault else 3000)
    assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}
