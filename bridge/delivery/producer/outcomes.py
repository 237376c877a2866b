"""The outcomes of a transaction, as exceptions:

    (none)        committed
    Aborted       no part of it will be visible once `abort` has returned; the producer goes on
    Broken        the producer is lost: fenced, or unable to abort. Only a requested commit may be made
    Indefinite    a commit was requested without an answer: only the committed offsets can tell
    EndedUnasked  it had ended before: part of it may be visible, and the committed offsets do not tell which part

They follow from the client's documentation and from experiments. An exception out of `produce` is never swallowed: the
transaction would commit without the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Self

from confluent_kafka import KafkaError

from bridge.kafka.errors import Fault, Meaning, Refusal, is_fenced, meaning_of
from bridge.wire.reasons import RejectReason


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a record, or a call, failed; `error` is the client's or a broker's, if any."""

    meaning: Meaning
    detail: str
    error: KafkaError | None = None

    @classmethod
    def of(cls, error: KafkaError) -> Self:
        return cls(meaning_of(error), error.str(), error)

    @property
    def code(self) -> str | None:
        return None if self.error is None else self.error.name()

    @property
    def fault(self) -> Fault:
        return self.meaning.fault

    @property
    def refusal(self) -> Refusal:
        """Why a message stays undelivered after this."""
        return Refusal(self.meaning.reason, self.detail)


UNANSWERED: Final = Meaning(Fault.PARTITION, RejectReason.TARGET_UNAVAILABLE)
INEXPRESSIBLE: Final = Meaning(Fault.RECORD)
NO_ANSWER: Final = Meaning(Fault.BROKERS, passes=True)
NO_PRODUCER: Final = Failure(Meaning(Fault.UNKNOWN), "there is no producer")


class Cause(Enum):
    """Why a transaction is given up. `narrowing.REMEDIES` has the needs of the next attempt after each cause."""

    REFUSED = "refused"
    """The client or a broker has refused a record or a call."""
    BROKERS_BUSY = "brokers busy"
    """Brokers or the group are temporarily busy."""
    UNACKNOWLEDGED = "unacknowledged"
    """Some records were not acknowledged although there was time."""
    TOO_SLOW = "too slow"
    """It would be open for too long."""
    QUEUE_FULL = "queue full"
    """The client's queue stayed full."""
    TARGETS_WORSE = "targets worse"
    """Targets take less than at the time of the plan."""
    CLOCK_SET_BACK = "clock set back"
    """Its records are not due any more (invariant I4)."""
    PRODUCER_LOST = "producer lost"
    COMMIT_NOT_MADE = "commit not made"


COMMIT_NOT_MADE: Final = Failure(Meaning(Fault.BROKERS), "the commit was not made")


@dataclass(frozen=True, slots=True)
class FailedRecord:
    """A failed record and its destination; `partition` is -1 if unknown."""

    topic: str
    partition: int
    failure: Failure


@dataclass(eq=False)
class Aborted(Exception):
    """The transaction must be given up. `failed` are the failed rows, by number within the transaction; `was_alone`:
    the failed record was sent by itself, so no other can be the reason."""

    cause: Cause
    failure: Failure
    failed: Mapping[int, FailedRecord] = field(default_factory=dict)
    was_alone: bool = False

    @classmethod
    def by(cls, failure: Failure, failed: Mapping[int, FailedRecord], *, was_alone: bool = False) -> Self:
        passes = failure.fault in (Fault.BROKERS, Fault.GROUP)
        return cls(Cause.BROKERS_BUSY if passes else Cause.REFUSED, failure, dict(failed), was_alone)


@dataclass(eq=False)
class NotReady(Exception):
    """There is no producer yet; there may be one later."""

    failure: Failure


@dataclass(eq=False)
class Broken(Exception):
    """The producer cannot go on. `fenced_itself`: its own initialisation has arrived late."""

    failure: Failure
    fenced_itself: bool = False

    @property
    def fenced_by(self) -> KafkaError | None:
        """A broker's error which says that another producer has this one's name."""
        error = self.failure.error
        return error if error is not None and not self.fenced_itself and is_fenced(error) else None


class Indefinite(Broken):
    """No answer to a commit."""


class EndedUnasked(Broken):
    """The transaction had ended before this client requested its end (`INVALID_TXN_STATE`). A late end of an earlier
    transaction commits or aborts half of this one: some rows may be visible, and the committed offsets do not tell
    which. Each row is looked up in its target before it is produced or skipped."""


class Incident(Enum):
    """A writer's news for its observer, from any thread, for the metrics."""

    END_IN_DOUBT = "end in doubt"
    """A request of a transaction may have been sent more than once."""
    ID_RENEWED = "id renewed"
    """A transactional id has a new epoch: because of such a request, after a failure, or after it was left."""
    DELIVERY_WAITED = "delivery waited"
    """No id was ready: the next transaction waits for the first one."""
    ENDED_UNASKED = "ended unasked"
    """A transaction had ended before the request for its end."""


OnIncident = Callable[[Incident], None]


TARGETS_WORSE: Final = Failure(UNANSWERED, "a target takes nothing any more")
OnStall = Callable[[float], bool]
"""Called with the seconds without progress. Returns whether targets take less than before: then waiting is useless."""
