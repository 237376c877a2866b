"""Redrive: dead letters go back into their delay topics after the repair of their fault.

A letter goes back into its old partition, where cancels of its id find it, with its old due time. It goes back only if
its delay topic is configured to use the dead-letter topic that has the letter. A letter that would be rejected again
stays, and counts as broken.

Exactly once: the transaction that puts letters back also writes a note with their offsets into their partition of the
dead-letter topic (bridge/wire/letters.py). The steps of a run, each with the cost of a crash after it:

1. `init_transactions` ends the open transaction of an earlier run, and fences a run that still goes on. (Cost:
   nothing.) The run calls it again before a transaction if a request of the previous one may arrive late
   (bridge/kafka/repeats.py).
2. The run looks up the ends of the logs, past open transactions: every note of an earlier run lies below them. (Cost:
   nothing.)
3. The first pass reads the notes. The second pass reads the letters and commits them in several transactions. (Cost: a
   crash leaves each transaction whole or undone, and the next run learns which by steps 1 to 3.)

A delay topic may refuse a letter, for its size: its producer had compressed it. That aborts the transaction. The run
finds the letter by halves, and puts all others back. The letter stays, and counts as broken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from bridge.dead_letters.reading import LetterTopics, Marks, Place, make_consumer, partition_of, record_batches
from bridge.dead_letters.rejection import GoingBack, Rejection
from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.admin import Cluster, Watermarks
from bridge.kafka.errors import Fault, fault_of, kafka_error
from bridge.kafka.repeats import Epochs
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.wire.letters import Gone, Letter, LetterChoice, Range, RedriveReport, is_redriven, redriven
from bridge.wire.received import headers_of
from timerstore.clock import Clock

CALL_TIMEOUT_S: Final = 30.0
FULL_POLL_S: Final = 0.1


class _Refused(Exception):
    """A delay topic has refused a record: the transaction is aborted."""


def redrive_letters(settings: Settings, clock: Clock, choice: LetterChoice, *, execute: bool) -> RedriveReport:
    """Redrive the chosen letters, or only count them. Raises BridgeError."""
    return Redrive(settings, clock, choice).run(execute=execute)


class Redrive:
    """One run over dead-letter topics."""

    def __init__(self, settings: Settings, clock: Clock, choice: LetterChoice) -> None:
        """Raises BridgeError."""
        self._cluster, self._clock, self._choice = Cluster(settings), clock, choice
        self._rejection = Rejection(settings)
        self._letters = LetterTopics(settings, self._cluster, list(choice.topics))
        self._consumer = make_consumer(settings)
        own = {"transactional.id": f"{settings.group_id}-redrive"}
        self._epochs = Epochs({**librdkafka(settings, "producer"), **own}, CALL_TIMEOUT_S)

    def run(self, *, execute: bool) -> RedriveReport:
        """Redrive the letters that were written before the run. Without `execute` the run writes nothing.

        Raises EnvironmentFailure, and StateError if the notes of earlier runs are unreadable.
        """
        report = RedriveReport()
        try:
            if execute:
                self._epochs.producer()
            # The ends include records of open transactions.
            marks = self._marks()
            gone = self._gone(marks)
            for batch in record_batches(self._consumer, self._chosen(marks), self._clock):
                self._put_back(batch, gone, report, execute=execute)
        except KafkaException as exception:
            raise EnvironmentFailure(
                "cannot put dead letters back",
                hint="Committed letters have gone back; run it again. Grant Read, Describe and Write on the "
                "dead-letter topics, Write on the delay topics and the transactional id.",
                reason=kafka_error(exception).str(),
                code="DB-1011",
            ) from exception
        finally:
            self._consumer.close()
        return report

    def _marks(self) -> dict[Place, Watermarks]:
        """The offsets to read for notes. For single letters they begin at the first one: its note comes later."""
        places = self._choice.places
        wanted = {(topic, partition) for topic, partition, _ in places}
        marks = self._cluster.watermarks([place for place in self._letters.places() if not places or place in wanted])
        first = {where: min(offset for *place, offset in places if tuple(place) == where) for where in wanted}
        return {
            where: Watermarks(start=max(mark.start, first.get(where, 0)), end=mark.end) for where, mark in marks.items()
        }

    def _chosen(self, marks: Marks) -> Marks:
        """The offsets to read for letters. For single letters they end after the last one."""
        if not self._choice.places:
            return marks
        ends: dict[Place, int] = {}
        for topic, partition, offset in self._choice.places:
            ends[topic, partition] = max(offset + 1, ends.get((topic, partition), 0))
        return {place: Watermarks(start=mark.start, end=min(mark.end, ends[place])) for place, mark in marks.items()}

    def _gone(self, marks: Marks) -> dict[Place, Gone]:
        """The redriven letters by the notes between the marks. With `since_ms`, unreadable notes are left out."""
        ranges: dict[Place, list[Range]] = {place: [] for place in marks}
        for message in (message for batch in record_batches(self._consumer, marks, self._clock) for message in batch):
            if not is_redriven(headers_of(message)):
                continue
            try:
                ranges[partition_of(message)] += self._letters.redriven(message)
            except StateError:
                if self._choice.since_ms is None:
                    raise
        return {place: Gone(spans) for place, spans in ranges.items()}

    def _put_back(
        self, batch: Sequence[Message], gone: Mapping[Place, Gone], report: RedriveReport, *, execute: bool
    ) -> None:
        """Put the chosen letters of a batch back, and count them."""
        counted = RedriveReport()
        chosen = [
            (GoingBack(letter, self._choice.headers(letter), message.key(), message.value()), message)
            for message in batch
            if (letter := self._judge(message, gone[partition_of(message)], counted)) is not None
        ]
        reasons = self._rejection.reasons([record for record, _ in chosen], self._clock.now_ms())
        back = []
        for (record, message), reason in zip(chosen, reasons, strict=True):
            is_broken = reason is not None or record.letter.is_cut
            (counted.broken if is_broken else counted.back)[record.letter.reason, record.letter.target] += 1
            if not is_broken:
                back.append((record, message))
        for record in self._go_back(back) if execute else ():
            kind = record.letter.reason, record.letter.target
            counted.back[kind] -= 1
            counted.broken[kind] += 1
        counted.back = +counted.back
        report.add(counted)

    def _go_back(self, back: Sequence[tuple[GoingBack, Message]]) -> list[GoingBack]:
        """Put the records back, and return the refused ones."""
        if not back:
            return []
        try:
            self._commit(self._epochs.producer(), back)
        except _Refused:
            half = len(back) // 2
            return [*self._go_back(back[:half]), *self._go_back(back[half:])] if half else [back[0][0]]
        return []

    def _judge(self, message: Message, gone: Gone, report: RedriveReport) -> Letter | None:
        """The letter if it is chosen; else None, and `report` counts the record."""
        headers = headers_of(message)
        if is_redriven(headers):
            return None
        letter = self._letters.letter(message)
        if (message.offset() or 0) in gone:
            report.before += 1
        elif letter is None:
            report.foreign += 1
        elif not self._choice.chooses(letter, message.timestamp()[1], (*partition_of(message), message.offset() or 0)):
            report.left += 1
        else:
            return letter
        return None

    def _commit(self, producer: Producer, back: Sequence[tuple[GoingBack, Message]]) -> None:
        """One transaction: the records and the note of their letters. A crash leaves both or neither. Raises _Refused,
        KafkaException."""
        offsets: dict[Place, list[int]] = {}
        failed: list[KafkaError] = []

        def on_delivery(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                failed.append(error)

        produce = partial(_produce, producer, on_delivery=on_delivery)
        producer.begin_transaction()
        try:
            for (letter, headers, key, value), message in back:
                offsets.setdefault(partition_of(message), []).append(message.offset() or 0)
                produce(topic=letter.topic, partition=letter.partition, key=key, value=value, headers=headers)
            for (topic, partition), gone in offsets.items():
                headers, value = redriven(self._letters.topics[topic].topic_id, gone)
                produce(topic=topic, partition=partition, value=value, headers=headers)
            producer.flush(CALL_TIMEOUT_S)
            producer.commit_transaction(CALL_TIMEOUT_S)
        except KafkaException as exception:
            error = kafka_error(exception)
            is_refused = Fault.RECORD in map(fault_of, (error, *failed))
            if is_refused or error.txn_requires_abort():
                producer.abort_transaction(CALL_TIMEOUT_S)
            if is_refused:
                self._epochs.renew()  # a refused batch leaves a gap in the sequence numbers of the client
                raise _Refused from None
            raise


def _produce(producer: Producer, **record: Any) -> None:
    while True:
        try:
            return producer.produce(**record)
        except BufferError:
            producer.poll(FULL_POLL_S)
