"""Which proxy, if any, stands between us and a URL."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["proxy_for"]


def proxy_for(url: str, explicit: str, environ: Mapping[str, str]) -> str:
    """URL of the proxy for this URL, "" for a direct connection.

    Args:
        url: where the request goes.
        explicit: a proxy named in the configuration; wins over the environment and is used
            for loopback addresses too.
        environ: variables as they were handed in: `HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`;
            lower case wins, as with curl.
    """
    parts = urlsplit(url)
    if explicit:
        return _with_scheme(explicit)
    name = f"{parts.scheme}_proxy"
    proxy = environ.get(name) or environ.get(name.upper()) or ""
    excluded = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    if not proxy or _excluded(parts.hostname or "", parts.port, excluded):
        return ""
    return _with_scheme(proxy)


def _with_scheme(proxy: str) -> str:
    proxy = proxy.strip()
    return proxy if "://" in proxy else f"http://{proxy}"


def _excluded(host: str, port: int | None, excluded: str) -> bool:
    """Whether NO_PROXY names this host: `*`, a name and all below it, an address, a network."""
    host = host.lower().rstrip(".")
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    return any(
        _names(entry, host, port, address)
        for entry in (raw.strip().lower() for raw in excluded.split(","))
        if entry
    )


def _names(
    entry: str,
    host: str,
    port: int | None,
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None,
) -> bool:
    if entry == "*":
        return True
    if address is not None and _covers(entry, address):
        return True
    entry, _, entry_port = entry.partition(":")
    if entry_port and entry_port != str(port):
        return False
    if address is not None:
        return _covers(entry, address)
    entry = entry.lstrip("*").strip(".")
    return host == entry or host.endswith(f".{entry}")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _covers(entry: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
