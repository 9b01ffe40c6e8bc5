"""`gpumem-otel ctl` against real listeners: what it prints, sends and returns."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import pytest
from support import certs
from support.cli_process import clean_environ
from support.controlling import IDENTITY, OTHER_JOB, TOKEN, controlling
from support.listening import WAIT, until
from support.yield_double import HELD, YieldDouble

from gpumem_otel.base.profile import Identity
from gpumem_otel.cli.main import main
from gpumem_otel.serve import discovery
from gpumem_otel.yielding.values import Phase, RestoreRequest, YieldLevel, YieldRequest


def test_state_yield_and_restore(run_dir, ctl):
    double = YieldDouble()
    with controlling(double, run_dir) as listener:
        code, out, err = ctl("state")
        assert (code, err) == (0, "")
        assert out.split("\n")[0].split() == [
            "job", "rank", "pid", "state", "since", "away", "lease", "target",
        ]  # fmt: skip
        assert re.search(r"^trainer +0 +7 +running .* -  unix:///", out, re.MULTILINE)

        code, out, err = ctl("yield", "--dry-run")
        assert (code, err) == (0, "")
        assert "a yield would give back 12.0 GiB" in out
        assert "may kill a parked job: none" in out
        assert double.moves == 0

        code, out, err = ctl("yield", "--lease", "30m", "--level", "tensors", "--keep", "buffer")
        assert (code, err) == (0, "trainer rank 0 (pid 7): yield: prepare, 0 B of 12.0 GiB\n")
        assert out.splitlines() == [
            "trainer rank 0 (pid 7): gave back 12.0 GiB in 0.25 s",
            "  moved: optimizer_state 8.0 GiB, parameter 4.0 GiB",
            "  left on the device: context 512.0 MiB",
            "  release: 0.25 s, 12.0 GiB, 48.0 GiB/s",
        ]
        asked = YieldRequest(level=YieldLevel.TENSORS, keep=("buffer",), lease_seconds=1800.0)
        assert double.submitted[-1] == (asked, f"uid {os.getuid()}")

        code, out, err = ctl("yield")
        assert (code, err) == (0, "")
        assert out == (
            "trainer rank 0 (pid 7): its memory is away already, nothing had to be moved\n"
        )

        code, out, _ = ctl("state", "--json")
        (state,) = json.loads(out)
        assert state["target"] == f"unix://{listener.socket_path}"
        assert state["value"]["state"] == "yielded"

        code, out, err = ctl("restore", "--class", "parameter", "--wait-seconds", "5", "--json")
        assert (code, err) == (0, "")
        (restored,) = json.loads(out)
        assert restored["value"]["report"]["moved_bytes"] == HELD
        asked = RestoreRequest(classes=("parameter",), wait_seconds=5.0)
        assert double.submitted[-1] == (asked, f"uid {os.getuid()}")
    assert double.moves == 2


def test_every_option_is_sent(run_dir, ctl, tmp_path):
    double = YieldDouble()
    with controlling(double, run_dir, disk_dirs=(str(tmp_path),)):
        code, _, err = ctl(
            "yield", "--level", "tensors", "--device", "1", "--device", "0", "--class", "parameter",
            "--class", "gradient", "--keep", "buffer", "--discard", "optimizer_state", "--lease",
            "2h", "--deadline", "90", "--wait-seconds", "3", "--verify", "--assume-private",
            "--release-host", "--dry-run", "--disk-dir", str(tmp_path),
        )  # fmt: skip
    assert (code, err) == (0, "")
    sent, default = double.submitted[0][0], YieldRequest()
    assert [f.name for f in fields(sent) if getattr(sent, f.name) == getattr(default, f.name)] == []
    assert sent == YieldRequest(
        level=YieldLevel.TENSORS,
        devices=(1, 0),
        classes=("parameter", "gradient"),
        keep=("buffer",),
        discard=("optimizer_state",),
        lease_seconds=7200.0,
        deadline_seconds=90.0,
        wait_seconds=3.0,
        dry_run=True,
        verify=True,
        assume_private=True,
        release_host=True,
        disk_dir=str(tmp_path),
    )


def test_zero_is_not_the_default(run_dir, ctl):
    double = YieldDouble()
    with controlling(double, run_dir):
        code, _, _ = ctl("restore", "--wait-seconds", "0")
        assert code == 0
        assert double.submitted[-1][0] == RestoreRequest(wait_seconds=0.0)
        code, _, err = ctl("yield", "--lease", "0")
        assert code == 2
        assert "lease_seconds must be 0.1 to 2678400 seconds, not 0; leave it out" in err
    assert len(double.submitted) == 1


def test_it_is_followed_although_too_many_watch(run_dir, capsys, monkeypatch):
    monkeypatch.setattr("gpumem_otel.yielding.control.app.MAX_WATCHERS", 0)
    monkeypatch.setattr("gpumem_otel.cli.ctl.jobs._POLL_SECONDS", 0.05)
    double = YieldDouble(by_hand=True)
    with controlling(double, run_dir):
        found = []
        follow = threading.Thread(target=lambda: found.append(main(["ctl", "yield"])))
        follow.start()
        until(lambda: len(double.submitted) == 1)
        double.waiting.clear()
        assert double.waiting.wait(WAIT)  # it polls
        assert found == []
        double.finish()
        follow.join(WAIT)
    assert found == [0]
    assert "gave back 12.0 GiB" in capsys.readouterr().out


def test_a_folder_may_have_any_name(tmp_path, ctl):
    folder = tmp_path / "run#1?x=[2"
    with controlling(YieldDouble(), folder):
        code, _, err = ctl("state", "--run-dir", str(folder))
    assert (code, err) == (0, "")


def test_it_waits_for_the_end_or_not(run_dir, ctl):
    double = YieldDouble(by_hand=True)
    with controlling(double, run_dir):
        code, out, _ = ctl("yield", "--no-wait")
        assert (code, out) == (0, "trainer rank 0 (pid 7): yield op-1 has begun\n")
        found = []
        follow = threading.Thread(target=lambda: found.append(main(["ctl", "yield"])))
        follow.start()
        until(lambda: len(double.submitted) == 2)
        double.advance(Phase.RELEASE, 5)
        assert found == []
        double.finish()
        follow.join(WAIT)
        assert found == [0]
    assert double.moves == 1


def test_what_is_refused_is_an_error(run_dir, ctl):
    double = YieldDouble(by_hand=True)
    with controlling(double, run_dir) as listener:
        ctl("yield", "--no-wait")
        code, out, err = ctl("restore")
        assert (code, out) == (1, "")
        assert err == (
            f"gpumem-otel: error: unix://{listener.socket_path}: operation op-1 runs: wait for it "
            "(HTTP 409)\n"
        )
        found = []
        follow = threading.Thread(target=lambda: found.append(main(["ctl", "yield"])))
        follow.start()
        until(lambda: len(double.submitted) == 3)
        double.finish("no safe point within 60 s: a step takes longer")
        follow.join(WAIT)
        assert found == [1]
        code, _, err = ctl("yield", "--disk-dir", "/etc")
        assert code == 1
        assert "control_disk_dirs" in err
    assert double.moves == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("yield", "--level", "all"),
        ("yield", "--lease", "soon"),
        ("yield", "--device", "-1"),
        ("yield", "--discard", "gradient"),
        ("restore", "--dry-run"),
        ("yield", "--lease", "0"),
        ("yield", "--level", "process", "--class", "parameter"),
        ("yield", "--keep", "parameter", "--discard", "parameter"),
        ("yield", "--class", "parameter", "--keep", "parameter"),
        ("state", "--run-dir", ""),
        (),
        ("state", "--target", "node7"),
        ("state", "--token-file", "/nowhere"),
        ("state", "--key-file", "x"),
        ("begin",),
    ],
)
def test_bad_usage(arguments, ctl):
    code, out, err = ctl(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("gpumem-otel: error: ")
    assert err.count("\n") == 1


def test_no_job_takes_commands(ctl, run_dir):
    code, out, err = ctl("state")
    assert (code, out) == (1, "")
    assert str(run_dir) in err
    assert "GPUMEM_OTEL_CONTROL=1" in err
    assert err.count("\n") == 1
    for verb in ("state", "yield", "restore"):
        code, out, _ = ctl(verb, "--json")
        assert (code, json.loads(out)) == (1, [])
    code, _, err = ctl("yield", "--target", "http://127.0.0.1:1")
    assert code == 1
    assert "http://127.0.0.1:1: " in err
    code, _, err = ctl("yield", "--target", f"unix://{run_dir}/x.sock")
    assert code == 1
    assert "no such socket" in err


def test_watch_without_an_answer(ctl, run_dir):
    code, out, err = ctl("watch", "--target", f"unix://{run_dir}/x.sock")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "gpumem-otel: error: no process answered"


def test_a_target_that_is_not_a_socket(ctl, tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        code, _, err = ctl("state", "--target", f"unix://{path}")
        assert code == 1
        assert err.startswith(f"gpumem-otel: error: unix://{path}: that is not a socket: ")


@pytest.fixture
def several_users(run_dir, tmp_path, monkeypatch):
    """A folder of another user in the default place, and no folder set."""
    del run_dir
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    monkeypatch.delenv("GPUMEM_OTEL_RUN_DIR")
    monkeypatch.setattr("gpumem_otel.cli.ctl.reach._PLACES", (f"{tmp_path}/gpumem-otel-*",))
    monkeypatch.setattr(
        "gpumem_otel.cli.ctl.reach.run_dirs", lambda given, _: (given or str(tmp_path / "mine"),)
    )
    theirs = tmp_path / "gpumem-otel-65533"
    theirs.mkdir(mode=0o700)
    return theirs


def of_another(folder):
    os.chown(folder, 65533, 65533)
    for path in folder.iterdir():
        os.lchown(path, 65533, 65533)


def test_root_finds_the_jobs_of_all_users(several_users, ctl):
    place = discovery._place(discovery._boot_id(), "", discovery._pid_namespace())
    dead = f"1-1-{place}.control-0.sock"
    with controlling(YieldDouble(), several_users) as listener:
        (several_users / dead).touch()  # of a process that has ended, and not a socket
        of_another(several_users)
        for arguments in ((), ("--run-dir", str(several_users))):
            code, out, err = ctl("state", "--json", *arguments)
            assert (code, err) == (0, "")
            assert [one["target"] for one in json.loads(out)] == [f"unix://{listener.socket_path}"]
        assert (several_users / dead).exists()  # nothing is deleted in the folder of another user
        several_users.chmod(0o777)
        code, _, err = ctl("state", "--run-dir", str(several_users))
        assert code == 1
        assert err == (
            f"gpumem-otel: error: run directory {several_users} is writable by others: "
            "chmod 700 it\n"
        )
        code, _, err = ctl("state")
        assert code == 1
        assert f"{several_users.parent}/mine; " in err
        os.chown(several_users, 0, 0)


def test_root_follows_no_link_of_another_user(several_users, ctl, tmp_path):
    with controlling(YieldDouble(), tmp_path / "elsewhere") as listener:
        name = Path(listener.socket_path).name
        (several_users / name).symlink_to(listener.socket_path)
        of_another(several_users)
        (tmp_path / "gpumem-otel-65532").symlink_to(tmp_path / "elsewhere")
        code, out, _ = ctl("state", "--json")
        assert (code, out) == (1, "[]\n")


def test_others_learn_whose_folders_there_are(several_users, ctl, monkeypatch):
    of_another(several_users)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    whose = f"{several_users} (sudo -u '#65533' gpumem-otel ctl)"
    code, _, err = ctl("state")
    assert code == 1
    assert f"{several_users.parent}/mine; " in err
    assert err.endswith(f": {whose}\n")
    code, _, err = ctl("state", "--run-dir", str(several_users))
    assert code == 1
    assert err.endswith("give your own (sudo -u '#65533' gpumem-otel ctl)\n")


def test_what_listens_there_is_something_else(ctl):
    with socket.create_server(("127.0.0.1", 0)) as server:
        page = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
        answers = [page, *[b"SSH-2.0-x\r\n"] * 2, b"", b""]

        def serve():
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        # after the second and third answer a second connection looks for TLS
        for fact in ("9564 + local rank", "not HTTP", "without an answer"):
            code, _, err = ctl("state", "--target", url)
            assert code == 1
            assert fact in err
        thread.join(WAIT)


RANK_1 = Identity(service_name="trainer", run_id="r1", rank=1, local_rank=1, world_size=2, pid=8)


def test_all_ranks_of_a_job_at_once(run_dir, ctl):
    doubles = [YieldDouble(), YieldDouble()]
    with ExitStack() as stack:
        for double, identity in zip(doubles, (IDENTITY, RANK_1), strict=True):
            stack.enter_context(controlling(double, run_dir, identity=identity))
        code, out, _ = ctl("yield")
        assert code == 0
        assert re.findall(r"rank (\d) .* gave back 12.0 GiB", out) == ["0", "1"]
    assert [double.moves for double in doubles] == [1, 1]


def test_several_jobs_are_not_stopped_by_accident(run_dir, ctl):
    doubles = [YieldDouble(), YieldDouble()]
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(controlling(double, run_dir, identity=identity))
            for double, identity in zip(doubles, (IDENTITY, OTHER_JOB), strict=True)
        ]
        code, out, err = ctl("yield")
        assert (code, out) == (2, "")
        assert "2 jobs take commands here" in err
        assert [double.moves for double in doubles] == [0, 0]
        code, _, _ = ctl("yield", "--target", f"unix://{listeners[1].socket_path}")
        assert code == 0
        assert [double.moves for double in doubles] == [0, 1]
        code, _, _ = ctl("yield", "--all")
        assert code == 0
        assert [double.moves for double in doubles] == [1, 1]


def test_two_jobs_of_one_name_are_not_stopped_by_accident(run_dir, ctl):
    """Jobs without a name share the default one, and each is rank 0."""
    doubles = [YieldDouble(), YieldDouble()]
    with ExitStack() as stack:
        for place, double in enumerate(doubles):  # part of the socket's name
            identity = replace(IDENTITY, local_rank=place)
            stack.enter_context(controlling(double, run_dir, identity=identity))
        code, out, err = ctl("yield")
        assert (code, out) == (2, "")
        assert "the same rank of one job" in err
        assert [double.moves for double in doubles] == [0, 0]
        code, _, _ = ctl("yield", "--all")
        assert code == 0
        assert [double.moves for double in doubles] == [1, 1]


def test_a_job_that_does_not_answer_is_not_stopped_by_accident(run_dir, ctl):
    double = YieldDouble()
    with controlling(double, run_dir), socket.socket(socket.AF_UNIX) as silent:
        name = discovery.socket_name(5)
        discovery.bind_socket(str(run_dir), name, silent, 8)

        def hang_up():
            for _ in range(2):
                silent.accept()[0].close()

        hanging_up = threading.Thread(target=hang_up)
        hanging_up.start()
        code, out, err = ctl("yield")
        assert (code, out) == (1, "")
        assert f"{name}: " in err
        assert "--target" in err
        assert double.submitted == []
        code, out, _ = ctl("yield", "--all")
        assert code == 1
        assert "gave back 12.0 GiB" in out
        hanging_up.join(WAIT)


def test_one_of_several_fails(run_dir, ctl):
    double = YieldDouble()
    with controlling(double, run_dir) as listener:
        url = f"unix://{listener.socket_path}"
        code, out, err = ctl("yield", "--target", url, "--target", "http://127.0.0.1:1")
        assert code == 1
        assert "gave back 12.0 GiB" in out
        assert "http://127.0.0.1:1: " in err


def test_over_tls_with_a_token(tmp_path, ctl):
    ca = certs.make_ca(tmp_path)
    pair = certs.issue(tmp_path, ca, "server", ["localhost"])
    (tmp_path / "tokens").write_text(f"read,yield {TOKEN} ci\n")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "wrong").write_text("another-token-0123456789\n")
    double = YieldDouble()
    options = {
        "host": "127.0.0.1",
        "token_file": str(tmp_path / "tokens"),
        "tls_cert_file": str(pair.cert_file),
        "tls_key_file": str(pair.key_file),
    }
    with controlling(double, **options) as listener:
        target = ("--target", f"https://localhost:{listener.address[1]}")
        token, trusted = (
            ("--token-file", str(tmp_path / "token")),
            ("--ca-file", str(ca.cert_file)),
        )
        code, out, err = ctl("yield", *target, *token, *trusted)
        assert (code, err) == (0, "trainer rank 0 (pid 7): yield: prepare, 0 B of 12.0 GiB\n")
        assert "gave back" in out
        code, _, err = ctl("restore", *target, *token, *trusted)
        assert code == 1
        assert "does not have the role restore" in err
        code, _, err = ctl("state", *target, "--token-file", str(tmp_path / "wrong"), *trusted)
        assert code == 1
        assert "a bearer token" in err
        code, _, err = ctl("state", *target, *token)
        assert code == 1
        assert "TLS: certificate verify failed" in err
        code, _, err = ctl("state", "--target", target[1].replace("https", "http"), *token)
        assert code == 1
    assert double.moves == 1


def test_a_token_is_not_sent_unencrypted(tmp_path, ctl):
    (tmp_path / "token").write_text(TOKEN)
    token = ("--token-file", str(tmp_path / "token"))
    code, _, err = ctl("state", "--target", "http://192.0.2.1:9564", *token)
    assert code == 2
    assert "--insecure" in err


def test_a_client_certificate(tmp_path, ctl):
    ca = certs.make_ca(tmp_path)
    pair = certs.issue(tmp_path, ca, "server", ["localhost"])
    ops = certs.issue(tmp_path, ca, "ops", [])
    double = YieldDouble()
    options = {
        "host": "127.0.0.1",
        "tls_cert_file": str(pair.cert_file),
        "tls_key_file": str(pair.key_file),
        "tls_client_ca_file": str(ca.cert_file),
        "client_roles": ("ops=yield",),
    }
    with controlling(double, **options) as listener:
        files = ("--ca-file", str(ca.cert_file), "--cert-file", str(ops.cert_file),
                 "--key-file", str(ops.key_file))  # fmt: skip
        target = ("--target", f"https://localhost:{listener.address[1]}")
        code, _, _ = ctl("yield", *target, *files)
        assert code == 0
        code, _, _ = ctl("state", *target, *files[:2])
        assert code == 1
    assert double.submitted == [(YieldRequest(), "certificate ops")]


def test_watch_prints_each_change(run_dir):
    double = YieldDouble(by_hand=True)
    with controlling(double, run_dir):
        command = [sys.executable, "-m", "gpumem_otel.cli.main", "ctl", "watch", "--json"]
        environ = clean_environ(GPUMEM_OTEL_RUN_DIR=str(run_dir), PYTHONUNBUFFERED="1")
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True) as watcher:
            assert json.loads(watcher.stdout.readline())["value"]["state"] == "running"
            double.submit(YieldRequest(), "test")
            line = json.loads(watcher.stdout.readline())
            while line["value"]["state"] != "yielding":
                line = json.loads(watcher.stdout.readline())
            double.finish()
            while line["value"]["state"] != "yielded":
                line = json.loads(watcher.stdout.readline())
            assert line["value"]["moved_bytes"] == sum(HELD.values())
            watcher.send_signal(2)
            assert watcher.wait(WAIT) == 130


def test_a_process_that_ends_while_it_is_followed(run_dir, capsys, monkeypatch):
    monkeypatch.setattr("gpumem_otel.cli.ctl.jobs._LOST_SECONDS", 0.2)
    double = YieldDouble(by_hand=True)
    found = []
    with controlling(double, run_dir):
        follow = threading.Thread(target=lambda: found.append(main(["ctl", "yield"])))
        follow.start()
        until(lambda: bool(double.submitted) and double.waiting.is_set())
    follow.join(WAIT)
    assert found == [1]
    *_, line = capsys.readouterr().err.splitlines()
    assert re.match(r"gpumem-otel: error: unix:///\S+: the yield began, ", line)
    assert "`gpumem-otel ctl state`" in line
