"""The life of the index directories, without a broker: Hypothesis lets instances come and go, hand partitions over, be
upgraded and damaged, while Kafka deletes records and forgets offsets.

A message is pending until it is delivered, or an operator gives it up. What must hold:

    each open partition that is read to its end has exactly the pending messages (none is lost, none comes again)
    a start that cannot have that is refused, with a documented code, and no other start is (`Refusals`)
    a valid index is used: nothing that it covers is read again (`Indexes`)
    the committed state says below which offset messages are in an index alone, and such an index stays; others leave

The walks of test_directory_walks.py always take place; the machine looks for other ones.

Not walked: messages whose records Kafka deletes while no instance has their partition (retention limits downtime).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bridge.errors import StateError
from bridge.start import reset_offsets
from bridge.start.facts import topic_facts
from bridge.start.roll_window import decode_parameters, limits_of
from bridge.stores.names import SourceName
from bridge.wire.committed_state import initial_state
from tests.manual_clock import ManualClock
from tests.model.directories_promises import Decoding, Indexes, Left, Marks, Refusals, flushable
from tests.model.directories_rig import (
    MINUTE_MS,
    NAMES,
    PARTITIONS,
    RETENTION_MS,
    WINDOW_MS,
    Broker,
    Crash,
    Instance,
    Message,
    crashing_after,
)
from tests.profiles import of_a_machine, timeout_s
from timerstore.disk import files

INSTANCES: Final = 2
instances = st.integers(0, INSTANCES - 1)
names = st.sampled_from(NAMES)
topics = st.sampled_from(sorted(PARTITIONS))


class Directories(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.home = Path(tempfile.mkdtemp(prefix="directories-", dir=memory if memory.is_dir() else None))
        self.clock = ManualClock()
        self.broker = Broker(self.clock)
        self.instances = [Instance(self.broker, number, self.home / str(number)) for number in range(INSTANCES)]
        self.earlier: dict[int, dict[SourceName, int]] = {}
        """By instance that was never upgraded: the offsets below which its index has all pending messages."""
        self.old_indexes: dict[int, dict[SourceName, int]] = {}
        """Old indexes of upgraded instances."""
        self.refusals: set[str] = set()
        """Of resets."""
        self.warranted, self.indexes = Refusals(self.broker), Indexes(self.broker)
        self.decoding, self.left = Decoding(self.broker), Left(self.broker)
        self.in_doubt: set[Message] = set()
        """Messages whose fate nobody can know, after one more failure than the bridge allows for."""

    def teardown(self) -> None:
        for instance in self.instances:
            instance.crash()
        shutil.rmtree(self.home)

    def of_state(self, *, is_running: bool) -> list[Instance]:
        return [each for each in self.instances if each.is_running is is_running]

    def pick(self, number: int, *, is_running: bool) -> Instance:
        found = self.of_state(is_running=is_running)
        return found[number % len(found)]

    # ---- the beginning

    @initialize(
        owners=st.tuples(*[instances] * len(NAMES)),
        earlier=st.sets(instances),
        written=st.lists(st.tuples(names, st.integers(1, 110)), max_size=8),
    )
    def begin(self, owners: tuple[int, ...], earlier: set[int], written: list[tuple[SourceName, int]]) -> None:
        self.broker.owners = dict(zip(NAMES, owners, strict=True))
        for name, minutes in written:
            self.write(name, minutes)
        if earlier:
            self.earlier = {number: {} for number in earlier}
            for topic, count in PARTITIONS.items():  # the first commits of the earlier version
                limits = limits_of(self.broker, [topic])[topic]  # type: ignore[arg-type]
                parameters = decode_parameters(self.instances[0].settings, topic, limits)
                state = initial_state(
                    offset=0, topic_id=self.broker.ids[topic], partitions=count, parameters=parameters
                )
                for partition in range(count):
                    self._commit_earlier((topic, partition), 0, None, state.metadata(), 0)

    def _commit_earlier(
        self, name: SourceName, offset: int, last: tuple[int, str, int, int] | None, metadata: str, gone_below: int
    ) -> None:
        fields: dict[str, Any] = {**json.loads(metadata), "v": 1, "p": last}
        fields.pop("g", None)
        if gone_below:
            fields["g"] = gone_below
        self.broker.commits[name] = (offset, json.dumps(fields))

    @precondition(lambda self: any(not each.is_running for each in self.instances if each.number in self.earlier))
    @rule(instance=instances, limit=st.integers(0, 4), has_flushed=st.booleans())
    def earlier_version_runs(self, instance: int, limit: int, has_flushed: bool) -> None:
        """It reads all, delivers some, in the order of all its partitions, and ends."""
        covered = self.earlier.get(instance)
        here = self.instances[instance]
        if covered is None or here.is_running:
            return
        mine = here.member.assignment()
        if any(name not in self.broker.commits or json.loads(self.broker.commits[name][1])["v"] > 2 for name in mine):
            return  # refused: DB-4001, DB-4005
        if any(json.loads(self.broker.commits[n][1])["t"] != self.broker.ids[n[0]] for n in mine):
            return  # DB-4014
        if any(o >= covered.get(name, 0) for name in mine for o in self.broker.gone(name)):
            return  # DB-4012
        due = sorted(
            (m.record.at_ms, *m.name, m.offset, m)
            for name in mine
            for m in self.broker.pending(name).values()
            if m.record.at_ms <= self.clock.now_ms()
        )[:limit]
        for *_, message in due:
            message.is_delivered = True
        if has_flushed:
            self.earlier[instance] = covered = {name: len(self.broker.logs[name]) for name in mine}
            here.earlier_index(covered)
        for name in mine:
            metadata = self.broker.commits[name][1]
            last = json.loads(metadata)["p"]
            last = due[-1][:4] if due and (last is None or list(due[-1][:4]) > last) else last
            gone = self.broker.gone(name)
            assert not gone or covered
            self._commit_earlier(
                name, len(self.broker.logs[name]), last, metadata, self.broker.starts[name] if gone else 0
            )

    # ---- messages

    @rule(name=names, minutes=st.integers(0, WINDOW_MS // MINUTE_MS))
    def write(self, name: SourceName, minutes: int) -> None:
        self.broker.write(name, self.clock.now_ms() + minutes * MINUTE_MS)

    @precondition(lambda self: self.of_state(is_running=True))
    @rule(instance=instances, limit=st.one_of(st.none(), st.integers(1, 3)))
    def read(self, instance: int, limit: int | None) -> None:
        here = self.pick(instance, is_running=True)
        self.decoding.note(here)
        here.read(limit)
        if limit is None:
            self._must_be_whole(here)

    @precondition(lambda self: self.of_state(is_running=True))
    @rule(instance=instances, limit=st.integers(1, 5), is_acknowledged=st.sampled_from([True, True, True, False]))
    def deliver(self, instance: int, limit: int, is_acknowledged: bool) -> None:
        here = self.pick(instance, is_running=True)
        for message in here.deliver(limit, is_acknowledged=is_acknowledged):
            assert message.record.at_ms <= self.clock.now_ms(), f"{message} is early"
            assert not message.is_delivered or message in self.in_doubt, f"{message} is delivered again"
            assert not message.is_given_up or message in self.in_doubt, f"{message} was given up"
            message.is_delivered = True

    @precondition(lambda self: self.of_state(is_running=True))
    @rule(instance=instances)
    def flush(self, instance: int) -> None:
        here = self.pick(instance, is_running=True)
        here.flush()
        ends = flushable(here)
        self.indexes.must_be_flushed(here, ends, ends)

    def _must_be_whole(self, here: Instance) -> None:
        """A partition that is read to its end has exactly the pending messages."""
        for name, found in here.pending().items():
            log = self.broker.logs[name]
            doubt = {m.offset for m in log if m in self.in_doubt}
            wanted = self.broker.pending(name).keys() - doubt
            assert wanted <= found, f"{name} has lost {wanted - found}"
            assert found <= wanted | doubt, f"{name} has {found - wanted} again"

    # ---- processes

    @precondition(lambda self: self.of_state(is_running=False))
    @rule(instance=instances)
    def start(self, instance: int) -> None:
        self._start(self.pick(instance, is_running=False))

    def _start(self, here: Instance) -> None:
        instance = here.number
        if instance in self.earlier:
            self.old_indexes[instance] = self.earlier[instance]
        self._watched(here, here.start)
        if not (here.refusal is not None and here.has_index_of_earlier_version()):
            self.earlier.pop(instance, None)

    def _watched(self, here: Instance, step: Any) -> None:
        """A step that opens partitions."""
        self._doubt_what_no_index_has(here)
        had_index = {name for name in NAMES if any(here.index((name[0], p)) for p in range(PARTITIONS[name[0]]))}
        had_index |= {name for name in self.old_indexes.get(here.number, {}) if here.has_index_of_earlier_version()}
        here.member.first_commits.clear()
        here.refusals = []
        covered, before = self.indexes.covered(here), here.store
        came = here.opened()
        try:
            step()
        finally:
            self._note_first_use(here, had_index)
        came = here.opened() - (came if here.store is before else frozenset())
        self.left.use(here)
        for error in here.refusals:
            assert self.warranted.is_warranted(here, error, covered), f"{error} though the indexes reach to {covered}"
        self.indexes.must_be_used(here, covered, came)
        if here.is_running:
            assert here.opened() == here.identity.without(here.member.assignment())

    def _note_first_use(self, here: Instance, had_index: set[SourceName]) -> None:
        """Without any trace of earlier deliveries here, all messages come again."""
        for name in here.member.first_commits:
            assert name not in had_index, f"{name} is taken for new, though its index is here"
            assert not self.broker.starts[name], f"{name} is taken for new, though it is old"
            for message in self.broker.logs[name]:
                message.is_delivered = False
                self.in_doubt.add(message)

    def _doubt_what_no_index_has(self, here: Instance) -> None:
        """Retention limits downtime: the index of another instance, or a lost one, may have had messages whose records
        Kafka has deleted since, and nobody has marked that."""
        for name in here.member.assignment() - here.opened():
            known = max(self._covered(here, name), self._marked(name))
            self.in_doubt |= {m for offset, m in self.broker.gone(name).items() if offset >= known}

    def _marked(self, name: SourceName) -> int:
        """The offset below which the committed state says that records are gone."""
        return int(json.loads(self.broker.commits[name][1]).get("g", 0)) if name in self.broker.commits else 0

    @precondition(lambda self: self.of_state(is_running=True))
    @rule(instance=instances, is_orderly=st.booleans())
    def end(self, instance: int, is_orderly: bool) -> None:
        here = self.pick(instance, is_running=True)
        ends = flushable(here)
        if is_orderly:
            here.stop()
            self.indexes.must_be_flushed(here, ends, ends)
        else:
            here.crash()

    @rule(number=instances, step=st.sampled_from(["start", "flush", "pass_time"]), count=st.integers(1, 6))
    def crash_between_files(self, number: int, step: str, count: int) -> None:
        """All instances end, one of them between two changes of files."""
        with crashing_after(count), suppress(Crash):
            if step == "pass_time":
                self.pass_time(11)
            elif step == "flush":
                self.instances[number].flush()
            elif not self.instances[number].is_running:
                self._start(self.instances[number])
        for each in self.instances:
            each.crash()

    @rule(name=names, to=instances, in_time=st.booleans())
    def move(self, name: SourceName, to: int, in_time: bool) -> None:
        """The group gives a partition to another instance."""
        owner = self.broker.owners[name]
        if owner == to:
            return
        here = self.instances[owner]
        if here.is_running:
            ends = flushable(here)
            here.revoke(frozenset([name]), in_time=in_time)
            self.indexes.must_be_flushed(here, {name} & ends.keys() if in_time else (), ends)
        self.broker.owners[name] = to
        for each in (self.instances[owner], self.instances[to]):
            if each.is_running:
                self._watched(each, each.rebase)

    # ---- time

    @rule(minutes=st.sampled_from([1, 11, 61]))
    def pass_time(self, minutes: int) -> None:
        """Running instances look in between."""
        self.clock.advance(minutes * MINUTE_MS)
        for each in self.instances:
            each.look()
            self._remove_left(each)

    def _remove_left(self, here: Instance) -> None:
        before = {name: here.index(name) for name in NAMES}
        for name in self.left.leave(here):
            index = before[name]
            if index is None:
                continue
            elsewhere = set().union(*(each.pending().get(name, ()) for each in self.instances))
            covered = max((self._covered(each, name) for each in self.instances if each is not here), default=0)
            lost = [o for o, m in self.broker.gone(name).items() if o < (index.offset or 0) and m not in self.in_doubt]
            lost = [o for o in lost if o not in elsewhere and covered <= o < self._marked(name)]
            assert not lost, f"the index of {name} was the only place of {lost}"

    @staticmethod
    def _covered(here: Instance, name: SourceName) -> int:
        found = here.index(name)
        return 0 if found is None or found.offset is None else found.offset

    @rule(name=names, share=st.floats(0, 1))
    def delete_records(self, name: SourceName, share: float) -> None:
        """Nobody delivers for a day, and Kafka deletes records. An instance that has their partition has read them, and
        looks before it ends."""
        self.clock.advance(RETENTION_MS)
        owner, log, start = self.instances[self.broker.owners[name]], self.broker.logs[name], self.broker.starts[name]
        self.decoding.note(owner)
        owner.read()
        self.broker.starts[name] = start + round(share * len(log[start:]))
        if name in owner.opened():
            for _ in range(2):
                self.clock.advance(MINUTE_MS)
                owner.look()
                owner.deliver(0)
                owner.flush()
                Marks.must_stand(owner, self.broker)

    @rule(days=st.integers(1, 2))
    def change_retention(self, days: int) -> None:
        """Of the topics; W follows at the next starts."""
        self.broker.retention_ms = days * RETENTION_MS

    @rule()
    def a_day_passes(self) -> None:
        """Nothing runs, or nobody looks."""
        self.clock.advance(RETENTION_MS)

    # ---- mishaps

    @rule(topic=topics, partition=st.one_of(st.none(), st.integers(0, 1)))
    def forget_offsets(self, topic: str, partition: int | None) -> None:
        """Deleted, or expired, while nothing of the topic runs."""
        for instance in self.instances:
            if any(name[0] == topic for name in instance.member.assignment()):
                instance.crash()
        for name in NAMES:
            if name[0] == topic and partition in (None, name[1]):
                self.broker.commits.pop(name, None)
                self.indexes.doubt([name])

    @rule(topic=topics)
    def make_topic_again(self, topic: str) -> None:
        for instance in self.instances:
            instance.crash()
        self.broker.ids[topic] = f"{topic}-{int(self.broker.ids[topic].partition('-')[2]) + 1}"
        for name in NAMES:
            if name[0] == topic:
                self.broker.logs[name], self.broker.starts[name] = [], 0
                self.indexes.doubt([name])
                for old in (*self.earlier.values(), *self.old_indexes.values()):
                    old.pop(name, None)

    @precondition(lambda self: self.of_state(is_running=False))
    @rule(instance=instances, name=names, index=st.integers(0, 5), is_cut=st.booleans())
    def damage(self, instance: int, name: SourceName, index: int, is_cut: bool) -> None:
        """A file of an index, while the instance is down."""
        here = self.pick(instance, is_running=False)
        directory = here.directory / name[0] / str(name[1])
        found = sorted(path for path in directory.glob("*") if path.is_file() and path.name != files.RESERVE)
        if not found:
            return
        path = found[index % len(found)]
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if is_cut else b"\0" * len(content))
        self.indexes.doubt([name], [here.number])
        self.in_doubt |= {m for offset, m in self.broker.gone(name).items() if offset >= self._marked(name)}

    @precondition(lambda self: not self.of_state(is_running=True))
    @rule(instance=instances, name=names, to=st.one_of(st.none(), st.tuples(instances, names)))
    def lose_index(self, instance: int, name: SourceName, to: tuple[int, SourceName] | None) -> None:
        """The index of a partition is lost, or it is moved into the directory of another one."""
        lost = self.instances[instance].path(name)
        places = [(name, lost)] if to is None else [(name, lost), (to[1], self.instances[to[0]].path(to[1]))]
        for each, _ in places:
            self.in_doubt |= {m for offset, m in self.broker.gone(each).items() if offset >= self._marked(each)}
        if lost.is_dir() and places[-1][1] != lost:
            shutil.rmtree(places[-1][1], ignore_errors=True)
            places[-1][1].parent.mkdir(parents=True, exist_ok=True)
            lost.rename(places[-1][1])
        elif to is None:
            shutil.rmtree(lost, ignore_errors=True)

    @rule(topic=topics, to=st.sampled_from(["earliest", "latest", "committed"]), on=instances)
    def reset(self, topic: str, to: Any, on: int) -> None:
        """An operator decides."""
        for instance in self.instances:
            instance.crash()
        here, mine = self.instances[on], [name for name in NAMES if name[0] == topic]
        facts = topic_facts(self.broker, [topic])  # type: ignore[arg-type]
        limits = limits_of(self.broker, [topic])[topic]  # type: ignore[arg-type]

        def found(_: object, __: object) -> list[Any]:
            places = []
            for name in mine:
                offset, metadata = self.broker.commits.get(name, (-1, None))
                places.append(mock.Mock(topic=name[0], partition=name[1], offset=offset, metadata=metadata))
            return places

        def commit(_: object, states: Any) -> None:
            self.broker.commits |= {name: (state.offset, state.metadata()) for name, state in states.items()}

        with mock.patch.multiple(reset_offsets, committed_places=found, _commit=commit):
            try:
                reset_offsets.reset_committed_states(
                    consumer={}, group_id="bridge", topics=facts, to=to, directory=here.directory,
                    parameters=lambda name: decode_parameters(here.settings, name, limits), now_ms=self.clock.now_ms(),
                )  # fmt: skip
            except StateError as error:
                self.refusals.add(error.code)
                return
        self.clock.advance(MINUTE_MS)
        self.indexes.doubt(mine)
        self.decoding.forget(mine)
        for name in mine:
            for message in self.broker.logs[name]:
                is_gone = message.offset < self.broker.starts[name]
                if to == "earliest":
                    message.is_delivered, message.is_given_up = False, is_gone
                elif to == "latest":
                    message.is_given_up = not message.is_delivered
                if to != "committed":
                    self.in_doubt.discard(message)
                elif is_gone:  # given up, but an index of another machine may still have it
                    self.in_doubt.add(message)

    @precondition(lambda self: any(each.refusal is not None for each in self.instances))
    @rule(instance=instances, name=names)
    def delete_foreign_index(self, instance: int, name: SourceName) -> None:
        """An operator does as DB-4015 says."""
        here = self.instances[instance]
        if not here.is_running and here.refusal is not None and here.refusal.code == "DB-4015":
            shutil.rmtree(here.directory / name[0] / str(name[1]), ignore_errors=True)

    # ---- always

    @invariant()
    def resets_are_refused_as_documented(self) -> None:
        assert self.refusals <= {"DB-4017"}

    @invariant()
    def old_indexes_stay_while_they_are_needed(self) -> None:
        for number, covered in list(self.old_indexes.items()):
            here = self.instances[number]
            if here.has_index_of_earlier_version():
                continue
            del self.old_indexes[number]
            for name, end in covered.items():
                elsewhere = set().union(*(each.pending().get(name, ()) for each in self.instances))
                kept = max(self._covered(each, name) for each in self.instances)
                end = min(end, self._marked(name))
                lost = [o for o, m in self.broker.gone(name).items() if kept <= o < end and m not in self.in_doubt]
                assert not set(lost) - elsewhere, f"the old index was the only place of {lost} of {name}"


@pytest.mark.timeout(timeout_s(600))
class TestDirectories(Directories.TestCase):  # type: ignore[misc,valid-type]
    """The machine."""

    settings = of_a_machine(check=45, ci=260, nightly=10_000, steps=30)
