"""bridge.ingest.batches.reader: what a process says that dies, and how it is started. It is a script of the test's."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bridge.errors import EnvironmentFailure, StateError
from bridge.ingest.batches.reader import JVM, BatchReader, CorruptBatch, End, Found, Stretch
from bridge.kafka.errors import RECORDS_GONE
from bridge.settings.clients import system_properties
from bridge.settings.model import Settings
from bridge.stores.names import SourceName
from bridge.wire.received import Record

A: SourceName = ("delay", 0)
B: SourceName = ("delay", 1)
STRETCHES = (Stretch(name=A, begin=4, end=100), Stretch(name=B, begin=7, end=100))
KILLED = "kill -9 $$"

Reading = Callable[..., list[tuple[SourceName, Found]]]


def place(offset: int) -> bytes:
    return b"R" + struct.pack(">qq?", offset, 1, True)


def record(offset: int, value: bytes) -> bytes:
    return place(offset) + struct.pack(">ii", -1, len(value)) + value + struct.pack(">i", 0)


def end(offset: int) -> bytes:
    return b"E" + struct.pack(">q", offset)


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reading:
    """Reads both stretches; the process does `first`, says `said`, and does `then`."""
    (tmp_path / "bin").mkdir()
    java, answer = tmp_path / "bin" / "java", tmp_path / "answer"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    def read(
        said: bytes, then: str = "", first: str = "", options: Sequence[str] = ()
    ) -> list[tuple[SourceName, Found]]:
        answer.write_bytes(said)
        java.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n{first}\ncat {answer}\n{then}\n')
        java.chmod(0o755)
        return list(BatchReader(dict, list, lambda: options).read(STRETCHES))

    return read


def test_each_stretch_has_its_answer(reading: Reading) -> None:
    (_, first), *rest = reading(record(4, b"v") + end(9) + end(7))
    assert isinstance(first, Record) and (first.offset, first.value) == (4, b"v")
    assert rest == [(A, End(offset=9)), (B, End(offset=7))]


@pytest.mark.parametrize(
    "torn",
    [b"", place(5)[:6], place(5) + struct.pack(">ii", -1, 1000) + end(1 << 60)],
    ids=["nothing", "place", "value"],
)
def test_what_a_process_leaves_that_dies_says_nothing_of_other_partitions(reading: Reading, torn: bytes) -> None:
    """Part of a value, as the pipe has it, may look like an end: what lies before it would never be read. And the
    partitions that it did not come to are not corrupt."""
    found = reading(record(4, b"v") + torn, KILLED)
    assert [(name, type(each)) for name, each in found] == [(A, Record), (A, CorruptBatch)]
    told = found[1][1]
    assert isinstance(told, CorruptBatch) and (told.offset, told.next) == (5, 6) and "-9" in told.reason


@pytest.mark.fault("a word of the JVM's own in the answer of the process that reads batches")
def test_what_is_no_answer_makes_no_batch_corrupt(reading: Reading) -> None:
    """Output of the JVM itself makes no batch corrupt, since its partition would be held."""
    with pytest.raises(EnvironmentFailure) as raised:
        reading(b"[0.001s][warning][gc] something is deprecated\n" + end(4), KILLED)
    assert raised.value.code == "DB-3060"


@pytest.mark.fault("a log that ends before, or begins behind, the offsets that are read batch by batch")
def test_an_offset_that_the_log_does_not_have_is_no_failure_of_the_process(reading: Reading) -> None:
    """Missing records have an error of their own, which ends the reading, without endless attempts."""
    with pytest.raises(StateError) as raised:
        reading(b"G" + struct.pack(">q", 4))
    assert raised.value.code == RECORDS_GONE
    assert {name: raised.value.fields[name] for name in ("topic", "partition", "wanted")} == {
        "topic": "delay", "partition": 0, "wanted": 4,
    }  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="no Linux")
@pytest.mark.fault("memory that runs out while a batch is unpacked")
def test_the_kernel_ends_this_process_first(reading: Reading, tmp_path: Path) -> None:
    """The kernel ends the process that unpacks a batch, and not the bridge."""
    reading(end(4) + end(7), first=f"head -c 1 > /dev/null; cat /proc/$$/oom_score_adj > {tmp_path}/score")
    assert (tmp_path / "score").read_text() == "1000\n"


def test_the_process_has_the_options_of_java_that_the_settings_name(reading: Reading, tmp_path: Path) -> None:
    """Proxies, trust stores and logins, and the token endpoint that it may ask; but not the heap of Spark's driver."""
    url = "https://idp.example/token"
    oidc = {
        "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "b", "sasl.oauthbearer.client.secret": "s",
        "sasl.oauthbearer.token.endpoint.url": url,
    }  # fmt: skip
    conf = {"spark.driver.extraJavaOptions": '-Xmx1g -Dhttps.proxyHost=proxy "-Djavax.net.ssl.trustStore=/a b"'}
    settings = Settings.of({"kafka": {"common": oidc}, "spark": {"conf": conf}})
    reading(end(4) + end(7), options=system_properties(settings))
    options = (tmp_path / "arguments").read_text().splitlines()
    assert options[len(JVM) : options.index("-cp")] == [
        f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={url}",
        "-Dhttps.proxyHost=proxy",
        "-Djavax.net.ssl.trustStore=/a b",
    ]
