"""The broker of the system tests: a container where an engine answers, else the native one; equal settings."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import docker
from docker.errors import APIError, DockerException
from testcontainers.core.container import DockerContainer

from dev.broker import EmbeddedBroker
from dev.broker.embedded import HOST, SINGLE_NODE, free_ports, join, kafka_version, wait_for_cluster
from tests.java import SHORT_LIVED

log = logging.getLogger(__name__)

ENGINE_TIMEOUT_S: Final = 5
RETENTION: Final = {"log.retention.check.interval.ms": 500, "log.initial.task.delay.ms": 500}
"""For topics that keep their records for seconds: ended segments are deleted soon."""
CONTAINER_CLUSTER_ID: Final = "5L6g3nShT-eMCtK--X86sw"


class Broker(Protocol):
    """A system test's knowledge of its broker."""

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients."""
        ...


@dataclass(frozen=True, slots=True)
class SharedBroker:
    """A native broker that the processes of a session share; `data` is its directory."""

    bootstrap: str
    data: Path


def start_broker(session: Path) -> AbstractContextManager[Broker]:
    """A broker for as long as the context lasts: a container, or the native one of all processes that meet in the
    directory `session`."""
    return container() if engine_answers() else shared(session)


@contextmanager
def shared(session: Path) -> Iterator[SharedBroker]:
    """The first process that asks starts it, and it ends with the last one. It is loaded by all, for the whole run."""
    note = session / "broker.json"
    with (session / "broker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(note.read_text()) if note.exists() else {"holders": []}
        file = next((held for holder in known["holders"] if (held := join(*holder)) is not None), None)
        if file is None:
            own = EmbeddedBroker(properties=RETENTION, tmpfs=True).start()
            known = {"bootstrap": own.bootstrap, "data": str(own.data), "holders": []}
            file = own.share()
        known["holders"].append((os.getpid(), file))
        note.write_text(json.dumps(known))
    try:
        yield SharedBroker(known["bootstrap"], Path(known["data"]))
    finally:
        os.close(file)


def own_broker(**more: Any) -> EmbeddedBroker:
    """A native broker that a test has for itself, to stop and to kill; `more` as for `EmbeddedBroker`."""
    return EmbeddedBroker(tmpfs=True, jvm_options=[SHORT_LIVED], **more)


def engine_answers() -> bool:
    """Whether a container engine answers that has the broker's image or can get it."""
    try:
        client = docker.from_env(timeout=ENGINE_TIMEOUT_S)
        try:
            client.ping()
            if not client.images.list(name=image()):
                client.images.pull(image())
        finally:
            client.close()
    except APIError as error:
        log.warning("a container engine answers, but has no %s: %s", image(), error)
        return False
    except DockerException:
        return False
    return True


def image() -> str:
    """The image with the version of Kafka that the native broker has."""
    return f"apache/kafka:{kafka_version()}"


class ContainerBroker:
    """A broker in a container; its port is the same inside and outside, since clients are told the inner one."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"


@contextmanager
def container() -> Iterator[ContainerBroker]:
    """A single-node broker in a container of `image()`."""
    port, controller_port = free_ports(2)
    properties = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@localhost:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://0.0.0.0:{port},CONTROLLER://localhost:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": "/tmp/kafka",
        **SINGLE_NODE,
        **RETENTION,
    }
    engine = DockerContainer(image()).with_envs(CLUSTER_ID=CONTAINER_CLUSTER_ID, **environment(properties))
    with engine.with_bind_ports(port, port):
        broker = ContainerBroker(port)
        wait_for_cluster(broker.bootstrap, CONTAINER_CLUSTER_ID)
        yield broker


def environment(properties: Mapping[str, object]) -> dict[str, str]:
    """Broker properties as environment variables, in the spelling of Kafka's own image: `a.b` -> KAFKA_A_B.

    (Its escapes for `_` and `-` are left out: no property of a broker has one in its name.)
    """
    return {"KAFKA_" + key.replace(".", "_").upper(): str(value) for key, value in properties.items()}
