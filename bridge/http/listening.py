"""The listening sockets of the bridge. All of its ports treat an address alike."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

from bridge.errors import EnvironmentFailure

BACKLOG: Final = 256
"""The queue of connections before their acceptance. If it is full, clients try again after a second."""
_ALL: Final = "::"
_NO_IPV6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
_HINTS: Final = {
    errno.EADDRINUSE: "Choose another {key}, or 0 for a free one.",
    errno.EACCES: "Choose another {key}: ports below 1024 need a special right.",
    errno.EADDRNOTAVAIL: "Set {host} to an address of this machine, or to 0.0.0.0 or :: for all of them.",
    errno.EAFNOSUPPORT: "Set {host} to an IPv4 address: this machine has no IPv6.",
}

_HINT: Final = "Correct {host} or {key}."
_NO_NAME: Final = "Correct {host}: it is not an address, and this machine cannot look up such a name."


def listening(host: str, port: int, key: str, host_key: str = "http.host") -> socket.socket:
    """A listening socket. `::` means IPv4 and IPv6, or IPv4 alone on a machine without IPv6. A name with addresses of
    both kinds means its IPv4 address, as for Java's clients. Raises EnvironmentFailure with a hint about `key` and
    `host_key`, the settings of port and host."""
    try:
        return _listening(host, port)
    except OSError as error:
        is_name = isinstance(error, socket.gaierror)
        reason = error.strerror if is_name else os.strerror(error.errno or 0)
        hint = (_NO_NAME if is_name else _HINTS.get(error.errno or 0, _HINT)).format(key=key, host=host_key)
        raise EnvironmentFailure(
            f"cannot listen on {host_and_port(host, port)}: {reason}", hint=hint, code="DB-3029"
        ) from None


def _listening(host: str, port: int) -> socket.socket:
    if host == _ALL:
        try:
            return socket.create_server((host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
            host = "0.0.0.0"
    found = {each[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)}
    family = socket.AF_INET if socket.AF_INET in found else socket.AF_INET6
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def host_and_port(host: str, port: int) -> str:
    """Host and port in the form of a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
