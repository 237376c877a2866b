"""A Kafka in memory, for a producer that is told when to fail (scripted_producer.py).

Held are the committed records of each partition, the group's offsets with their metadata, the epoch of each
transactional id, and the transactions that are open. A transaction that is older than its time-out by the fake clock is
aborted, and its producer fenced, as a coordinator does it.

A `Fault` says which step goes wrong, with which error, for which records, and how often. What is in no fault works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import KafkaError

from bridge.stores.names import SourceName
from tests.manual_clock import ManualClock

CODES: Final = sorted(
    {
        code
        for name in dir(KafkaError)
        if name.lstrip("_")[:1].isupper() and isinstance(code := getattr(KafkaError, name), int)
    }
    - {KafkaError.NO_ERROR}
)
"""Every error that the client knows, whatever our tables say of it."""
RIVAL_CODES: Final = frozenset(
    {
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.UNRELEASED_INSTANCE_ID,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError._FENCED,
    }
)

PLACE_CODES: Final = [
    code
    for code in CODES
    if code not in RIVAL_CODES
    and code not in (KafkaError._FATAL, KafkaError._STATE, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)
]
"""What may be said of a place again and again: all but what the client says of itself or of its name."""

Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a partition holds; `sent_ms` is when it was handed to the client, by the bridge's clock."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    sent_ms: int

    @property
    def bytes(self) -> int:
        """About how large it is."""
        return len(self.value or b"") + len(self.key or b"")


@dataclass(slots=True, kw_only=True, eq=False)
class Fault:
    """At `step` (init, begin, produce, report, silence, offsets, commit, abort) there is this error.

    Of the steps produce, report and silence only the records of `topic` and `partition` (None: all) are concerned that
    `records` names: "all", "keyless", or "large". `is_named`: the broker says which records of a batch it refuses.
    `times`: how often (None: always). `is_applied`: a commit is made although its answer is an error. `takes_ms`: how
    long the failing call takes.
    """

    step: str
    code: int
    topic: str | None = None
    partition: int | None = None
    records: str = "all"
    is_named: bool = False
    times: int | None = None
    is_fatal: bool = False
    is_retriable: bool = False
    requires_abort: bool = False
    is_applied: bool = False
    takes_ms: int = 0

    def error(self, **more: bool) -> KafkaError:
        """As the client gives it."""
        flags = {
            "fatal": self.is_fatal, "retriable": self.is_retriable, "txn_requires_abort": self.requires_abort, **more
        }  # fmt: skip
        return KafkaError(self.code, "scripted", **flags)

    def concerns(self, record: Record) -> bool:
        """Whether this record is one of its."""
        return (
            self.topic in (None, record.topic)
            and self.partition in (None, record.partition)
            and (self.records != "keyless" or record.key is None)
            and (self.records != "large" or record.bytes >= LARGE_BYTES)
        )


LARGE_BYTES: Final = 500
"""Of a record that faults call large."""


@dataclass(slots=True, eq=False)
class Open:
    """A transaction that is open: since when (monotonic), what it holds, and the offsets that were sent."""

    name: str
    since_s: float
    records: list[Record] = field(default_factory=list)
    offsets: dict[SourceName, tuple[int, str]] = field(default_factory=dict)


class Kafka:
    """See the module."""

    def __init__(self, clock: ManualClock, partitions: dict[str, int], timeout_s: float = 10.0) -> None:
        self.clock = clock
        self.partitions = partitions
        self.timeout_s = timeout_s
        self.logs: dict[SourceName, list[Record]] = {
            (topic, partition): [] for topic, count in partitions.items() for partition in range(count)
        }
        self.offsets: dict[SourceName, tuple[int, str]] = {}
        self.epochs: dict[str, int] = {}
        self.open: dict[str, Open] = {}
        self.faults: list[Fault] = []
        self.faulty_topics: set[str] = set()
        self.generation = 0
        self.is_prompt = False
        self.latency_ms = 1
        self.acknowledged_max: int | None = None
        self.batch_rows = 1_000
        self.fenced_s: list[float] = []
        self.told: set[int] = set()
        self.unexplained = 0
        """How many calls failed without a word about a place."""
        self.meanwhile: list[Callable[[], None]] = []
        """Happens while the brokers are waited for next."""
        self.began = self.committed = self.aborted = self.expired = 0
        self.torn: set[tuple[str, int]] = set()
        """Ids and epochs whose transaction has ended unasked."""
        self.tears_at: tuple[str, int] | None = None
        """At what step (report, offsets, commit) the next one does; of reports, after so many."""
        self.on_commit: Callable[[Open], None] = lambda _: None
        self.on_offsets: Callable[[Sequence[SourceName]], None] = lambda _: None

    # -- what goes wrong

    def fault(self, step: str, record: Record | None = None) -> Fault | None:
        """The fault of a step, if there is any; it is used up by that."""
        for fault in self.faults:
            if fault.step == step and (record is None or fault.concerns(record)):
                self.use(fault)
                return fault
        return None

    def use(self, fault: Fault) -> None:
        """It happens once more."""
        self.told.add(fault.code)
        self.unexplained += fault.topic is None
        if fault.code in RIVAL_CODES:
            self.fenced_s.append(self.clock.monotonic_s())
        if fault.times is not None:
            fault.times -= 1
            if not fault.times:
                self.faults.remove(fault)

    def inject(self, fault: Fault) -> None:
        """From now on."""
        self.faults.append(fault)
        if fault.step in ("produce", "report", "silence"):
            self.faulty_topics |= {fault.topic} if fault.topic is not None else set(self.partitions)

    def end_transients(self) -> None:
        """What was to pass has passed; what stays, stays."""
        self.faults = self.lasting()
        self.latency_ms, self.acknowledged_max = 1, None

    def lasting(self) -> list[Fault]:
        """What does not pass by itself: places, and kinds of records, that are not taken."""
        return [fault for fault in self.faults if fault.times is None and fault.topic is not None]

    # -- coordinator and partitions

    def pass_ms(self, ms: float) -> None:
        """Time passes; transactions time out."""
        self.clock.advance(max(0, round(ms)))
        now_s = self.clock.monotonic_s()
        for name, transaction in list(self.open.items()):
            if now_s - transaction.since_s > self.timeout_s:
                self.expired += 1
                self.epochs[name] += 1
                del self.open[name]

    def init(self, name: str) -> int:
        """A new epoch; what was open is aborted."""
        self.open.pop(name, None)
        self.epochs[name] = self.epochs.get(name, -1) + 1
        return self.epochs[name]

    def rival(self) -> None:
        """Another instance initialises every transactional id."""
        for name in list(self.epochs):
            self.init(name)
        self.fenced_s.append(self.clock.monotonic_s())

    def add(self, name: str) -> Open:
        """The open transaction of an id, which begins with its first record or offset."""
        if name not in self.open:
            self.open[name] = Open(name, self.clock.monotonic_s())
        return self.open[name]

    def commit(self, name: str) -> None:
        """The transaction's records and offsets are there, all at once."""
        transaction = self.open.pop(name, None) or Open(name, 0)
        self.committed += 1
        self.on_commit(transaction)
        for record in transaction.records:
            self.logs[record.topic, record.partition].append(record)
        self.offsets.update(transaction.offsets)

    def tear(self, name: str, step: str, count: int = 0) -> bool:
        """Whether the open transaction of an id is ended unasked at this step: what it has by now is committed, and
        nothing more under its epoch."""
        if self.tears_at is None or self.tears_at[0] != step or count < self.tears_at[1]:
            return False
        transaction, self.tears_at = self.add(name), None
        del self.open[name]
        self.torn.add((name, self.epochs[name]))
        for record in transaction.records:
            self.logs[record.topic, record.partition].append(record)
        self.offsets.update(transaction.offsets)
        return True

    def are_pending(self, names: Sequence[SourceName]) -> bool:
        """Whether offsets of these partitions are in an open transaction."""
        return any(name in transaction.offsets for transaction in self.open.values() for name in names)
