"""bridge.ingest.batches.reader: what a process says that dies, and how it is started. It is a script of the test's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.errors import EnvironmentFailure
from bridge.ingest.batches.reader import BatchReader, CorruptBatch, End, Found, Stretch
from bridge.wire.received import Record
from timerstore.rows.sources import SourceName

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
    """Reads both stretches; the process says `said`, and does `then`."""
    (tmp_path / "bin").mkdir()
    java, answer = tmp_path / "bin" / "java", tmp_path / "answer"
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    def read(said: bytes, then: str = "", **properties: str) -> list[tuple[SourceName, Found]]:
        answer.write_bytes(said)
        java.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {answer}\n{then}\n')
        java.chmod(0o755)
        return list(BatchReader(lambda: properties, list).read(STRETCHES))

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


def test_the_process_may_ask_the_token_endpoint(reading: Reading, tmp_path: Path) -> None:
    url = "https://idp.example/token"
    with pytest.raises(EnvironmentFailure):
        reading(b"", "exit 1", **{"sasl.oauthbearer.token.endpoint.url": url})
    arguments = (tmp_path / "arguments").read_text()
    assert f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={url} -cp" in arguments
