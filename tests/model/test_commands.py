"""Moves and recalls against a store that crashes: each message comes once or never, and the answers say which."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiles import PROFILE
from tests.unit.timerstore.entries import Record, entries
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig, take
from timerstore.cancels.cancels import NO_ORIGIN, SEVERAL
from timerstore.cancels.commands import Decision
from timerstore.limits import Limits
from timerstore.operations.state import Taken
from timerstore.operations.transaction import Transaction
from timerstore.rows.entry import DECIDED, Kind

EXAMPLES = {"check": 60, "ci": 300, "nightly": 20_000}[PROFILE]
FAR_MS = NOW_MS + 10_000
READER = ("ingest", "ingest some")
STEPS = ("send", "move", "recall", *READER, "deliver", "abort", "crash", "flush", "load", "reopen", "lose")


def by_origin(offsets: Iterable[int]) -> dict[str, object]:
    """What a command by origin has in its columns."""
    named = sorted(offsets)
    if len(named) == 1:
        return {"origin": named[0]}
    return {"origin": SEVERAL, "value": ",".join(map(str, named)).encode()}


SILENT = b"silent"
"""How the keys of commands begin that are not answered: this alone, of those that are written once more behind a copy;
with the offset of the client's record, of moves by id."""


class Site:
    """A log, a store, and what the bridge does with both."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.chance = chance
        self.rig = Rig(directory, limits=Limits(window_bytes=1_000, flush_records=1))
        self.now_ms = NOW_MS
        self.messages: dict[str, Record] = {}
        self.commands: dict[str, list[str]] = {}
        """Of each command that is answered, the messages that it is about."""
        self.sent: dict[bytes, int] = {}
        """Where clients wrote commands, by their keys."""
        self.moved_ms: dict[str, int] = {}
        self.arrived: dict[str, list[int]] = defaultdict(list)
        """When each message was due that came."""
        self.ended: set[str] = set()
        """Messages that have come, or were recalled."""
        self.false: list[str] = []
        """Commands that were told that nothing is pending, though it was."""
        self.answers: dict[tuple[str, str], list[tuple[Decision, bool]]] = defaultdict(list)
        """By command and message."""

    # ---- producers

    def send(self) -> None:
        name = f"m{len(self.messages)}"
        due_ms = self.now_ms + self.chance.randrange(0, 3_000)
        self.messages[name] = self._write(due_ms, value=name.encode(), id=name)

    def command(self, kind: Kind) -> None:
        """Of some messages; a few are about another topic, and come to nothing."""
        if not self.messages:
            return
        name = self.chance.choice(list(self.messages))
        if self.chance.random() < 0.1:
            self._write(None, command=kind, moved_ms=self.now_ms, origin=NO_ORIGIN)
            return
        command = f"c{len(self.commands)}"
        by_id = self.chance.random() < 0.4
        if by_id and kind is Kind.MOVE and self.chance.random() < 0.5:
            key = SILENT + b"/%d" % len(self.rig.log)
            due_ms = self.now_ms + self.chance.randrange(0, 3_000)
            self.sent[key] = self._write(None, key=key, command=kind, moved_ms=due_ms, id=name).offset
            return
        beside = self.chance.choices(list(self.messages), k=self.chance.randrange(4))
        names = [name] if by_id else sorted({name, *beside})
        self.commands[command] = names
        if kind is Kind.MOVE:
            self.moved_ms[command] = self.now_ms + self.chance.randrange(0, 3_000)
        named = {"id": name} if by_id else by_origin(self.messages[each].offset for each in names)
        key, moved_ms = command.encode(), self.moved_ms.get(command)
        self.sent[key] = self._write(None, key=key, command=kind, moved_ms=moved_ms, **named).offset

    def _write(self, due_ms: int | None, **more: object) -> Record:
        log = self.rig.log
        log.append(replace(Record(*ORDERS, len(log), due_ms), **more))  # type: ignore[arg-type]
        return log[-1]

    # ---- the bridge

    def ingest_some(self) -> None:
        """A reader that has not come to the end of the log."""
        begin = self.rig.store.next_offset
        end = self.chance.randint(begin, len(self.rig.log))
        self.rig.store.append(entries(self.rig.log[begin:end]), end, self.now_ms)

    def transact(self, end: str) -> None:
        """Take, decide, and commit, abort, or commit and crash before it is known."""
        if not self.rig.store.is_caught_up():
            return
        transaction = self.rig.store.begin(self.now_ms)
        output: list[tuple[int | None, dict[str, object]]] = []
        arrived: list[tuple[str, int]] = []
        answers: list[tuple[str, str, Decision, bool]] = []
        for _ in range(self.chance.randrange(1, 4)):
            rows = take(transaction, self.now_ms, self.chance.choice((1, 3, 100)))
            self._plan(transaction, rows, output, arrived, answers)
        if end == "abort":
            transaction.rollback()
            return
        # From here on it is committed.
        self.rig.committed = transaction.progress()
        for due_ms, more in output:
            self._write(due_ms, **more)
        for message, due in arrived:
            self.arrived[message].append(due)
            self.ended.add(message)
        for command, about, decision, is_move in answers:
            self.answers[command, about].append((decision, is_move))
            if decision is Decision.ACT and not is_move:
                self.ended.add(about)
            elif decision not in (Decision.ACT, Decision.PASSED, Decision.UNKNOWN) and about not in self.ended:
                self.false.append(command)
        if end == "crash":
            self.rig.store.close()
            self.rig.open(self.now_ms)
        else:
            if self.chance.random() < 0.3:  # what is committed is read before it is known to be
                self.ingest_some()
            transaction.acknowledge()

    def _plan(
        self,
        transaction: Transaction,
        rows: Taken,
        output: list[tuple[int | None, dict[str, object]]],
        arrived: list[tuple[str, int]],
        answers: list[tuple[str, str, Decision, bool]],
    ) -> None:
        payload, kinds = rows.payload, rows.payload.column("kind").to_numpy()
        values = [value.decode() for value in payload.column("value").to_pylist()]
        keys = payload.column("key").to_pylist()
        at_origin = {row.offset: name for name, row in self.messages.items()}
        dues, origins = payload.column("due").to_pylist(), payload.column("origin").to_pylist()
        offset = rows.offset
        timers = np.flatnonzero(kinds == Kind.TIMER)
        copied = timers[[self.chance.random() < 0.3 for _ in timers]]
        if len(copied):
            transaction.copied(
                offset[copied], payload.column("origin").to_numpy()[copied], payload.column("id").take(pa.array(copied))
            )
        for row in timers.tolist():
            assert dues[row] <= self.now_ms, "early"
            if row in copied:
                later = {"value": values[row].encode(), "id": values[row], "origin": origins[row], "rolls": 1}
                output.append((dues[row] + self.chance.randrange(0, 500), later))
            else:
                arrived.append((values[row], dues[row]))
        commands = np.flatnonzero(np.isin(kinds, DECIDED))
        at = {int(offset[row]): row for row in commands.tolist()}
        latest, passed = dict[tuple[Any, ...], int](), dict[int, int]()
        for row in sorted(commands.tolist(), key=lambda row: (self.sent.get(keys[row], 0), row), reverse=True):
            id = payload.column("id")[row].as_py()
            same = id, None if id is not None else (payload.column("value")[row].as_py(), origins[row])
            if kinds[row] == Kind.MOVE and origins[row] != NO_ORIGIN:
                if same in latest:
                    passed[int(offset[row])] = latest[same]
                latest.setdefault(same, int(offset[row]))
        for each in transaction.decide(offset[commands], self.now_ms, passed):
            row, effect = at[each.effect.offset], each.effect
            again: dict[str, object] = {"key": keys[row], "command": Kind(int(kinds[row])), "moved_ms": dues[row]}
            if each.decision is not Decision.SENT_ON:
                again = again | {"key": SILENT} if effect.is_move else {"key": SILENT, "cancels": True}
            if keys[row] != SILENT or each.decision is Decision.SENT_ON:
                output.extend((None, again | by_origin([origin])) for origin in each.written.tolist())
            if each.decision is not Decision.SENT_ON:
                command = keys[row].decode()
                about = self.commands.get(command, [])
                if each.named is not None:
                    about = [at_origin[origin] for origin in each.named.tolist()]
                if not keys[row].startswith(SILENT):
                    answers += [(command, name, each.decision, effect.is_move) for name in about]
                if each.decision is Decision.ACT and effect.is_move:
                    ids = effect.payload.column("id").take(pa.array(each.live))
                    transaction.copied(effect.rows.offset[each.live], effect.origin[each.live], ids)
                for live in each.live.tolist() if each.decision is Decision.ACT and effect.is_move else ():
                    name = effect.payload.column("id")[live].as_py()
                    moved = {"value": effect.payload.column("value")[live].as_py(), "id": name}
                    output.append((dues[row], moved | {"origin": int(effect.origin[live]), "rolls": 1}))

    def step(self, what: str) -> None:
        rig = self.rig
        match what:
            case "send":
                for _ in range(3):
                    self.send()
            case "move" | "recall":
                for _ in range(2):
                    self.command(Kind.MOVE if what == "move" else Kind.RECALL)
            case "ingest":
                rig.ingest()
            case "ingest some":
                self.ingest_some()
            case "deliver" | "abort" | "crash":
                self.now_ms += self.chance.randrange(0, 800)
                self.transact(what)
            case "flush":
                rig.store.maintenance.flush(self.now_ms)
            case "load":
                rig.load(self.now_ms)
            case "reopen":
                rig.reopen()
            case "lose":
                rig.store.close()
                shutil.rmtree(rig.directory)
                rig.open(self.now_ms)

    def settle(self) -> None:
        """Until nothing is pending."""
        self.now_ms += 100_000
        for _ in range(400):
            self.rig.ingest()
            while self.rig.load(self.now_ms):
                pass
            before = len(self.rig.log)
            self.transact("deliver")
            is_written = before != len(self.rig.log)
            if not is_written and self.rig.store.next_due_ms() is None and not self.rig.store.stats().pending:
                return
            self.now_ms += 1_000
        raise AssertionError("no end of it")

    def check(self) -> None:
        assert not self.false, f"{self.false} are told that nothing is pending"
        told: dict[str, list[tuple[str, Decision, bool]]] = defaultdict(list)
        for command, names in self.commands.items():
            for name in names:
                found = self.answers[command, name]
                assert len(found) == 1, f"{command} has {len(found)} answers about {name}"
                told[name].append((command, *found[0]))
        for name in self.messages:
            acted = [(command, is_move) for command, decision, is_move in told[name] if decision is Decision.ACT]
            recalled = [command for command, is_move in acted if not is_move]
            assert len(recalled) <= 1, f"{name} was recalled twice"
            assert len(self.arrived[name]) == (0 if recalled else 1), f"{name} came {self.arrived[name]}: {told[name]}"
            if any(decision is Decision.LEFT for _, decision, _ in told[name]):
                assert not recalled, f"{name} is told to have left, and was recalled"


@pytest.mark.fault("crashes amid commands")
@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(seed=st.integers(0, 1 << 32), steps=st.lists(st.sampled_from(STEPS), min_size=5, max_size=40))
def test_answers_are_true_through_crashes(seed: int, steps: list[str]) -> None:
    """In any course of events a message arrives once unless a recall was answered with success, and each command is
    answered once."""
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder) / "store", random.Random(seed))
        for step in ("send", *steps):
            site.step(step)
        site.settle()
        site.check()
        site.rig.store.close()
