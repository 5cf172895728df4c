"""Names of this machine in requests."""

import ipaddress
import socket
from contextlib import suppress

LOCALHOST = "localhost"


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a host."""
    if host == LOCALHOST:
        return True
    with suppress(ValueError):
        address = ipaddress.IPv6Address(host)
        return (address.ipv4_mapped or address).is_loopback
    with suppress(OSError):
        return socket.inet_aton(host)[0] == 127  # also of 127.1
    return False


def host_of(header: str) -> str:
    """A Host header without its port and last dot, in lower case; an IPv6 address without its brackets."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")
