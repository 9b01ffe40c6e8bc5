"""`ctl`: targets, durations and credentials; how an operation is shown."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import fields

import click
import pytest
from support import certs

from gpumem_otel.cli.ctl import command, view
from gpumem_otel.cli.ctl.client import Reply
from gpumem_otel.cli.ctl.jobs import OperationProgress, Outcome
from gpumem_otel.cli.ctl.targets import Credentials, Target, credentials, parse_target
from gpumem_otel.cli.main import main
from gpumem_otel.errors import ConfigError
from gpumem_otel.yielding.control.schema import as_json
from gpumem_otel.yielding.values import RestoreRequest, YieldReport, YieldRequest

GIB = 1 << 30


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("unix:///run/x.sock", Target("unix:///run/x.sock", path="/run/x.sock")),
        ("unix:/run/x.sock", Target("unix:/run/x.sock", path="/run/x.sock")),
        ("http://[::1]:9564", Target("http://[::1]:9564", host="::1", port=9564)),
        ("https://node7:9564/", Target("https://node7:9564/", host="node7", port=9564, tls=True)),
    ],
)
def test_targets(url, target):
    assert parse_target(url) == target


@pytest.mark.parametrize(
    "url",
    ["", "node7", "node7:9564", "http://node7", "http://:9564", "http://node7:0", "http://x:99999",
     "http://x:y", "http://x:1/v1", "http://x:1?token=a", "http://user:secret@x:1",
     "http://user:secret@x:y", "ftp://x:1", "unix:x",
     "unix://relative.sock", "unix://", "http://[::1"],
)  # fmt: skip
def test_what_is_not_a_target(url):
    with pytest.raises(ConfigError) as caught:
        parse_target(url)
    assert "\n" not in str(caught.value)
    assert "user:secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "clear"),
    [("http://node7:1", True), ("http://10.0.0.1:1", True), ("http://127.0.0.1:1", False),
     ("http://[::1]:1", False), ("http://localhost:1", False), ("https://node7:1", False),
     ("unix:///x", False)],
)  # fmt: skip
def test_where_others_can_read(url, clear):
    assert parse_target(url).in_the_clear is clear


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("1.5", 1.5), ("90s", 90.0), ("30m", 1800.0), ("2H", 7200.0), ("1d", 86400.0)],
)
def test_durations(text, seconds):
    assert command._duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1", "nan", "inf", "1_0", "1e3", "5 m", "\u0661", "1w"])
def test_what_is_not_a_duration(text):
    with pytest.raises(click.BadParameter):
        command._duration(text)


def options(name):
    """The parameters of a verb that no other verb has."""
    common = {"targets", "run_dir", "token_file", "ca_file", "cert_file", "key_file", "insecure",
              "as_json", "every", "wait"}  # fmt: skip
    return {p.name for p in command.command.commands[name].params} - common


def test_every_field_of_a_request_is_an_option():
    assert options("yield") == {field.name for field in fields(YieldRequest)}
    assert options("restore") == {field.name for field in fields(RestoreRequest)}


def test_files(tmp_path):
    assert credentials("", "", "", "").token == ""
    (tmp_path / "token").write_text("  abcdefgh01234567\n")
    shown = credentials(str(tmp_path / "token"), "", "", "")
    assert shown.token == "abcdefgh01234567"
    assert "abc" not in repr(shown)
    ca = certs.make_ca(tmp_path)
    pair = certs.issue(tmp_path, ca, "ops", [])
    files = (str(ca.cert_file), str(pair.cert_file), str(pair.key_file))
    assert credentials("", *files).tls.cert_store_stats()["x509_ca"] == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("/nowhere", "", "", ""), "token file /nowhere: No such file"),
        (("two", "", "", ""), "^token file two: "),
        (("short", "", "", ""), "token file short: .* 16 characters"),
        (("binary", "", "", ""), "token file binary: "),
        (("", "/nowhere", "", ""), "^--ca-file /nowhere: "),
        (("", "two", "", ""), "^--ca-file two: "),
        (("", "", "two", ""), "^client certificate two: "),
        (("nul", "", "", ""), "^token file nul: "),
        (("huge", "", "", ""), "^token file huge: .*16384 bytes"),
        (("", "", "", "key.pem"), "--key-file .* --cert-file"),
    ],
)
def test_files_that_cannot_be_used(arguments, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two").write_text("read secret-token\n")
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "nul").write_bytes(b"secret-token\0-0123456789")
    (tmp_path / "huge").write_bytes(b"secret" * 3_000)
    (tmp_path / "short").write_text("secret-of-mine\n")
    with pytest.raises(ConfigError, match=reason) as caught:
        credentials(*arguments)
    assert "secret" not in str(caught.value)


def test_errors_of_answers():
    assert Reply(404, None).error.endswith(" (HTTP 404)")
    assert Reply(409, {"detail": "wait"}).error == "wait (HTTP 409)"
    assert Credentials().token == ""


PROCESS = {"service_name": "train\x1b[31m", "rank": 3, "pid": 7}


def operation(kind="yield", **report):
    return {
        "id": "op-1",
        "kind": kind,
        "state": "done",
        "error": "",
        "report": {**as_json(YieldReport(operation="op-1")), **report},
    }


def test_a_report():
    done = operation(
        moved_bytes={"parameter": 2 * GIB, "gradient": GIB},
        residual_bytes={"context": 512 << 20},
        phases=[
            {"phase": "prepare", "seconds": 0.1, "size_bytes": 0},
            {"phase": "release", "seconds": 0.5, "size_bytes": 3 * GIB},
        ],
        host_bytes=3 * GIB,
        checksums="equal",
        dangers=["NCCL's watchdog after 600 s"],
        notes=["x\ny"],
    )
    lines = view.report_lines(Outcome("u", done, process=PROCESS))
    assert lines[1:] == [
        "  moved: parameter 2.0 GiB, gradient 1.0 GiB",
        "  left on the device: context 512.0 MiB",
        "  prepare: 0.10 s",
        "  release: 0.50 s, 3.0 GiB, 6.0 GiB/s",
        "  held in host memory: 3.0 GiB",
        "  checksums equal",
        "  may kill a parked job: NCCL's watchdog after 600 s",
        lines[-1],
    ]
    assert lines[0].endswith("rank 3 (pid 7): gave back 3.0 GiB in 0.60 s")
    assert all(line.isprintable() for line in lines)


def test_what_is_discarded_is_given_back_too():
    done = operation(moved_bytes={"gradient": GIB}, discarded_bytes={"parameter": 2 * GIB})
    first, *lines = view.report_lines(Outcome("u", done, process=PROCESS))
    assert first.endswith("gave back 3.0 GiB in 0.00 s")
    assert lines == ["  moved: gradient 1.0 GiB", "  discarded: parameter 2.0 GiB"]


def test_a_dry_run_says_what_would_be():
    value = operation(operation="", moved_bytes={"parameter": GIB}, expected_seconds=0.25)
    (first, _) = view.report_lines(Outcome("u", value, process=PROCESS))
    assert first.endswith("a yield would give back 1.0 GiB, in about 0.2 s")


def test_a_table_of_states():
    now = 10_000 * 10**9
    status = {"state": "yielded", "since_ns": now - 90 * 10**9, "moved_bytes": 3 * GIB,
              "lease_expiry_ns": now + 3600 * 10**9, "reason": "no\x1b room"}  # fmt: skip
    text = view.state_table(
        [Outcome("unix:///a", status, process=PROCESS), Outcome("b", error="gone")], now
    )
    row, reason = text.splitlines()[1:]
    assert reason.endswith("rank 3 (pid 7): no\\u001b room")
    assert row.split()[1:] == [
        "3", "7", "yielded", "90", "s", "3.0", "GiB", "60", "min", "left", "unix:///a",
    ]  # fmt: skip
    assert "\x1b" not in text


def test_away_and_held_have_different_names():
    status = {"state": "yielded", "since_ns": 0, "moved_bytes": 3 * GIB, "lease_expiry_ns": 0,
              "operation": None, "reason": ""}  # fmt: skip
    outcome = Outcome("u", status, process=PROCESS)
    assert "away" in view.state_table([outcome], 0).splitlines()[0].split()
    assert view.change_line(outcome).endswith(": yielded, 3.0 GiB away")
    report = YieldReport(host_bytes=4 * GIB, disk_bytes=GIB, operation="op")
    done = {"kind": "yield", "state": "done", "report": as_json(report)}
    (line,) = view.report_lines(Outcome("u", done, process=PROCESS))[1:]
    assert line.strip() == "held in host memory: 4.0 GiB, 1.0 GiB on disk"
    assert line.strip() in str(report).splitlines()


def test_without_a_terminal_each_phase_is_a_line(capfd, monkeypatch):
    clock = iter((0.0, 1.0, 2.0, 3.0, 12.0, 13.0, 22.9, 23.0, 23.1, 24.0))
    monkeypatch.setattr(view.time, "monotonic", lambda: next(clock))
    process = {"service_name": "train", "rank": 3, "pid": 7}

    def shown(phase, done=0, total=0, url="u"):
        show(OperationProgress(url, phase, done, total, process))
        return capfd.readouterr()

    def line(text):
        return "", f"train rank 3 (pid 7): yield{text}\n"

    nothing = "", ""
    with view.bars({"u": "yield 0", "v": "yield 1"}, "yield") as show:
        assert shown("") == line(" has begun")
        assert shown("") == nothing
        assert shown("prepare") == line(": prepare")
        assert shown("release", 0, 2 * GIB) == line(": release, 0 B of 2.0 GiB")
        assert shown("release", GIB, 2 * GIB) == nothing  # 9 s later
        assert shown("release", GIB, 2 * GIB) == line(": release, 1.0 GiB of 2.0 GiB")
        assert shown("release", 2 * GIB, 2 * GIB) == nothing
        assert shown("release", 2 * GIB, 2 * GIB) == line(": release, 2.0 GiB of 2.0 GiB")
        assert shown("") == line(" waits")
        assert shown("release", url="v") == line(": release")
    with view.bars({"u": "yield 0"}, "yield", silent=True) as show:
        assert shown("prepare") == nothing


def test_a_bar_has_gib_and_speed(monkeypatch):
    reading, writing = os.openpty()
    with os.fdopen(writing, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("TERM", "xterm")
        with view.bars({"u": "yield 0"}) as show:
            show(OperationProgress("u", "", 0, 0))
            show(OperationProgress("u", "release", 0, 2 * GIB))
            show(OperationProgress("u", "release", GIB, 2 * GIB))
        terminal.flush()
        os.set_blocking(reading, False)
        drawn = b""
        with suppress(BlockingIOError):
            while piece := os.read(reading, 65536):
                drawn += piece
    os.close(reading)
    text = drawn.decode()
    assert "yield 0 release" in text
    assert "1.0/2.0 GiB" in text
    assert "GiB/s" in text


GOES_ON = "not waited for: the {} goes on. `gpumem-otel ctl state` shows it"
INTERRUPTED = {
    ("yield", True): (
        GOES_ON.format("yield")
        + ", `gpumem-otel ctl restore` takes the memory again once it has ended"
    ),
    ("restore", True): GOES_ON.format("restore"),
    ("yield", False): (
        "`gpumem-otel ctl state` shows whether the yield has begun: no answer came so far"
    ),
}


@pytest.mark.parametrize(("kind", "begun"), INTERRUPTED)
def test_ctrl_c_reports_what_the_job_does(monkeypatch, tmp_path, capsys, kind, begun):
    url = f"unix://{tmp_path}/socket"

    def interrupted(_clients, _call, show):
        if begun:
            show(OperationProgress(url, "", 0, 0))
        raise KeyboardInterrupt

    monkeypatch.setattr("gpumem_otel.cli.ctl.jobs.at_once", interrupted)
    assert main(["ctl", kind, "--target", url]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == f"gpumem-otel: warning: {INTERRUPTED[kind, begun]}"


def test_a_line_that_cannot_be_written_ends_nothing(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpumem_otel.cli.ctl.view.click.echo", full)
    with view.bars({}, "yield") as show:
        show(OperationProgress("u", "prepare", 0, 0))
        show(OperationProgress("u", "release", 1, 2))
