"""Sources whose rows cannot be finished now, because nothing takes what must be written for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from bridge.delivery.targets.target import Target
from bridge.kafka.errors import Refusal
from bridge.wire.headers import RejectReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwritable:
    """Why a source cannot go on: in words, and the partitions that it waits for (none: the time)."""

    refusal: Refusal
    places: Collection[tuple[str, int]] = ()


class Unplannable(Exception):
    """Rows of these sources (by index) cannot be finished now: plan again without them."""

    def __init__(self, unwritable: Mapping[int, Unwritable]) -> None:
        super().__init__(f"{len(unwritable)} sources cannot be written to")
        self.unwritable = unwritable


def refuse_down(topics: Mapping[str, Target], places: Mapping[int, Collection[tuple[str, int]]]) -> None:
    """Raises Unplannable for the sources that need a place which takes nothing now."""
    down = {
        source: Unwritable(
            refusal=Refusal(RejectReason.TARGET_UNAVAILABLE, f"{topic}-{partition} takes nothing now"),
            places=frozenset(wanted),
        )
        for source, wanted in places.items()
        for topic, partition in wanted
        if topics[topic].is_down(partition)
    }
    if down:
        raise Unplannable(down)
