"""Group membership: which partitions are ours, and what Kafka holds of them.

The consumer fetches nothing (Spark reads the topics). It is a member of the group so that Kafka decides who owns a
partition, and so that the group metadata in every transaction fences an instance that lost it (KIP-447). Rules (design,
section 3, *Ownership*):

    - static membership: a restart within the session time-out moves no partition, a second instance of the same name
      fences the first
    - every assigned partition is paused at once, and assigned at the log's end, so that nothing is fetched and
      `auto.offset.reset` never asked
    - a revocation is answered only after `on_revoked` has returned, and that only after the open transaction has ended
    - assignment and group metadata are sampled together, with the number of revocations so far: a transaction planned
      before a revocation is told from one planned after it, even when the same partition came back
    - committed states are read stable: an open transaction's outcome is waited for

The thread polls without blocking and waits in between: the client serves one call at a time, and `membership()` must
not wait for a poll.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from bridge.errorlog import ErrorLog
from bridge.errors import BridgeError, EnvironmentFailure, FencedError, InternalError
from bridge.guard import Guard, Unanswered
from bridge.progress import CommittedState, decode_metadata
from timerstore.clock import Clock
from timerstore.sources import SourceName

POLL_INTERVAL_S: Final = 0.1
READ_SLICE_S: Final = 2.0
COMMIT_ATTEMPTS_MAX: Final = 5
COMMIT_TIMEOUT_S: Final = 20.0

FORCED: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",  # makes committed() wait for open transactions
    "enable.partition.eof": False,
}
"""What the rules above rest on; wins over any given configuration."""

FENCED_CODES: Final = frozenset(
    {
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.UNRELEASED_INSTANCE_ID,
        KafkaError.PRODUCER_FENCED,
        KafkaError._FENCED,
    }
)
_DENIED_CODES: Final = frozenset(
    {
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,
    }
)

log = structlog.get_logger("bridge.ownership")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Owned partitions, the group metadata that proves it, and how many revocations there were before (all of one
    moment).
    """

    partitions: frozenset[SourceName]
    revocations: int
    metadata: object


class OwnershipListener(Protocol):
    """Called on the membership's thread; everything but `on_revoked` must return quickly."""

    def on_assigned(self, partitions: frozenset[SourceName]) -> None:
        """The full assignment after partitions were added."""
        ...

    def on_revoked(self, partitions: frozenset[SourceName], *, lost: bool) -> None:
        """`partitions` are taken from us, or are somebody else's already (`lost`). Returns only when no transaction is
        open.
        """
        ...

    def on_fatal(self, error: BridgeError) -> None:
        """Membership has ended and does not come back."""
        ...


class Ownership:
    """The bridge's membership in its consumer group. All methods may be called from any thread."""

    def __init__(
        self,
        *,
        config: Mapping[str, Any],
        group_id: str,
        instance_id: str,
        topics: Collection[str],
        listener: OwnershipListener,
        clock: Clock,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """`config` are librdkafka properties of a consumer (connection, security, session time-out, assignment
        strategy).
        """
        self._topics = sorted(topics)
        self._listener = listener
        self._clock = clock
        self._poll_interval_s = poll_interval_s
        self._config = {
            "partition.assignment.strategy": "cooperative-sticky",
            **config,
            "group.id": group_id,
            "group.instance.id": instance_id,
            **FORCED,
        }
        if self._config.get("group.protocol") == "consumer":
            del self._config["partition.assignment.strategy"]
            self._cooperative = True
        else:
            self._cooperative = "cooperative" in str(self._config["partition.assignment.strategy"])
        self._trouble = ErrorLog("bridge.ownership", "group-membership-trouble", clock)
        self._lock = threading.Lock()
        self._partitions: frozenset[SourceName] = frozenset()
        self._revocations = 0
        self._stop = threading.Event()
        self._failure: BridgeError | None = None
        self._consumer: Consumer | None = None
        self._thread: threading.Thread | None = None

    # -- life

    def start(self) -> None:
        """Join the group; returns at once, `on_assigned` follows. Raises EnvironmentFailure when the client refuses its
        settings.
        """
        try:
            self._consumer = Consumer(
                {**self._config, "error_cb": self._on_error, "logger": logging.getLogger("bridge.librdkafka")}
            )
            self._consumer.subscribe(
                self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
        except KafkaException as error:
            raise EnvironmentFailure(
                "the group's consumer cannot be made",
                hint="Look at kafka.common and kafka.consumer.",
                reason=_text(error),
            ) from error
        self._thread = threading.Thread(target=self._run, name="ownership", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Leave the poll loop and close the consumer. A static member stays in the group until its session times out,
        so that a restart finds its partitions. The dispatcher must have stopped before: no callback is made from here
        on.
        """
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                log.warning("ownership-stop-timeout", timeout_s=timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Pause the calling thread, unless this is being stopped."""
        self._stop.wait(timeout_s)

    # -- what is ours

    def assignment(self) -> frozenset[SourceName]:
        """Owned partitions."""
        with self._lock:
            return self._partitions

    def membership(self) -> Membership:
        """Owned partitions together with the group metadata that a transaction must carry."""
        with self._lock:
            try:
                metadata = self._client().consumer_group_metadata()
            except RuntimeError as closed:
                raise self._gone() from closed
            return Membership(partitions=self._partitions, revocations=self._revocations, metadata=metadata)

    def group_metadata(self) -> object:
        """The group metadata alone."""
        return self.membership().metadata

    # -- committed states

    def read_committed_states(
        self, partitions: Collection[SourceName], timeout_s: float = 30.0
    ) -> dict[SourceName, CommittedState | None]:
        """What Kafka holds of `partitions`; None where there is no commit.

        Waits while a transaction that carries one of the offsets is open (it ends within its transaction time-out).
        Raises StateError for a commit that is not the bridge's, EnvironmentFailure after `timeout_s`.
        """
        if not partitions:
            return {}
        wanted = [TopicPartition(topic, partition) for topic, partition in sorted(partitions)]
        deadline = self._clock.monotonic_s() + timeout_s
        while True:
            left = deadline - self._clock.monotonic_s()
            try:
                answers = self._client().committed(wanted, timeout=max(0.1, min(READ_SLICE_S, left)))
                error = next((answer.error for answer in answers if answer.error is not None), None)
            except KafkaException as exception:
                error = kafka_error(exception)
            except RuntimeError as closed:
                raise self._gone() from closed
            if error is None:
                return {(a.topic, a.partition): _state_of(a) for a in answers}
            if is_fenced(error):
                raise fenced(error)
            if error.code() in _DENIED_CODES or is_fatal(error) or left <= 0 or self._stop.is_set():
                raise EnvironmentFailure(
                    "the committed offsets cannot be read",
                    hint=_hint(error),
                    reason=error.str(),
                    waited_s=timeout_s,
                ) from None
            self._stop.wait(0.1)

    def commit_states(self, states: Mapping[SourceName, CommittedState]) -> None:
        """Commit states outside of a transaction: first use. As `commit_offsets`."""
        self.commit_offsets(
            [TopicPartition(*name, state.offset, state.metadata()) for name, state in sorted(states.items())]
        )

    def commit_offsets(self, offsets: Sequence[TopicPartition]) -> None:
        """Commit outside of a transaction, as a member of the group. One request, which the broker stores as a whole.

        Raises FencedError when we are no member any more, EnvironmentFailure when it cannot be done; after the latter
        it may have happened.
        """
        guard = Guard("consumer-commit")
        try:
            guard.call(lambda: self._commit_offsets(list(offsets)), COMMIT_TIMEOUT_S)
        except Unanswered as unanswered:
            raise EnvironmentFailure(
                "the offsets cannot be committed",
                hint="Check that the brokers are reachable and that the group's coordinator answers.",
                reason=str(unanswered),
            ) from None
        finally:
            guard.close()

    def _commit_offsets(self, offsets: list[TopicPartition]) -> None:
        for attempt in range(1, COMMIT_ATTEMPTS_MAX + 1):
            try:
                answers = self._client().commit(offsets=offsets, asynchronous=False)
                error = next((answer.error for answer in answers if answer.error is not None), None)
            except KafkaException as exception:
                error = kafka_error(exception)
            except RuntimeError as closed:
                raise self._gone() from closed
            if error is None:
                return
            if is_fenced(error):
                raise fenced(error)
            if attempt == COMMIT_ATTEMPTS_MAX or is_fatal(error) or not _passing(error):
                raise EnvironmentFailure(
                    "the offsets cannot be committed", hint=_hint(error), reason=error.str(), attempts=attempt
                )
            self._stop.wait(0.1 * attempt)

    # -- the thread

    def _run(self) -> None:
        consumer = self._client()
        try:
            while not self._stop.is_set():
                message = consumer.poll(0)
                error = None if message is None else message.error()
                if error is not None:
                    self._judge(error)
                # A record can only come from a fetch that was sent between assign and pause. Spark reads it too.
                if message is None:
                    self._stop.wait(self._poll_interval_s)
        except BridgeError as failure:
            self._fail(failure)
        except KafkaException as exception:
            reason = kafka_error(exception)
            self._fail(fenced(reason) if is_fenced(reason) else _ended(reason))
        except Exception as exception:  # noqa: BLE001 - the application must know that nobody polls any more
            bug = InternalError("group membership failed", hint="Please report this.", reason=repr(exception))
            bug.__cause__ = exception
            self._fail(bug)
        finally:
            self._stop.set()
            self._set(frozenset(), revoked=True)
            self._consumer = None
            consumer.close()

    def _on_error(self, error: KafkaError) -> None:
        """Errors of the client itself; called from poll."""
        self._judge(error)

    def _judge(self, error: KafkaError) -> None:
        if is_fenced(error):
            raise fenced(error)
        if is_fatal(error) or error.code() in _DENIED_CODES:
            raise _ended(error)
        self._trouble.warn(error)

    def _fail(self, error: BridgeError) -> None:
        if self._failure is None:
            self._failure = error
            # Before the application hears of it: no further transaction can be planned with what we believed to own.
            self._set(frozenset(), revoked=True)
            self._listener.on_fatal(error)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        added = [TopicPartition(p.topic, p.partition, OFFSET_END) for p in partitions]
        names = frozenset((p.topic, p.partition) for p in partitions)
        if self._cooperative:
            consumer.incremental_assign(added)
            everything = self.assignment() | names
        else:
            consumer.assign(added)
            everything = names
        if added:
            consumer.pause(added)
        self._set(everything, revoked=False)
        log.info("partitions-assigned", added=len(names), owned=len(everything))
        self._listener.on_assigned(everything)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._give_up(consumer, partitions, lost=False)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._give_up(consumer, partitions, lost=True)

    def _give_up(self, consumer: Consumer, partitions: list[TopicPartition], *, lost: bool) -> None:
        names = frozenset((p.topic, p.partition) for p in partitions)
        if not self._stop.is_set():
            log.info("partitions-revoked", count=len(names), lost=lost)
            if lost:
                # They may be somebody else's already: a transaction that is open now must not be committed.
                self._set(self.assignment() - names, revoked=True)
            self._listener.on_revoked(names, lost=lost)
        self._set(self.assignment() - names, revoked=True)
        if self._cooperative:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()

    def _set(self, partitions: frozenset[SourceName], *, revoked: bool) -> None:
        with self._lock:
            self._partitions = partitions
            self._revocations += revoked

    def _client(self) -> Consumer:
        if self._consumer is None:
            raise self._gone()
        return self._consumer

    def _gone(self) -> BridgeError:
        """Why there is no consumer."""
        return self._failure or EnvironmentFailure("group membership has ended", hint="The bridge is stopping.")


def is_fatal(error: KafkaError) -> bool:
    """Whether the client is of no use after this error."""
    return error.fatal() or error.code() == KafkaError._FATAL


def is_fenced(error: KafkaError) -> bool:
    """Whether somebody else has our name now. A callback gets the error wrapped, with the cause in words."""
    if error.code() == KafkaError._FATAL:
        return any(KafkaError(code).str() in error.str() for code in FENCED_CODES)
    return error.code() in FENCED_CODES


def fenced(error: KafkaError) -> FencedError:
    """What to tell the operator when Kafka says that the name is somebody else's now."""
    return FencedError(
        "another instance of the same name took over",
        hint="If that was not meant: give every instance its own bridge.instance.",
        reason=error.str(),
    )


def kafka_error(exception: KafkaException) -> KafkaError:
    """The error inside of a client's exception."""
    inner = exception.args[0] if exception.args else None
    return inner if isinstance(inner, KafkaError) else KafkaError(KafkaError._FAIL, str(exception))


def _text(exception: KafkaException) -> str:
    return kafka_error(exception).str()


def _ended(error: KafkaError) -> EnvironmentFailure:
    return EnvironmentFailure("group membership has ended", hint=_hint(error), reason=error.str(), code=error.name())


def _passing(error: KafkaError) -> bool:
    """Whether a repetition may succeed. A rebalance is none of these: the assignment must be looked at anew."""
    return error.retriable() or error.code() in {
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._WAIT_COORD,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.REQUEST_TIMED_OUT,
    }


def _hint(error: KafkaError) -> str:
    if error.code() in _DENIED_CODES:
        return "Grant the bridge READ on its group and delay topics, and check its credentials."
    if error.code() == KafkaError.UNSTABLE_OFFSET_COMMIT:
        return "A transaction of this bridge id is still open; it ends with its transaction time-out, then start again."
    return "Check that the brokers are reachable and that the group's coordinator answers."


def _state_of(answer: TopicPartition) -> CommittedState | None:
    if answer.offset < 0:
        return None
    return decode_metadata((answer.topic, answer.partition), answer.offset, answer.metadata)
