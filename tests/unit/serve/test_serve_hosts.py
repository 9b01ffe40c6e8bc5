"""Which Host headers are ours."""

from __future__ import annotations

import socket

import pytest

from gpumem_otel.serve.guard import HostNames, host_name, machine_names


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:9464", "localhost"),
        ("node7.cluster.local.", "node7.cluster.local"),
        (" node7:9464 ", "node7"),
        ("127.0.0.1:9464", "127.0.0.1"),
        ("[::1]:9464", "::1"),
        ("[0:0:0:0:0:0:0:1]", "::1"),
        ("[::ffff:10.1.2.3]:9464", "10.1.2.3"),
        ("[fe80::1%eth0]", ""),
        ("[fe80::1]", "fe80::1"),
        ("", ""),
        ("::1", ""),
        ("a b", ""),
        ("user@localhost", ""),
        ("localhost:port", ""),
        ("localhost/x", ""),
        ("[::1", ""),
        ("[localhost]", ""),
    ],
)
def test_one_spelling(header, name):
    assert host_name(header) == name


@pytest.mark.parametrize(
    ("header", "connected_to", "allowed"),
    [
        ("localhost", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.8.9.1:80", "127.0.0.1", True),
        ("[::1]", "127.0.0.1", True),
        ("evil.example", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("10.9.8.7", "127.0.0.1", False),
        ("10.9.8.7", "10.9.8.7", True),
        ("10.9.8.7", "::ffff:10.9.8.7", True),
        ("", "127.0.0.1", False),
        ("metrics.example", "127.0.0.1", True),
        ("METRICS.example:80", "127.0.0.1", True),
        ("other.example", "127.0.0.1", False),
    ],
)
def test_who_is_allowed(header, connected_to, allowed):
    names = HostNames("0.0.0.0", ("metrics.example:9464",))
    assert names.allows(host_name(header), connected_to) is allowed


def test_the_bound_address_and_this_host_are_allowed():
    names = HostNames("192.0.2.4", ())
    assert names.allows("192.0.2.4", "10.0.0.1")
    assert names.allows(socket.gethostname().lower(), "10.0.0.1")


def test_a_star_allows_any_host():
    assert HostNames("127.0.0.1", ("*",)).allows("evil.example", "127.0.0.1")


def test_learned_names_are_added():
    names = HostNames("127.0.0.1", ())
    assert not names.learned
    names.learn(frozenset({"node7.cluster.local", "10.1.1.1"}))
    assert names.learned
    assert names.allows("node7.cluster.local", "127.0.0.1")
    assert names.allows("10.1.1.1", "127.0.0.1")
    assert names.allows("localhost", "127.0.0.1")


def test_the_machine_knows_its_own_name():
    assert socket.gethostname().lower() in machine_names()
