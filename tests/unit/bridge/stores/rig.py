"""Stores of some partitions, and the logs and committed states that a bridge and Kafka would have of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.stores.loan import Loan, Rows
from bridge.stores.names import SourceName
from tests.model.stores import ModelStores, State, batch, open_stores
from tests.unit.timerstore.entries import Record, gather
from timerstore.limits import Limits
from timerstore.rows.cuts import Cuts

ORDERS, BILLS, RETRY = ("delay", 0), ("delay", 1), ("retry", 0)
NOW_MS = 1_000_000


class Rig:
    """All partitions are ours, caught up and live."""

    def __init__(
        self, directory: Path, names: Collection[SourceName] = (ORDERS, BILLS, RETRY), limits: Limits | None = None
    ) -> None:
        self.directory = directory
        self.limits = limits or Limits()
        self.logs: dict[SourceName, list[Record]] = {name: [] for name in names}
        self.states = dict.fromkeys(names, State())
        self.log_starts: dict[SourceName, int] = {}
        self.cuts: dict[SourceName, Cuts] = {}
        self.gone: set[SourceName] = set()
        """The partitions of which Kafka lacks records of pending messages."""
        self.stores = self.open()

    def open(self) -> ModelStores:
        topic_ids = {topic: f"id of {topic}" for topic, _ in self.logs}
        self.stores = open_stores(
            ModelStores, self.directory, topic_ids, list(self.logs), self.states,
            log_starts=self.log_starts, cuts=self.cuts, now_ms=NOW_MS, limits=self.limits,
        )  # fmt: skip
        directory = replace(self.stores.directory, spare=lambda names: set(names) - self.gone)
        self.stores.directory = directory
        resume = self.stores.resume_offsets()
        offsets = {name: self.log_starts.get(name, 0) if at is None else at for name, at in resume.items()}
        self.stores.start_at(offsets, {name: len(log) for name, log in self.logs.items()})
        self.stores.join()
        return self.stores

    def reopen(self) -> ModelStores:
        self.stores.close()
        return self.open()

    def cut(self, name: SourceName, offset: int) -> None:
        """A log loses its records from this offset on, and the committed state follows."""
        del self.logs[name][offset:]
        self.states[name] = replace(self.states[name], offset=min(self.states[name].offset, offset))
        self.cuts[name] = (*self.cuts.get(name, ()), (len(self.cuts.get(name, ())) + 1, offset))

    def produce(self, name: SourceName, *due_ms: int | None) -> None:
        log = self.logs[name]
        for due in due_ms:
            log.append(Record(*name, len(log), due))

    def ingest(self) -> int:
        """Everything new, as one batch, of all partitions in turn."""
        at = self.stores.next_offsets()
        new = [record for name in at for record in self.logs[name][at[name] :]]
        return self.stores.append(batch(new), {name: len(self.logs[name]) for name in at}, NOW_MS)

    def load(self, now_ms: int = NOW_MS) -> int:
        """All windows; returns how many there were."""
        loaded = 0
        while (loading := self.stores.next_loading(now_ms)) is not None:
            self.stores.admit(loading, gather(loading.window))
            loaded += 1
        return loaded

    def take(self, loan: Loan, until_ms: int, limit: int) -> list[tuple[int, SourceName, int]]:
        """The taken rows, as (due, partition, offset)."""
        return self.told(loan.take(until_ms, limit))

    def told(self, rows: Rows) -> list[tuple[int, SourceName, int]]:
        return list(zip(rows.at.tolist(), self.stores.sources_of(rows), rows.offset.tolist(), strict=True))

    def commit(self, loan: Loan) -> set[SourceName]:
        """Commit, and return of which partitions offsets are sent."""
        after = self.stores.states_after(loan)
        self.states |= after
        loan.acknowledge()
        return set(after)

    def deliver(self, until_ms: int = NOW_MS, limits: Sequence[int] = (1_000,)) -> list[tuple[int, SourceName, int]]:
        """One transaction."""
        loan = self.stores.begin(until_ms)
        taken = [row for limit in limits for row in self.take(loan, until_ms, limit)]
        self.commit(loan)
        return taken

    def finish(self, now_ms: int, rounds: int = 1_000) -> None:
        """Deliver everything that is due at `now_ms`, loading windows, as the bridge would."""
        for _ in range(rounds):
            loaded = self.load(now_ms)
            if not self.deliver(now_ms) and not loaded and all(not v.is_behind(now_ms) for v in self.stores.views()):
                return
        raise AssertionError("no end of it")
