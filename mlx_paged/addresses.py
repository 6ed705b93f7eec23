"""Address checks for untrusted URLs: blocks private networks and metadata services."""

from __future__ import annotations

import ipaddress
import socket
from enum import Enum
from typing import Any

from mlx_paged.errors import MlxPagedError

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# IPv6 prefix that embeds IPv4 addresses.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Cloud metadata services outside the link-local range: AWS over IPv6, Alibaba, Oracle.
_METADATA = tuple(map(ipaddress.ip_address, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192")))


class Reach(Enum):
    """Set of addresses that a connection may use."""

    PUBLIC = "public"  # the public internet
    NO_METADATA = (
        "no metadata"  # private networks too, but no link-local address or metadata service
    )
    ANY = "any"


class UnreachableHostError(MlxPagedError):
    """A host has no address, or a forbidden one.

    Attributes:
        is_forbidden: True if an address is forbidden.
    """

    def __init__(self, message: str, *, is_forbidden: bool) -> None:
        super().__init__(message)
        self.is_forbidden = is_forbidden


def addresses_of(host: str, port: int, reach: Reach) -> list[tuple[Any, ...]]:
    """Resolves a host to (family, type, protocol, socket address) tuples.

    Raises:
        UnreachableHostError: The host has no address, or one that `reach` forbids.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UnreachableHostError(f"there is no host {host[:100]}", is_forbidden=False) from None
    if not all(_is_allowed(str(entry[4][0]), reach) for entry in found):
        kind = "that is not public" if reach is Reach.PUBLIC else "of a metadata service"
        raise UnreachableHostError(f"its host has an address {kind}", is_forbidden=True)
    return [(family, kind, protocol, address) for family, kind, protocol, _, address in found]


def _is_allowed(text: str, reach: Reach) -> bool:
    if reach is Reach.ANY:
        return True
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    check = _is_public if reach is Reach.PUBLIC else _is_no_metadata
    return all(check(each) for each in (address, *_inner(address)))


def _inner(address: _Address) -> list[_Address]:
    """Returns the IPv4 addresses embedded in an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[_Address | None] = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in found if each is not None]


def _is_public(address: _Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return True  # the embedded address decides
    return address.is_global and not address.is_multicast


def _is_no_metadata(address: _Address) -> bool:
    return not (
        address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address in _METADATA
    )
