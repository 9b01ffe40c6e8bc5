"""Which Host headers are ours.

A page in somebody's browser can point a name of its own at 127.0.0.1 and read what answers there
(DNS rebinding). The browser then sends that foreign name as Host, so it is refused.
"""

from __future__ import annotations

import ipaddress
import re
import socket

__all__ = ["HostNames", "host_name", "host_port", "machine_names"]

_NAME_AND_PORT = re.compile(r"(?:\[(?P<v6>[0-9a-f:.%]+)\]|(?P<name>[^\[\]:/@?#\s]+))(?::\d{0,5})?")


def host_name(header: str) -> str:
    """The name or address in a Host header, in one spelling, "" where there is none.

    Lower case, without port, brackets and final dot; an IPv4 address inside IPv6 as IPv4.
    """
    match = _NAME_AND_PORT.fullmatch(header.strip().lower())
    if match is None:
        return ""
    return _one_spelling(match["v6"] or match["name"])


def _one_spelling(name: str) -> str:
    name = name.strip().lower().rstrip(".")
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def machine_names() -> frozenset[str]:
    """Host name, full name and addresses of this machine; asks the resolver, so it may block."""
    name = socket.gethostname()
    found = {name}
    try:
        # Bytes, since str would import the idna codec on a thread of ours.
        answers = socket.getaddrinfo(
            name.encode("ascii", "ignore"), None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME
        )
    except OSError:
        answers = []
    for _, _, _, canonical, address in answers:
        found.update((canonical, str(address[0])))
    return frozenset(filter(None, map(_one_spelling, found)))


class HostNames:
    """The names known at once: loopback, the bound address, this machine, those configured.

    What only the resolver knows (`machine_names`) is added by `learn`.
    """

    def __init__(self, bound: str, allowed: tuple[str, ...]) -> None:
        configured = {host_name(entry) or _one_spelling(entry) for entry in allowed}
        self.any = "*" in allowed
        self.learned = False
        self._names = frozenset(
            filter(
                None,
                {"localhost", _one_spelling(bound), _one_spelling(socket.gethostname())}
                | configured,
            )
        )

    def learn(self, names: frozenset[str]) -> None:
        """Add the names that had to be looked up."""
        self._names |= names
        self.learned = True

    def allows(self, name: str, connected_to: str) -> bool:
        """Whether a request may name this host.

        Args:
            name: as `host_name` gave it.
            connected_to: local address of the connection: in a pod that binds 0.0.0.0 nobody
                else knows the pod's address.
        """
        if self.any:
            return True
        if not name:
            return False
        if name in self._names or name == _one_spelling(connected_to):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def host_port(host: str, port: object) -> str:
    """As in a URL: brackets around an address of IPv6 (RFC 3986, 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
