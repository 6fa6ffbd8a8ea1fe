"""Validation of host names and ZMQ endpoints that an operator or an engine gives.

Host names go into request headers, metric labels, logs and keys of a shared Redis, so an invalid name is refused as
soon as it is read.
"""

import ipaddress
import re
from collections.abc import Callable

MAX_HOST = 253  # characters of a host name, by RFC 1035
MAX_IPC = 107  # bytes of a Unix socket's path (sockaddr_un)
# One label of a host name as in RFC 1123, with the underscore too, which container networks allow.
LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*\.?")
NUMBER = re.compile(r"\d+|0[xX][0-9a-fA-F]*")
TCP = re.compile(r"tcp://(\[[^\[\]]*\]|[^\[\]:/]*):(\d{1,5})")


def _check_address(read: Callable[[str], object], host: str, how: str) -> None:
    try:
        read(host)
    except ValueError as error:
        raise ValueError(f"{error}; write an address {how}, or a host name") from None


def check_host(host: str) -> None:
    """Raise ValueError, with the reason, unless `host` is a host name or an address (IPv6 without brackets)."""
    if ":" in host:
        _check_address(ipaddress.IPv6Address, host, "in brackets, like [::1]")
        if "%" in host:
            raise ValueError(f"the zone in {host[:100]!r} means something on this machine alone; give a global address")
        return
    if not host.isascii():
        raise ValueError(f"the host {host[:100]!r} is not ASCII; write it in its xn-- form")
    if len(host) > MAX_HOST or not NAME.fullmatch(host):
        raise ValueError(f"{host[:100]!r} is not a host name")
    if NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):  # inet_aton reads 1.2 as an address too
        _check_address(ipaddress.IPv4Address, host, "as four numbers from 0 to 255, like 127.0.0.1")


def one_spelling(host: str) -> str:
    """Return an address in its canonical spelling, so that one engine has one name.

    `0:0:0:0:0:0:0:1` becomes `::1`, and the IPv4-mapped `::ffff:10.0.0.7` becomes 10.0.0.7. Host names are returned
    unchanged.
    """
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    return str(address.ipv4_mapped or address)


def check_endpoint(endpoint: str) -> None:
    """Raise ValueError, with the reason, if a ZMQ subscriber in another process cannot connect to `endpoint`."""
    if endpoint.startswith("ipc://"):
        if not 0 < len(endpoint.removeprefix("ipc://").encode()) <= MAX_IPC or not endpoint.isprintable():
            raise ValueError(f"{endpoint[:120]!r} names no socket; write ipc:///PATH, of {MAX_IPC} bytes at most")
        return
    found = TCP.fullmatch(endpoint)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ValueError(f"{endpoint[:120]!r} must be a ZMQ endpoint like tcp://HOST:5557")
    check_host(found[1].strip("[]"))
