"""Connections by way of a proxy, as HTTPS_PROXY and NO_PROXY say; Flower follows these variables too."""

from __future__ import annotations

import os
import socket
import ssl
from base64 import b64encode
from http.client import HTTPConnection, HTTPSConnection
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from fedhassle.errors import UserError
from fedhassle.federation.agreement import Address

LOOPBACK = ("127.0.0.1", "::1")  # between the programs of one machine: never by way of a proxy


class Proxy(NamedTuple):
    """A proxy that opens tunnels (CONNECT)."""

    address: Address
    headers: dict[str, str]  # its user and password, if it needs them

    @property
    def shown(self) -> str:
        """The proxy as messages name it, without a password."""
        return f"{self.address.host}:{self.address.port}"


def proxy_for(host: str) -> Proxy | None:
    """The proxy between this machine and a host; None if there is none."""
    found = getproxies()
    url = found.get("https") or found.get("all")
    if not url or proxy_bypass(host):
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        raise UserError(f"HTTPS_PROXY is {url!r}: expected http://HOST:PORT")
    headers = {}
    if parts.username is not None:
        words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {b64encode(words.encode()).decode()}"
    return Proxy(Address(parts.hostname, parts.port or 80), headers)


def connection_to(
    address: Address, timeout: float, context: ssl.SSLContext | None = None
) -> HTTPConnection | HTTPSConnection:
    """A connection that is not open yet, by HTTPS with a context; through the proxy if there is one."""
    proxy = proxy_for(address.host)
    target = address if proxy is None else proxy.address
    made = (
        HTTPConnection(*target, timeout=timeout)
        if context is None
        else HTTPSConnection(*target, timeout=timeout, context=context)
    )
    if proxy is not None:
        made.set_tunnel(address.host, address.port, proxy.headers)
    return made


def opened(address: Address, timeout: float) -> socket.socket:
    """A socket that is connected to an address, through the proxy if there is one."""
    line = connection_to(address, timeout)
    line.connect()
    return line.sock  # type: ignore[no-any-return, unused-ignore]


def spare_loopback() -> None:
    """Makes connections of this process and its children within the machine avoid the proxy."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host for host in known.split(",") if host]
    if "*" not in hosts:
        hosts += [host for host in LOOPBACK if host not in hosts]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)
