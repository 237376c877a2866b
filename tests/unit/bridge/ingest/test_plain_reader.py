"""bridge.ingest.plain_reader: records that may wait are handed out together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bridge.ingest import plain_reader
from bridge.ingest.plain_reader import LATEST_S, WAIT_SHARE, PlainReader, Read
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from tests.manual_clock import ManualClock

PARAMETERS = DecodeParameters(max_delay_ms=10**9, roll_window_ms=10**9, has_default_target=True)
EPOCHS = (DecodeEpoch(offset=0, parameters=PARAMETERS),)
FAR = [("delay-for", b"1h")]


def record(offset: int, headers: list[tuple[str, bytes]], now_ms: int) -> Any:
    values = {
        "topic": "delay", "partition": 0, "offset": offset, "error": None, "timestamp": (2, now_ms), "key": b"k",
        "value": b"v", "headers": headers,
    }  # fmt: skip
    return SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})


class ScriptedConsumer:
    """A record each millisecond; their headers are `script`."""

    def __init__(self, script: list[list[tuple[str, bytes]]]) -> None:
        self.script, self.read, self.clock = script, 0, ManualClock()
        self.began_ms = self.clock.now_ms()

    def poll(self, timeout_s: float) -> Any:
        found = self.consume(1, timeout_s)
        return found[0] if found else None

    def consume(self, count: int, timeout_s: float) -> list[Any]:
        found = list[Any]()
        for _ in range(int(timeout_s * 1_000) + 1):
            if len(found) < count and self.read <= self.clock.now_ms() - self.began_ms and self.read < len(self.script):
                found.append(record(self.read, self.script[self.read], self.clock.now_ms()))
                self.read += 1
            if len(found) == count:
                break
            self.clock.advance(1)
        return found


@pytest.mark.parametrize(
    ("script", "rows"),
    [
        ([FAR] * 1_000, LATEST_S * 1_000),
        ([[("delay-for", b"400ms")]] * 1_000, 400 / WAIT_SHARE),
        ([FAR] * 50 + [[("delay-for", b"0s")]] * 9, 50),
        ([FAR] * 50 + [[("delay-cancel", b"id")]] * 9, 50),
        ([FAR] * 50 + [[*FAR, ("delay-id", b"id"), ("delay-replace", b"true")]] * 9, 50),
        ([FAR], 1),
    ],
    ids=["far", "near", "now", "a command", "a replacement", "alone"],
)
def test_records_wait_for_a_share_of_their_time(
    monkeypatch: pytest.MonkeyPatch, script: list[list[tuple[str, bytes]]], rows: float
) -> None:
    """A small batch costs the store as much as a large one, so records are handed out together: after a share of the
    time until the first of them is due, and at once with a command."""
    consumer = ScriptedConsumer(script)
    monkeypatch.setattr(plain_reader, "made", lambda _what, _make: consumer)
    read: Read = PlainReader({}, "group", {("delay", 0): EPOCHS}, consumer.clock).poll()
    assert rows <= len(read.entries) <= rows + 2_000 * plain_reader.GATHER_S + 2
    assert read.ends == {("delay", 0): len(read.entries)}
