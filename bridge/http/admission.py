"""Chooses the connection to end if there are too many. Pure.

Connections without a valid request go first, the oldest before the others. So clients that connect and send nothing
displace each other, but no client with a valid request. An address with too many connections displaces its own.
Connections with credentials do not count by address: behind a reverse proxy all users share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final, TypeVar

HEAD_S: Final = 5.0
"""The time of a connection for its TLS handshake and the head of its first request."""
NETWORK_BITS: Final = 64
"""The prefix of an IPv6 address that counts as one client: one machine has all addresses of such a network."""

K = TypeVar("K")


class Standing(IntEnum):
    """The standing of a connection's client. Connections of the lowest standing go first."""

    STRANGER = 0
    """It has sent no complete request, or none with valid credentials."""
    IDLE = 1
    """Its last request was valid."""
    BUSY = 2
    """A valid request is under way: the connection stays."""


@dataclass(slots=True, kw_only=True)
class Guest:
    """An open connection."""

    place: str | None
    """The client's `place_of`; None after it has shown credentials."""
    since_s: float
    standing: Standing = Standing.STRANGER


def counted_place(address: str) -> str:
    """The unit in which connections are counted: an IPv4 address, or the network of an IPv6 address."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(ip, IPv6Address):
        return str(ip)
    return str(ip.ipv4_mapped or ip_network((ip, NETWORK_BITS), strict=False))


def one_to_go(guests: Mapping[K, Guest], newcomer: K, *, guests_max: int, place_max: int) -> K | None:
    """The connection to end for the newcomer, itself one of the guests: another one, or the newcomer if all others are
    busy. None: there is room."""
    place = guests[newcomer].place
    mine = {key: guest for key, guest in guests.items() if guest.place == place}
    if len(mine) > place_max:
        crowd: Mapping[K, Guest] = mine
    elif len(guests) > guests_max:
        crowd = guests
    else:
        return None
    idle = [key for key, guest in crowd.items() if guest.standing < Standing.BUSY and key is not newcomer]
    return min(idle, key=lambda key: (crowd[key].standing, crowd[key].since_s), default=newcomer)
