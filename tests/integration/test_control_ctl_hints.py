"""What `gpumem-otel ctl` says where it gets no answer, or a refusal: one line with the way out."""

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

from gpumem_otel.cli.ctl import client as ctl_hints
from gpumem_otel.cli.ctl import jobs
from gpumem_otel.cli.ctl.client import Client, Credentials, Unreachable, parse_target

JOBS = (
    "`gpumem-otel ctl state` without --target lists those of the jobs that run, with --run-dir "
    "those in another folder"
)
NEEDED = "a bearer token, or a client certificate that has a role, is needed"
OF_CLIENTS = "it may want a client certificate, --cert-file and --key-file"
STANDS_STILL = (
    "its process is stopped (kill -CONT goes on with it), or stands still in a call that lets no "
    "other thread run"
)
PORT = "9564 + local rank unless its GPUMEM_OTEL_CONTROL_PORT is another"


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


def written(tmp_path, token):
    path = tmp_path / "shown"
    path.write_text(token)
    return "--token-file", str(path)


def url(listener, scheme="http"):
    return f"{scheme}://127.0.0.1:{listener.address[1]}"


def test_no_token_and_one_that_is_not_known(fails, tokens, tmp_path):
    with controlling(YieldDouble(), host="127.0.0.1", token_file=tokens) as listener:
        assert fails("state", url(listener)) == (
            f"{NEEDED}: --token-file names a file with the token, --cert-file and --key-file the "
            "certificate (HTTP 401)"
        )
        shown = written(tmp_path, "another-token-0123456789")
        assert fails("state", url(listener), *shown) == (
            f"{NEEDED}: the one in {shown[1]} is none that the job knows, see its "
            "GPUMEM_OTEL_CONTROL_TOKEN_FILE (HTTP 401)"
        )


def test_a_token_without_the_role(fails, tokens, tmp_path):
    with controlling(YieldDouble(), host="127.0.0.1", token_file=tokens) as listener:
        for verb in ("yield", "restore"):
            assert fails(verb, url(listener), *written(tmp_path, READER)) == (
                f"token dashboard does not have the role {verb}: add it to that line of the job's "
                "token file, or show a token that has it (HTTP 403)"
            )


def test_certificates(fails, files, ca, tmp_path):
    server = {"host": "127.0.0.1", "tls_client_ca_file": str(ca.cert_file), **files}
    mine = certs.issue(tmp_path, ca, "ops", [])
    other = certs.issue(tmp_path, certs.make_ca(tmp_path), "stranger", [])
    trusted = ("--ca-file", str(ca.cert_file))

    def shown(pair):
        return *trusted, "--cert-file", str(pair.cert_file), "--key-file", str(pair.key_file)

    with controlling(YieldDouble(), **server, client_roles=("ops=read", "boss=yield")) as listener:
        target = url(listener, "https")
        assert fails("state", target, *trusted) == (f"closed without an answer: {OF_CLIENTS}")
        assert fails("state", target, *shown(other)) == (
            f"closed without an answer: it may not take {other.cert_file}, which has to be valid "
            "and signed by the job's GPUMEM_OTEL_CONTROL_TLS_CLIENT_CA_FILE"
        )
        assert fails("yield", target, *shown(mine)) == (
            "certificate ops does not have the role yield: add it to the job's "
            "GPUMEM_OTEL_CONTROL_CLIENT_ROLES (HTTP 403)"
        )
    with controlling(YieldDouble(), **server, client_roles=("boss=yield",)) as listener:
        assert fails("state", url(listener, "https"), *shown(mine)) == (
            f"{NEEDED}: {mine.cert_file} has none, which the job's "
            "GPUMEM_OTEL_CONTROL_CLIENT_ROLES gives; or take --token-file (HTTP 401)"
        )


def test_a_server_that_is_not_trusted(fails, tokens, files, ca, tmp_path):
    named = certs.issue(tmp_path, ca, "elsewhere", ["node7"])
    for pair, options, reason in (
        (files, (), ": --ca-file names the certificate of who signed the server's"),
        (
            {"tls_cert_file": str(named.cert_file), "tls_key_file": str(named.key_file)},
            ("--ca-file", str(ca.cert_file)),
            ": take a name that it has in --target",
        ),
    ):
        shown = (*options, *written(tmp_path, READER))
        with controlling(YieldDouble(), host="127.0.0.1", token_file=tokens, **pair) as listener:
            said = fails("state", url(listener, "https"), *shown)
        assert said.startswith("TLS: certificate verify failed (")
        assert said.endswith(reason)


@pytest.mark.parametrize("clients", [False, True])
def test_http_to_a_port_of_tls_and_the_other_way_round(fails, tokens, files, ca, clients):
    more = {"tls_client_ca_file": str(ca.cert_file), "client_roles": ("read",)} if clients else {}
    options = {"host": "127.0.0.1", "token_file": tokens}
    with controlling(YieldDouble(), **options, **files, **more) as listener:
        assert fails("state", url(listener)) == (
            f"it speaks TLS: take {url(listener, 'https')} in --target"
        )
    with controlling(YieldDouble(), **options) as listener:
        assert fails("state", url(listener, "https")) == (
            f"it speaks plain HTTP, no TLS: take {url(listener)} in --target"
        )


def test_an_address_of_ipv6_keeps_its_brackets_in_the_way_out(fails, tokens, files):
    with controlling(YieldDouble(), host="::1", token_file=tokens, **files) as listener:
        port = listener.address[1]
        assert fails("state", f"http://[::1]:{port}") == (
            f"it speaks TLS: take https://[::1]:{port} in --target"
        )
    with controlling(YieldDouble(), host="::1", token_file=tokens) as listener:
        port = listener.address[1]
        assert fails("state", f"https://[::1]:{port}") == (
            f"it speaks plain HTTP, no TLS: take http://[::1]:{port} in --target"
        )


def test_a_second_look_shows_no_token(fails, tmp_path):
    """What listens there closes the first connection, and is looked at once more."""
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
        said = fails("state", target, *written(tmp_path, READER))
        thread.join(WAIT)
    assert said == "it closed the connection without an answer"
    first, second = came
    assert READER.encode() in first
    assert second.startswith(b"\x16\x03")  # a ClientHello
    assert READER.encode() not in second


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_a_process_that_answers_nothing(family, tmp_path):
    """As one that is stopped: the kernel goes on taking its connections."""
    with socket.socket(family) as server:
        server.bind(str(tmp_path / "s") if family == socket.AF_UNIX else ("127.0.0.1", 0))
        server.listen()
        name = server.getsockname()
        address = f"unix://{name}" if family == socket.AF_UNIX else f"http://127.0.0.1:{name[1]}"
        client = Client(parse_target(address), Credentials())
        with pytest.raises(Unreachable) as caught:
            client.ask("GET", "/v1/state", timeout=0.1)
    lost = "" if family == socket.AF_UNIX else ", or nothing reaches that machine"
    assert caught.value.format_message() == (
        f"{address}: no answer within 0.1 s: {STANDS_STILL}{lost}"
    )


def test_a_process_that_lets_nobody_in_any_more(fails, tmp_path):
    """As one that is stopped while others ask: the kernel keeps as many as its queue takes."""
    with ExitStack() as waiting:
        server = waiting.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(tmp_path / "s"))
        server.listen(1)
        for _ in range(2):
            one = waiting.enter_context(socket.socket(socket.AF_UNIX))
            one.connect(str(tmp_path / "s"))
        said = fails("state", f"unix://{tmp_path}/s")
    assert said == f"as many wait there as may: {STANDS_STILL}"


def serving(server, *answers):
    """A thread that answers so many requests, each on a connection of its own, then no more."""
    asked = []

    def serve():
        for answer in (*answers, None):
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(65536).split(b" ", 2)[:2])
                if answer is None:
                    while connection.recv(65536):  # until it is given up
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
        said = fails("yield", f"unix://{tmp_path}/s")
        thread.join(WAIT)
    assert said == (
        f"no answer within 0.1 s: {STANDS_STILL}; `gpumem-otel ctl state` shows whether the yield "
        "has begun"
    )
    assert asked == [[b"GET", b"/v1/state"], [b"POST", b"/v1/yield"]]


def test_a_job_that_ends_with_the_question_in_its_ear(fails, tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()

        def serve():
            server.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        said = fails("state", f"unix://{tmp_path}/s")
        thread.join(WAIT)
    assert said == f"closed without an answer, as by a job that ends: {JOBS}"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("scheme", "hint"),
    [
        ("http", "it closed the connection without an answer"),
        ("https", f"closed without an answer: {OF_CLIENTS}"),
    ],
    ids=["http", "https"],
)
def test_a_second_look_at_one_that_never_answers_comes_to_an_end(fails, monkeypatch, scheme, hint):
    monkeypatch.setattr(ctl_hints, "_LOOK_SECONDS", 0.05)
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
            assert fails("state", f"{scheme}://127.0.0.1:{server.getsockname()[1]}") == hint
        finally:
            over.set()
            thread.join(WAIT)
    assert looked


def test_nobody_at_a_port(fails):
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        assert fails("state", f"http://127.0.0.1:{bound.getsockname()[1]}") == (
            "nobody listens there: the job has ended, or takes no commands over TCP (its "
            f"GPUMEM_OTEL_CONTROL_HOST); its port is {PORT}"
        )


def test_a_socket_that_is_not_there_or_of_a_job_that_has_ended(
    fails, run_dir, tmp_path, monkeypatch
):
    run_dir.mkdir()
    for path in (run_dir / "none.sock", tmp_path / "nowhere" / "none.sock"):
        assert fails("state", f"unix://{path}") == f"there is no such socket: {JOBS}"
    monkeypatch.chdir(run_dir)  # an address has 108 bytes
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("dead.sock")
    assert fails("state", f"unix://{run_dir}/dead.sock") == (
        f"nobody listens there any more, the job has ended: {JOBS}"
    )
    (run_dir / "file").touch()
    for path in (run_dir / "file", run_dir / "file" / "x.sock", run_dir):
        assert fails("state", f"unix://{path}") == f"that is no socket: {JOBS}"


def test_the_way_out_leads_to_the_job(ctl, run_dir):
    """`ctl state` without --target lists the socket that was meant."""
    with controlling(YieldDouble(), run_dir) as listener:
        code, _, err = ctl("state", "--target", f"unix://{run_dir}/another.sock")
        assert code == 1
        assert JOBS in err
        code, out, _ = ctl("state")
        assert code == 0
        assert f"unix://{listener.socket_path}" in out
