"""confluent_kafka's transactional Producer, as far as the bridge uses it, on a Kafka in memory (scripted_kafka.py).

What of librdkafka counts here:

    a batch is answered as a whole, except where the broker names several records that it refuses (KIP-467): then the
        others of the batch fail with _INVALID_DIFFERENT_RECORD
    after a failed record the transaction can only be aborted: produce raises _STATE, all else the record's error
    a fatal error is told to `error_cb`, and raised by every call from then on
    reports come out of poll and flush only
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from bridge.delivery.targets.partitioner import murmur2
from tests.model.scripted_kafka import Fault, Kafka, Record

Report = Callable[[KafkaError | None, Any], None]


class _Message:
    """What a delivery report says of the record."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def topic(self) -> str:
        return self._record.topic

    def partition(self) -> int:
        return self._record.partition


class ScriptedProducer:
    """See the module. One thread."""

    def __init__(self, kafka: Kafka, config: dict[str, Any]) -> None:
        self.kafka = kafka
        self.name = str(config["transactional.id"])
        self._error_cb: Callable[[KafkaError], None] = config["error_cb"]
        self._epoch = -1
        self._queue: list[tuple[Record, Report | None]] = []
        self._reports: list[Callable[[], None]] = []
        self._abortable: KafkaError | None = None
        self._fatal: KafkaError | None = None
        self._is_open = False

    # -- calls

    def init_transactions(self, timeout: float) -> None:
        self._call("init", timeout)
        self._epoch = self.kafka.init(self.name)

    def begin_transaction(self) -> None:
        self._call("begin", 0)
        if self._is_open:
            raise KafkaException(KafkaError(KafkaError._STATE, "a transaction is open"))
        self.kafka.began += 1
        self._is_open = True

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        callback: Report | None,
        _timestamp_cb: object,
        _timestamp: int,
        headers: Sequence[tuple[str, str | bytes | None]],
    ) -> None:
        if self._fatal is not None:
            raise KafkaException(self._fatal)
        if self._abortable is not None or not self._is_open:
            raise KafkaException(KafkaError(KafkaError._STATE, "only an abort is possible"))
        count = self.kafka.partitions.get(topic, 1)
        if partition >= count:
            raise KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION))
        if partition < 0:
            partition = 0 if key is None else (murmur2(key) & 0x7FFFFFFF) % count
        pairs = tuple((name, text.encode() if isinstance(text, str) else text) for name, text in headers)
        record = Record(
            topic=topic, partition=partition, key=key, value=value, headers=pairs, sent_ms=self.kafka.clock.now_ms()
        )
        fault = self.kafka.fault("produce", record)
        if fault is not None:
            raise self._failed(fault)
        self._queue.append((record, callback))

    def send_offsets_to_transaction(self, offsets: Sequence[TopicPartition], metadata: object, timeout: float) -> None:
        self._call("offsets", timeout)
        if metadata != self.kafka.generation:
            self._abortable = KafkaError(KafkaError.ILLEGAL_GENERATION, "revoked", txn_requires_abort=True)
            raise KafkaException(self._abortable)
        self.kafka.on_offsets([(each.topic, each.partition) for each in offsets])
        transaction = self.kafka.add(self.name)
        transaction.offsets.update(
            {(each.topic, each.partition): (each.offset, each.metadata or "") for each in offsets}
        )
        self.kafka.tear(self.name, "offsets")

    def commit_transaction(self, timeout: float) -> None:
        fault = next((fault for fault in self.kafka.faults if fault.step == "commit"), None)
        if fault is not None and fault.is_applied and self._is_open and self._is_well():
            self.flush(0)
            if not self._queue and self._abortable is None:
                self._is_open = False
                self.kafka.commit(self.name)
        self._call("commit", timeout)
        self.flush(0)
        self.kafka.tear(self.name, "commit")
        self._must_be_well()
        if self._queue:
            self.kafka.pass_ms(1_000 * timeout)
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "records are left", retriable=True))
        if self._is_open:
            self._is_open = False
            self.kafka.commit(self.name)

    def abort_transaction(self, timeout: float) -> None:
        self._call("abort", timeout)
        self.purge()
        self._serve()
        self._is_open, self._abortable = False, None
        self.kafka.open.pop(self.name, None)
        self.kafka.aborted += 1

    def list_topics(self, _topic: str, _timeout: float) -> object:
        """What the client knows of partitions is up to date here."""
        return None

    def flush(self, timeout: float) -> int:
        self._settle()
        self._serve()
        if self._queue:
            self.kafka.pass_ms(1_000 * timeout)
        return len(self)

    def poll(self, timeout: float) -> int:
        if self.kafka.is_prompt:
            self._settle()
        self.kafka.pass_ms(1_000 * timeout)
        self._serve()
        return 0

    def purge(self, **_: bool) -> None:
        error = KafkaError(KafkaError._PURGE_QUEUE)
        for record, report in self._queue:
            self._report(record, report, error)
        self._queue = []

    def __len__(self) -> int:
        return len(self._queue) + len(self._reports)

    # -- inside

    def _call(self, step: str, timeout: float) -> None:
        """A question to the coordinator. Raises what it, or the script, says."""
        self.kafka.pass_ms(self.kafka.latency_ms)
        if self._fatal is not None:
            raise KafkaException(self._fatal)
        fault = self.kafka.fault(step)
        if fault is not None:
            self.kafka.pass_ms(min(fault.takes_ms, 1_000 * timeout))
            raise self._failed(fault)
        if step not in ("init", "begin"):
            self._must_be_well(is_abort=step == "abort")

    def _is_well(self) -> bool:
        return self._fatal is None and self._abortable is None and self.kafka.epochs.get(self.name) == self._epoch

    def _must_be_well(self, *, is_abort: bool = False) -> None:
        if self._abortable is not None and not is_abort:
            raise KafkaException(self._abortable)
        if self.kafka.epochs.get(self.name) != self._epoch:
            raise KafkaException(self._be_fenced())
        if (self.name, self._epoch) in self.kafka.torn:
            raise self._ended()

    def _be_fenced(self) -> KafkaError:
        self._fatal = KafkaError(KafkaError._FENCED, "another producer, or a time-out", fatal=True)
        words = KafkaError(KafkaError._FENCED).str()  # the wrapped error names the cause in words only
        self._error_cb(KafkaError(KafkaError._FATAL, f"Fatal error: {words}", fatal=True))
        return self._fatal

    def _ended(self) -> KafkaException:
        """Its transaction has ended, and it did not ask for that."""
        self._fatal = KafkaError(KafkaError.INVALID_TXN_STATE, fatal=True)
        self._error_cb(KafkaError(KafkaError._FATAL, f"Fatal error: {self._fatal.str()}", fatal=True))
        return KafkaException(self._fatal)

    def _failed(self, fault: Fault) -> KafkaException:
        error = fault.error()
        if fault.is_fatal:
            self._fatal = error
            self._error_cb(KafkaError(KafkaError._FATAL, f"fatal: {error.str()}", fatal=True))
        elif fault.requires_abort:
            self._abortable = error
        return KafkaException(error)

    def _settle(self) -> None:
        """The brokers answer, batch by batch; in all for no more records than they take at a time."""
        while self.kafka.meanwhile:
            self.kafka.meanwhile.pop()()
        if not self._queue:
            return
        self.kafka.pass_ms(self.kafka.latency_ms)
        room = self.kafka.acknowledged_max or len(self._queue)
        queue, self._queue = self._queue[:room], self._queue[room:]
        waiting = []
        by_partition = sorted(queue, key=lambda each: (each[0].topic, each[0].partition))
        for _, several in groupby(by_partition, key=lambda each: (each[0].topic, each[0].partition)):
            records = list(several)
            for start in range(0, len(records), self.kafka.batch_rows):
                batch = records[start : start + self.kafka.batch_rows]
                if self._is_silent(batch):
                    waiting += batch
                else:
                    self._answer(batch)
        self._queue = waiting + self._queue

    def _is_silent(self, batch: list[tuple[Record, Report | None]]) -> bool:
        return self.kafka.fault("silence", batch[0][0]) is not None

    def _answer(self, batch: list[tuple[Record, Report | None]]) -> None:
        if self.kafka.epochs.get(self.name) != self._epoch:
            self._refuse(batch, {id(record): KafkaError(KafkaError.INVALID_PRODUCER_EPOCH) for record, _ in batch})
            self._be_fenced()
            return
        for fault in self.kafka.faults:
            concerned = [record for record, _ in batch if fault.step == "report" and fault.concerns(record)]
            if concerned:
                self.kafka.use(fault)
                is_named = fault.is_named and len(concerned) > 1
                named = {id(record) for record in (concerned if is_named else [record for record, _ in batch])}
                other = KafkaError(KafkaError._INVALID_DIFFERENT_RECORD)
                self._refuse(batch, {id(r): fault.error() if id(r) in named else other for r, _ in batch})
                if fault.is_fatal:
                    self._failed(fault)
                return
        if (self.name, self._epoch) in self.kafka.torn:
            self._refuse(batch, {id(record): KafkaError(KafkaError.INVALID_TXN_STATE) for record, _ in batch})
            self._ended()
            return
        transaction = self.kafka.add(self.name)
        transaction.records += [record for record, _ in batch]
        self.kafka.tear(self.name, "report", len(transaction.records))
        for record, report in batch:
            self._report(record, report, None)

    def _refuse(self, batch: list[tuple[Record, Report | None]], errors: dict[int, KafkaError]) -> None:
        for record, report in batch:
            self._report(record, report, errors[id(record)])
        if self._abortable is None:
            first = errors[id(batch[0][0])]
            self._abortable = KafkaError(first.code(), first.str(), txn_requires_abort=True)

    def _report(self, record: Record, report: Report | None, error: KafkaError | None) -> None:
        if report is not None:
            self._reports.append(lambda: report(error, _Message(record)))

    def _serve(self) -> None:
        reports, self._reports = self._reports, []
        for report in reports:
            report()
