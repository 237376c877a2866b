"""The duties of a start towards an index directory: conditions of refusals, the first offset to read, the time of an
index's removal.

Derived from the broker, the files and the mishaps of a test alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Final

from bridge.errors import BridgeError
from bridge.stores.directory import KEPT_MS, StoreDirectory
from bridge.stores.names import SourceName
from bridge.stores.stores import Life
from bridge.wire.decode_epochs import parameters_at
from tests.model.directories_rig import MINUTE_MS, NAMES, Broker, Instance

WAITS_MS: Final = MINUTE_MS // 2
"""A start may wait for others in between."""


class Refusals:
    """The conditions of each refusal, for its partition; one without a condition here is unwarranted."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._conditions: Mapping[str, Callable[[Instance, SourceName], bool]] = {
            "DB-3002": lambda _, name: name in broker.silent,
            "DB-3010": self._has_no_commits,
            "DB-4001": self._is_forgotten,
            "DB-4002": lambda here, name: self._is_forgotten(here, name) and bool(broker.starts[name]),
            "DB-4011": lambda _, name: broker.commits[name][0] < broker.starts[name],
            "DB-4012": self._may_have_lost,
            "DB-4014": self._is_of_another_topic,
            "DB-4015": self._has_foreign_index,
        }

    def is_warranted(self, here: Instance, error: BridgeError, covered: Mapping[SourceName, int]) -> bool:
        """Whether a start of an instance with these valid indexes may end in this error."""
        topic, partition = error.fields.get("topic"), error.fields.get("partition")
        named = [name for name in NAMES if topic in (None, name[0]) and partition in (None, name[1])]
        is_of_topic = error.code in ("DB-3010", "DB-4014") or any(self._has_no_commits(here, name) for name in named)
        mine = {*NAMES} if is_of_topic else {*here.member.assignment()}
        if error.code == "DB-4012":
            mine -= covered.keys()
        return any(self._conditions[error.code](here, name) for name in named if name in mine)

    def _has_no_commits(self, _: Instance, name: SourceName) -> bool:
        return not any(each[0] == name[0] for each in self._broker.commits)

    def _is_forgotten(self, _: Instance, name: SourceName) -> bool:
        return name not in self._broker.commits

    def _may_have_lost(self, _: Instance, name: SourceName) -> bool:
        """Kafka says so, or the first unread record is too old for messages of before it."""
        log, state = self._broker.logs[name], self._broker.state(name)
        assert state is not None
        if state.gone_below:
            return True
        widest_ms = max(epoch.parameters.roll_window_ms for epoch in state.epochs)
        spare_ms = self._broker.retention_ms - widest_ms
        is_old = state.offset < len(log) and log[state.offset].record.ts_ms < self._broker.clock.now_ms() - spare_ms
        return self._broker.starts[name] > state.first_offset and (is_old or spare_ms <= 0)

    def _is_of_another_topic(self, _: Instance, name: SourceName) -> bool:
        return (
            name in self._broker.commits and json.loads(self._broker.commits[name][1])["t"] != self._broker.ids[name[0]]
        )

    def _has_foreign_index(self, here: Instance, name: SourceName) -> bool:
        found = here.checkpoint(name)
        return found is not None and found.identity.log_id != here.log_id(name)


class Indexes:
    """The valid indexes of instances, derived from the files and the mishaps."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._doubtful: set[tuple[int, SourceName]] = set()
        self._windows: dict[SourceName, list[int]] = {}
        """The roll windows of records below O, by offset."""

    def doubt(self, names: Collection[SourceName], instances: Collection[int] = range(9)) -> None:
        """Until they are opened again, these indexes may be useless."""
        self._doubtful |= {(number, name) for number in instances for name in names}

    def covered(self, here: Instance) -> dict[SourceName, int]:
        """The ends of this instance's valid indexes of its partitions that are not open."""
        found = {}
        for name in here.member.assignment() - here.opened():
            index, state = here.index(name), self._broker.commits.get(name)
            if (here.number, name) in self._doubtful or index is None or index.offset is None or state is None:
                continue
            if index.offset >= self._broker.starts[name] and state[0] >= index.offset:
                found[name] = index.offset
        return found

    def must_be_used(self, here: Instance, covered: Mapping[SourceName, int], came: Collection[SourceName]) -> None:
        """Reading of the partitions that came begins at the end of the valid index, else where the log begins."""
        store = here.store
        if store is None:
            return
        next_offsets, reports = store.next_offsets(), " ".join(store.reports)
        for name in came:
            state = self._broker.state(name)
            assert state is not None
            first = max(self._broker.starts[name], state.first_offset)
            if name in covered:
                assert next_offsets[name] == covered[name], f"{name}: the index to {covered[name]} is not used"
                assert f"{name[0]}/{name[1]}: the" not in reports, f"{name}: {reports}"
            else:
                assert next_offsets[name] >= first, f"{name} is read from {next_offsets[name]}, before {first}"
            self._doubtful.discard((here.number, name))

    def must_be_flushed(self, here: Instance, names: Collection[SourceName], ends: Mapping[SourceName, int]) -> None:
        """After a flush in time, the next start reads nothing below these ends."""
        for name in names:
            index = here.index(name)
            assert index is not None and index.offset == ends[name], f"{name} is flushed to {index}, not {ends[name]}"


def flushable(here: Instance) -> dict[SourceName, int]:
    """The committed offset of each open partition, or the next offset to read if that is lower."""
    store = here.store
    if store is None:
        return {}
    next_offsets = store.next_offsets()
    return {name: min(state.offset, next_offsets[name]) for name, state in store.committed().items()}


class Decoding:
    """Each record is read again with the parameters that it was finished with."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def note(self, here: Instance) -> None:
        """Records are about to be read."""
        if here.pipeline is None or here.store is None:
            return
        for name, at in here.store.next_offsets().items():
            state = self._broker.state(name)
            for message in self._broker.logs[name][at:]:
                window_ms = parameters_at(here.pipeline._epochs[name], message.offset).roll_window_ms
                is_again = state is not None and message.offset < state.offset and message.window_ms
                assert not is_again or message.window_ms == window_ms, f"{message} is read with W of {window_ms}"
                message.window_ms = window_ms

    def forget(self, names: Collection[SourceName]) -> None:
        """An operator's reset: all is read anew."""
        for name in names:
            for message in self._broker.logs[name]:
                message.window_ms = 0


class Marks:
    """Messages in an index alone are marked in the committed state."""

    @staticmethod
    def must_stand(here: Instance, broker: Broker) -> None:
        """After a look and a transaction, for each live partition."""
        if here.store is None:
            return
        pending = here.pending()
        for name in here.store.in_life(Life.LIVE):
            state, gone = broker.state(name), [o for o in pending[name] if o < broker.starts[name]]
            assert state is not None
            if gone:
                assert state.gone_below > max(gone), f"{name}: {gone} are gone, and nobody is told"


class Left:
    """When an index leaves: once its partition was not delivered here for ten minutes, if Kafka lacks nothing of it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._directories: dict[int, StoreDirectory] = {}
        self._used_ms: dict[int, dict[SourceName, tuple[int, int | None]]] = {}
        """By instance: the earliest and the latest possible time of the last use."""

    def use(self, here: Instance) -> None:
        """Partitions were opened, or refused."""
        used, now_ms = self._of(here), self._broker.clock.now_ms()
        for name in here.member.assignment():
            is_open = name in here.opened()
            used[name] = (now_ms, now_ms) if is_open else (used.get(name, (now_ms, None))[0], None)

    def leave(self, here: Instance) -> set[SourceName]:
        """Let them leave. Returns the ones that did."""
        store, now_ms = here.store, self._broker.clock.now_ms()
        if store is None:
            return set()
        used, before = self._of(here), self._there(here)
        for name in before:
            earliest_ms, latest_ms = used.get(name, (now_ms, None))
            used[name] = (earliest_ms, latest_ms or now_ms) if name not in here.opened() else (now_ms, now_ms)
        store.remove_left(now_ms)
        gone = before - self._there(here)
        free = {name for name in before - here.member.assignment() - here.opened() if self._is_spare(name)}
        must = {name for name in free if now_ms - (used[name][1] or now_ms) >= KEPT_MS}
        may = {name for name in free if now_ms - used[name][0] >= KEPT_MS - WAITS_MS}
        assert must <= gone, f"{here.number}: the indexes of {must - gone} stay"
        assert gone <= may, f"{here.number}: the indexes of {gone - may} leave too early"
        for name in gone:
            del used[name]
        return gone

    def _of(self, here: Instance) -> dict[SourceName, tuple[int, int | None]]:
        directory = None if here.store is None else here.store.directory
        if directory is not None and self._directories.get(here.number) is not directory:
            self._directories[here.number], self._used_ms[here.number] = directory, {}
        return self._used_ms.setdefault(here.number, {})

    @staticmethod
    def _there(here: Instance) -> set[SourceName]:
        return {name for name in NAMES if here.path(name).is_dir()}

    def _is_spare(self, name: SourceName) -> bool:
        return name in self._broker.commits and not json.loads(self._broker.commits[name][1]).get("g")
