"""A node that is dead, and that the brokers have not noticed yet: they go on naming it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from bridge.kafka.construction import collecting_logger
from bridge.kafka.errors import kafka_error
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings

HOST = "127.0.0.1"
TOPIC = "orders"
WAITS_S = 1.0
ATTEMPTS_MAX = 20
"""In that time, with a back-off. Without one there are thousands."""
API_VERSIONS, METADATA, LIST_OFFSETS, DESCRIBE_CONFIGS = 18, 3, 2, 32


@contextmanager
def brokers_with_a_dead_node() -> Iterator[str]:
    """A node that answers what cluster it is of: another one, that nobody hears, is controller and leader."""
    with socket.create_server((HOST, 0)) as server, socket.create_server((HOST, 0)) as gone:
        dead = int(gone.getsockname()[1])
        gone.close()
        threading.Thread(target=_accept, args=(server, dead), daemon=True).start()
        yield f"{HOST}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def _accept(server: socket.socket, dead: int) -> None:
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_serve, args=(connection, dead), daemon=True).start()


def _serve(connection: socket.socket, dead: int) -> None:
    own = int(connection.getsockname()[1])
    with connection, suppress(OSError, struct.error), connection.makefile("rb") as asked:
        while True:
            [size] = struct.unpack(">i", asked.read(4))
            api, version, correlation = struct.unpack_from(">hhi", asked.read(size))
            body = _versions(version) if api == API_VERSIONS else _metadata(own, dead)
            connection.sendall(struct.pack(">ii", 4 + len(body), correlation) + body)


def _versions(version: int) -> bytes:
    """The oldest of each."""
    unsupported = KafkaError.UNSUPPORTED_VERSION if version else 0
    apis = [(API_VERSIONS, 0, 0), (METADATA, 0, 1), (LIST_OFFSETS, 0, 1), (DESCRIBE_CONFIGS, 0, 1)]
    return struct.pack(">hi", unsupported, len(apis)) + b"".join(struct.pack(">hhh", *api) for api in apis)


def _metadata(own: int, dead: int) -> bytes:
    nodes = b"".join(
        struct.pack(">i", n) + _text(HOST) + struct.pack(">ih", port, -1) for n, port in ((1, own), (2, dead))
    )
    partition = struct.pack(">hii", 0, 0, 2) + struct.pack(">ii", 1, 2) * 2
    topic = struct.pack(">h", 0) + _text(TOPIC) + struct.pack(">bi", 0, 1) + partition
    return struct.pack(">i", 2) + nodes + struct.pack(">ii", 2, 1) + topic


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def ask_controller(admin: AdminClient) -> Any:
    [answer] = admin.describe_configs([ConfigResource(ResourceType.TOPIC, TOPIC)], request_timeout=WAITS_S).values()
    return answer


def ask_leader(admin: AdminClient) -> Any:
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    [answer] = admin.list_offsets({TopicPartition(TOPIC, 0): latest}, request_timeout=WAITS_S).values()
    return answer


@pytest.mark.fault("a dead node that the brokers still name")
@pytest.mark.parametrize("ask", [ask_controller, ask_leader])
def test_a_question_for_a_dead_node_costs_a_few_attempts(ask: Any) -> None:
    """While a question for the node waits, connections to it are tried with a back-off, and take little CPU."""
    lines: list[str] = []
    with brokers_with_a_dead_node() as bootstrap:
        settings = Settings.of({"kafka": {"common": {"bootstrap.servers": bootstrap}}})
        config: dict[str, Any] = {**librdkafka(settings, "admin"), "debug": "broker"}
        admin = AdminClient(config, logger=collecting_logger(lines))
        error = ask(admin).exception(30 * WAITS_S)
        assert error is None or kafka_error(error).code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT)
        while admin.poll(0):
            pass
    attempts = [line for line in lines if "/2: Connecting to" in line]
    assert 1 <= len(attempts) <= ATTEMPTS_MAX, len(attempts)
