"""A run of `redrive` with a configuration, and what is said of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from bridge.cluster import Cluster
from bridge.errors import EnvironmentFailure
from bridge.kafka import librdkafka
from bridge.redrive import Choice, Redrive, Report
from bridge.settings import Settings
from timerstore.clock import Clock


def redrive(
    settings: Settings,
    clock: Clock,
    *,
    topics: Collection[str],
    reasons: Collection[str],
    targets: Collection[str],
    due_now: bool,
    set_headers: Sequence[tuple[str, bytes]],
    execute: bool,
) -> Report:
    """Go over the dead-letter topics of `topics` (all delay topics if empty). Raises BridgeError."""
    cluster, name = Cluster(settings), f"{settings.group_id}-redrive"
    delay_topics = cluster.topics(settings.delay_topics)
    dead_letters = cluster.topics({settings.dead_letter_topic(topic) for topic in topics or settings.delay_topics})
    if not dead_letters:
        raise EnvironmentFailure(
            "there is no dead-letter topic", hint="`delay-bridge run` makes it, where bridge.create_topics is true."
        )
    consumer = {key: v for key, v in librdkafka(settings, "consumer").items() if key != "group.instance.id"}
    run = Redrive(
        consumer={**consumer, "group.id": name, "auto.offset.reset": "earliest", "queued.max.messages.kbytes": "16384"},
        producer={**librdkafka(settings, "producer"), "transactional.id": name},
        topic_ids={topic: found.topic_id for topic, found in dead_letters.items()},
        partitions={topic: found.partitions for topic, found in delay_topics.items()},
        clock=clock,
    )
    choice = Choice(topics=topics, reasons=reasons, targets=targets, due_now=due_now, set_headers=set_headers)
    return run.run(choice, execute=execute)


def lines(report: Report, *, execute: bool) -> Iterator[str]:
    """The report for people, one line for each reason and target."""
    for (reason, target), count in sorted(report.back.items()):
        yield f"{'put back' if execute else 'goes back':12}{count:>8}  {reason}  {target}"
    for (reason, target), count in sorted(report.broken.items()):
        yield f"{'stays':12}{count:>8}  {reason}  {target}  (needs --due now or --set-header)"
    others = {"not chosen": report.left, "back before": report.before, "no letters": report.foreign}
    for name, count in others.items():
        if count:
            yield f"{name:12}{count:>8}"
    total = sum(report.back.values())
    letters = f"{total} dead letter{'s' * (total != 1)}"
    yield f"{letters} put back" if execute else f"{letters} would go back: --execute does it"
