"""The time-outs of a transaction, all derived from one setting.

T is `transaction.timeout.ms` of the producer. The brokers abort an older transaction and fence its producer, so each
step of a transaction must end, or be given up, before T.

    0 ....... T/3 ......... 6T/10 ............ 9T/10 .. T                 15T/10
    take, plan, produce    |                  |         |                  |
             fill ends     the client has     all is    the brokers abort  offsets, commit and
             here          all records, or    acknow-   it                 abort are given up: the
                           give up            ledged,                      brokers have decided
                                              or give up

`CONDITIONS` hold between these times and the user's settings; `TimeBudgets.of` refuses a configuration
that breaks one, and names it. The tests assert the conditions that hold for any T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from bridge.errors import ConfigurationError

TRANSACTION_TIMEOUT_MS: Final = 10_000
"""The default of T: the open transaction of a dead instance blocks readers of its targets no longer than this."""
TRANSACTION_TIMEOUT_MS_MIN: Final = 3_000
MESSAGE_MARGIN_MS: Final = 1_000
LINGER_MS: Final = 100
"""The default of linger.ms: longer than a usual transaction, which ends with a flush. An idempotent producer of
librdkafka sends no more records to a partition with five unacknowledged ones. While records wait for that after their
linger time, the client's thread spins (seen in 2.16)."""
POLL_INTERVAL_MS: Final = 300_000
"""The default of max.poll.interval.ms."""
LOOK_UP_REQUESTS: Final = 3
ABORT_S: Final = 20.0
"""The longest time from T to the abort by the brokers, which search every 10 s
(transaction.abort.timed.out.transaction.cleanup.interval.ms)."""


class _Share:
    """A share of T; on the class itself, of one second."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __get__(self, budgets: TimeBudgets | None, _: type[TimeBudgets]) -> float:
        return self._share * (1.0 if budgets is None else budgets.transaction_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBudgets:
    """The time-outs in seconds; `transaction_s` is T."""

    transaction_s: float = TRANSACTION_TIMEOUT_MS / 1000
    message_s: float = (TRANSACTION_TIMEOUT_MS - MESSAGE_MARGIN_MS) / 1000
    """message.timeout.ms: the failure of a record is known before the transaction's time-out."""
    linger_s: float = LINGER_MS / 1000
    commit_interval_s: float = 0.04
    poll_interval_s: float = POLL_INTERVAL_MS / 1000

    fill_s = _Share(1 / 3)
    """An older transaction takes no more rows."""
    send_s = _Share(0.6)
    """Deadline for the client to accept all records; then the transaction is given up."""
    acknowledge_s = _Share(0.9)
    """Deadline for the acknowledgement of all records; then the transaction is given up."""
    full_s = _Share(0.3)
    """The longest time that the client's queue may stay full without accepting a record."""
    stalled_s = _Share(0.4)
    """Without an acknowledgement for this time, the partitions with unacknowledged records are at fault."""
    look_up_s = _Share(0.15)
    """Time-out of each of the LOOK_UP_REQUESTS for targets; a transaction may be open meanwhile."""
    call_s = _Share(0.5)
    """Time-out of one call of the client; a retriable time-out is repeated until the deadline of the whole step."""
    unanswered_s = _Share(0.6)
    """A call that ignores its time-out for this time is abandoned, with its producer."""
    step_s = _Share(1.5)
    """Time-out for sending offsets, committing, aborting: after T the brokers have decided anyway."""

    @property
    def pending_s(self) -> float:
        """The longest wait for committed offsets: no open transaction holds them back for longer."""
        return self.transaction_s + ABORT_S

    def is_timed_out(self, age_s: float) -> bool:
        """Whether the brokers may have aborted a transaction for its age."""
        return age_s >= self.acknowledge_s

    @classmethod
    def of(
        cls, producer: Mapping[str, object], *, commit_interval_ms: int, poll_interval_ms: int = POLL_INTERVAL_MS
    ) -> TimeBudgets:
        """The budgets for these producer properties. Raises ConfigurationError that names each broken condition."""
        transaction_ms = _number(producer, "transaction.timeout.ms", TRANSACTION_TIMEOUT_MS)
        message_ms = _number(producer, "message.timeout.ms", _number(producer, "delivery.timeout.ms", -1))
        linger_ms = _number(producer, "linger.ms", _number(producer, "queue.buffering.max.ms", LINGER_MS))
        budgets = cls(
            transaction_s=transaction_ms / 1000,
            message_s=(message_ms if message_ms >= 0 else max(1, transaction_ms - MESSAGE_MARGIN_MS)) / 1000,
            linger_s=linger_ms / 1000,
            commit_interval_s=commit_interval_ms / 1000,
            poll_interval_s=poll_interval_ms / 1000,
        )
        broken = [relation for relation in CONDITIONS if not relation.holds(budgets)]
        if broken:
            conditions = "; ".join(f"{relation.name}: {relation.text}" for relation in broken)
            raise ConfigurationError(
                f"settings contradict each other: {conditions}",
                hint="Correct these settings; the default of kafka.producer.transaction.timeout.ms is 10000.",
                code="DB-2027",
            )
        return budgets


USUAL: Final = TimeBudgets()


class Condition(NamedTuple):
    """A condition between settings; `text` states it with their names."""

    name: str
    text: str
    holds: Callable[[TimeBudgets], bool]


CONDITIONS: Final = (
    Condition(
        "transaction-is-long-enough",
        f"kafka.producer.transaction.timeout.ms is at least {TRANSACTION_TIMEOUT_MS_MIN}",
        lambda b: b.transaction_s * 1000 >= TRANSACTION_TIMEOUT_MS_MIN,
    ),
    Condition(
        "message-within-transaction",
        "kafka.producer.message.timeout.ms (or delivery.timeout.ms) is less than its transaction.timeout.ms, and not 0",
        lambda b: 0 < b.message_s < b.transaction_s,
    ),
    Condition(
        "linger-within-fill",
        "kafka.producer.linger.ms is at most a tenth of its transaction.timeout.ms",
        lambda b: b.linger_s <= b.transaction_s / 10 < b.fill_s,
    ),
    Condition(
        "commit-interval-within-fill",
        "delivery.commit_interval is less than a third of kafka.producer.transaction.timeout.ms",
        lambda b: b.commit_interval_s < b.fill_s,
    ),
    Condition(
        "transaction-within-poll-interval",
        "kafka.consumer.max.poll.interval.ms is at least three times kafka.producer.transaction.timeout.ms, "
        "since a partition is given back only after the end of the open transaction",
        lambda b: b.poll_interval_s >= 3 * b.transaction_s >= b.acknowledge_s + b.step_s,
    ),
)


def _number(properties: Mapping[str, object], name: str, default: int) -> int:
    value = properties.get(name)
    return default if value is None else int(float(str(value)))
