"""How long delivery may take for what: every time-out of a transaction, derived from one setting.

T is `transaction.timeout.ms` of the producer. The brokers abort what is open for longer, and fence the producer; so
whatever is done within a transaction must be over, or be given up, before that.

    0 ....... T/3 ......... 6T/10 ............ 9T/10 .. T                 15T/10
    take, plan, produce    |                  |         |                  |
             fill ends     the client has     all is    the brokers abort  offsets, commit and
             here          all records, or    acknow-   it                 abort are given up: the
                           give up            ledged,                      brokers have decided
                                              or give up

`RELATIONS` says what has to hold between these and what a user may set; `TimeBudgets.of` refuses a configuration that
breaks one, with its name. What holds between these whatever T is, the tests assert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from bridge.errors import ConfigurationError

TRANSACTION_TIMEOUT_MS: Final = 10_000
"""T unless it is set: the open transaction of a dead instance hides its targets no longer than this."""
TRANSACTION_TIMEOUT_MS_MIN: Final = 3_000
MESSAGE_MARGIN_MS: Final = 1_000
LINGER_MS: Final = 100
"""linger.ms of transactions unless it is set: longer than a usual one, which ends with a flush. An idempotent producer
of librdkafka sends no more of a partition while five of its records are not acknowledged. While one that has lingered
waits for that, the client's thread spins (seen in 2.16)."""
POLL_INTERVAL_MS: Final = 300_000
"""max.poll.interval.ms unless it is set."""
LOOK_UP_REQUESTS: Final = 3
ABORT_S: Final = 20.0
"""The brokers look every 10 s (transaction.abort.timed.out.transaction.cleanup.interval.ms) what is older than T."""


class _Share:
    """Of T; read from the class, of one second."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __get__(self, budgets: TimeBudgets | None, _: type[TimeBudgets]) -> float:
        return self._share * (1.0 if budgets is None else budgets.transaction_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBudgets:
    """Seconds; `transaction_s` is T."""

    transaction_s: float = TRANSACTION_TIMEOUT_MS / 1000
    message_s: float = (TRANSACTION_TIMEOUT_MS - MESSAGE_MARGIN_MS) / 1000
    """message.timeout.ms: a record that cannot be written is known before the transaction is over."""
    linger_s: float = LINGER_MS / 1000
    commit_interval_s: float = 0.02
    poll_interval_s: float = POLL_INTERVAL_MS / 1000

    fill_s = _Share(1 / 3)
    """Nothing is taken into a transaction that is open for longer."""
    send_s = _Share(0.6)
    """The client has taken every record by then, or the transaction is given up."""
    acknowledge_s = _Share(0.9)
    """Every record is acknowledged by then, or the transaction is given up."""
    full_s = _Share(0.3)
    """How long the client's queue may stay full without taking anything."""
    stalled_s = _Share(0.4)
    """Nothing is acknowledged for so long: the partitions that have not acknowledged are to blame."""
    look_up_s = _Share(0.15)
    """One of the LOOK_UP_REQUESTS of a look at targets; a transaction may be open meanwhile."""
    call_s = _Share(0.5)
    """One call of the client; a retriable time-out is repeated until the deadline of the whole step."""
    unanswered_s = _Share(0.6)
    """When a call that ignores its time-out is left behind, with the producer."""
    step_s = _Share(1.5)
    """Sending offsets, committing, aborting: after T the brokers have decided anyway."""

    @property
    def pending_s(self) -> float:
        """Committed offsets are waited for so long: nothing that is just open holds them back for longer."""
        return self.transaction_s + ABORT_S

    def is_timed_out(self, age_s: float) -> bool:
        """Whether the brokers may have aborted a transaction for its age."""
        return age_s >= self.acknowledge_s

    @classmethod
    def of(
        cls, producer: Mapping[str, object], *, commit_interval_ms: int, poll_interval_ms: int = POLL_INTERVAL_MS
    ) -> TimeBudgets:
        """The budgets under these producer properties. Raises ConfigurationError with the name of each relation that
        they break.
        """
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
        broken = [relation for relation in RELATIONS if not relation.holds(budgets)]
        if broken:
            found = "; ".join(f"{relation.name}: {relation.text}" for relation in broken)
            raise ConfigurationError(
                f"settings contradict each other: {found}",
                hint="Correct these settings; kafka.producer.transaction.timeout.ms is 10000 unless it is set.",
                code="DB-2027",
            )
        return budgets


USUAL: Final = TimeBudgets()


class Relation(NamedTuple):
    """`text` says with the names of settings what has to hold."""

    name: str
    text: str
    holds: Callable[[TimeBudgets], bool]


RELATIONS: Final = (
    Relation(
        "transaction-is-long-enough",
        f"kafka.producer.transaction.timeout.ms is at least {TRANSACTION_TIMEOUT_MS_MIN}",
        lambda b: b.transaction_s * 1000 >= TRANSACTION_TIMEOUT_MS_MIN,
    ),
    Relation(
        "message-within-transaction",
        "kafka.producer.message.timeout.ms (or delivery.timeout.ms) is less than its transaction.timeout.ms, and not 0",
        lambda b: 0 < b.message_s < b.transaction_s,
    ),
    Relation(
        "linger-within-fill",
        "kafka.producer.linger.ms is at most a tenth of its transaction.timeout.ms",
        lambda b: b.linger_s <= b.transaction_s / 10 < b.fill_s,
    ),
    Relation(
        "commit-interval-within-fill",
        "delivery.commit_interval is less than a third of kafka.producer.transaction.timeout.ms",
        lambda b: b.commit_interval_s < b.fill_s,
    ),
    Relation(
        "transaction-within-poll-interval",
        "kafka.consumer.max.poll.interval.ms is at least three times kafka.producer.transaction.timeout.ms, "
        "since a partition is given back only when the open transaction has ended",
        lambda b: b.poll_interval_s >= 3 * b.transaction_s >= b.acknowledge_s + b.step_s,
    ),
)


def _number(properties: Mapping[str, object], name: str, default: int) -> int:
    value = properties.get(name)
    return default if value is None else int(float(str(value)))
