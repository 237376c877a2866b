"""The loops around produce: the hottest code of delivery, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

from confluent_kafka import KafkaError, KafkaException, Message

from bridge.delivery.plan.due_rows import Batch
from bridge.wire import headers as h


class Stopped(Exception):
    """Produce raised after `done` records of the batch."""

    def __init__(self, cause: Exception, done: int) -> None:
        self.cause = cause
        self.done = done


def produce_plain(produce: Callable[..., None], batch: Batch, start: int) -> int:
    """The hot loop: nothing but produce. Arguments are positional because that is faster."""
    topic, origin_name, due_name = batch.topic, h.ORIGIN, h.DUE
    columns = (batch.values, batch.keys, batch.origins or [], batch.dues or [])
    rest = columns if start == 0 else tuple(column[start:] for column in columns)
    done = start
    try:
        for done, (value, key, origin, due) in enumerate(zip(*rest, strict=True), start):  # noqa: B007 - read when produce raised
            produce(topic, value, key, -1, None, None, 0, [(origin_name, origin), (due_name, due)])
    except (KafkaException, BufferError, ValueError) as cause:
        raise Stopped(cause, done) from None
    return len(batch)


def produce_any(
    produce: Callable[..., None],
    batch: Batch,
    report: Callable[[int, KafkaError | None, Message], None],
    ids: Sequence[int] | None,
    start: int,
) -> int:
    """As `produce_plain`, with headers and partitions of each record's own, and reports that know the record where
    there are `ids`.
    """
    topic = batch.topic
    headers = batch.all_headers()
    partitions = repeat(-1, len(batch)) if batch.partitions is None else batch.partitions
    reports = repeat(None, len(batch)) if ids is None else [partial(report, i) for i in ids]
    done = start
    calls = zip(batch.values, batch.keys, partitions, reports, headers, strict=True)
    try:
        for done, (value, key, partition, callback, own) in enumerate(calls):
            if done >= start:
                produce(topic, value, key, partition, callback, None, 0, own)
    except (KafkaException, BufferError, ValueError) as cause:
        raise Stopped(cause, done) from None
    return len(batch)
