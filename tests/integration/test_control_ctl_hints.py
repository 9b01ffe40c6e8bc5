"""What `gpumem-otel ctl` reports without an answer, or of a refusal: one line with the way out."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack

import pytest
from support import certs
from support.controlling import READER, controlling
from support.listening import WAIT
from support.yield_double import YieldDouble

from gpumem_otel.cli.ctl import client as ctl_client
from gpumem_otel.cli.ctl import jobs
from gpumem_otel.cli.ctl.client import Client, Unreachable
from gpumem_otel.cli.ctl.targets import Credentials, parse_target

JOBS = "`gpumem-otel ctl state` without --target"
STOPPED = "kill -CONT"
PORT = "9564 + local rank"
CLIENT_CA = "GPUMEM_OTEL_CONTROL_TLS_CLIENT_CA_FILE"


@pytest.fixture
def fails(ctl):
    """The reason of a verb that fails, without its target."""

    def run(verb, target, *options):
        code, out, err = ctl(verb, "--target", target, *options)
        assert (code, out, err.count("\n")) == (1, "", 1)
        start = f"gpumem-otel: error: {target}: "
        assert err.startswith(start)
        return err.removeprefix(start).rstrip("\n")

    return run


def names(reason, *words):
    """Whether a reason holds each of these facts."""
    return all(word in reason for word in words)


def written(tmp_path, token):
    path = tmp_path / "shown"
    path.write_text(token)
    return "--token-file", str(path)


def url(listener, scheme="http"):
    return f"{scheme}://127.0.0.1:{listener.address[1]}"


def test_no_token_and_one_that_is_not_known(fails, tokens, tmp_path):
    with controlling(YieldDouble(), host="127.0.0.1", token_file=tokens) as listener:
        reason = fails("state", url(listener))
        assert names(reason, "--token-file", "--cert-file", "--key-file", "(HTTP 401)")
        shown = written(tmp_path, "another-token-0123456789")
        reason = fails("state", url(listener), *shown)
        assert names(reason, shown[1], "GPUMEM_OTEL_CONTROL_TOKEN_FILE", "(HTTP 401)")


def test_a_token_without_the_role(fails, tokens, tmp_path):
    with controlling(YieldDouble(), host="127.0.0.1", token_file=tokens) as listener:
        for verb in ("yield", "restore"):
            reason = fails(verb, url(listener), *written(tmp_path, READER))
            assert names(reason, "token dashboard", f"role {verb}", "(HTTP 403)")


def test_certificates(fails, files, ca, tmp_path):
    server = {"host": "127.0.0.1", "tls_client_ca_file": str(ca.cert_file), **files}
    mine = certs.issue(tmp_path, ca, "ops", [])
    other = certs.issue(tmp_path, certs.make_ca(tmp_path), "stranger", [])
    trusted = ("--ca-file", str(ca.cert_file))

    def shown(pair):
        return *trusted, "--cert-file", str(pair.cert_file), "--key-file", str(pair.key_file)

    with controlling(YieldDouble(), **server, client_roles=("ops=read", "boss=yield")) as listener:
        target = url(listener, "https")
        assert names(fails("state", target, *trusted), "--cert-file", "--key-file")
        assert names(fails("state", target, *shown(other)), str(other.cert_file), CLIENT_CA)
        reason = fails("yield", target, *shown(mine))
        assert names(reason, "certificate ops", "role yield", "CLIENT_ROLES", "(HTTP 403)")
    with controlling(YieldDouble(), **server, client_roles=("boss=yield",)) as listener:
        reason = fails("state", url(listener, "https"), *shown(mine))
        assert names(reason, str(mine.cert_file), "CLIENT_ROLES", "--token-file", "(HTTP 401)")


def test_a_server_that_is_not_trusted(fails, tokens, files, ca, tmp_path):
    named = certs.issue(tmp_path, ca, "elsewhere", ["node7"])
    elsewhere = {"tls_cert_file": str(named.cert_file), "tls_key_file": str(named.key_file)}
    for pair, options, way_out in (
        (files, (), "--ca-file"),
        (elsewhere, ("--ca-file", str(ca.cert_file)), "--target"),
    ):
        shown = (*options, *written(tmp_path, READER))
        with controlling(YieldDouble(), host="127.0.0.1", token_file=tokens, **pair) as listener:
            reason = fails("state", url(listener, "https"), *shown)
        assert names(reason, "certificate verify failed", way_out)


@pytest.mark.parametrize("clients", [False, True])
def test_http_to_a_port_of_tls_and_the_other_way_round(fails, tokens, files, ca, clients):
    more = {"tls_client_ca_file": str(ca.cert_file), "client_roles": ("read",)} if clients else {}
    options = {"host": "127.0.0.1", "token_file": tokens}
    with controlling(YieldDouble(), **options, **files, **more) as listener:
        assert names(fails("state", url(listener)), url(listener, "https"), "--target")
    with controlling(YieldDouble(), **options) as listener:
        assert names(fails("state", url(listener, "https")), url(listener), "--target")


def test_an_address_of_ipv6_keeps_its_brackets_in_the_way_out(fails, tokens, files):
    with controlling(YieldDouble(), host="::1", token_file=tokens, **files) as listener:
        port = listener.address[1]
        assert names(fails("state", f"http://[::1]:{port}"), f"https://[::1]:{port} ")
    with controlling(YieldDouble(), host="::1", token_file=tokens) as listener:
        port = listener.address[1]
        assert names(fails("state", f"https://[::1]:{port}"), f"http://[::1]:{port} ")


def test_a_second_look_shows_no_token(fails, tmp_path):
    """The port closes the first connection; the second one only looks for TLS."""
    came = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    came.append(connection.recv(65536))

        thread = threading.Thread(target=serve)
        thread.start()
        target = f"http://127.0.0.1:{server.getsockname()[1]}"
        fails("state", target, *written(tmp_path, READER))
        thread.join(WAIT)
    first, second = came
    assert READER.encode() in first
    assert second.startswith(b"\x16\x03")  # a ClientHello
    assert READER.encode() not in second


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_a_process_that_answers_nothing(family, tmp_path):
    """Like a stopped process: the kernel still accepts its connections."""
    with socket.socket(family) as server:
        server.bind(str(tmp_path / "s") if family == socket.AF_UNIX else ("127.0.0.1", 0))
        server.listen()
        name = server.getsockname()
        address = f"unix://{name}" if family == socket.AF_UNIX else f"http://127.0.0.1:{name[1]}"
        client = Client(parse_target(address), Credentials())
        with pytest.raises(Unreachable) as caught:
            client.ask("GET", "/v1/state", timeout=0.1)
    assert caught.value.waited
    reason = caught.value.format_message()
    assert names(reason, address, "0.1 s", STOPPED)
    assert names(reason, "that machine") is (family == socket.AF_INET)


def test_a_process_whose_queue_is_full(fails, tmp_path):
    """Like a stopped process: the kernel has filled its queue of connections."""
    with ExitStack() as waiting:
        server = waiting.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(tmp_path / "s"))
        server.listen(1)
        for _ in range(2):
            waiter = waiting.enter_context(socket.socket(socket.AF_UNIX))
            waiter.connect(str(tmp_path / "s"))
        assert names(fails("state", f"unix://{tmp_path}/s"), "full", STOPPED)


def serving(server, *answers):
    """A thread that answers these requests, each on its own connection, and no later one."""
    asked = []

    def serve():
        for answer in (*answers, None):
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(65536).split(b" ", 2)[:2])
                if answer is None:
                    while connection.recv(65536):  # until the client closes
                        pass
                else:
                    body = json.dumps(answer).encode()
                    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
                    connection.sendall(head + body)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread, asked


def test_a_command_that_is_not_answered_is_waited_for_once(fails, monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "_SUBMIT_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        thread, asked = serving(server, {"status": {"state": "running"}, "process": {}})
        reason = fails("yield", f"unix://{tmp_path}/s")
        thread.join(WAIT)
    assert names(reason, "0.1 s", STOPPED, "`gpumem-otel ctl state`", "yield")
    assert asked == [[b"GET", b"/v1/state"], [b"POST", b"/v1/yield"]]


def test_a_job_that_ends_before_it_answers(fails, tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()

        def serve():
            server.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        reason = fails("state", f"unix://{tmp_path}/s")
        thread.join(WAIT)
    assert names(reason, "without an answer", JOBS)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("scheme", "hint"), [("http", "without an answer"), ("https", "--cert-file")]
)
def test_a_second_look_at_a_silent_port_comes_to_an_end(fails, monkeypatch, scheme, hint):
    monkeypatch.setattr(ctl_client, "_LOOK_SECONDS", 0.05)
    over, looked = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            first, _ = server.accept()
            with first:
                first.recv(65536)
            second, _ = server.accept()
            with second:
                looked.append(second.recv(65536))
                over.wait(WAIT)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            assert names(fails("state", f"{scheme}://127.0.0.1:{server.getsockname()[1]}"), hint)
        finally:
            over.set()
            thread.join(WAIT)
    assert looked


def test_a_port_without_a_listener(fails):
    with socket.socket() as bound:  # without listen()
        bound.bind(("127.0.0.1", 0))
        reason = fails("state", f"http://127.0.0.1:{bound.getsockname()[1]}")
    assert names(reason, "GPUMEM_OTEL_CONTROL_HOST", PORT)


def test_a_socket_that_is_not_there_or_of_a_job_that_has_ended(
    fails, run_dir, tmp_path, monkeypatch
):
    run_dir.mkdir()
    for path in (run_dir / "none.sock", tmp_path / "nowhere" / "none.sock"):
        assert names(fails("state", f"unix://{path}"), "no such socket", JOBS)
    monkeypatch.chdir(run_dir)  # an address has 108 bytes at most
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("dead.sock")
    assert names(fails("state", f"unix://{run_dir}/dead.sock"), "has ended", JOBS)
    (run_dir / "file").touch()
    for path in (run_dir / "file", run_dir / "file" / "x.sock", run_dir):
        assert names(fails("state", f"unix://{path}"), "not a socket", JOBS)


def test_the_way_out_leads_to_the_job(ctl, run_dir):
    """`ctl state` without --target lists the right socket."""
    with controlling(YieldDouble(), run_dir) as listener:
        code, _, err = ctl("state", "--target", f"unix://{run_dir}/another.sock")
        assert code == 1
        assert JOBS in err
        code, out, _ = ctl("state")
        assert code == 0
        assert f"unix://{listener.socket_path}" in out
