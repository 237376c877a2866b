"""Checks of the bridge's machine: store directory, HTTP port, Java, connector."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from uuid import uuid4

from bridge.checks.finding import Context, Finding, failed, ok, warned
from bridge.errors import StateError
from bridge.http.listening import host_and_port
from bridge.install import connector
from bridge.settings.clients import QUIET, java, java_program, system_properties
from bridge.settings.secrets import Redactor
from bridge.spark import installed
from timerstore.disk import checkpoint as checkpoints
from timerstore.disk.files import ASIDE_SUFFIX, CHECKPOINT, FULL
from timerstore.errors import Corrupt, DiskFailure

JAVA_VERSION_MIN: Final = 17
_WRONG_DIRECTORY: Final = "correct kafka.common.bootstrap.servers or store.directory (only an index: it can be deleted)"
_JAVA_TIMEOUT_S: Final = 30.0
_JAVA_VERSION: Final = re.compile(r'version "(\d+)')


def check_directory(context: Context) -> Iterator[Finding]:
    """The directory is writable and has room for a few segments.

    With an index in it, a lack of room is only a warning: the start reclaims delivered messages and so makes room.
    """
    directory = context.settings.store.directory
    has_index = any(directory.rglob(CHECKPOINT)) or any(directory.rglob(f"*{ASIDE_SUFFIX}"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(directory).free
    except OSError as error:
        if error.errno in FULL and has_index:
            yield _of_room(directory, 0, context.settings.store.flush_bytes, has_index=True)
            return
        detail = f"{directory} cannot be written: {error.strerror}"
        yield failed("directory", detail, "correct store.directory or its permissions")
        return
    yield _of_room(directory, free, context.settings.store.flush_bytes, has_index=has_index)


def _of_room(directory: Path, free: int, flush: int, *, has_index: bool) -> Finding:
    detail = f"{directory.resolve()}, {free / 2**30:.1f} GiB free"
    if free < 2 * flush:
        remedy = "free some space, for a segment and its successor"
        return (warned if has_index else failed)("directory", detail, remedy)
    if free < 20 * flush:
        remedy = "free some space: pending messages are kept here"
        return warned("directory", detail, remedy)
    return ok("directory", detail)


def check_remote(context: Context) -> Iterator[Finding]:
    """Shared storage can be written, listed, read and deleted. Only `check` asks: a start goes on without it."""
    name, uri = "shared storage", context.settings.store.remote
    if uri is None:
        return
    from bridge.remote.objects import Objects, RemoteTrouble

    objects, key = Objects(uri), f"check-{uuid4().hex}/written"
    try:
        objects.put(key, b"x")
        is_listed = key in objects.keys(key.partition("/")[0], lambda: None)
        is_read = objects.get(key) == b"x"
        objects.delete(key)
    except RemoteTrouble as trouble:
        yield warned(name, str(trouble), "correct store.remote, its credentials and its rights; delivery does without")
        return
    if is_listed and is_read:
        yield ok(name, uri)
    else:
        yield warned(name, f"{uri}: a new object is not found", "use storage that lists and reads new objects at once")


def check_directory_identity(context: Context) -> Iterator[Finding]:
    """The index in the directory belongs to this cluster and to its present topics."""
    name, directory = "directory identity", context.settings.store.directory
    try:
        identities = [
            (path.parts[-3], checkpoint.identity)
            for path in sorted(directory.glob(f"*/*/{CHECKPOINT}"))
            if (checkpoint := checkpoints.read(path.parent)) is not None
        ]
    except Corrupt as error:
        yield warned(name, str(error), "none needed: `run` rebuilds it from Kafka")
        return
    except DiskFailure as error:
        yield failed(name, error.message, error.hint)
        return
    if not identities:
        yield ok(name, "empty: it will be filled from Kafka")
        return
    cluster_id = context.cluster.describe().cluster_id
    for other in sorted({identity.cluster_id for _, identity in identities} - {cluster_id}):
        detail = f"{directory} belongs to cluster {other}, this is {cluster_id}"
        yield failed(name, detail, _WRONG_DIRECTORY, error=StateError)
        return
    ids = context.cluster.topic_ids(context.settings.delay_topics)
    for topic in sorted(
        {topic for topic, old in identities if topic in ids and not old.log_id.startswith(f"{ids[topic]}/")}
    ):
        detail = f"topic {topic} was deleted and created again after {directory} was written"
        yield failed(name, detail, _WRONG_DIRECTORY, error=StateError)
    yield ok(name, f"belongs to cluster {cluster_id}")


def check_http(context: Context) -> Iterator[Finding]:
    """The HTTP API is off, asks for credentials, or listens for this machine only."""
    http = context.settings.http
    if http.api == "off":
        yield ok("http api", "off")
        return
    place = host_and_port(http.host, http.api_port)
    if http.user is not None or http.token_file is not None:
        yield ok("http api", f"{place}, with a password or token")
    elif _is_loopback(http.host):
        yield ok("http api", f"{place}, for this machine only")
    else:
        detail = f"{place} shows keys and ids to everybody who reaches it"
        remedy = "set http.user and http.password_file, or http.token_file; or http.host: 127.0.0.1; or http.api: off"
        yield warned("http api", detail, remedy)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_java(_: Context) -> Iterator[Finding]:
    """Java is installed and recent enough for Spark."""
    java_path = java_program()
    remedy = f"install Java {JAVA_VERSION_MIN} (Debian: openjdk-{JAVA_VERSION_MIN}-jre-headless) or set JAVA_HOME"
    try:
        ran = subprocess.run(
            [java_path, "-version"], capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield failed("java", f"{java_path} does not run: {error}", remedy)
        return
    match = _JAVA_VERSION.search(ran.stderr + ran.stdout)
    if match is not None and int(match[1]) >= JAVA_VERSION_MIN:
        yield ok("java", f"version {match[1]}")
    else:
        version = f"version {match[1]}" if match else "no version"
        yield failed("java", f"{java_path}: {version}", remedy)


def check_connector(context: Context) -> Iterator[Finding]:
    """Spark's Kafka connector is installed."""
    jars = context.connector_jars()
    absent = [str(jar) for jar in jars if not jar.is_file()]
    if absent or not jars:
        remedy = "run `make install`, or use the image: it contains them"
        yield failed("connector", f"missing: {', '.join(absent) or 'all jars'}", remedy)
    else:
        yield ok("connector", f"{len(jars)} jars in {jars[0].parent}")


def check_java_properties(context: Context) -> Iterator[Finding]:
    """The client properties have equivalents in Spark's Java client."""
    java(context.settings)
    yield ok("java client", "all client properties can be translated")


def check_java_client(context: Context) -> Iterator[Finding]:
    """The brokers answer Spark's Java client. Only `check` asks: a start does not spend the time for another JVM."""
    name, properties = "java client", java(context.settings)
    needed = [jar for jar in context.connector_jars() if jar.name.startswith(("kafka-clients", connector.FRAME_WRITER))]
    if len(needed) < 2:
        return  # check_connector reports it
    parts = [part for key, value in properties.items() for part in (key.removeprefix("kafka."), value)]
    classes = os.pathsep.join([*map(str, needed), str(installed.home() / "jars" / "*")])
    options = (*QUIET, "-XX:TieredStopAtLevel=1", "-Xmx128m", *system_properties(context.settings))
    command = [java_program(), *options, "-cp", classes, "delaybridge.ClientProbe", str(int(context.timeout_s * 1000))]
    try:
        ran = subprocess.run(
            command, input="\0".join(parts), capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=False
        )
    except OSError:
        return  # check_java reports it
    except subprocess.TimeoutExpired:
        yield warned(name, f"no result within {_JAVA_TIMEOUT_S:g} s", "run `check` again on an idle machine")
        return
    if ran.returncode == 0:
        yield ok(name, "the brokers answer it")
    else:
        output = Redactor(context.settings.secrets())("; ".join(dict.fromkeys(ran.stdout.split("\n"))).strip("; "))
        remedy = "correct security.protocol, sasl.* and ssl.* under kafka.common: librdkafka accepts them"
        yield failed(name, f"Spark's client cannot be used: {output or 'it does not start'}", remedy)
