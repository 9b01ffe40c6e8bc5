"""The Unix socket of the control API: whose it is, and who comes through it."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from support.controlling import IDENTITY, TOKEN, bearer, call, controlling, short
from support.listening import WAIT, until
from support.yield_double import YieldDouble

from gpumem_otel.base.profile import Identity
from gpumem_otel.serve import discovery
from gpumem_otel.serve.peers import Peer
from gpumem_otel.settings.config import ControlConfig
from gpumem_otel.yielding.control.listener import ControlListener

RANK_3 = Identity(service_name="x", local_rank=3)


def test_the_socket_is_this_users_alone_and_goes_with_the_listener(tmp_path):
    run_dir = tmp_path / "run"
    mask = os.umask(0)
    try:
        with controlling(YieldDouble(), run_dir, identity=RANK_3) as listener:
            path = Path(listener.socket_path)
            mode = path.stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
            assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
            assert path.name.startswith(f"{os.getpid()}-")
            assert path.name.endswith(".control-3.sock")
            assert discovery.control_sockets(str(run_dir)) == [str(path)]
            assert [entry.name for entry in run_dir.iterdir()] == [path.name]
            assert discovery.targets(str(run_dir)) == []
    finally:
        os.umask(mask)
    assert list(run_dir.iterdir()) == []


def test_a_long_path_is_no_obstacle(tmp_path):
    run_dir = tmp_path / ("d" * 120) / ("e" * 120)
    with controlling(YieldDouble(), run_dir) as listener:
        folder = os.open(run_dir, os.O_RDONLY)
        try:
            short = f"/proc/self/fd/{folder}/{Path(listener.socket_path).name}"
            assert call(short, "GET", "/v1/state").status == 200
        finally:
            os.close(folder)


def dead_process():
    """The pid of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def stale(run_dir, pid):
    place = discovery.socket_name(0).split("-", 2)[2].split(".")[0]
    path = run_dir / f"{pid}-1-{place}.control-0.sock"
    with socket.socket(socket.AF_UNIX) as sock, short(path) as address:
        sock.bind(address)
    return path


def test_sockets_of_the_dead_are_dropped_and_of_the_living_never(tmp_path):
    run_dir = tmp_path / "run"
    with controlling(YieldDouble(), run_dir) as listener:
        dead = stale(run_dir, dead_process())
        elsewhere = run_dir / f"{dead_process()}-1-00000000.control-1.sock"
        with socket.socket(socket.AF_UNIX) as sock, short(elsewhere) as address:
            sock.bind(address)
        (run_dir / "mine.sock").touch()
        # of another container nobody knows who lives, but whether somebody listens
        assert discovery.control_sockets(str(run_dir)) == [listener.socket_path]
        assert not dead.exists()
        assert elsewhere.exists()
        with socket.socket(socket.AF_UNIX) as sock:
            beside = run_dir / "1-1-00000000.control-2.sock"
            with short(beside) as address:
                sock.bind(address)
            sock.listen(0)
            for _ in range(3):  # also once its queue is full
                found = discovery.control_sockets(str(run_dir))
                assert found == [listener.socket_path, str(beside)]
        assert (run_dir / "mine.sock").exists()
        assert call(listener.socket_path, "GET", "/v1/state").status == 200
        # another process of the same rank and folder has a name of its own
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with controlling(YieldDouble(), run_dir) as other:
                    code = int(other.socket_path == listener.socket_path)
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert call(listener.socket_path, "GET", "/v1/state").status == 200


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_is_not_used(tmp_path, mode, caplog):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    listener = ControlListener(
        YieldDouble(), ControlConfig(enabled=True), run_dir=str(run_dir), identity=IDENTITY
    )
    listener.start()
    try:
        until(lambda: "is writable by others" in caplog.text)
        assert list(run_dir.iterdir()) == []
        run_dir.chmod(0o700)  # it is tried again
        assert listener.wait(WAIT)
    finally:
        listener.stop(WAIT)


def test_a_symlink_is_not_followed(tmp_path, caplog):
    (tmp_path / "link").symlink_to(tmp_path)
    listener = ControlListener(
        YieldDouble(),
        ControlConfig(enabled=True),
        run_dir=str(tmp_path / "link"),
        identity=IDENTITY,
    )
    listener.start()
    try:
        until(lambda: "is a symlink" in caplog.text)
    finally:
        listener.stop(WAIT)
    assert [entry.name for entry in tmp_path.iterdir()] == ["link"]


def test_another_user_is_refused(tmp_path, monkeypatch, audit):
    double = YieldDouble()
    with controlling(double, tmp_path) as listener:
        here = os.getuid()
        monkeypatch.setattr(
            "gpumem_otel.serve.protocol.peer_of",
            lambda transport: Peer(uid=here + 1, pid=5),
        )
        answer = call(listener.socket_path, "POST", "/v1/yield")
        assert (answer.status, answer.detail) == (
            403, "this socket is for the user of the job and for root",
        )  # fmt: skip
    assert double.submitted == []
    assert 'from="pid 5" outcome="refused"' in audit()[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_real_process_of_another_user_is_refused(audit):
    """First by the mode of the socket, then, where somebody changed that, by who it is."""
    nobody = 65534
    double = YieldDouble()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the socket alone has to hold
        with controlling(double, folder) as listener:
            statuses = []
            for mode in (0o600, 0o666):
                Path(listener.socket_path).chmod(mode)
                pid = os.fork()
                if pid == 0:
                    code = 99
                    try:
                        os.setuid(nobody)
                        code = call(listener.socket_path, "POST", "/v1/yield").status - 400
                    except PermissionError:
                        code = 98
                    finally:
                        os._exit(code)
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert statuses == [98, 3]
    assert double.submitted == []
    assert len(audit()) == 1


def test_the_kernel_says_who_comes(tmp_path, audit):
    """A child of another pid is told apart, whatever it sends."""
    double = YieldDouble()
    with controlling(double, tmp_path) as listener:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                answer = call(listener.socket_path, "POST", "/v1/yield", bearer(TOKEN), body={})
                code = answer.status != 202
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert f'from="pid {pid}"' in audit()[0]
