"""The check that a broker accepts connections. It takes seconds; the Kafka client alone would try for minutes."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Final

from bridge.errors import EnvironmentFailure

CONNECT_S: Final = 3.0
DEFAULT_PORT: Final = 9092


def refuse_unreachable(bootstrap: str, timeout_s: float = CONNECT_S) -> None:
    """Raises EnvironmentFailure unless one of the brokers (host:port, separated by commas) accepts a connection in
    time, name resolution included."""
    servers = [server.strip() for server in bootstrap.split(",") if server.strip()]
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    for server in servers:
        threading.Thread(target=lambda name=server: answers.put(_trouble(name, timeout_s)), daemon=True).start()
    troubles = list[str]()
    while len(troubles) < len(servers):
        try:
            trouble = answers.get(timeout=timeout_s + 0.5)
        except queue.Empty:
            troubles.append("no answer in time")
            break
        if not trouble:
            return
        troubles.append(trouble)
    raise EnvironmentFailure(
        "cannot reach the brokers: none accepts a connection",
        hint="Check kafka.common.bootstrap.servers, and that the brokers are running.",
        reason="; ".join(dict.fromkeys(troubles)) or "no broker is named",
        bootstrap=bootstrap,
        code="DB-3080",
    )


def _trouble(server: str, timeout_s: float) -> str:
    """Why the server accepts no connection; empty if it does."""
    address = server.rpartition("://")[2]
    host, colon, port = address.rpartition(":") if not address.endswith("]") else (address, "", "")
    try:
        place = (host if colon else address).strip("[]"), int(port) if colon else DEFAULT_PORT
        socket.create_connection(place, timeout_s).close()
    except TimeoutError:
        return "no answer in time"
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""
