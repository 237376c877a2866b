"""What commands among due rows write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from structlog.testing import capture_logs

from bridge.delivery.doubt.findings import Findings
from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.commands import DueCommands
from bridge.delivery.plan.due_rows import DueRows, SourceColumns
from bridge.delivery.plan.fates import Unplannable
from bridge.delivery.plan.planner import NOTHING, Plan, Planner
from bridge.delivery.plan.record_size import record_bytes
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.target import Target
from bridge.stores import loan as stores
from bridge.stores.names import OFFSET_BITS
from bridge.wire import headers as h
from bridge.wire.answers import Outcome
from bridge.wire.schedule import packed
from tests.entries import rows_of, timer
from tests.unit.bridge.delivery.plan.test_ticks import FAILS, MINUTE, NOW, SOURCES, WELL, Known
from timerstore.cancels.cancels import NO_ORIGIN, SEVERAL
from timerstore.cancels.commands import Decided, Decision, Effect
from timerstore.rows.entry import Kind
from timerstore.rows.position import AT_MIN, OFFSET_MAX, Int64s, Positions


class Loan:
    """A transaction in which every command acts on some rows."""

    def __init__(self, *rows: dict[str, Any]) -> None:
        self._rows = rows_of([(each["at"], 0, each["offset"], each) for each in rows])
        self.originals: list[int] = []
        """Of what leaves as a copy."""

    def decide(self, commands: Sequence[int], _now_ms: int, *_: object) -> list[tuple[int, Decided]]:
        rows, payload = self._rows, self._rows.payload
        origin = payload.column("origin").to_numpy()
        positions = Positions(rows.at, rows.offset)
        effects = [
            Effect(
                offset=int(key) & OFFSET_MAX,
                is_move=True,
                rows=positions,
                origin=origin,
                payload=payload,
                named=np.array([7]),
                key=None,
            )
            for key in commands
        ]
        return [
            (
                int(key) >> OFFSET_BITS,
                Decided(effect=each, decision=Decision.ACT, live=np.arange(len(rows)), named=np.array([7])),
            )
            for key, each in zip(commands, effects, strict=True)
        ]

    def copied(self, _seq: Int64s, origin: Int64s, _ids: pa.Array) -> None:
        self.originals += origin.tolist()


class UnderWay(Loan):
    """A transaction in which a command acts, and may have missed a copy."""

    def __init__(self, *rows: dict[str, Any], kind: Kind) -> None:
        super().__init__(*rows)
        self._kind = kind

    def decide(self, commands: Sequence[int], _now_ms: int, *_: object) -> list[tuple[int, Decided]]:
        ((source, found),) = super().decide(commands, _now_ms)
        effect = replace(found.effect, is_move=self._kind is Kind.MOVE)
        return [(source, replace(found, effect=effect, behind=np.array([7])))]


class Several(Loan):
    """A transaction in which a command that names several originals comes to this, of each."""

    def __init__(self, *rows: dict[str, Any], decisions: dict[int, Decision]) -> None:
        super().__init__(*rows)
        self._decisions = decisions

    def decide(self, commands: Sequence[int], _now_ms: int, *_: object) -> list[tuple[int, Decided]]:
        rows, payload, named = self._rows, self._rows.payload, np.array(sorted(self._decisions))
        origin, positions = payload.column("origin").to_numpy(), Positions(rows.at, rows.offset)
        effect = Effect(
            offset=int(commands[0]) & OFFSET_MAX,
            is_move=True,
            rows=positions,
            origin=origin,
            payload=payload,
            named=named,
            key=None,
        )
        return [
            (
                int(commands[0]) >> OFFSET_BITS,
                Decided(
                    effect=effect,
                    decision=decision,
                    live=np.arange(len(rows) if decision is Decision.ACT else 0),
                    named=named[[self._decisions[each] is decision for each in named.tolist()]],
                ),
            )
            for decision in dict.fromkeys(self._decisions.values())
        ]


def planned(
    due: int,
    *rows: dict[str, Any],
    bytes_max: int = 1_000_000,
    loan: Callable[..., Loan] = Loan,
    names: str = "delay/0/7",
    letters: Target = WELL,
    findings: Findings = NOTHING,
    kind: Kind = Kind.MOVE,
    more: h.Headers | None = None,
) -> Plan:
    """A move of these rows, that was written a second ago; the delay topic takes records of so many bytes. Or their
    recall."""
    what = [(h.MOVE_ORIGIN, names.encode()), (h.UNTIL, str(due).encode())]
    named: h.Headers = [*(what if kind is Kind.MOVE else [(h.CANCEL_ORIGIN, names.encode())]), *(more or [])]
    move = {**timer("delay", 0, 20, due, None, kind=int(kind), headers=named), "ts": NOW - 1_000}
    move["origin"] = 7 if names.startswith("delay/0/") else NO_ORIGIN
    planner = Planner(
        targets=cast("Targets", Known({"delay": Target(partitions=1, bytes_max=bytes_max), "delay.dlt": letters})),
        permitted=lambda _: True,
        default_targets={"delay": None},
        dead_letter_topics={"delay": "delay.dlt"},
        retry=RetryPolicy(),
    )
    planner.begin()
    taken, found = rows_of([(AT_MIN, 0, 20, move)]), cast("stores.Loan", loan(*rows))
    return planner.plan(taken, SOURCES, NOW, findings, found)


def moved(due: int, *rows: dict[str, Any]) -> list[str]:
    """When the rows are due after the move."""
    plan = planned(due, *rows)
    copies = [dict(headers) for batch in plan.batches() for headers in batch.all_headers()]
    return [copy[h.COPY_DUE] if isinstance(copy[h.COPY_DUE], str) else copy[h.COPY_DUE].decode() for copy in copies]


@pytest.mark.parametrize(
    ("more", "due", "expected"),
    [
        ({}, NOW - 60 * MINUTE, NOW - 60 * MINUTE),
        ({"schedule": packed({h.EVERY: "1s"}, is_start_given=False), "tick": 3}, NOW - 60 * MINUTE, NOW - 1_000),
        ({"schedule": packed({h.EVERY: "1s"}, is_start_given=False), "tick": 3}, NOW + MINUTE, NOW + MINUTE),
    ],
)
def test_a_tick_is_moved_no_further_back_than_to_the_move(more: dict[str, Any], due: int, expected: int) -> None:
    """Else ten years of ticks would have been missed, and `delay-missed: all` delivers them all."""
    row = {**timer("delay", 0, 9, NOW + 5 * MINUTE, "orders", **more), "origin": 7}
    assert moved(due, row) == [str(expected)]


def test_what_cannot_be_copied_is_not_moved() -> None:
    """It becomes a dead letter, and the answer does not count it."""
    small = {**timer("delay", 0, 8, NOW + MINUTE, "orders"), "origin": 7}
    large = {**timer("delay", 0, 9, NOW + MINUTE, "orders", value=b"v" * 2_000), "origin": 7}
    both = planned(NOW + 2 * MINUTE, small, large, bytes_max=1_500)
    assert {batch.topic: len(batch) for batch in both.batches()} == {"delay": 1, "delay.dlt": 1}
    assert [(answer.outcome, answer.count) for answer in both.answers] == [(Outcome.MOVED, 1)]
    none = planned(NOW + 2 * MINUTE, large, bytes_max=1_500)
    assert [(answer.outcome, answer.count) for answer in none.answers] == [(Outcome.UNKNOWN, 1)]


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"headers": [("delay-topic\0", b"1")]}, b"bad-header-name"), ({"target": None}, b"no-target")],
)
def test_what_could_not_be_read_again_is_not_moved(more: dict[str, Any], reason: bytes) -> None:
    """Its topic has no default target any more, or the client would cut a header's name. Nothing else waits for such a
    copy to come back."""
    good = {**timer("delay", 0, 8, NOW + MINUTE, "orders"), "origin": 7}
    bad = {**timer("delay", 0, 9, NOW + MINUTE, "orders"), "origin": 6, **more}
    made: list[Loan] = []

    def loan(*rows: dict[str, Any]) -> Loan:
        made.append(Loan(*rows))
        return made[-1]

    plan = planned(NOW + 2 * MINUTE, good, bad, loan=loan)
    letters = [
        dict(headers) for batch in plan.batches() if batch.topic == "delay.dlt" for headers in batch.all_headers()
    ]
    assert [letter[h.REASON] for letter in letters] == [reason]
    assert made[0].originals == [7]


@pytest.mark.parametrize("headers", [[(h.CORRELATION, b"c")], [], [(h.COPY_FORWARDED, b"delay/0/20")]])
@pytest.mark.parametrize("kind", [Kind.MOVE, Kind.RECALL])
def test_behind_a_copy_that_is_under_way_a_command_is_written_once_more(kind: Kind, headers: h.Headers) -> None:
    """It acts on what is pending, and is answered for that. What is written is not answered."""
    row = {**timer("delay", 0, 8, NOW + MINUTE, "orders"), "origin": 7}
    plan = planned(NOW + 2 * MINUTE, row, loan=lambda *rows: UnderWay(*rows, kind=kind), kind=kind, more=headers)
    assert [(answer.count, answer.origins) for answer in plan.answers] == [(1, (("delay", 0, 7),))]
    written = [dict(each) for batch in plan.batches() for each in batch.all_headers()]
    commands = [each for each in written if each.keys() & {h.MOVE_ORIGIN, h.CANCEL_ORIGIN}]
    name = h.MOVE_ORIGIN if kind is Kind.MOVE else h.CANCEL_ORIGIN
    assert [each[name] for each in commands] == [b"delay/0/7"]
    assert not any(h.CORRELATION in each for each in commands)
    assert len(written) - len(commands) == (kind is Kind.MOVE)


def test_commands_weigh_what_they_write() -> None:
    """Transactions are bounded by it: keys and headers count as values do."""
    row = {**timer("delay", 0, 8, NOW + MINUTE, "orders", headers=[("x", b"h" * 9_000)], key=b"k" * 5_000), "origin": 7}
    plan = planned(NOW + 2 * MINUTE, row)
    written = sum(
        record_bytes(*record)
        for batch in plan.batches()
        for record in zip(batch.keys, batch.values, batch.all_headers(), strict=True)
    )
    assert written < plan.bytes < 1.2 * written


def test_moves_that_a_later_one_makes_moot() -> None:
    """Of the same messages, in whatever order they are named; not pauses, which leave some messages as they are."""
    told = [
        ("delay/0/7", NOW, 7), ("delay/0/8", NOW, 8), ("delay/0/7", h.NEVER_MS, 7), ("delay/0/7", NOW + 1, 7),
        ("delay/1/7", NOW, NO_ORIGIN), ("delay/1/7", NOW, NO_ORIGIN), ("delay/0/8,7", NOW, SEVERAL),
        ("delay/0/7,8", NOW, SEVERAL),
    ]  # fmt: skip
    rows = []
    for n, (names, due, origin) in enumerate(told):
        headers = [(h.MOVE_ORIGIN, names.encode())]
        move = timer("delay", 0, 20 + n, due, None, kind=int(Kind.MOVE), headers=headers)
        rows.append((AT_MIN, 0, 20 + n, {**move, "origin": origin}))
    commands = DueCommands(DueRows(rows_of(rows), SourceColumns(SOURCES, {"delay": None})))
    assert commands.passed() == {20: 23, 26: 27}


def test_a_move_that_was_written_once_more_is_older_than_what_was_written_meanwhile() -> None:
    """The last one in the order of the clients acts: a timeout that was put off twice must not end at the first time.
    Where clients wrote to several partitions, there is none but that of the records."""
    for place, expected in ((b"delay/0/3", {21: 20, 22: 20}), (b"delay/1/3", {20: 22, 21: 22})):
        rows = []
        for n, forwarded in enumerate((b"delay/0/20", place, b"delay/0/4")):
            headers = [(h.MOVE_ORIGIN, b"delay/0/7"), (h.COPY_FORWARDED, forwarded)]
            move = timer("delay", 0, 20 + n, NOW, None, kind=int(Kind.MOVE), headers=headers)
            rows.append((AT_MIN, 0, 20 + n, {**move, "origin": 7}))
        commands = DueCommands(DueRows(rows_of(rows), SourceColumns(SOURCES, {"delay": None})))
        assert commands.passed() == expected


def test_moves_by_id_that_a_later_one_makes_moot() -> None:
    """Those that ask for an answer, too. Each is decided in its place, also one that an earlier version has written
    again. Neither pauses, nor recalls, nor what cannot be written."""
    again, elsewhere = (h.COPY_FORWARDED, b"delay/0/3"), (h.COPY_FORWARDED, b"delay/1/900")
    asks, correlates = (h.REPLY_TO, b"answers"), (h.CORRELATION, b"c")
    told: list[tuple[str, int, h.Headers]] = [
        ("a", NOW, []), ("b", NOW, [asks]), ("a", NOW, [correlates]), ("a", h.NEVER_MS, []), ("a", NOW, [elsewhere]),
        ("a", NOW + 1, []), ("a", NOW, [again]), ("b", NOW, []), ("a", NOW, [(h.COPY_FORWARDED, b"delay/1/901")]),
        ("c", NOW, []), ("c", NOW, []), ("d", NOW, []), ("d", h.NEXT_MS, []),
    ]  # fmt: skip
    rows = []
    for n, (id, due, more) in enumerate(told):
        headers, target = [(h.MOVE, id.encode()), *more], "answers" if asks in more else None
        move = timer("delay", 0, 20 + n, due, target, kind=int(Kind.MOVE), id=id, headers=headers)
        rows.append((AT_MIN, 0, 20 + n, move))
    rows.append((AT_MIN, 0, 40, timer("delay", 0, 40, NOW, None, kind=int(Kind.RECALL), id="a")))
    commands = DueCommands(DueRows(rows_of(rows), SourceColumns(SOURCES, {"delay": None})))
    assert commands.passed() == {20: 26, 21: 27, 22: 26, 24: 28, 25: 26, 29: 30}
    assert commands.passed({26, 30}) == {20: 25, 21: 27, 22: 25, 24: 28}


def test_where_a_move_needs_a_dead_letter_and_those_fail_its_source_waits() -> None:
    """Else each transaction would begin with it, and abort. What its topic has refused for its size is cut."""
    large = {**timer("delay", 0, 9, NOW + MINUTE, "orders", value=b"v" * 2_000), "origin": 7}
    for trouble in (FAILS, Target(partitions=2, bytes_max=None, down={1: "has no leader"})):
        with pytest.raises(Unplannable) as raised:
            planned(NOW, large, bytes_max=1_500, letters=trouble)
        (waits,) = raised.value.unwritable.values()
        assert waits.places == {("delay.dlt", -1)}
        assert planned(NOW, {**large, "value": b""}, bytes_max=1_500, letters=trouble).answers
    plan = planned(NOW, large, bytes_max=1_500, findings=Findings(no_letter={20}, cut={20}))
    assert [(len(batch), batch.values) for batch in plan.batches() if batch.topic == "delay.dlt"] == [(1, [None])]


def test_commands_without_effect_are_reported() -> None:
    """Most ask for no answer."""
    with capture_logs() as logs:
        planned(NOW, loan=lambda *found: Several(*found, decisions={7: Decision.UNKNOWN}))
    (line,) = logs
    assert (line["event"], line["commands"], line["first"]) == ("commands-without-effect", 1, "delay/0/20")


@pytest.mark.parametrize("decision", [each for each in Decision if each not in (Decision.SENT_ON, Decision.TOO_MANY)])
def test_answers_about_several_messages_add_up(decision: Decision) -> None:
    """Also where the last of them has an answer of its own, of a command that was written again for it alone."""
    several = {7: Decision.ACT, 8: Decision.NOTHING, 9: Decision.SENT_ON, 10: Decision.LEFT, 11: Decision.LEFT}
    rows = [{**timer("delay", 0, 7, NOW + MINUTE, "orders"), "origin": 7}]
    plan = planned(
        NOW + 2 * MINUTE, *rows, loan=lambda *found: Several(*found, decisions=several), names="delay/0/7,8,9,10,11"
    )
    assert {answer.outcome: [origin[2] for origin in answer.origins] for answer in plan.answers} == {
        Outcome.MOVED: [7],
        Outcome.NOT_PENDING: [8],
        Outcome.DELIVERED: [10, 11],
    }
    written = [dict(headers) for batch in plan.batches() for headers in batch.all_headers()]
    assert [each[h.MOVE_ORIGIN] for each in written if h.MOVE_ORIGIN in each] == [b"delay/0/9"]
    rows = [{**timer("delay", 0, 12, NOW + MINUTE, "orders"), "origin": 9}] if decision is Decision.ACT else []
    last = planned(NOW, *rows, loan=lambda *found: Several(*found, decisions={9: decision}), names="delay/0/9")
    assert sum(answer.count for answer in (*plan.answers, *last.answers)) == len(several)


def test_a_resume_of_several_says_what_came_of_each() -> None:
    """Of four: a schedule that is over, and is ended behind its copies; a message that does not recur, and stays
    as it is; one that goes on; one whose copy does not fit, a dead letter."""
    ended, going = (packed({h.EVERY: "1s", **more}, is_start_given=False) for more in ({h.END: str(NOW - MINUTE)}, {}))
    rows = [
        {**timer("delay", 0, 7, h.NEVER_MS, "orders", schedule=ended, tick=3), "origin": 1},
        {**timer("delay", 0, 11, h.NEVER_MS, "orders", schedule=going, tick=3), "origin": 1},
        {**timer("delay", 0, 8, NOW + MINUTE, "orders"), "origin": 2},
        {**timer("delay", 0, 9, h.NEVER_MS, "orders", schedule=going, tick=3), "origin": 3},
        {**timer("delay", 0, 10, h.NEVER_MS, "orders", schedule=going, tick=3, value=b"v" * 2_000), "origin": 4},
    ]
    decisions = dict.fromkeys((1, 2, 3, 4), Decision.ACT)
    plan = planned(
        h.NEXT_MS,
        *rows,
        bytes_max=1_500,
        loan=lambda *found: Several(*found, decisions=decisions),
        names="delay/0/1,2,3,4",
    )
    assert {answer.outcome: [origin[2] for origin in answer.origins] for answer in plan.answers} == {
        Outcome.MOVED: [3],
        Outcome.NOT_PENDING: [2],
        Outcome.UNKNOWN: [4],
    }
    assert [answer.count for answer in plan.answers] == [1, 1, 1]
    written = [(batch.topic, dict(headers)) for batch in plan.batches() for headers in batch.all_headers()]
    copies, last = [each for topic, each in written if topic == "delay" and h.COPY_ORIGIN in each], written[4]
    assert [(int(each[h.COPY_ORIGIN] or 0), int(each[h.COPY_DUE] or 0)) for each in copies] == [
        (1, h.NEVER_MS),
        (1, NOW),
        (2, NOW + MINUTE),
        (3, NOW),
    ]
    assert last[0] == "delay" and last[1][h.CANCEL_ORIGIN] == b"delay/0/1"
    assert [topic for topic, _ in written] == ["delay"] * 5 + ["delay.dlt"]


def test_what_was_put_off_is_brought_forward_as_it_was_due() -> None:
    """Its due time and its attempts stay, and it comes up at once; what is not due, and a schedule, stay as they
    are."""
    every = packed({h.EVERY: "1s"}, is_start_given=False)
    rows = [
        {**timer("delay", 0, 7, NOW - MINUTE, "orders", attempt=2), "at": NOW + MINUTE, "origin": 1},
        {**timer("delay", 0, 8, NOW - MINUTE, "orders", tick=3), "at": NOW + MINUTE, "origin": 2},
        {**timer("delay", 0, 9, NOW + MINUTE, "orders"), "origin": 3},
        {**timer("delay", 0, 10, NOW + MINUTE, "orders", schedule=every, tick=4), "origin": 2},
    ]
    decisions = dict.fromkeys((1, 2, 3), Decision.ACT)
    plan = planned(h.AS_DUE_MS, *rows, loan=lambda *found: Several(*found, decisions=decisions), names="delay/0/1,2,3")
    told = {answer.outcome: [origin[2] for origin in answer.origins] for answer in plan.answers}
    assert told == {Outcome.MOVED: [1, 2], Outcome.NOT_PENDING: [3]}
    copies = [dict(headers) for batch in plan.batches() for headers in batch.all_headers()]
    names = (h.COPY_ORIGIN, h.COPY_DUE, h.COPY_ATTEMPT, h.COPY_AT)
    assert sorted(tuple(int(each[name] or 0) if name in each else None for name in names) for each in copies) == [
        (1, NOW - MINUTE, 2, None),
        (2, NOW - MINUTE, 0, None),
        (2, NOW + MINUTE, 0, None),
        (3, NOW + MINUTE, 0, None),
    ]


@pytest.mark.parametrize(("place", "outcome"), [("away/0", Outcome.FORBIDDEN), ("delay/5", Outcome.NOT_PENDING)])
@pytest.mark.parametrize("offsets", [[7], [7, 8, 12]])
def test_messages_that_are_nowhere_are_counted_too(place: str, outcome: Outcome, offsets: list[int]) -> None:
    """In a topic that is none of ours, or a partition that there is not."""
    names = f"{place}/{','.join(map(str, offsets))}"
    (answer,) = planned(NOW, loan=lambda *found: Several(*found, decisions={}), names=names).answers
    assert (answer.outcome, answer.count) == (outcome, len(offsets))
    assert [offset for *_, offset in answer.origins] == offsets
