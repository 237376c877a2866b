"""Lost transaction markers: the end of a transaction that brokers have lost is written again (KAFKA-20734).

A coordinator that is lost between the decision on a transaction and its end leaves the end to its successor. In Kafka
4.3.0 to 4.4.0 the successor passes over partitions without a leader, and after a power failure no partition has one for
a moment. It calls such a transaction complete, but its offsets stay pending: a bridge that asks for stable offsets (at
its start, or without an answer to a commit) waits without end, and readers of the delay topic stop before its records.

The end of a transaction covers everything that its producer has open in a partition. So another transaction under the
same id, in the same partitions, ends the one before as well, if it has the same outcome. Only the coordinator knows
that outcome, and only until the id is initialised again. It is asked before that, if any offsets are pending:

    facts                                                action
    no offsets are pending                               none
    the last transaction was committed                   another one is committed
    it was aborted                                       another one is aborted
    it is open (its process was killed)                  the initialisation aborts it; another one is aborted if offsets
                                                         are pending even then
    there is no answer                                   the id is not initialised; the coordinator is asked again
    the coordinator has forgotten (a start that failed)  no guess: if offsets stay pending, the process ends
                                                         (`explain`), and an operator chooses (resolve.py)

Such a transaction commits an offset of a partition that the group does not read (dead letters; the broker removes it
after `offsets.retention.minutes`). Its records are cancels without a target.

An abort in place of a commit would take the one before back: hence the transaction waits until every partition has a
leader, and a call without an answer is repeated. Its offsets go first: without them it would take back copies of
messages that count as finished later. With them nothing is lost; messages are delivered again.

This module goes once docs/brokers.md names no release with the fault. With it go resolve.py, the order of
transactional_ids.py that it explains, bridge/spark/transactions.py and the calls of `MarkerRepair`. The initialisation
of every id then ends the open transaction of a killed process, without a question.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from enum import Enum
from functools import partial
from typing import Final

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    AclOperation,
    AdminClient,
)

from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.construction import CLIENT_LOG
from bridge.kafka.errors import is_unreadable, kafka_error
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings
from bridge.wire.commands import cancel_headers

PENDING_S: Final = 1.0
"""The longest normal time of pending offsets, after which the reason is looked for: a commit takes milliseconds."""
ANSWER_S: Final = 5.0
"""The longest wait for any answer of the group's coordinator, connections included: a busy broker needs seconds."""
SOON_S: Final = 0.25
"""The wait for an answer before the question about open transactions; after most kills there is one."""
LOOKS: Final[Mapping[str, object]] = {"retry.backoff.ms": 5, "retry.backoff.max.ms": 10}
"""Intervals between looks. A busy bridge has pending offsets most of the time, but not of one transaction: between two
of them there are some milliseconds without any."""
ASK_S: Final = 2.0
ANSWERS_S: Final = 60.0
"""The longest wait for the outcomes of all ids: a slow machine needs half a minute for the first of them."""
CALL_S: Final = 10.0

log = structlog.get_logger("bridge.delivery.producer.transaction_markers")

States = Callable[[Sequence[str]], Mapping[str, str | None]]
"""Maps transactional ids to their states, as their coordinators know them (bridge/spark/transactions.py)."""


class Outcome(Enum):
    COMMITTED = "committed"
    ABORTED = "aborted"


DECIDED: Final[Mapping[str, Outcome]] = {
    "PrepareCommit": Outcome.COMMITTED,
    "CompleteCommit": Outcome.COMMITTED,
    "PrepareAbort": Outcome.ABORTED,
    "CompleteAbort": Outcome.ABORTED,
    "PrepareEpochFence": Outcome.ABORTED,
}
"""The outcome of an id's last transaction according to the id's state. Other states (`Empty`) tell nothing."""
OPEN: Final = "Ongoing"


class MarkerRepair:
    """See the module. Its methods are for any thread."""

    def __init__(
        self, settings: Settings, ask: States, forgotten_as: Outcome | None = None, answers_s: float = ANSWERS_S
    ) -> None:
        """`forgotten_as`: an operator's choice for transactions that their coordinators have forgotten; `explain` waits
        up to `answers_s` for outcomes."""
        self._settings = settings
        self._ask = ask
        self._forgotten_as = forgotten_as
        self._answers_s = answers_s
        self._changed = threading.Condition()
        self._unrepaired: set[str] = set()
        """Ids that await a question, their initialisation, or another end."""
        self._forgotten: set[str] = set()

    def left_open(self, names: Sequence[str]) -> str | None:
        """The id, of these, with an open transaction of a killed process, if any: its pending offsets hide losses of
        the other ids. None of the ids is initialised yet. The initialisation aborts the transaction; the next one under
        that id must be aborted, too, if offsets are pending even then. Raises KafkaException without an answer."""
        if not are_offsets_pending(self._settings, SOON_S):
            return None
        open_id = next((name for name, state in self._ask(names).items() if state == OPEN), None)
        if open_id is not None:
            self._unrepaired.add(open_id)
        return open_id

    def outcome_of(self, name: str, known: Outcome | None = None) -> Outcome | None:
        """The present or future outcome of that id's last transaction, if its end may have to be written again;
        `known`: the coordinator's earlier answer. The id is not initialised yet. Raises KafkaException without an
        answer, EnvironmentFailure if brokers would refuse `write`."""
        self._unrepaired.add(name)
        if not are_offsets_pending(self._settings, SOON_S):
            self._forgotten.clear()
            return None
        if known is not None:
            return known
        state = self._ask([name])[name]
        if state == OPEN:
            return Outcome.ABORTED
        if not are_offsets_pending(self._settings):
            self._forgotten.clear()
            return None
        self._must_be_allowed()
        # An id that its coordinator does not know gets a new producer, which cannot end open transactions of an earlier
        # one.
        outcome = None if state is None else DECIDED.get(state, self._forgotten_as)
        log.warning("offsets-pending", id=name, state=state, to_be=None if outcome is None else outcome.value)
        if outcome is None:
            self._forgotten.add(name)
            self._settle(name)
        return outcome

    def concluded(self, name: str) -> None:
        """The id is initialised, so its last transaction has ended, or never will. Until then, pending offsets may be
        its own."""
        self._settle(name)

    def _settle(self, name: str) -> None:
        with self._changed:
            self._unrepaired.discard(name)
            self._changed.notify_all()

    def explain(self) -> StateError | None:
        """Why offsets stay pending for longer than the longest transaction: the outcome of one is unknown. None: for
        another reason, or one that may pass. Waits for questions and repairs under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unrepaired, self._answers_s)
        try:
            is_known = self._unrepaired or not self._forgotten or not are_offsets_pending(self._settings)
        except KafkaException:
            return None
        if is_known:
            return None
        return StateError(
            "the brokers have lost the end of a transaction, and have forgotten whether it was committed",
            hint="If another instance is down, start it first: the transaction may be its own. Else stop this one and "
            "choose: `delay-bridge resolve --as aborted` may deliver messages twice, `--as committed` may lose some.",
            ids=", ".join(sorted(self._forgotten)),
            code="DB-4007",
        )

    def _must_be_allowed(self) -> None:
        """Make sure of the rights: a refusal of offsets in the middle of `write` would abort a transaction to
        commit."""
        topic = self._unread()
        admin = _admin(self._settings)  # kept: a deleted client would not answer
        answers = admin.describe_topics(
            TopicCollection([topic]), include_authorized_operations=True, request_timeout=ASK_S
        )
        try:
            allowed = answers[topic].result().authorized_operations or [AclOperation.READ]  # not all brokers tell
        except KafkaException as exception:
            if not is_unreadable(kafka_error(exception)):
                raise
            allowed = []
        if AclOperation.READ not in allowed:
            raise EnvironmentFailure(
                "brokers have lost the end of a transaction, and this client has no right to write it again",
                hint="Make this topic, or grant Read on it, and start again. Nothing is lost or doubled until then.",
                topic=topic,
                code="DB-3004",
            )

    def _unread(self) -> str:
        """A topic whose offsets the group never reads."""
        return self._settings.dead_letter_topic(next(iter(self._settings.delay_topics)))

    def write(
        self, name: str, producer: Producer, outcome: Outcome, on_repeat: Callable[[], None] = lambda: None
    ) -> None:
        """End the last transaction of that id again, if offsets are still pending; the producer is initialised.
        `on_repeat` is called before a call is repeated. Raises KafkaException, after which the producer is useless;
        EnvironmentFailure if brokers would refuse the write."""
        if not are_offsets_pending(self._settings):
            self._settle(name)
            return
        self._must_be_allowed()
        places = _partitions(self._settings, must_be_led=True)
        with closing(_consumer(self._settings)) as consumer:
            metadata = consumer.consumer_group_metadata()
        offsets = [TopicPartition(self._unread(), 0, 0)]
        nothing: list[tuple[str, str | bytes | None]] = list(cancel_headers(f"unused-{uuid.uuid4()}", forwarded=name))
        producer.begin_transaction()
        _repeated(partial(producer.send_offsets_to_transaction, offsets, metadata, CALL_S), on_repeat)
        for topic, partition in places:
            producer.produce(topic, None, key=name, headers=nothing, partition=partition)
        end = producer.commit_transaction if outcome is Outcome.COMMITTED else producer.abort_transaction
        _repeated(partial(end, CALL_S), on_repeat)
        self._settle(name)
        log.info("transaction-ended-again", id=name, outcome=outcome.value)


def _repeated(call: Callable[[], object], on_repeat: Callable[[], None]) -> None:
    """Make a call, and repeat it once if allowed: the time-out aborts a longer transaction. Raises KafkaException."""
    try:
        call()
    except KafkaException as exception:
        if not kafka_error(exception).retriable():
            raise
        on_repeat()
        call()


def are_offsets_pending(settings: Settings, pending_s: float = PENDING_S) -> bool:
    """Whether offsets of the group are pending for longer than a commit takes, in any transaction. Raises
    KafkaException without an answer."""
    # A consumer is asked, since a time-out of the admin client may abort the process (an assertion, seen in 2.16). It
    # does not distinguish pending offsets from a missing answer: hence the second look, which accepts pending ones.
    # With many instances, some partition is always about to be committed: hence the third look, at each by itself.
    if settings.delivery.mode != "exactly-once":
        return False
    wanted = [TopicPartition(*place) for place in _partitions(settings)]
    with closing(_consumer(settings)) as stable:
        if _has_offsets(stable, wanted, pending_s):
            return False
        with closing(_consumer(settings, "read_uncommitted")) as any_:
            if not _has_offsets(any_, wanted, ANSWER_S):
                text = "the group's coordinator does not answer"
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, text, retriable=True))
        return not all(_has_offsets(stable, [one], pending_s) for one in wanted)


def _has_offsets(consumer: Consumer, wanted: list[TopicPartition], timeout_s: float) -> bool:
    """Whether an answer came in time."""
    try:
        consumer.committed(wanted, timeout=timeout_s)
    except KafkaException as exception:
        if kafka_error(exception).code() in (KafkaError._TIMED_OUT, KafkaError.UNSTABLE_OFFSET_COMMIT):
            return False
        raise
    return True


def _consumer(settings: Settings, isolation: str = "read_committed") -> Consumer:
    """A consumer that is no member of the group, and gets none of its partitions."""
    no_member = {"group.instance.id": "", "isolation.level": isolation}
    return Consumer({**librdkafka(settings, "consumer"), **no_member, **LOOKS}, logger=CLIENT_LOG)


def _partitions(settings: Settings, *, must_be_led: bool = False) -> list[tuple[str, int]]:
    """The partitions of the delay topics. `must_be_led`: raises KafkaException while one has no leader."""
    admin = _admin(settings)
    by_topic = {
        topic: admin.list_topics(topic, timeout=ASK_S).topics[topic].partitions for topic in settings.delay_topics
    }
    if must_be_led and any(one.leader < 0 for partitions in by_topic.values() for one in partitions.values()):
        text = "a partition of a delay topic has no leader"
        raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, text, retriable=True))
    return [(topic, partition) for topic, partitions in by_topic.items() for partition in partitions]


def _admin(settings: Settings) -> AdminClient:
    return AdminClient(librdkafka(settings, "admin"), logger=CLIENT_LOG)
