"""The opening of partitions' stores, before `Stores.add`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.stores.names import SourceName
from timerstore.operations.recovery import Found
from timerstore.rows.cuts import Cuts
from timerstore.rows.position import Progress
from timerstore.store import TimerStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The arguments of `TimerStore.open` for one partition."""

    found: Found
    committed: Progress
    log_start: int
    cuts: Cuts = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """Open stores, before `Stores.add`."""

    stores: Mapping[SourceName, TimerStore]

    def resume_offsets(self) -> dict[SourceName, int | None]:
        """The first offset that ingest reads of each: O_c; None: the log's start."""
        return {name: store.resume_offset() for name, store in self.stores.items()}

    def held_below(self) -> dict[SourceName, int]:
        """For each partition, the offset below which its index has all pending rows that Kafka has lost."""
        return {name: store.held_below() for name, store in self.stores.items()}

    def start_at(self, offsets: Mapping[SourceName, int], log_ends: Mapping[SourceName, int]) -> None:
        """Set the first expected offsets. `log_ends` are the logs' ends after the read of the committed states: below
        them there may be copies that another process wrote."""
        for name, store in self.stores.items():
            store.start_at(offsets[name], log_ends[name])

    def behind(self) -> int:
        """The number of offsets up to the committed O."""
        return sum(max(0, each.committed.offset - each.next_offset) for each in self.stores.values())

    def close(self) -> None:
        """Close the stores, which were not added."""
        for store in self.stores.values():
            store.close()
