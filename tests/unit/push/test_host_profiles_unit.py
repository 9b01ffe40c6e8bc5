"""What pyroscope-io is handed, and what is logged about the settings that it has none for."""

from __future__ import annotations

import logging
import sys
import types

import pytest

from gpumem_otel.base.profile import Identity
from gpumem_otel.push.host_profiles import start_host_profiles
from gpumem_otel.settings.config import PyroscopeConfig, Secret

JOB = Identity(service_name="train", namespace="ml", run_id="r1", rank=3, tags=(("team", "a"),))


@pytest.fixture
def configured(monkeypatch):
    """The keywords of each call of pyroscope.configure."""
    calls = []
    module = types.ModuleType("pyroscope")
    module.configure = lambda **keywords: calls.append(keywords)
    monkeypatch.setitem(sys.modules, "pyroscope", module)
    return calls


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, "gpumem_otel")
    return lambda: [(r.levelname, r.getMessage()) for r in caplog.records]


def test_all_that_is_handed_over(configured, logged):
    config = PyroscopeConfig(
        url="http://h", basic_auth_user="u", basic_auth_password=Secret("p"), tenant_id="t"
    )
    assert start_host_profiles(config, JOB)
    assert configured == [
        {
            "application_name": "train",
            "server_address": "http://h",
            "basic_auth_username": "u",
            "basic_auth_password": "p",
            "tenant_id": "t",
            "http_headers": None,
            "tags": {"rank": "3", "team": "a", "namespace": "ml", "run_id": "r1"},
            "mem_enabled": True,
        }
    ]
    assert logged() == []


@pytest.mark.parametrize(
    ("config", "headers"),
    [
        ({"bearer_token": Secret("tok")}, {"Authorization": "Bearer tok"}),
        (
            {"bearer_token": Secret("tok"), "headers": (("authorization", Secret("Own")),)},
            {"authorization": "Own"},
        ),
        (
            {"bearer_token": Secret("tok"), "headers": (("X-A", Secret("1")),)},
            {"Authorization": "Bearer tok", "X-A": "1"},
        ),
    ],
)
def test_what_wins_is_as_in_our_own_pushes(configured, config, headers):
    config = PyroscopeConfig(url="http://h", basic_auth_user="u", **config)
    assert start_host_profiles(config, JOB)
    assert configured[0]["http_headers"] == headers
    assert configured[0]["basic_auth_username"] == ""


def test_a_token_file_is_read_once(configured, logged, tmp_path):
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert start_host_profiles(PyroscopeConfig(url="http://h", bearer_token_file=str(file)), JOB)
    assert configured[0]["http_headers"] == {"Authorization": "Bearer from-file"}
    ((level, text),) = logged()
    assert level == "INFO"
    assert "bearer token" in text


def test_without_its_token_it_is_not_started(configured, logged, tmp_path):
    file = tmp_path / "token"
    assert not start_host_profiles(
        PyroscopeConfig(url="http://h", bearer_token_file=str(file)), JOB
    )
    assert configured == []
    assert logged() == [("WARNING", f"host profiles: token file {file}: No such file or directory")]


def test_settings_that_it_does_not_follow_are_named(configured, logged):
    config = PyroscopeConfig(
        url="https://h", ca_file="/ca.pem", client_cert_file="/c.pem", proxy=Secret("http://u:pw@p")
    )
    assert start_host_profiles(config, JOB)
    ((level, text),) = logged()
    assert level == "WARNING"
    assert text.endswith("ca_file, client_cert_file, proxy")


def test_a_binary_of_another_python_is_not_called_absent(logged, tmp_path, monkeypatch):
    """The package is there, and what it imports has no file for this Python."""
    (tmp_path / "pyroscope.py").write_text("import pyroscope_native_of_another_python\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pyroscope", raising=False)
    assert not start_host_profiles(PyroscopeConfig(url="http://h"), JOB)
    assert logged() == [
        (
            "WARNING",
            (
                "host profiles: pyroscope-io does not fit this Python: "
                "No module named 'pyroscope_native_of_another_python'"
            ),
        )
    ]
