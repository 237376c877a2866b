"""The search for cuts of logs: the first record of a later leader.

Each record carries the epoch of the leader that wrote it, and epochs rise along the log. A leader with a shorter log
than its predecessor truncates the other replicas at its own end, and writes there under its own epoch. A stretch that
was read under one epoch and now has records of a later epoch therefore held other records when it was read.

One consumer searches the stretches of all partitions at the same time: an election of many partitions costs as many
fetches as that of one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

from timerstore.clock import SystemClock

if TYPE_CHECKING:
    from bridge.stores.names import SourceName  # loads pyarrow, which no command needs at its start

ANSWER_S: Final = 10.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStretch:
    """Offsets [start, end) of a log, which were read under `epoch` or earlier ones."""

    epoch: int
    start: int
    end: int


def find_cut(stretch: ReadStretch) -> Generator[int, int | None, int | None]:
    """The first offset of the stretch with a record of a later leader; None: no such record.

    The generator yields an offset and receives the epoch of the first record from there on, or None at the end of the
    stretch; some offsets may hold no record. Most stretches were not cut, so the search begins at the end.
    """
    low, high, step, is_cut = stretch.start - 1, stretch.end, 1, False
    while high - low > 1:
        at = max((low + high) // 2, stretch.end - step)
        epoch = yield at
        if epoch is not None and epoch <= stretch.epoch:
            low = at
        else:
            high, is_cut = at, is_cut or epoch is not None
        step *= 2
    return high if is_cut else None


def cuts(
    consumer: Consumer, stretches: Mapping[SourceName, ReadStretch], beat: Callable[[], None] = lambda: None
) -> dict[SourceName, int | None]:
    """The cut of each log, by `find_cut`; partitions that do not answer are left out. `consumer` reads uncommitted
    records, too, and reports the ends of logs."""
    searches = {place: find_cut(stretch) for place, stretch in stretches.items()}
    offsets: dict[SourceName, int | None] = {}
    answers: dict[SourceName, int | None] = dict.fromkeys(searches)
    while answers:
        beat()
        asked = {}
        for place, epoch in answers.items():
            try:
                asked[place] = searches[place].send(epoch)
            except StopIteration as done:
                offsets[place] = done.value
        answers = _epochs(consumer, asked, stretches) if asked else {}
    return offsets


def _epochs(
    consumer: Consumer, asked: Mapping[SourceName, int], stretches: Mapping[SourceName, ReadStretch]
) -> dict[SourceName, int | None]:
    """The epochs of the first records from these offsets on, of the partitions that answer in time."""
    clock = SystemClock()
    epochs: dict[SourceName, int | None] = {}
    consumer.incremental_assign([TopicPartition(*place, offset) for place, offset in asked.items()])
    deadline_s = clock.monotonic_s() + ANSWER_S
    while len(epochs) < len(asked) and clock.monotonic_s() < deadline_s:
        message = consumer.poll(_POLL_S)
        error = None if message is None else message.error()
        if message is None or (error is not None and error.code() != KafkaError._PARTITION_EOF):
            continue
        place = (str(message.topic()), int(message.partition() or 0))
        if place not in asked or place in epochs:
            continue
        is_there = error is None and (message.offset() or 0) < stretches[place].end
        epoch = message.leader_epoch() if is_there else None
        epochs[place] = -1 if is_there and epoch is None else epoch
        consumer.incremental_unassign([TopicPartition(*place)])
    return epochs
