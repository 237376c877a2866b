"""bridge.http.listening: one meaning of an address for each port, and errors that name it with the reason."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

import pytest

from bridge.api.listener import Listener
from bridge.errors import EnvironmentFailure
from bridge.http.listening import listening
from bridge.http.management import ManagementServer
from bridge.http.protection import Protection
from bridge.telemetry.health import Health
from bridge.telemetry.metrics import Metrics
from tests.unit.bridge.api.fakes import Bridge


def management(host: str, port: int) -> ManagementServer:
    return ManagementServer(host, port, health=Health(), registry=Metrics().registry)


def api(host: str, port: int) -> Listener:
    return Listener(host, port, source=Bridge(), protection=Protection(), show_payloads=False)


PORTS = pytest.mark.parametrize(("key", "serve"), [("http.port", management), ("http.api_port", api)])


@pytest.mark.fault("the address `::`, and one that cannot be listened on")
@pytest.mark.parametrize("serve", [management, api])
def test_all_addresses_are_ipv4_and_ipv6(serve: Callable[[str, int], Any]) -> None:
    """`::` is dual stack on each port."""
    with serve("::", 0) as server:
        for address in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])):
            socket.create_connection((address, server.port), timeout=10).close()


def test_all_addresses_of_a_machine_without_ipv6_are_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says so in either of two ways."""
    create = socket.create_server
    for number in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):

        def without(*address: Any, family: int = socket.AF_INET, number: int = number, **more: Any) -> socket.socket:
            if family == socket.AF_INET6:
                raise OSError(number, "no IPv6")
            return create(*address, family=family, **more)

        monkeypatch.setattr(socket, "create_server", without)
        with listening("::", 0, "http.port") as found:
            socket.create_connection(("127.0.0.1", found.getsockname()[1]), timeout=10).close()


@pytest.mark.fault("a name with an IPv6 and an IPv4 address")
def test_a_name_with_addresses_of_both_kinds_is_its_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each port listens on the IPv4 address of such a name: Java, and with it an executor of Spark, connects to that
    one. A name with an IPv6 address alone is that one."""
    look_up = socket.getaddrinfo
    addresses = ["::1", "127.0.0.1"]

    def found(host: str, *args: Any, **more: Any) -> list[Any]:
        return [each for address in addresses if host == "pod" for each in look_up(address, *args, **more)]

    families: list[int] = []
    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(socket, "create_server", lambda *_, family, **__: families.append(family))
    listening("pod", 0, "spark.frames_port")
    addresses.pop()
    listening("pod", 0, "spark.frames_port")
    assert families == [socket.AF_INET, socket.AF_INET6]


@PORTS
def test_an_address_that_cannot_be_listened_on_is_named_with_the_reason(
    key: str, serve: Callable[[str, int], Any]
) -> None:
    """And the hint is about the setting that is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, number, reason, hint in (
            ("127.0.0.1", port, f"127.0.0.1:{port}: Address already in use", f"Choose another {key}"),
            ("192.0.2.1", 0, "192.0.2.1:0: Cannot assign requested address", "Set http.host to an address"),
            ("2001:db8::1", 0, "[2001:db8::1]:0: ", "Set http.host to an"),
            ("no such host", 0, "no such host:0: Name or service not known", "Correct http.host"),
        ):
            with pytest.raises(EnvironmentFailure) as caught:
                serve(host, number)
            assert f"cannot listen on {reason}" in caught.value.message and caught.value.hint.startswith(hint)
