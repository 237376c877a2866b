"""`delay-bridge resolve`: an operator decides the outcome of a transaction that the brokers have forgotten.

The brokers have lost its markers (transaction_markers.py) and its outcome, so a start ends with status 4. The choices,
with the cost of a wrong one:

    aborted     its messages are pending: delivered ones are delivered again
    committed   its messages are finished: undelivered ones are lost

For each transactional id of the instance, while offsets are pending: 1. the coordinator is asked, and its knowledge
overrides the choice; 2. the id is initialised; 3. one more transaction is ended the same way. After a crash between
the steps 2 and 3, repeat the command with the same choice.
"""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from bridge.delivery.producer.transaction_markers import MarkerRepair, Outcome, States, are_offsets_pending
from bridge.delivery.producer.transactional_ids import names_of
from bridge.errors import EnvironmentFailure, StateError
from bridge.kafka.construction import CLIENT_LOG
from bridge.kafka.errors import kafka_error
from bridge.kafka.repeats import Epochs
from bridge.settings.clients import librdkafka
from bridge.settings.model import Settings

ANSWER_S: Final = 10.0
INIT_S: Final = 30.0
"""Time-out of `init_transactions`, which first aborts an open transaction."""


def must_be_pending(settings: Settings) -> None:
    """Raises StateError if no transaction's end is missing, EnvironmentFailure without an answer from the brokers, or
    while the instance is a member of its group.
    """
    try:
        is_pending, members = are_offsets_pending(settings), _members(settings)
    except KafkaException as exception:
        raise _failure(exception) from None
    if not is_pending:
        raise StateError(
            "nothing to resolve: no transaction holds back the committed offsets of this bridge",
            hint="Nothing was changed. Start the bridge.",
            group=settings.group_id,
            code="DB-4009",
        )
    if settings.group_instance_id in members:
        raise EnvironmentFailure(
            "an instance of this bridge is still a member of its group",
            hint="Stop it, wait for delivery.session_timeout, and try again.",
            instance=settings.bridge.instance,
            code="DB-1013",
        )


def resolve_transactions(settings: Settings, choice: Outcome, ask: States) -> dict[str, Outcome]:
    """End the last transactions of this instance again, whose markers are missing. Returns the outcomes by
    transactional id.

    Raises EnvironmentFailure without an answer from the brokers, StateError if offsets stay pending.
    """
    repair, done = MarkerRepair(settings, ask, forgotten_as=choice), {}
    try:
        for name in names_of(settings.transactional_id):
            outcome = repair.outcome_of(name)
            if outcome is not None:
                producer = Epochs({**librdkafka(settings, "producer"), "transactional.id": name}, INIT_S).producer()
                repair.write(name, producer, outcome)
                done[name] = outcome
        is_pending = are_offsets_pending(settings)
    except KafkaException as exception:
        raise _failure(exception) from None
    if is_pending:
        raise StateError(
            "a transaction of another instance holds back the committed offsets",
            hint="Start the other instances, or resolve with the bridge.instance of one that is permanently gone. "
            "`kafka-transactions find-hanging` names the producer.",
            ended=", ".join(done),
            code="DB-4008",
        )
    return done


def _members(settings: Settings) -> set[str]:
    """The names of the group's static members."""
    admin = AdminClient(librdkafka(settings, "admin"), logger=CLIENT_LOG)
    answer = admin.describe_consumer_groups([settings.group_id], request_timeout=ANSWER_S)[settings.group_id]
    return {member.group_instance_id for member in answer.result().members}


def _failure(exception: KafkaException) -> EnvironmentFailure:
    return EnvironmentFailure(
        "cannot write the end of a transaction again",
        hint="Check the brokers and the permissions, then repeat the command with the same choice.",
        reason=kafka_error(exception).str(),
        code="DB-3005",
    )
