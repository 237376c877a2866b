"""Which connection goes where more come than there is room for. Pure.

Connections without a valid request go first, the oldest of them before the others. So clients that connect and say
nothing displace each other, and nobody who asks for something. An address with too many connections displaces its own.
Those whose clients have shown credentials are not counted by address: behind a reverse proxy all users have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final, TypeVar

HEAD_S: Final = 5.0
"""From a connection's begin to the end of its first request's head, a TLS handshake included."""
NETWORK_BITS: Final = 64
"""Of an IPv6 address: one machine has all addresses of such a network."""

K = TypeVar("K")


class Standing(IntEnum):
    """What is known of a connection's client, in the order in which connections go."""

    STRANGER = 0
    """It has sent no whole request, or none that it may send."""
    IDLE = 1
    """Its last request was valid."""
    BUSY = 2
    """A valid request is under way: the connection stays."""


@dataclass(slots=True, kw_only=True)
class Guest:
    """A connection that is open."""

    place: str | None
    """Of the client: `place_of`. None once it has shown credentials."""
    since_s: float
    standing: Standing = Standing.STRANGER


def place_of(address: str) -> str:
    """The address, or the network of an IPv6 address, for which connections are counted."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return str(found)
    return str(found.ipv4_mapped or ip_network((found, NETWORK_BITS), strict=False))


def one_to_go(guests: Mapping[K, Guest], newcomer: K, *, guests_max: int, place_max: int) -> K | None:
    """The connection that ends for the newcomer, which is one of the guests; the newcomer itself where all others are
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
