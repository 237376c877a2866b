"""bridge.kafka.leader_epochs: where logs were cut, found by the epochs of their records."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from confluent_kafka import KafkaError, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from bridge.kafka import leader_epochs
from bridge.kafka.leader_epochs import ReadStretch, cuts

Log = dict[int, int]
"""Epochs of records, by offset."""


class Consumer:
    """Reads scripted logs; those that are `silent` do not answer, the `broken` ones answer with an error."""

    def __init__(self, logs: dict[str, Log], silent: set[str] | None = None, broken: set[str] | None = None) -> None:
        self.logs, self.silent, self.broken = logs, silent or set(), broken or set()
        self.rounds, self.polls, self.messages = 0, 0, list[Any]()

    def incremental_assign(self, places: list[TopicPartition]) -> None:
        self.rounds += 1
        self.messages = []
        for place in places:
            if place.topic in self.broken:
                self.messages.append(_message(place, error=KafkaError(KafkaError._BAD_MSG)))
                continue
            log = self.logs[place.topic]
            for offset in [each for each in sorted(log) if each >= place.offset][:2]:
                told = {"error": None, "offset": offset, "leader_epoch": log[offset]}
                self.messages += [] if place.topic in self.silent else [_message(place, **told)]
            end = KafkaError(KafkaError._PARTITION_EOF)
            self.messages += [] if place.topic in self.silent else [_message(place, error=end)]

    def poll(self, _: float) -> Any:
        self.polls += 1
        return self.messages.pop(0) if self.messages else None

    def incremental_unassign(self, places: list[TopicPartition]) -> None:
        names = {place.topic for place in places}
        self.messages = [each for each in self.messages if each.topic() not in names]


def _message(place: TopicPartition, **told: object) -> Any:
    told = {"topic": place.topic, "partition": place.partition, **told}
    return mock.Mock(**{f"{name}.return_value": value for name, value in told.items()})


@st.composite
def logs(draw: st.DrawFn) -> tuple[Log, ReadStretch]:
    """A log of which some offsets hold no record, and what was read of it."""
    epochs = sorted(draw(st.lists(st.integers(0, 4), max_size=40)))
    start, beyond = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    log = {start + i: epoch for i, epoch in enumerate(epochs) if draw(st.booleans())}
    end = start + max(0, len(epochs) - beyond)
    return log, ReadStretch(epoch=draw(st.integers(0, 4)), start=start, end=end)


@given(st.lists(logs(), min_size=1, max_size=4))
def test_cuts_are_found_where_later_epochs_begin(drawn: list[tuple[Log, ReadStretch]]) -> None:
    """Whatever holds no record in between; a log that was not cut has none. Many logs are asked at the same time."""
    scripted: Any = Consumer({str(number): log for number, (log, _) in enumerate(drawn)})
    stretches = {(str(number), 0): stretch for number, (_, stretch) in enumerate(drawn)}
    found = cuts(scripted, stretches)
    for place, stretch in stretches.items():
        inside = {at: e for at, e in scripted.logs[place[0]].items() if stretch.start <= at < stretch.end}
        kept = [offset for offset, epoch in inside.items() if epoch <= stretch.epoch]
        is_cut = any(epoch > stretch.epoch for epoch in inside.values())
        assert found[place] == (max(kept, default=stretch.start - 1) + 1 if is_cut else None)
    alone = [Consumer(scripted.logs) for _ in stretches]
    for each, (place, stretch) in zip(alone, stretches.items(), strict=True):
        cuts(each, {place: stretch})  # type: ignore[arg-type]
    assert scripted.rounds == max(each.rounds for each in alone)


def test_logs_that_do_not_answer_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are searched to their ends. A log that was not cut takes one fetch."""
    monkeypatch.setattr(leader_epochs, "SystemClock", lambda: mock.Mock(**{"monotonic_s.side_effect": iter(range(99))}))
    monkeypatch.setattr(leader_epochs, "ANSWER_S", 20.0)
    log = dict.fromkeys(range(9), 1)
    scripted: Any = Consumer({"a": log, "b": log, "c": {**log, 8: 2, 7: 2}}, silent={"b"})
    stretches = {(topic, 0): ReadStretch(epoch=1, start=0, end=9) for topic in "abc"}
    assert cuts(scripted, stretches) == {("a", 0): None, ("c", 0): 7}
    quiet: Any = Consumer({"a": log})
    assert cuts(quiet, {("a", 0): stretches["a", 0]}) == {("a", 0): None} and quiet.rounds == 1


@pytest.mark.fault("a corrupt batch, behind an election")
def test_a_log_that_cannot_be_read_delays_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that answers with an error is left out at once; nothing waits for it."""
    monkeypatch.setattr(leader_epochs, "SystemClock", lambda: mock.Mock(**{"monotonic_s.side_effect": iter(range(99))}))
    log = dict.fromkeys(range(9), 1)
    scripted: Any = Consumer({"a": log, "b": log}, broken={"b"})
    stretches = {(topic, 0): ReadStretch(epoch=1, start=0, end=9) for topic in "ba"}
    assert cuts(scripted, stretches) == {("a", 0): None} and scripted.polls == 2
