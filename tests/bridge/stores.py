"""A store in a list, behind the dispatcher's seam: what it promises, without memory limits, files or Spark."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from timerstore.entry import PAYLOAD, Kind
from timerstore.position import AT_MIN, OFFSET_MAX, ORIGIN, Position, Progress
from timerstore.sources import SourceName, Sources
from timerstore.transaction import Rows

DEFAULTS: dict[str, Any] = {
    "kind": int(Kind.TIMER),
    "target": None,
    "target_partition": None,
    "key": None,
    "value": b"value",
    "headers": [],
    "id": None,
    "replace": False,
    "attempt": 0,
    "rolls": 0,
    "reason": None,
}


def timer(topic: str, partition: int, offset: int, due: int, target: str | None, **more: Any) -> dict[str, Any]:
    """An entry of an original timer; `headers` as pairs."""
    entry = {**DEFAULTS, "topic": topic, "partition": partition, "offset": offset, "at": due, "due": due, "ts": due - 1}
    return {**entry, "origin": offset, "target": target, **more}


def reject(topic: str, partition: int, offset: int, ts: int, reason: str, **more: Any) -> dict[str, Any]:
    """An entry of a record that decoding refused."""
    entry = timer(topic, partition, offset, ts, None, kind=int(Kind.REJECT), reason=reason, **more)
    return {**entry, "at": AT_MIN, "ts": ts}


class ListStore:
    """Entries by position. `ends` are the ingested ends by source; rows at or below P that were not taken are late."""

    def __init__(self, states: Mapping[SourceName, Progress], sources: Sources) -> None:
        self.sources = sources
        self.committed = {sources.index(*name): progress for name, progress in states.items()}
        self.ends = {source: progress.offset for source, progress in self.committed.items()}
        self.acknowledged: list[tuple[int, int]] = []
        self.rollbacks = 0
        self._position = ORIGIN
        self._rows: list[tuple[int, int, int, dict[str, Any]]] = []
        self._open = False
        self._news = False
        self._changed = threading.Condition(threading.RLock())

    def add(self, entries: Iterable[dict[str, Any]], ends: Mapping[SourceName, int] | None = None) -> None:
        """Ingest."""
        with self._changed:
            for entry in entries:
                source = self.sources.index(entry["topic"], entry["partition"])
                self._rows.append((entry["at"], source, entry["offset"], entry))
                self.ends[source] = max(self.ends[source], entry["offset"] + 1)
            for name, end in (ends or {}).items():
                self.ends[self.sources.index(*name)] = end
            self._rows.sort(key=lambda row: row[:3])
            self._wake()

    def __len__(self) -> int:
        with self._changed:
            return len(self._rows)

    def begin(self) -> ListTransaction:
        with self._changed:
            assert not self._open, "one transaction at a time"
            self._open = True
            return ListTransaction(self)

    def is_caught_up(self) -> bool:
        return True

    def next_wakeup_ms(self) -> int | None:
        with self._changed:
            return self._rows[0][0] if self._rows else None

    def offsets_behind(self) -> bool:
        with self._changed:
            return any(self.ends[source] > progress.offset for source, progress in self.committed.items())

    def is_pressed(self) -> bool:
        return False

    def outruns(self, now_ms: int) -> bool:
        return self._position.at_ms > now_ms + 2_000

    def step_back(self, now_ms: int) -> None:
        with self._changed:
            for source, old in self.committed.items():
                bound = Position(now_ms - 1, source, OFFSET_MAX)
                if old.position > bound:
                    self.committed[source] = old.stepped_back(source, bound)
            self._position = Position(now_ms - 1, 0, OFFSET_MAX)

    def wait(self, timeout_s: float | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._news, timeout_s)
            self._news = False

    def wake(self) -> None:
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._news = True
        self._changed.notify_all()


class ListTransaction:
    """Rows on loan."""

    def __init__(self, store: ListStore) -> None:
        self._store = store
        self._taken: list[tuple[int, int, int, dict[str, Any]]] = []
        self._position = store._position
        self._progress: dict[int, Progress] = {}
        self._ended = False

    def take(self, now_ms: int, max_rows: int) -> Rows:
        store = self._store
        with store._changed:
            due = [row for row in store._rows if row[0] <= now_ms][:max_rows]
            store._rows = store._rows[len(due) :]
        self._taken += due
        for at, source, offset, _ in due:
            if at > AT_MIN:
                self._position = max(self._position, Position(at, source, offset))
        return rows_of(due)

    def progress(self) -> dict[int, Progress]:

        new = {
            source: old.moved(self._store.ends[source], max(self._position, old.position))
            for source, old in self._store.committed.items()
        }
        self._progress = {source: state for source, state in new.items() if state != self._store.committed[source]}
        return self._progress

    def acknowledge(self) -> None:
        assert not self._ended
        store = self._store
        with store._changed:
            store.committed.update(self._progress)
            store.acknowledged += [(source, offset) for _, source, offset, _ in self._taken]
            store._position = self._position
            self._end()

    def rollback(self) -> None:
        assert not self._ended
        store = self._store
        with store._changed:
            store._rows = sorted(self._taken + store._rows, key=lambda row: row[:3])
            store.rollbacks += 1
            self._end()
            store._wake()

    def _end(self) -> None:
        self._ended = True
        self._store._open = False


def rows_of(rows: list[tuple[int, int, int, dict[str, Any]]]) -> Rows:
    """Entries as the store hands them out."""
    columns = {
        field.name: pa.array([_cell(field.name, entry) for *_, entry in rows], type=field.type) for field in PAYLOAD
    }
    return Rows(
        at=np.array([row[0] for row in rows], dtype=np.int64),
        source=np.array([row[1] for row in rows], dtype=np.int32),
        offset=np.array([row[2] for row in rows], dtype=np.int64),
        payload=pa.RecordBatch.from_pydict(columns, schema=PAYLOAD),
    )


def _cell(name: str, entry: dict[str, Any]) -> Any:
    if name == "headers":
        return [{"key": key, "value": value} for key, value in entry["headers"]]
    return entry[name]
