"""timerstore.cancels.commands: what moves and recalls come to in corners. (The rest is tried by tests/model.)"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from dev.harness.waiting import wait_until
from tests.unit.timerstore.entries import Record, entries
from tests.unit.timerstore.rig import NOW_MS, ORDERS, Rig
from tests.unit.timerstore.rig import take as take_from
from timerstore.budget import Budgets
from timerstore.cancels import commands, effects, id_index
from timerstore.cancels.cancels import NO_ORIGIN, SEVERAL
from timerstore.cancels.commands import WAITING_MS_MAX, Decision, Effect
from timerstore.cancels.digests import Digests
from timerstore.cancels.effects import _Found
from timerstore.clock import SystemClock
from timerstore.errors import Closed
from timerstore.operations import transaction as operations_transaction
from timerstore.operations.find import PENDING, LogQuery, PendingState
from timerstore.operations.state import Taken
from timerstore.operations.transaction import Transaction
from timerstore.rows.entry import PAYLOAD, Kind
from timerstore.rows.position import AT_MIN

SOON_MS, FAR_MS = NOW_MS + 1_000, NOW_MS + 100_000
FEW = 10


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(effects, "ROWS_MAX", FEW)
    rig = Rig(tmp_path / "store")
    rig.load()
    return rig


def write(rig: Rig, due_ms: int | None, **more: Any) -> Record:
    rig.log.append(replace(Record(*ORDERS, len(rig.log), due_ms), **more))
    return rig.log[-1]


def take(rig: Rig, now_ms: int = NOW_MS, limit: int = 10) -> tuple[Transaction, Taken]:
    transaction = rig.store.begin()
    return transaction, take_from(transaction, now_ms, limit)


def several(*offsets: int) -> dict[str, Any]:
    """What a command that names several originals has in its columns."""
    return {"origin": SEVERAL, "value": ",".join(map(str, offsets)).encode()}


def decide(rig: Rig, now_ms: int = NOW_MS) -> Decision:
    """What the one command that was written comes to."""
    rig.ingest()
    transaction, rows = take(rig, now_ms)
    (decided,) = transaction.decide(rows.offset, now_ms)
    rig.commit(transaction, [rows])
    return decided.decision


def roll(rig: Rig, meanwhile: Callable[[], None] = lambda: None) -> None:
    """The message at offset 0 leaves as a copy; `meanwhile` happens between the commit and its being known."""
    transaction, rows = take(rig)
    transaction.copied(rows.offset, rows.payload.column("origin").to_numpy(), rows.payload.column("id"))
    write(rig, NOW_MS + 5, id="m", origin=0, rolls=1)
    meanwhile()
    rig.commit(transaction, [rows])


@pytest.mark.parametrize("named", [{"origin": 0}, {"id": "m"}])
def test_a_copy_that_is_read_before_its_commit_is_known_is_in_transit_no_more(rig: Rig, named: dict[str, Any]) -> None:
    """Else commands for its message would be written again and again, for ever."""
    write(rig, NOW_MS - 10, id="m")
    rig.ingest()
    roll(rig, rig.ingest)  # type: ignore[arg-type]
    assert not len(rig.store.state.commands.in_transit)
    assert [row.rolls for row in rig.deliver(NOW_MS + 10)] == [1]
    write(rig, None, command=Kind.RECALL, **named)
    assert decide(rig, NOW_MS + 20) is Decision.NOTHING


def test_a_command_that_is_read_before_such_a_copy_is_written_again(rig: Rig) -> None:
    write(rig, NOW_MS - 10, id="m")
    rig.ingest()
    write(rig, None, command=Kind.RECALL, origin=0)
    roll(rig, rig.ingest)  # type: ignore[arg-type]
    assert decide(rig) is Decision.SENT_ON
    write(rig, None, command=Kind.RECALL, origin=0)
    assert decide(rig) is Decision.ACT


@pytest.mark.parametrize("named", [{"origin": 0}, {"id": "m"}])
def test_a_copy_that_is_not_read_yet_is_in_transit(rig: Rig, named: dict[str, Any]) -> None:
    """The command is in front of the copy, and is read after the commit that wrote it, without it."""
    write(rig, NOW_MS - 10, id="m")
    rig.ingest()
    write(rig, None, command=Kind.RECALL, **named)
    roll(rig)
    rig.store.append(entries(rig.log[1:2]), 2, NOW_MS)
    transaction, rows = take(rig)
    (decided,) = transaction.decide(rows.offset, NOW_MS)
    assert decided.decision is Decision.SENT_ON
    assert decided.named is not None and decided.named.tolist() == [0]


def command_after_a_restart(rig: Rig, **more: Any) -> None:
    """A command is read, and not yet the copy of its message behind it, which an earlier process has written."""
    write(rig, NOW_MS - 10, id="m")
    rig.ingest()
    write(rig, None, command=Kind.RECALL, **more)
    roll(rig)
    rig.reopen()
    begin = rig.store.next_offset
    rig.store.append(entries(rig.log[begin:2]), 2, NOW_MS)


def test_after_a_restart_a_copy_may_be_unread(rig: Rig) -> None:
    """What an earlier process wrote behind the command is in transit as well."""
    command_after_a_restart(rig, origin=0)
    transaction, rows = take(rig)
    (decided,) = transaction.decide(rows.offset, NOW_MS)
    assert decided.decision is Decision.SENT_ON


@pytest.mark.fault("commands by id at a start")
def test_a_command_by_id_waits_for_copies_of_an_earlier_process(rig: Rig) -> None:
    """A command by id is decided once the log is read up to its end at the start, with the messages of which only a
    copy is left; until then O stays below it, and rows behind it wait."""
    command_after_a_restart(rig, id="m")
    assert rig.store.next_due_ms() == NOW_MS + WAITING_MS_MAX
    transaction, rows = take(rig)
    assert not len(rows) and transaction.progress().offset == 1
    transaction.acknowledge()
    rig.news.clear()
    rig.store.append(entries(rig.log[2:]), 3, NOW_MS)
    assert rig.news.is_set() and rig.store.next_due_ms() == AT_MIN
    transaction, rows = take(rig)
    (decided,) = transaction.decide(rows.offset[:1], NOW_MS)
    assert decided.decision is Decision.SENT_ON and decided.written.tolist() == [0]


def gives_up_by_time(_rig: Rig) -> int:
    return NOW_MS + WAITING_MS_MAX


def gives_up_by_number(rig: Rig) -> int:
    with mock.patch.object(commands, "WAITING_MAX", 0):
        rig.store.begin(NOW_MS).rollback()
    return NOW_MS


def gives_up_without_room(rig: Rig) -> int:
    rig.store.state.share(Budgets(replace(rig.limits, overtaken_bytes=1)))
    assert not rig.store.has_room()
    return NOW_MS


@pytest.mark.parametrize("gives_up", [gives_up_by_time, gives_up_by_number, gives_up_without_room])
def test_the_wait_of_commands_by_id_is_bounded(rig: Rig, gives_up: Callable[[Rig], int]) -> None:
    """By 10 s, 10,000 commands, and room for new rows: then their effect is unknown, they touch nothing, and the rows
    behind them go on."""
    command_after_a_restart(rig, id="m")
    now_ms = gives_up(rig)
    transaction = rig.store.begin(now_ms)
    rows = take_from(transaction, now_ms, 10)
    decided = transaction.decide(rows.offset, now_ms)
    assert {each.decision for each in decided} == {Decision.UNKNOWN}
    rig.commit(transaction, [rows])
    rig.ingest()
    assert rig.store.stats().pending == 1
    write(rig, None, command=Kind.RECALL, id="m")
    assert decide(rig) is Decision.SENT_ON


def test_the_time_of_commands_by_id_ends_only_where_messages_are_delivered(rig: Rig) -> None:
    """While these wait until the log is read, the wait costs nothing."""
    command_after_a_restart(rig, id="m")
    rig.store.state.cancels.inherited = 9
    rig.store.append(entries(rig.log[2:]), 3, NOW_MS + WAITING_MS_MAX)
    transaction, rows = take(rig)
    assert not len(rows)
    transaction.rollback()
    rig.store.begin(NOW_MS + WAITING_MS_MAX).rollback()
    assert rig.store.next_due_ms() == AT_MIN


def test_a_flush_that_makes_room_does_not_end_the_wait_of_commands(rig: Rig) -> None:
    """Nor does a commit that lets it: the room comes back in a moment."""
    command_after_a_restart(rig, id="m")
    rig.store.state.share(Budgets(replace(rig.limits, flush_bytes=0)))
    rig.store.state.resident.stored = 0
    assert not rig.store.has_room()
    assert rig.store.next_due_ms() == NOW_MS + WAITING_MS_MAX
    rig.store.state.resident.stored = 1
    assert not rig.store.has_room()
    assert rig.store.next_due_ms() == AT_MIN


@pytest.mark.parametrize("kind", [Kind.MOVE, Kind.RECALL])
def test_one_that_names_another_topic_comes_to_nothing(rig: Rig, kind: Kind) -> None:
    """Alone or beside others."""
    write(rig, NOW_MS, command=kind, origin=NO_ORIGIN)
    rig.ingest()
    transaction, rows = take(rig)
    assert transaction.decide(rows.offset, NOW_MS) == []
    rig.commit(transaction, [rows])
    write(rig, NOW_MS, command=kind, origin=NO_ORIGIN)
    write(rig, NOW_MS, command=kind, origin=0)
    assert decide(rig) is Decision.NOTHING


@pytest.mark.parametrize("named", [{"origin": 0}, {"id": "m"}])
@pytest.mark.parametrize("kind", [Kind.MOVE, Kind.RECALL])
def test_what_replaces_is_pending_for_a_command_of_the_same_transaction(
    rig: Rig, kind: Kind, named: dict[str, Any]
) -> None:
    """What it replaces is cancelled by a row of its own offset, which leaves at once."""
    timer = write(rig, FAR_MS, id="m", replace=True)
    command = write(rig, None, command=kind, **named)
    cancel = replace(timer, due_ms=None, cancels=True, replace=False)
    rig.store.append(entries([timer, cancel, command]), 2, NOW_MS)
    transaction, rows = take(rig)
    assert len(rows) == 2
    (decided,) = transaction.decide(rows.offset, NOW_MS)
    expected = Decision.ACT if "origin" in named else Decision.SENT_ON
    assert (decided.decision, decided.named.tolist()) == (expected, [0])  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [Kind.MOVE, Kind.RECALL])
@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("named", [{"origin": 0}, {"id": "m"}])
def test_a_copy_under_way_beside_what_is_pending(
    rig: Rig, named: dict[str, Any], is_restarted: bool, kind: Kind
) -> None:
    """A tick waits for another attempt, and the next one is being written; or two messages share an id. By origin the
    command acts, and is needed once more behind the copy; by id one is written for each of both, once the copy is known
    of."""
    write(rig, NOW_MS - 10, id="m")
    write(rig, FAR_MS, id="m", **(named | {"rolls": 1} if "origin" in named else {}))
    rig.ingest()
    transaction, rows = take(rig)
    transaction.copied(rows.offset, rows.payload.column("origin").to_numpy(), rows.payload.column("id"))
    write(rig, None, command=kind, **named)
    write(rig, FAR_MS + 5, id="m", origin=0, rolls=1)
    if is_restarted:
        rig.commit(transaction, [rows])
        rig.reopen()
        begin = rig.store.next_offset
        rig.store.append(entries(rig.log[begin:3]), 3, NOW_MS)
    else:
        rig.store.append(entries(rig.log[2:3]), 3, NOW_MS)
        rig.commit(transaction, [rows])
    if "id" in named and is_restarted:
        transaction, rows = take(rig)
        assert not len(rows)
        transaction.rollback()
        rig.ingest()
    transaction, rows = take(rig)
    (decided,) = transaction.decide(rows.offset, NOW_MS)
    if "origin" in named:
        assert (decided.decision, decided.written.tolist()) == (Decision.ACT, [0])
    else:
        assert (decided.decision, decided.written.tolist()) == (Decision.SENT_ON, [0, 1])
    rig.commit(transaction, [rows])
    rig.ingest()
    write(rig, None, command=kind, origin=0)
    rig.ingest()
    transaction, rows = take(rig)
    (decided,) = transaction.decide(rows.offset, NOW_MS)
    assert (decided.decision, decided.written.tolist()) == (Decision.ACT, [])


def test_a_copy_that_is_read_with_a_command_behind_it_is_not_under_way(rig: Rig) -> None:
    write(rig, NOW_MS - 10, id="m")
    rig.ingest()
    transaction, rows = take(rig)
    transaction.copied(rows.offset, rows.payload.column("origin").to_numpy(), rows.payload.column("id"))
    rig.commit(transaction, [rows])
    write(rig, FAR_MS, id="m", origin=0, rolls=1)
    write(rig, None, command=Kind.RECALL, origin=0)
    assert decide(rig) is Decision.ACT


def test_of_moves_of_one_message_the_last_acts(rig: Rig) -> None:
    """If each acted, it would have to wait for the copy of the one before."""
    write(rig, FAR_MS)
    moves = [write(rig, None, command=Kind.MOVE, moved_ms=FAR_MS + n, origin=0) for n in range(5)]
    rig.ingest()
    transaction, rows = take(rig)
    passed = {int(offset): int(rows.offset[-1]) for offset in rows.offset[:-1]}
    decided = transaction.decide(rows.offset, NOW_MS, passed)
    assert [each.decision for each in decided] == [Decision.PASSED] * 4 + [Decision.ACT]
    transaction.copied(decided[-1].effect.rows.offset, decided[-1].effect.origin, pa.nulls(1, pa.string()))
    write(rig, moves[-1].moved_ms, origin=0, rolls=1)
    rig.commit(transaction, [rows])
    rig.ingest()
    assert rig.store.stats().pending == 1
    rig.reopen()
    rig.ingest()
    assert rig.store.stats().pending == 1


@pytest.mark.parametrize("is_behind", [False, True])
def test_an_older_move_that_was_written_once_more_is_passed_over(rig: Rig, *, is_behind: bool) -> None:
    """The later one, which was sent meanwhile, is in front of it, and acts first. Not where there is a copy between the
    two: nothing else would act on it, and it would be lost when the command is read again."""
    write(rig, FAR_MS)
    rig.ingest()
    transaction, rows = take(rig)
    transaction.rollback()
    later = write(rig, None, command=Kind.MOVE, moved_ms=FAR_MS + 2, origin=0)
    if is_behind:
        write(rig, FAR_MS, origin=0, rolls=1)
    older = write(rig, None, command=Kind.MOVE, moved_ms=FAR_MS + 1, origin=0)
    rig.ingest()
    transaction, rows = take(rig)
    decided = transaction.decide(rows.offset, NOW_MS, {older.offset: later.offset})
    expected = [Decision.ACT, Decision.ACT] if is_behind else [Decision.ACT, Decision.PASSED]
    assert [each.decision for each in decided] == expected


def test_one_that_acts_in_place_of_what_was_on_its_way_does_not_wait_for_it(rig: Rig) -> None:
    """Else neither acts, and both are finished: read again, both would cover a message that nothing has moved."""
    write(rig, FAR_MS)
    for n in range(2):
        write(rig, None, command=Kind.MOVE, moved_ms=FAR_MS + n, origin=0)
    rig.ingest()
    transaction, rows = take(rig)
    older, later = rows.offset.tolist()
    rig.store.state.commands.sent_on[0] = FAR_MS
    decided = transaction.decide(rows.offset, NOW_MS, {older: later})
    assert [each.decision for each in decided] == [Decision.PASSED, Decision.ACT]


def test_a_move_whose_message_has_left_is_not_passed_over(rig: Rig) -> None:
    """Each says so."""
    write(rig, NOW_MS - 10)
    rig.ingest()
    rig.deliver()
    for _ in range(2):
        write(rig, None, command=Kind.MOVE, moved_ms=FAR_MS, origin=0)
    rig.ingest()
    transaction, rows = take(rig)
    decided = transaction.decide(rows.offset, NOW_MS, {int(rows.offset[0]): int(rows.offset[1])})
    assert [each.decision for each in decided] == [Decision.NOTHING] * 2


def test_of_commands_by_one_id_the_first_acts(rig: Rig) -> None:
    """Each of the others is answered behind it, with one of its messages."""
    for _ in range(3):
        write(rig, FAR_MS, id="m")
    for kind in (Kind.RECALL, Kind.RECALL, Kind.MOVE):
        write(rig, None, command=kind, id="m")
    rig.ingest()
    transaction, rows = take(rig)
    decided = transaction.decide(rows.offset, NOW_MS)
    assert [each.written.tolist() for each in decided] == [[0, 1, 2], [0], [0]]


def test_a_transaction_leaves_further_commands_of_an_id_to_the_next_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its commands by id cover enough messages, rows behind them wait, too; the first command of each id acts."""
    monkeypatch.setattr(operations_transaction, "COVERED_MAX", 5)
    for id in ("m", "m", "n"):
        write(rig, FAR_MS, id=id)
    for id in ("m", "m", "m", "m", "m", "n", "n"):
        write(rig, None, command=Kind.MOVE, moved_ms=FAR_MS, id=id)
    write(rig, NOW_MS)
    rig.ingest()
    decided = []
    while rig.store.next_due_ms() == AT_MIN:
        transaction, rows = take(rig)
        decided.append([each.decision for each in transaction.decide(rows.offset[:4], NOW_MS)])
        assert transaction.progress().offset == min(11, 3 + sum(map(len, decided)) + (len(decided) == 3))
        rig.commit(transaction, [rows])
    assert decided == [[Decision.SENT_ON] * 2, [Decision.SENT_ON] * 2, [Decision.SENT_ON] * 3]


def test_a_move_by_id_that_a_later_one_makes_moot_is_passed_over(rig: Rig) -> None:
    """Not one whose messages a recall takes before, nor where the later one is about too many."""
    write(rig, FAR_MS, id="m")
    for kind in (Kind.MOVE, Kind.RECALL, Kind.MOVE, Kind.MOVE):
        write(rig, None, command=kind, id="m")
    rig.ingest()
    transaction, rows = take(rig)
    first, _, second, last = rows.offset.tolist()
    decided = transaction.decide(rows.offset, NOW_MS, {first: last, second: last})
    assert [each.decision for each in decided] == [Decision.PASSED, *[Decision.SENT_ON] * 3]
    assert not any(len(each.live) for each in decided)
    transaction.rollback()
    for _ in range(FEW):
        write(rig, FAR_MS, id="m")
    write(rig, None, command=Kind.MOVE, id="m")
    rig.ingest()
    transaction, rows = take(rig)
    decided = transaction.decide(rows.offset, NOW_MS, {first: int(rows.offset[-1])})
    assert [each.decision for each in decided][::4] == [Decision.SENT_ON, Decision.TOO_MANY]


def test_a_recall_by_id_that_cannot_be_written_leaves_its_messages_to_later_commands(rig: Rig) -> None:
    """It has touched none of them."""
    for kind in (None, None, Kind.RECALL, Kind.MOVE):
        write(rig, None if kind else FAR_MS, id="m", **({"command": kind} if kind else {}))
    rig.ingest()
    transaction, rows = take(rig)
    decided = transaction.decide(rows.offset, NOW_MS, silent=rows.offset[:1].tolist())
    assert [each.written.tolist() for each in decided] == [[0, 1], [0, 1]]


def test_a_move_by_id_is_not_passed_over_by_one_that_covers_too_many(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in transit count: with them the later move touches nothing."""
    monkeypatch.setattr(operations_transaction, "ROWS_MAX", FEW)
    write(rig, NOW_MS - 10, id="m")
    rig.ingest()
    for _ in range(FEW - 1):
        write(rig, FAR_MS, id="m")
    transaction, rows = take(rig)
    transaction.copied(rows.offset, rows.payload.column("origin").to_numpy(), rows.payload.column("id"))
    rig.commit(transaction, [rows])
    for due_ms in (None, FAR_MS, None):
        write(rig, due_ms, id="m", **({} if due_ms else {"command": Kind.MOVE, "moved_ms": FAR_MS}))
    rig.ingest()
    transaction, rows = take(rig)
    first, last = rows.offset.tolist()
    decided = transaction.decide(rows.offset, NOW_MS, {first: last})
    assert [each.decision for each in decided] == [Decision.SENT_ON, Decision.TOO_MANY]


def test_a_recall_behind_a_copy_comes_before_later_moves_by_id(rig: Rig) -> None:
    """None of them is passed over with the answer that its message was moved."""
    write(rig, NOW_MS - 10, id="m")
    write(rig, FAR_MS, id="m")
    rig.ingest()
    for more in ({"origin": 0}, {"id": "m"}, {"id": "m"}):
        write(rig, None, command=Kind.RECALL if "origin" in more else Kind.MOVE, moved_ms=FAR_MS, **more)
    transaction, rows = take(rig)
    transaction.copied(rows.offset, rows.payload.column("origin").to_numpy(), rows.payload.column("id"))
    rig.commit(transaction, [rows])
    rig.ingest()
    transaction, rows = take(rig)
    decided = transaction.decide(rows.offset, NOW_MS, {3: 4})
    assert [each.decision for each in decided] == [Decision.SENT_ON] * 3


def test_what_a_move_could_not_copy_is_not_in_transit(rig: Rig) -> None:
    """It became a dead letter. Else a command about it would be written again and again, for ever."""
    write(rig, FAR_MS)
    write(rig, None, command=Kind.MOVE, moved_ms=FAR_MS, origin=0)
    assert decide(rig) is Decision.ACT
    write(rig, None, command=Kind.RECALL, origin=0)
    assert decide(rig) is Decision.NOTHING


def test_a_command_by_origin_has_no_limit(rig: Rig) -> None:
    """As it is read again it covers all rows of its message, so it must act on all: ticks that are tried again."""
    write(rig, NOW_MS - 10)
    rig.ingest()
    rig.deliver()
    for _ in range(FEW + 1):
        write(rig, SOON_MS, origin=0, rolls=1)
    write(rig, None, command=Kind.RECALL, origin=0)
    assert decide(rig) is Decision.ACT
    assert rig.store.stats().pending == 0
    rig.store.close()
    shutil.rmtree(rig.directory)
    rig.open()
    rig.ingest()
    assert rig.store.stats().pending == 0


@pytest.mark.parametrize("kind", [Kind.MOVE, Kind.RECALL])
@pytest.mark.parametrize("is_flushed", [False, True])
def test_commands_by_one_id_share_what_they_are_about(rig: Rig, kind: Kind, *, is_flushed: bool) -> None:
    """Thousands of them may come at once, about a thousand messages: rows for each would take gigabytes. Each is about
    what was sent before it."""
    for _ in range(FEW // 2):
        write(rig, FAR_MS, id="i" * 200, target="t" * 200)
    if is_flushed:
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    for _ in range(FEW // 2):
        for _ in range(100):
            write(rig, None, command=kind, id="i" * 200)
        write(rig, FAR_MS, id="i" * 200, target="t" * 200)
    write(rig, None, command=kind, id="i" * 200)
    rig.ingest()
    found = list(rig.store.state.commands.effects.values())
    assert len({id(effect.rows) for effect in found}) == 1
    assert [effect.upto for effect in found[::100]] == list(range(FEW // 2, FEW + 1))
    size = effects.EFFECT_BYTES * len(found) + effects.TIMER_BYTES * FEW
    assert rig.store.state.commands.bytes == size
    transaction, rows = take(rig, limit=1_000)
    transaction.decide(rows.offset, NOW_MS)
    rig.commit(transaction, [rows])
    assert rig.store.state.commands.bytes == 0


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_commands_wait_until_there_is_room_for_what_they_are_about(rig: Rig, *, by_id: bool, is_flushed: bool) -> None:
    """Those that copy nothing, too: a batch may have thousands, about a hundred messages or a thousand each."""
    ids, limit = 40, 40_000
    for i in range(ids * FEW):
        write(rig, FAR_MS, id=f"{i % ids}" * 100)
    if is_flushed:
        rig.ingest()
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    rig.store.state.share(Budgets(replace(rig.limits, overtaken_bytes=limit)))
    for i in range(ids):
        write(rig, None, command=Kind.RECALL, **({"id": f"{i}" * 100} if by_id else several(*range(i, 400, ids))))
    reader = threading.Thread(target=rig.ingest)
    reader.start()
    held, pieces, decided = rig.store.state.commands, 0, list[Decision]()
    while len(decided) < ids:
        wait_until(lambda: held.effects, 20, "commands")
        assert held.bytes < limit + limit // 4
        pieces += 1
        transaction, rows = take(rig, limit=1_000)
        decided += [each.decision for each in transaction.decide(rows.offset, NOW_MS)]
        rig.commit(transaction, [rows])
    reader.join()
    assert decided == [Decision.SENT_ON if by_id else Decision.ACT] * ids
    assert pieces > 1
    assert held.bytes == 0


def test_messages_that_many_moves_name_take_their_room_for_each(rig: Rig) -> None:
    """As each holds its own rows of them."""
    messages, limit = 20, 100_000
    for _ in range(messages):
        write(rig, FAR_MS, value=b"x" * 1_000)
    rig.ingest()
    rig.deliver()
    rig.store.state.share(Budgets(replace(rig.limits, overtaken_bytes=limit)))
    for _ in range(200):
        write(rig, None, command=Kind.MOVE, moved_ms=FAR_MS + 1, **several(*range(messages)))

    def ingest() -> None:
        with suppress(Closed):
            rig.ingest()

    reader = threading.Thread(target=ingest, daemon=True)
    reader.start()
    held = rig.store.state.commands
    wait_until(lambda: held.effects, 30, "the first piece")
    assert held.bytes <= 2 * limit
    rig.store.close()
    reader.join(30)
    assert not reader.is_alive()


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize(("small", "names"), [(0, 1), (2 * effects.FIRST_READ, 1), (2 * effects.FIRST_READ, 20)])
def test_moves_wait_until_there_is_room_for_their_messages(
    rig: Rig, small: int, names: int, *, is_flushed: bool
) -> None:
    """What they copy is held in memory until they are decided: a batch with more is taken in piece by piece, also where
    those that it begins with are `small`."""
    count, large = 10 * effects.FIRST_READ, b"x" * 1_000
    rig.store.state.share(Budgets(replace(rig.limits, overtaken_bytes=100 * len(large))))
    for i in range(count):
        write(rig, FAR_MS, value=b"" if i < small else large)
    rig.ingest()
    if is_flushed:
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    for begin in range(0, count, names):
        named = {"origin": begin} if names == 1 else several(*range(begin, begin + names))
        write(rig, None, command=Kind.MOVE, moved_ms=FAR_MS + 1, **named)
    reader = threading.Thread(target=rig.ingest)
    reader.start()
    decided: list[Decision] = []
    state = rig.store.state
    while len(decided) < count // names:
        wait_until(lambda: len(state.commands.effects), 20, "moves")
        assert state.commands.bytes < 150 * len(large)
        transaction, rows = take(rig, limit=count)
        decided += [each.decision for each in transaction.decide(rows.offset, NOW_MS)]
        rig.commit(transaction, [rows])
    reader.join()
    assert decided == [Decision.ACT] * (count // names)
    assert state.commands.bytes == 0
    assert rig.store.next_offset == count + count // names


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("how", ["replaced", "moved"])
def test_what_is_cancelled_or_moved_already_is_none_of_too_many(rig: Rig, how: str, *, is_flushed: bool) -> None:
    for i in range(FEW + 2):
        write(rig, FAR_MS, id="m", **({"replace": True} if how == "replaced" or i == 0 else {"origin": 0, "rolls": 1}))
        rig.ingest()
        if how == "moved" and i <= FEW:
            write(rig, None, command=Kind.MOVE, origin=0, moved_ms=FAR_MS)
            assert decide(rig) is Decision.ACT
    if is_flushed:
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    write(rig, None, command=Kind.RECALL, id="m")
    assert decide(rig) is Decision.SENT_ON


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("command", [Kind.RECALL, Kind.MOVE])
def test_many_rows_of_one_message_are_not_too_many_messages(rig: Rig, command: Kind, *, is_flushed: bool) -> None:
    """A message that comes each second has a thousand after a quarter of an hour in which its target fails."""
    write(rig, NOW_MS - 10, id="m")
    rig.ingest()
    rig.deliver()
    for _ in range(3 * FEW):
        write(rig, FAR_MS, id="m", origin=0, rolls=1)
    rig.ingest()
    if is_flushed:
        rig.deliver()
        rig.store.maintenance.flush(NOW_MS)
    write(rig, None, command=command, id="m")
    rig.ingest()
    transaction, rows = take(rig)
    (decided,) = transaction.decide(rows.offset, NOW_MS)
    assert decided.decision is Decision.SENT_ON and decided.written.tolist() == [0]


@pytest.mark.parametrize("at_once", [1, 3, 1 << 18])
@pytest.mark.parametrize("flushed", [0, 2])
def test_an_id_has_too_many_messages_from_one_more_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, flushed: int, at_once: int
) -> None:
    """For the commands behind that; wherever its messages are, and however many of them are looked at at a time."""
    monkeypatch.setattr(id_index, "FOUND_ROWS_MAX", at_once)
    for i in range(2 * FEW):
        copy: dict[str, Any] = {"origin": 3, "rolls": 1} if i == 3 else {}
        write(rig, FAR_MS, id="m", **copy)
        if i + 1 == flushed:
            rig.ingest()
            rig.deliver()
            rig.store.maintenance.flush(NOW_MS)
        if i in (1, FEW, FEW + 1, 2 * FEW - 1):
            write(rig, None, command=Kind.RECALL, id="m")
    rig.ingest()
    found = rig.store.state.commands.effects.values()
    assert [(effect.upto, effect.is_too_many) for effect in found] == [(2, False), (11, False), (0, True), (0, True)]


@pytest.mark.parametrize("command", [Kind.RECALL, Kind.MOVE])
@pytest.mark.parametrize("also", [None, 0])
def test_an_offset_that_no_record_can_have_names_nothing(rig: Rig, command: Kind, also: int | None) -> None:
    """Neither when it is decided, nor when it is read again; alone or beside another one."""
    write(rig, None)
    for _ in range(2):
        write(rig, SOON_MS)
    rig.ingest()
    rig.deliver()
    named: dict[str, Any] = {"origin": 1 << 48} if also is None else several(also, (1 << 48) + 1, 1 << 48)
    write(rig, None, command=command, **named, moved_ms=NOW_MS)
    assert decide(rig) is Decision.NOTHING
    for is_lost in (False, True):
        rig.store.close()
        if is_lost:
            shutil.rmtree(rig.directory)
        rig.open()
        rig.ingest()
        assert rig.store.stats().pending == 2


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_what_was_recalled_is_found_as_cancelled_and_what_was_moved_as_its_copy(
    rig: Rig, *, is_flushed: bool, is_lost: bool
) -> None:
    """Until it is passed over; also by a process that has read the commands as finished."""
    for _ in range(4):
        write(rig, FAR_MS)
    rig.ingest()
    if is_flushed:
        rig.store.maintenance.flush(NOW_MS)
    write(rig, None, command=Kind.RECALL, **several(0, 3))
    write(rig, None, command=Kind.MOVE, origin=1, moved_ms=FAR_MS + 1)
    rig.ingest()
    transaction, rows = take(rig)
    assert [each.decision for each in transaction.decide(rows.offset, NOW_MS)] == [Decision.ACT, Decision.ACT]
    write(rig, FAR_MS + 1, origin=1, rolls=1)
    rig.commit(transaction, [rows])
    if is_lost:
        rig.store.close()
        shutil.rmtree(rig.directory)
        rig.open(NOW_MS)
    rig.ingest()

    def found(*states: PendingState) -> list[int]:
        return [row.offset for row in rig.store.find(LogQuery(states=frozenset(states)), NOW_MS).rows]

    assert found(PendingState.CANCELLED) == [0, 3]
    assert found(*PENDING) == [2, 6]
    assert rig.store.stats().pending == 2
    while rig.load(FAR_MS + 1):
        pass
    assert [row.offset for row in rig.deliver(FAR_MS + 1)] == [2, 6]
    assert found(PendingState.CANCELLED) == []


def test_each_message_that_a_command_names_has_a_decision(rig: Rig) -> None:
    """One pending, one delivered, one that was never there, one in transit, and one of the future; only what may be
    in transit is decided again."""
    write(rig, NOW_MS - 10, id="m")
    write(rig, NOW_MS - 5)
    write(rig, FAR_MS)
    rig.ingest()
    write(rig, None, command=Kind.RECALL, **several(1, 0, 2, 2, 3, 99, 999_999_999_999_999))
    transaction, rows = take(rig, limit=1)
    transaction.copied(rows.offset, rows.payload.column("origin").to_numpy(), rows.payload.column("id"))
    write(rig, NOW_MS + 5, id="m", origin=0, rolls=1)
    rig.store.append(entries(rig.log[3:4]), 4, NOW_MS)
    rig.commit(transaction, [rows])
    transaction, rows = take(rig)
    decided = {each.decision: each for each in transaction.decide(rows.offset, NOW_MS)}
    named = {decision: [] if each.named is None else each.named.tolist() for decision, each in decided.items()}
    assert named == {
        Decision.ACT: [2],
        Decision.SENT_ON: [0],
        Decision.LEFT: [1],
        Decision.NOTHING: [3, 99, 999_999_999_999_999],
    }


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("is_taken", [False, True])
def test_what_a_command_acts_on_is_counted_out_once(rig: Rig, end: str, *, is_taken: bool) -> None:
    """Also where a cancel of it is read before the commit is known, and whether or not its time has come by then."""
    for _ in range(3):
        write(rig, SOON_MS)
    write(rig, None, command=Kind.RECALL, **several(0, 1))
    rig.ingest()
    transaction, rows = take(rig)
    (decided,) = transaction.decide(rows.offset, NOW_MS)
    assert decided.decision is Decision.ACT
    if is_taken:
        assert take_from(transaction, SOON_MS, 10).offset.tolist() == [2]
    write(rig, None, cancels=True, origin=0)
    rig.ingest()
    if end == "rollback":
        transaction.rollback()
        assert (rig.store.stats().pending, rig.store.state.cancels.cancelled) == (2, 1)
        transaction, rows = take(rig)
        transaction.decide(rows.offset, NOW_MS)
    rig.commit(transaction, [rows])
    assert rig.store.state.cancels.cancelled == 2
    assert rig.store.stats().pending == (0 if is_taken and end == "commit" else 1)


def test_what_one_command_names_is_found_among_those_of_many(tmp_path: Path) -> None:
    """In no more time than a few look-ups take: a batch may have thousands, which name a hundred each."""
    rig, count, clock = Rig(tmp_path / "store"), 400_000, SystemClock()
    offsets = np.random.default_rng(1).permutation(count) * 1_000  # sparse, and in no order
    nulls = [pa.nulls(count, field.type) for field in PAYLOAD]
    ordered, spans = np.sort(offsets), {int(each) * 1_000: (each, each + 1) for each in range(count)}
    found = _Found(ordered, ordered, pa.RecordBatch.from_arrays(nulls, schema=PAYLOAD), 1.0, spans)
    in_transit = rig.store.state.commands.in_transit
    in_transit.add(offsets, Digests(np.zeros(count, np.uint64), np.zeros(count, np.uint64)))
    begin_s, named = clock.monotonic_s(), ordered[:100]
    for _ in range(100):
        rows, payload = found.rows_of([*named.tolist(), 0, 5], 50_000)
        assert rows.offset.tolist() == named[:50].tolist() and len(payload) == 50
        effect = Effect(
            offset=1 << 47,
            is_move=False,
            rows=rows,
            origin=rows.offset,
            payload=payload,
            named=named,
            key=None,
        )
        assert len(in_transit.of(effect)) == 100
    assert clock.monotonic_s() - begin_s < 10.0
    in_transit.remove(named[:1])
    assert in_transit.of(effect).tolist() == named[1:].tolist()
    rig.store.close()


@pytest.mark.parametrize("named", [{"origin": 1 << 48}, several(0, (1 << 48) + 1, 1 << 48)])
def test_a_cancel_of_such_an_offset_leaves_all_others_alone(rig: Rig, named: dict[str, Any]) -> None:
    for _ in range(3):
        write(rig, SOON_MS)
    rig.ingest()
    write(rig, None, cancels=True, **named)
    rig.ingest()
    assert rig.store.stats().pending == (2 if "value" in named else 3)


def test_a_cancel_covers_each_of_several_messages(rig: Rig) -> None:
    """At once, and when the index is made again; not those that come after it."""
    for _ in range(4):
        write(rig, SOON_MS)
    rig.ingest()
    write(rig, None, cancels=True, **several(3, 0, 5, 3))
    write(rig, SOON_MS)
    rig.ingest()
    assert (rig.store.stats().pending, rig.store.state.cancels.cancelled) == (3, 2)
    rig.deliver()
    rig.store.close()
    shutil.rmtree(rig.directory)
    rig.open()
    rig.ingest()
    assert rig.store.stats().pending == 3
    rig.finish(SOON_MS)
    assert [record.offset for record in rig.delivered if record.kind is Kind.TIMER] == [1, 2, 5]


def test_each_of_several_messages_has_its_own_decision(rig: Rig) -> None:
    """Each is named once, in whatever order; of what is acted on, there are rows."""
    write(rig, NOW_MS - 20)  # 0: leaves as a copy
    write(rig, NOW_MS - 10)  # 1: is delivered
    write(rig, FAR_MS)  # 2: waits
    write(rig, FAR_MS)  # 3: is moved by another command of the transaction
    write(rig, FAR_MS)  # 4: is cancelled before
    write(rig, FAR_MS)  # 5: is recalled by another command of the transaction
    write(rig, None, cancels=True, origin=4)
    write(rig, None, command=Kind.MOVE, origin=3, moved_ms=FAR_MS)
    write(rig, None, command=Kind.RECALL, origin=5)
    write(rig, None, command=Kind.RECALL, **several(4, 2, 3, 1, 0, 2, 5, 6, 11, 1 << 49))
    rig.ingest()
    transaction, rows = take(rig)
    transaction.copied(rows.offset[rows.offset == 0], np.array([0]), pa.nulls(1, pa.string()))
    _, _, *decided = transaction.decide(rows.offset, NOW_MS)
    assert {each.decision: each.named.tolist() for each in decided if each.named is not None} == {
        Decision.ACT: [2],
        Decision.SENT_ON: [0, 3, 5],
        Decision.LEFT: [1],
        Decision.NOTHING: [4, 6, 11, 1 << 49],
    }
    assert [each.effect.origin[each.live].tolist() for each in decided] == [[2], [], [], []]


def test_the_lock_is_held_for_so_many_messages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for so many commands, each of which may name a hundred, with many rows each."""
    for _ in range(12):
        write(rig, FAR_MS)
    for _ in range(3):
        write(rig, FAR_MS, origin=0, rolls=1)
    for begin in range(0, 12, 3):
        write(rig, None, command=Kind.RECALL, **several(*range(begin, begin + 3)))
    rig.ingest()
    held: list[int] = []
    real = Transaction._judged

    def judged(self: Transaction, effects: Sequence[Effect]) -> Any:
        held.append(sum(0 if effect.named is None else len(effect.named) for effect in effects))
        return real(self, effects)

    monkeypatch.setattr(Transaction, "_judged", judged)
    monkeypatch.setattr(operations_transaction, "DECIDED_AT_ONCE", 5)
    transaction, rows = take(rig)
    assert len(transaction.decide(rows.offset, NOW_MS)) == 4
    assert held == [3, 6, 3]


@pytest.mark.fault("an index that is lost between a command by origin and its copy")
def test_a_finished_command_has_acted_on_every_pending_row_below_it(rig: Rig) -> None:
    """A move by origin acts although an older one on the same message is in transit: read again without an index, its
    tombstone covers no pending message."""
    write(rig, FAR_MS)
    rig.ingest()
    write(rig, None, command=Kind.MOVE, moved_ms=FAR_MS + 1, origin=0)
    rig.ingest()
    rig.store.state.commands.sent_on[0] = FAR_MS
    transaction, rows = take(rig)
    decided = transaction.decide(rows.offset, NOW_MS)
    assert [each.decision for each in decided] == [Decision.ACT]
    write(rig, FAR_MS + 1, origin=0)
    rig.commit(transaction, [rows])
    rig.store.close()
    shutil.rmtree(rig.directory)
    rig.open()
    rig.ingest()
    assert rig.store.stats().pending == 1
