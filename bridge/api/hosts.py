"""Names under which a browser may ask without a password. Pure.

A page from elsewhere cannot read answers of another origin, unless its own name leads here: its server has the name
point to this machine (DNS rebinding), and the browser takes the bridge for that page's server. The name is in the Host
header, so only names that no stranger can own are answered. A password or TLS keep such a page out by themselves: it
has neither the password, which browsers give to the origin that it was typed for, nor a certificate of its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Final

PRIVATE: Final = (".localhost", ".svc", ".local", ".internal")
"""Ends of names that no one can register: this machine, Kubernetes services (`.svc`, `.svc.cluster.local`), private
networks. A name without a dot, such as a container's or a pod's, is private too."""


def is_private(host: str | None, own: Collection[str] = ()) -> bool:
    """Whether a Host header has an address, a private name, or one of our `own`; also without one, which browsers
    always send."""
    if host is None:
        return True
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]{1,5})?", host)
    if match is None:
        return False
    name = match[1].lower().removesuffix(".")
    is_plain = "." not in name and not name.startswith("[")
    return is_plain or name in own or name.endswith(PRIVATE) or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
