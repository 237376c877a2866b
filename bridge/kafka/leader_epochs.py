"""Where logs were cut: the first record that a later leader has written.

A partition's records carry the epochs of the leaders that wrote them, which rise along the log. A leader that has less
of the log than the one before it cuts the others off at its own end, and writes there under its own epoch. So records
of later epochs in a stretch that was read under an earlier one show that something else was there when it was read.

The stretches of all partitions are searched at the same time, by one consumer: an election of many partitions costs as
many fetches as that of one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

from timerstore.clock import SystemClock

ANSWER_S: Final = 10.0
_POLL_S: Final = 0.1

Place = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Offsets [start, end) of a log, which were read under leaders of no later epoch."""

    epoch: int
    start: int
    end: int


def search(stretch: Stretch) -> Generator[int, int | None, int | None]:
    """Where later leaders have begun to write to the stretch; None: they have not.

    It asks for the epoch of the first record from an offset on, which is None where the stretch has no more; some
    offsets may hold no record. Most stretches were not cut, so that it begins at the end.
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
    consumer: Consumer, stretches: Mapping[Place, Stretch], beat: Callable[[], None] = lambda: None
) -> dict[Place, int | None]:
    """Where each log was cut, as of `search`; those that do not answer are left out. `consumer` reads
    uncommitted records, too, and tells of ends."""
    searches, found = {place: search(each) for place, each in stretches.items()}, dict[Place, int | None]()
    answers: dict[Place, int | None] = dict.fromkeys(searches)
    while answers:
        beat()
        asked = {}
        for place, epoch in answers.items():
            try:
                asked[place] = searches[place].send(epoch)
            except StopIteration as done:
                found[place] = done.value
        answers = _epochs(consumer, asked, stretches) if asked else {}
    return found


def _epochs(
    consumer: Consumer, asked: Mapping[Place, int], stretches: Mapping[Place, Stretch]
) -> dict[Place, int | None]:
    """The epochs of the first records from these offsets on, of those that answer in time."""
    clock, found = SystemClock(), dict[Place, int | None]()
    consumer.incremental_assign([TopicPartition(*place, offset) for place, offset in asked.items()])
    deadline_s = clock.monotonic_s() + ANSWER_S
    while len(found) < len(asked) and clock.monotonic_s() < deadline_s:
        message = consumer.poll(_POLL_S)
        error = None if message is None else message.error()
        if message is None or (error is not None and error.code() != KafkaError._PARTITION_EOF):
            continue
        place = (str(message.topic()), int(message.partition() or 0))
        if place not in asked or place in found:
            continue
        is_there = error is None and (message.offset() or 0) < stretches[place].end
        epoch = message.leader_epoch() if is_there else None
        found[place] = -1 if is_there and epoch is None else epoch
        consumer.incremental_unassign([TopicPartition(*place)])
    return found
