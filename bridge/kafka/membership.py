"""Group membership: the owned partitions and their committed states.

The consumer fetches nothing (Spark reads the topics). As a member of the group it gets an assignment, and its group
metadata in every transaction fences an instance that has lost its partitions (KIP-447). The rules:

    - membership is static: a restart within the session time-out moves no partition, and a second instance of the same
      name fences the first. A member that comes back after its time-out may be fenced as well; the process starts anew
    - every assigned partition is paused at once, and assigned at the log's end: nothing is fetched, and
      `auto.offset.reset` never applies
    - a revocation is answered only after `on_revoked` has returned, which waits for the end of the open transaction
    - assignment and group metadata are sampled together, with the number of revocations: this tells a transaction
      planned before a revocation from one planned after it, even when the same partition came back
    - committed states are stable: a reader waits for the outcome of an open transaction

One thread polls the client and makes all other calls to it (calls.py has the reason). The group metadata is sampled
between two polls: the call waits for the end of a poll, and a poll may contain a revocation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from bridge.errors import BridgeError, EnvironmentFailure, InternalError, StateError
from bridge.kafka.calls import CallRefused, OwnerThreadCalls, Unanswered
from bridge.kafka.construction import CLIENT_LOG, made
from bridge.kafka.error_log import ErrorLog
from bridge.kafka.errors import fenced, is_denied, is_fatal, is_fenced, kafka_error, may_pass
from bridge.settings.time_budgets import USUAL
from bridge.stores.names import SourceName
from bridge.telemetry.heartbeats import Beat, unwatched
from bridge.wire.committed_state import CommittedState, decode_metadata
from timerstore.clock import Clock

POLL_INTERVAL_S: Final = 0.1
READ_SLICE_S: Final = 2.0
COMMIT_ATTEMPTS_MAX: Final = 5
COMMIT_TIMEOUT_S: Final = 20.0
CALLBACK_S: Final = 1.0
"""The longest wait of a call for the polling thread."""
REVOCATION_POLL_S: Final = 0.01

FORCED: Final[Mapping[str, Any]] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",  # makes committed() wait for open transactions
    "enable.partition.eof": False,
}
"""Properties that the rules above require; they override any given configuration."""

log = structlog.get_logger("bridge.kafka.membership")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Owned partitions, the group metadata that proves the ownership, and the number of revocations before; all of the
    same moment.
    """

    partitions: frozenset[SourceName]
    revocations: int
    metadata: object


class OwnershipListener(Protocol):
    """Callbacks of the membership's thread, which must return quickly. `on_revoked` has a separate thread, for which
    the membership waits.
    """

    def on_assigned(self, partitions: frozenset[SourceName]) -> None:
        """The full assignment after a change; empty without partitions. `membership` already returns it."""
        ...

    def on_revoked(self, partitions: frozenset[SourceName], *, lost: bool, revocations: int) -> None:
        """`partitions` are taken from this instance, or already belong to another member (`lost`). Returns once no open
        transaction carries them. `revocations` is the number in `Membership` that includes this revocation.
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
        beat: Beat = unwatched,
        pending_s: float = USUAL.pending_s,
        explain: Callable[[], BridgeError | None] = lambda: None,
    ) -> None:
        """`config` are librdkafka properties of a consumer (connection, security, session time-out, assignment
        strategy). `pending_s` is the longest wait for committed offsets; then `explain` may return the reason.
        """
        self._pending_s = pending_s
        self._explain = explain
        self._topics = sorted(topics)
        self._listener = listener
        self._clock = clock
        self._poll_interval_s = poll_interval_s
        self._beat = beat
        self._config = {
            "partition.assignment.strategy": "cooperative-sticky",
            **config,
            "group.id": group_id,
            "group.instance.id": instance_id,
            **FORCED,
        }
        self._cooperative = "cooperative" in str(self._config["partition.assignment.strategy"])
        self._trouble = ErrorLog("bridge.kafka.membership", "group-membership-trouble", clock)
        self._mailbox = OwnerThreadCalls()
        self._lock = threading.Lock()
        self._partitions: frozenset[SourceName] = frozenset()
        self._revocations = 0
        self._metadata: object = None
        # Used by the polling thread only: the last assignment from Kafka, and the last report to the listener.
        self._owned: frozenset[SourceName] = frozenset()
        self._is_lost = False
        """Partitions were lost, and none were assigned since."""
        self._reported: tuple[frozenset[SourceName], int] = (frozenset(), 0)
        self._stop = threading.Event()
        self._failure: BridgeError | None = None
        self._consumer: Consumer | None = None
        self._thread: threading.Thread | None = None

    # -- life

    def start(self) -> None:
        """Join the group. Returns at once; `on_assigned` follows. Raises EnvironmentFailure if the client refuses its
        settings.
        """
        self._consumer = made("the group's member", self._member)
        self._thread = threading.Thread(target=self._run, name="ownership", daemon=True)
        self._thread.start()

    def _member(self) -> Consumer:
        consumer = Consumer({**self._config, "error_cb": self._judge, "logger": CLIENT_LOG})
        revoked, lost = (partial(self._give_up, lost=is_lost) for is_lost in (False, True))
        consumer.subscribe(self._topics, on_assign=self._on_assign, on_revoke=revoked, on_lost=lost)
        return consumer

    def stop(self, timeout_s: float = 10.0) -> None:
        """Leave the poll loop and close the consumer. A static member stays in the group until its session times out,
        so a restart gets the same partitions. Stop the dispatcher first: no callback is made from here on.
        """
        self._stop.set()
        self._mailbox.wake()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                log.warning("ownership-stop-timeout", timeout_s=timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Pause the calling thread, unless the membership is stopping."""
        self._stop.wait(timeout_s)

    # -- the assignment

    def assignment(self) -> frozenset[SourceName]:
        with self._lock:
            return self._partitions

    def membership(self) -> Membership:
        """Owned partitions with the group metadata for a transaction. Never waits for the client.

        Raises the error that ended the membership.
        """
        if self._failure is not None:
            raise self._failure
        with self._lock:
            return Membership(partitions=self._partitions, revocations=self._revocations, metadata=self._metadata)

    # -- committed states

    def read_committed_states(
        self,
        partitions: Collection[SourceName],
        timeout_s: float | None = None,
        strict: Collection[SourceName] | None = None,
    ) -> dict[SourceName, CommittedState | None]:
        """The committed states of `partitions`; None without a commit. Commits of other programs are left out, except
        for `strict` partitions (None: all).

        Waits for an open transaction that carries one of the offsets; it ends within its transaction time-out. Raises
        StateError for another program's commit of a strict partition, and EnvironmentFailure after `timeout_s`. Without
        `timeout_s` the error comes from `explain`, which may take long; a shorter wait proves no open transaction.
        """
        is_patient, timeout_s = timeout_s is None, self._pending_s if timeout_s is None else timeout_s
        if not partitions:
            return {}
        wanted = [TopicPartition(topic, partition) for topic, partition in sorted(partitions)]
        deadline = self._clock.monotonic_s() + timeout_s
        while True:
            left = deadline - self._clock.monotonic_s()
            slice_s = max(0.1, min(READ_SLICE_S, left))
            try:
                answers = self._mailbox.call(partial(self._committed, wanted, slice_s), 2 * slice_s + CALLBACK_S)
                error = next((answer.error for answer in answers if answer.error is not None), None)
            except KafkaException as exception:
                error = kafka_error(exception)
            except Unanswered as unanswered:
                error = KafkaError(KafkaError._TIMED_OUT, str(unanswered))
            except CallRefused:
                raise self._gone() from None
            if error is None:
                return _states_of(answers, partitions if strict is None else strict)
            if is_fenced(error):
                raise fenced(error)
            if left <= 0 and is_patient and not self._stop.is_set():
                reason = self._explain()
                if reason is not None:
                    raise reason
                # The explanation waits for repairs, which end open transactions: one more attempt.
                is_patient, deadline = False, self._clock.monotonic_s() + READ_SLICE_S
                continue
            if _is_refused(error) or is_fatal(error) or left <= 0 or self._stop.is_set():
                raise EnvironmentFailure(
                    "cannot read the committed offsets",
                    hint=_hint(error),
                    reason=error.str(),
                    waited_s=timeout_s,
                    code="DB-3007",
                )
            self._stop.wait(0.1)

    def _committed(self, partitions: list[TopicPartition], timeout_s: float) -> list[TopicPartition]:
        return self._client().committed(partitions, timeout=timeout_s)

    def commit_states(self, states: Mapping[SourceName, CommittedState], owned: frozenset[SourceName]) -> bool:
        """Commit the first states, outside a transaction. Commits nothing if the assignment is no longer exactly
        `owned` (another instance may have begun). Returns whether it committed. Raises as `commit_offsets`.
        """
        offsets = [TopicPartition(*name, state.offset, state.metadata()) for name, state in sorted(states.items())]
        return self._commit(offsets, lambda: self._owned == owned)

    def commit_offsets(self, offsets: Sequence[TopicPartition]) -> None:
        """Commit outside a transaction, as a member of the group. The broker stores the request as a whole.

        Raises FencedError after a loss of the membership, and EnvironmentFailure for other failures; then the outcome
        of the commit is unknown.
        """
        self._commit(offsets, lambda: True)

    def _commit(self, offsets: Sequence[TopicPartition], may_be_made: Callable[[], bool]) -> bool:
        """The polling thread calls `may_be_made`, so the assignment cannot change between that call and the commit."""

        def commit() -> bool:
            if not may_be_made():
                return False
            self._commit_offsets(list(offsets))
            return True

        try:
            return self._mailbox.call(commit, COMMIT_TIMEOUT_S)
        except Unanswered as unanswered:
            raise EnvironmentFailure(
                "cannot commit the offsets",
                hint="Check that the brokers are reachable and that the group's coordinator answers.",
                reason=str(unanswered),
                code="DB-3008",
            ) from None
        except CallRefused:
            raise self._gone() from None

    def _commit_offsets(self, offsets: list[TopicPartition]) -> None:
        for attempt in range(1, COMMIT_ATTEMPTS_MAX + 1):
            self._beat()
            try:
                answers = self._client().commit(offsets=offsets, asynchronous=False)
                error = next((answer.error for answer in answers if answer.error is not None), None)
            except KafkaException as exception:
                error = kafka_error(exception)
            if error is None:
                return
            if is_fenced(error):
                raise fenced(error)
            if attempt == COMMIT_ATTEMPTS_MAX or is_fatal(error) or not may_pass(error):
                raise EnvironmentFailure(
                    "cannot commit the offsets",
                    hint=_hint(error),
                    reason=error.str(),
                    attempts=attempt,
                    code="DB-3008",
                )
            self._stop.wait(0.1 * attempt)

    # -- the thread

    def _run(self) -> None:
        consumer = self._client()
        try:
            while not self._stop.is_set():
                self._beat()
                message = consumer.poll(0)
                error = None if message is None else message.error()
                if error is not None:
                    self._judge(error)
                self._sample(consumer)
                # A record here comes from a fetch between assign and pause. Spark reads the record, too.
                if message is None:
                    self._mailbox.serve(self._poll_interval_s)
        except BridgeError as failure:
            self._fail(failure)
        except KafkaException as exception:
            reason = kafka_error(exception)
            self._fail(self._fenced(reason) if is_fenced(reason) else _ended(reason))
        except Exception as exception:  # noqa: BLE001 - the application must know that polling has ended
            bug = InternalError(
                "group membership failed", hint="Please report this.", reason=repr(exception), code="DB-7001"
            )
            bug.__cause__ = exception
            self._fail(bug)
        finally:
            self._stop.set()
            self._set(frozenset(), revoked=True)
            self._consumer = None
            self._mailbox.close()
            consumer.close()

    def _sample(self, consumer: Consumer) -> None:
        """Publish the group metadata together with its assignment, and report a new assignment to the listener.

        Between two polls neither can change. During a poll the call would wait for its end, hence possibly for a
        revocation, which waits for the transaction that asks.
        """
        metadata = consumer.consumer_group_metadata()
        with self._lock:
            self._metadata = metadata
            self._partitions = self._owned
            news = (self._owned, self._revocations)
        if news != self._reported and (self._owned or self._reported[0]):
            self._reported = news
            self._listener.on_assigned(self._owned)

    def _judge(self, error: KafkaError) -> None:
        """Judge an error of a poll or of the client itself."""
        if is_fenced(error):
            raise self._fenced(error)
        if is_fatal(error) or _is_refused(error):
            raise _ended(error)
        self._trouble.warn(error)

    def _fenced(self, error: KafkaError) -> BridgeError:
        """The error of a fenced member: another instance fenced it, or, after a session time-out, it fenced itself.
        Brokers mistake the second JoinGroup of a returning member for another member's (librdkafka issue 3437)."""
        return _ended(error) if self._is_lost else fenced(error)

    def _fail(self, error: BridgeError) -> None:
        if self._failure is None:
            self._failure = error
            # First, before the application is told: no further transaction may be planned with the old assignment.
            self._set(frozenset(), revoked=True)
            self._listener.on_fatal(error)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        added = [TopicPartition(p.topic, p.partition, OFFSET_END) for p in partitions]
        names = frozenset((p.topic, p.partition) for p in partitions)
        if self._cooperative:
            consumer.incremental_assign(added)
            self._owned |= names
        else:
            consumer.assign(added)
            self._owned = names
        self._is_lost &= not names
        if added:
            consumer.pause(added)
        log.info("partitions-assigned", added=len(names), owned=len(self._owned))

    def _give_up(self, consumer: Consumer, partitions: list[TopicPartition], *, lost: bool) -> None:
        names = frozenset((p.topic, p.partition) for p in partitions)
        self._owned -= names
        self._is_lost |= lost
        if lost:
            # Another member may own them already: the open transaction must not be committed.
            self._set(self._owned, revoked=True)
        if not self._stop.is_set():
            log.info("partitions-revoked", count=len(names), lost=lost)
            self._tell_revoked(names, lost=lost, revocations=self._revocations + (not lost))
        self._set(self._owned, revoked=not lost)
        if self._cooperative:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()

    def _tell_revoked(self, names: frozenset[SourceName], *, lost: bool, revocations: int) -> None:
        """Wait for the listener. Meanwhile, make the calls that the end of the open transaction may need."""
        failed: list[Exception] = []

        def tell() -> None:
            try:
                self._listener.on_revoked(names, lost=lost, revocations=revocations)
            except Exception as error:  # noqa: BLE001 - raised again below
                failed.append(error)

        teller = threading.Thread(target=tell, name="revocation", daemon=True)
        teller.start()
        while teller.is_alive():
            self._mailbox.serve(REVOCATION_POLL_S)
        if failed:
            raise failed[0]

    def _set(self, partitions: frozenset[SourceName], *, revoked: bool) -> None:
        with self._lock:
            self._partitions = partitions
            self._revocations += revoked

    def _client(self) -> Consumer:
        if self._consumer is None:
            raise self._gone()
        return self._consumer

    def _gone(self) -> BridgeError:
        return self._failure or EnvironmentFailure(
            "group membership has ended", hint="The bridge is stopping.", code="DB-3009"
        )


def _ended(error: KafkaError) -> EnvironmentFailure:
    return EnvironmentFailure(
        "group membership has ended", hint=_hint(error), reason=error.str(), error=error.name(), code="DB-3009"
    )


def _is_refused(error: KafkaError) -> bool:
    return is_denied(error) or error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED


def _hint(error: KafkaError) -> str:
    if _is_refused(error):
        return "Grant the bridge READ on its group and delay topics, and check its credentials."
    if error.code() == KafkaError.UNSTABLE_OFFSET_COMMIT:
        return "A transaction of this bridge id is still open. Start again after its transaction time-out."
    if is_fenced(error):
        return "Start the bridge again: its session had timed out before it came back to the group."
    return "Check that the brokers are reachable and that the group's coordinator answers."


def _states_of(
    answers: Iterable[TopicPartition], strict: Collection[SourceName]
) -> dict[SourceName, CommittedState | None]:
    states: dict[SourceName, CommittedState | None] = {}
    for answer in answers:
        name = (answer.topic, answer.partition)
        try:
            states[name] = None if answer.offset < 0 else decode_metadata(name, answer.offset, answer.metadata)
        except StateError as error:
            if name in strict:
                raise
            log.warning("committed-state-unreadable", topic=name[0], partition=name[1], reason=error.message)
    return states
