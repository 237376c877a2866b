"""bridge.ingest.batches: partitions that end readers, corrupt batches, and what the next start knows of either."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import EnvironmentFailure, StateError
from bridge.ingest.batches import reading_mark
from bridge.ingest.batches.choices import BATCHES, SKIPPED, Choices
from bridge.ingest.batches.reader import CorruptBatch, TooLargeRecord
from bridge.ingest.batches.reading_mark import ReadingMark
from bridge.ingest.batches.suspects import AGAIN_S, AHEAD, FAILURES_MAX, PAUSE_S_MAX, Suspects
from bridge.ingest.decode_records import decode_records, unread_entry
from bridge.kafka.errors import records_gone
from bridge.stores.names import Offsets, SourceName
from bridge.wire.received import Record, Unread
from tests.manual_clock import ManualClock
from tests.unit.bridge.ingest import stand_ins
from tests.unit.bridge.ingest.stand_ins import EPOCHS, A, B, Batches, Store, suspects, topic_id
from timerstore.rows.entry import Kind

BOMB = TooLargeRecord(offset=2, ts=7, by_broker=True, size=700_000_000)
TORN = CorruptBatch(offset=2, next=5, reason="its CRC is wrong")
QUERY = EnvironmentFailure("Spark cannot read", hint="", reason="Java heap space", code="DB-3017")


class Bench:
    """Suspects over a log of ten records in each partition."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock()
        self.batches = Batches({A: 10, B: 10})
        self.store = Store({A: 0, B: 0})
        self.entries: list[dict[str, Any]] = []
        self.suspects: Suspects = suspects(self.batches, self.clock, directory)

    def look(self) -> bool:
        return self.suspects.look(self.store.next_offsets(), self.take, lambda: False)

    def take(self, records: list[Record] | Unread, ends: Mapping[SourceName, int]) -> None:
        entries = unread_entry(records) if isinstance(records, Unread) else decode_records(records, EPOCHS)
        self.store.append(entries, ends, 0, lambda: None)
        self.entries += entries.to_pylist()

    def starts_again(self) -> None:
        """Another process, of which the store is new."""
        self.suspects = suspects(self.batches, self.clock, self.directory)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.fault("a record that memory cannot hold")
def test_a_record_that_cannot_be_held_becomes_a_dead_letter_without_a_body(bench: Bench) -> None:
    """A dead letter has the place, time and size of the record. What lies before and behind it is read, in order."""
    bench.batches.finds[A] = [BOMB]
    bench.suspects.suspect({A: 0}, "a test")
    assert bench.suspects.names == {A} and bench.suspects.trusted({A: 0, B: 3}) == {B: 3}
    assert not bench.look()
    assert bench.store.held[A] == list(range(10)) and bench.store.ends == {A: 10, B: 0}
    [letter] = [entry for entry in bench.entries if entry["kind"] == Kind.REJECT]
    assert (letter["topic"], letter["partition"], letter["offset"], letter["ts"]) == (*A, 2, 7)
    assert (letter["key"], letter["value"], letter["reason"]) == (None, None, "too-large-to-read")
    assert letter["headers"] == [{"key": "delay-omitted", "value": b"record (700000000 bytes)"}]
    assert not bench.suspects.names, "it is trusted again"


@pytest.mark.fault("records of hundreds of thousands of headers that are empty")
def test_headers_without_names_or_values_take_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such records are taken in a few at a time, although their compressed size is small."""
    laden = Record(*A, 0, 0, True, None, None, [("", None)] * 400)
    monkeypatch.setattr(stand_ins, "record", lambda _, offset: laden._replace(offset=offset))
    monkeypatch.setattr("bridge.ingest.batches.suspects.TAKEN_BYTES", 100_000)
    taken = list[int]()
    bench.suspects.suspect({A: 0}, "a test")
    bench.suspects.look({A: 0}, lambda entries, _: taken.append(len(entries)), lambda: False)
    assert taken == [3, 3, 3, 1]


@pytest.mark.fault("a corrupt batch")
def test_a_corrupt_batch_holds_its_partition_alone(bench: Bench) -> None:
    """The bridge looks at the batch again from time to time: a replaced broker may bring it back."""
    bench.batches.finds[A] = [TORN]
    bench.suspects.suspect({A: 0, B: 0}, "a test")
    assert not bench.look() and not bench.look()
    assert bench.store.held == {A: [0, 1], B: list(range(10))}
    assert bench.suspects.names == {A} and bench.suspects.held() == {A: TORN}
    assert bench.suspects.are_done({A: 2, B: 10}) and not bench.suspects.are_done({A: 2})
    assert bench.suspects.alarms() == ("delay/0 is not read: its batch at offset 2 is corrupt (DB-4060)",)
    assert len(bench.batches.stretches) == 2
    bench.clock.advance(int(AGAIN_S * 1000) + 1)
    assert not bench.look() and bench.suspects.held() == {A: TORN}
    bench.batches.finds.clear()
    bench.clock.advance(int(AGAIN_S * 1000) + 1)
    assert bench.look(), "readers have to begin anew"
    assert not bench.suspects.names and not bench.suspects.alarms() and bench.store.held[A] == [0, 1, 2, 3, 4]


def test_a_batch_that_an_operator_skips_leaves_a_dead_letter(bench: Bench) -> None:
    """The next look finds it, and so does another process that meets the batch again."""
    bench.batches.finds[A] = [TORN]
    bench.suspects.suspect({A: 0}, "a test")
    bench.look()
    choices = Choices(bench.directory, BATCHES)
    place = (topic_id(A[0]), A[1])
    assert choices.add(place, 2, SKIPPED) and not choices.add(place, 2, SKIPPED)
    for _ in range(2):
        assert bench.look() or not bench.suspects.held()
        assert bench.store.ends[A] == 5 and not bench.suspects.names
        [letter] = [entry for entry in bench.entries if entry["reason"] == "corrupt"]
        assert letter["offset"] == 2 and letter["headers"][0]["value"] == b"records from offset 2 to 4"
        bench.starts_again()
        bench.store, bench.entries = Store({A: 0, B: 0}), []
        bench.suspects.suspect({A: 0}, "a test")


@pytest.mark.fault("a corrupt batch where another topic of the same name had one")
def test_the_skip_of_a_batch_is_for_its_topic(bench: Bench) -> None:
    """The skip of a batch counts for the topic with that batch, and for no topic that is created again under its name.
    A skip that names no topic by its id, of an earlier version, counts for none: it is repeated."""
    Choices(bench.directory, BATCHES).add(A, 2, SKIPPED)
    Choices(bench.directory, BATCHES).add((topic_id(A[0]), A[1]), 2, SKIPPED)
    for generation, is_skipped in ((1, True), (2, False)):
        bench.suspects = suspects(bench.batches, bench.clock, bench.directory, partial(topic_id, generation=generation))
        bench.store, bench.batches.finds[A] = Store({A: 0, B: 0}), [TORN]
        bench.suspects.suspect({A: 0}, "a test")
        bench.look()
        assert (A not in bench.suspects.held()) is is_skipped


def test_brokers_that_do_not_answer_are_asked_again_after_a_pause(bench: Bench) -> None:
    """Each pause is longer than the one before; nothing is skipped meanwhile."""
    bench.batches.fails = EnvironmentFailure("failed", hint="", reason="no answer", code="DB-3060")
    bench.suspects.suspect({A: 0}, "a test")
    for times, pause_ms in ((1, 2_000), (2, 4_000), (3, 8_000)):
        bench.look()
        bench.look()
        assert len(bench.batches.stretches) == times and bench.suspects.names == {A}
        bench.clock.advance(pause_ms)
    bench.batches.fails = None
    bench.look()
    assert bench.store.held[A] == list(range(10))


def test_a_partition_that_cannot_be_asked_does_not_keep_others_from_being_read(bench: Bench) -> None:
    """Each look begins with another one."""
    bench.batches.refuses = A
    bench.suspects.suspect({A: 0, B: 0}, "a test")
    bench.look()
    assert bench.suspects.names == {A, B}
    bench.clock.advance(2_000)
    bench.look()
    assert bench.suspects.names == {A} and bench.store.held[B] == list(range(10))


def test_where_the_process_does_not_work_the_readers_try_again(bench: Bench) -> None:
    """No start waits for it without end. What is held stays so."""
    bench.batches.finds[B] = [TORN]
    bench.suspects.suspect({B: 0}, "a test")
    bench.look()
    bench.suspects.suspect({A: 0}, "a test")
    bench.batches.fails = EnvironmentFailure("failed", hint="", reason="no Java", code="DB-3060")
    for _ in range(FAILURES_MAX):
        assert A in bench.suspects.names
        bench.clock.advance(int(PAUSE_S_MAX * 1000))
        bench.look()
    assert bench.suspects.names == {B} and bench.suspects.held() == {B: TORN}


def test_what_was_not_taken_in_is_not_trusted(bench: Bench) -> None:
    """The assignment has changed while it was read: what comes of it is dropped."""
    over = list[bool]()

    def drop(*_: object) -> None:
        over.append(True)

    bench.suspects.suspect({A: 0}, "a test")
    bench.suspects.look(bench.store.next_offsets(), drop, lambda: bool(over))
    assert over and bench.suspects.names == {A}
    bench.look()
    assert bench.store.held[A] == list(range(10)) and not bench.suspects.names


def test_only_two_processes_that_end_at_the_same_place_make_it_suspect(bench: Bench) -> None:
    """One may have ended for any reason; an orderly end says that there was none."""
    bench.suspects.reading({A: 3, B: 4})
    bench.starts_again()
    assert not bench.suspects.names
    bench.suspects.reading({A: 2, B: 4})
    bench.clock.advance(1_000)
    bench.suspects.reading({A: 3, B: 5})
    bench.starts_again()
    assert bench.suspects.names == {A}, "B was read on"
    bench.look()
    assert bench.batches.stretches[0].end == 3 + AHEAD
    bench.suspects.reading({A: 10, B: 5})
    bench.suspects.rests()
    bench.starts_again()
    assert not bench.suspects.names and not (bench.directory / reading_mark.FILE).exists()


def test_what_java_has_ended_at_is_suspect_at_the_next_start(bench: Bench) -> None:
    """The end of this process, which is in order otherwise, does not take that back."""
    bench.suspects.judge(EnvironmentFailure("Java has ended", hint="", code="DB-3016"), 1, {A: 4})
    bench.suspects.reading({B: 1})
    bench.suspects.rests()
    bench.starts_again()
    assert bench.suspects.names == {A}


def test_a_query_that_fails_for_its_records_makes_them_suspect(bench: Bench) -> None:
    """So does one that fails a second time, whatever it says; a broker that is away does not."""
    away = EnvironmentFailure("Spark cannot read", hint="", reason="no broker", code="DB-3017")
    bench.suspects.judge(away, 1, {A: 0})
    assert not bench.suspects.names
    bench.suspects.judge(QUERY, 1, {A: 0})
    assert bench.suspects.names == {A}
    bench.suspects.judge(away, 2, {A: 0, B: 0})
    assert bench.suspects.names == {A, B}
    bench.suspects.forget({A})
    assert bench.suspects.names == {B}


@pytest.mark.parametrize("text", ["", "[]", '{"at": 1}', '{"at": {"a": 1}, "before": {}}', "[" * 100_000])
def test_a_mark_that_cannot_be_read_marks_nothing(tmp_path: Path, text: str) -> None:
    """It can be removed at any time, as everything beside it."""
    (tmp_path / reading_mark.FILE).write_text(text)
    assert not ReadingMark(tmp_path).suspects


@pytest.mark.fault("a mark of two threads at once")
def test_a_mark_of_what_has_ended_java_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain reader's note of its place does not overwrite the mark of another thread."""
    mark, write = ReadingMark(tmp_path), ReadingMark._write
    ended = threading.Thread(target=mark.distrust, args=({A: 5},))

    def interrupted(self: ReadingMark, at: Offsets, before: Offsets) -> None:
        if threading.current_thread() is not ended:
            ended.start()
            ended.join(0.1)
        write(self, at, before)

    monkeypatch.setattr(ReadingMark, "_write", interrupted)
    mark.note({A: 2})
    ended.join()
    mark.clear()
    assert ReadingMark(tmp_path).suspects == {A: 5}


def test_records_that_are_gone_are_told_at_once(bench: Bench) -> None:
    """The process does not try again, as it would where brokers do not answer."""
    bench.batches.fails = records_gone(topic="delay", partition=0, wanted=0)
    bench.suspects.suspect({A: 0}, "a test")
    with pytest.raises(StateError):
        bench.look()
