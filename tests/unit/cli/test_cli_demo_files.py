"""The demo's files, its warnings, and the addresses that it prints."""

from __future__ import annotations

import logging

import pytest

from gpumem_otel.base.profile import Frame, HeapProfile, ProfileKind, Sample
from gpumem_otel.cli.demo import command, profile_files
from gpumem_otel.cli.demo.command import base_url, one_line_warnings, scrape_config
from gpumem_otel.cli.demo.profile_files import LastProfiles
from gpumem_otel.profiles import pprof


def profiles(size_bytes: int, kind: ProfileKind = ProfileKind.LIVE) -> tuple[HeapProfile, ...]:
    return (HeapProfile(kind, 0, (Sample((Frame("f", "/f.py", 1),), 1, size_bytes),)),)


def test_the_fullest_moment_is_kept_with_the_last(tmp_path):
    kept = LastProfiles(tmp_path)
    assert kept.write() is None
    for size_bytes in (10, 30, 20):
        kept.take(ProfileKind.LIVE, profiles(size_bytes), {}, 1)
        assert kept.write().size_bytes == size_bytes
    kept.take(ProfileKind.ALLOCATED, profiles(99, ProfileKind.ALLOCATED), {}, 1)
    kept.write()
    assert kept.fullest.size_bytes == 30
    assert sorted(kept.written) == ["allocated", "fullest", "live"]
    for name, size_bytes in (("fullest", 30), ("live", 20)):
        written = pprof.decode((tmp_path / f"{name}.pb.gz").read_bytes())
        assert written.total("inuse_space") == size_bytes


def test_nothing_is_taken_after_the_last_write(tmp_path):
    kept = LastProfiles(tmp_path)
    kept.take(ProfileKind.LIVE, profiles(10), {}, 1)
    assert kept.write(last=True).size_bytes == 10
    kept.take(ProfileKind.LIVE, profiles(50), {}, 2)
    assert kept.write().size_bytes == kept.fullest.size_bytes == 10


@pytest.mark.parametrize("before", range(3))
def test_files_that_ctrl_c_interrupted_are_written_at_the_end(tmp_path, monkeypatch, before):
    """GIVEN Ctrl-C at any of the first files THEN none of them is missing, and none is old."""
    kept, names, write = LastProfiles(tmp_path), [], profile_files.write_output

    def interrupted(path, data):
        if len(names) == before:
            names.append("interrupted")
            raise KeyboardInterrupt
        names.append(path)
        write(path, data)

    kept.take(ProfileKind.LIVE, profiles(30), {}, 1)
    kept.take(ProfileKind.ALLOCATED, profiles(99, ProfileKind.ALLOCATED), {}, 1)
    monkeypatch.setattr(profile_files, "write_output", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.write()
    kept.take(ProfileKind.LIVE, profiles(20), {}, 2)
    assert kept.write(last=True).size_bytes == 20
    assert sorted(kept.written) == ["allocated", "fullest", "live"]
    for name, size_bytes in (("fullest", 30), ("live", 20)):
        written = pprof.decode((tmp_path / f"{name}.pb.gz").read_bytes())
        assert written.total("inuse_space") == size_bytes
    names.clear()
    kept.write()
    assert names == [], "each is written once"


def test_warnings_are_held_until_it_listens(capsys):
    log = logging.getLogger("gpumem_otel.push")
    with one_line_warnings() as warnings:
        log.info("window: another one is open; try again when it is over")
        log.warning("read failed: %s", "held")
        assert not capsys.readouterr().err
        warnings.print_held()
        log.warning("window failed: %s", "recording is off")
    assert capsys.readouterr().err.splitlines() == [
        "gpumem-otel: warning: read failed: held",
        "gpumem-otel: warning: window failed: recording is off",
    ]


def test_urls_are_ones_to_ask():
    assert base_url(("127.0.0.1", 9464), tls=False) == "http://127.0.0.1:9464"
    assert base_url(("0.0.0.0", 1), tls=True) == "https://127.0.0.1:1"
    assert base_url(("::", 1), tls=False) == "http://[::1]:1"


def test_a_scrape_config_names_its_job_and_its_scheme():
    plain = "scrape_configs: [{job_name: gpumem, static_configs: [{targets: ['[::1]:1']}]}]"
    assert scrape_config("http://[::1]:1") == plain
    assert "job_name: gpumem, scheme: https, static" in scrape_config("https://a:1")


@pytest.mark.parametrize(
    ("environ", "interval", "window"),
    [
        ({}, 2.0, 0.5),
        ({"GPUMEM_OTEL_INTERVAL": "1"}, 1.0, 0.25),
        ({"GPUMEM_OTEL_INTERVAL": "60"}, 60.0, 0.5),
        ({"GPUMEM_OTEL_INTERVAL": "5", "GPUMEM_OTEL_ALLOCATED_WINDOW": "2"}, 5.0, 2.0),
    ],
)
def test_the_environment_wins_over_the_demos_own_pace(monkeypatch, environ, interval, window):
    for name in ("GPUMEM_OTEL_INTERVAL", "GPUMEM_OTEL_ALLOCATED_WINDOW"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    profiles = command._config({}, allocated=True).profiles
    assert (profiles.interval_seconds, profiles.allocated_window_seconds) == (interval, window)
