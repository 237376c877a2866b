"""What becomes of a due row: the table in fates.py row by row, and that every row has exactly one fate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.delivery.doubt.findings import Findings
from bridge.delivery.plan import fates as passes
from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.dead_letters import hold
from bridge.delivery.plan.due_rows import DueRows, SourceColumns
from bridge.delivery.plan.fates import (
    DEAD_LETTER_TOPIC,
    LETTERS_FAIL,
    OWN,
    Fate,
    Fates,
    OwnTopics,
    Unplannable,
)
from bridge.delivery.plan.forwarded_cancels import Forwards
from bridge.delivery.plan.overdue import BURST_MS, OverduePolicy
from bridge.delivery.plan.planner import Planner
from bridge.delivery.plan.record_size import SizeLimits
from bridge.delivery.targets.breakers import EVERY
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.partitioner import PARTITIONER, murmur2
from bridge.delivery.targets.target import Target
from bridge.errors import EnvironmentFailure
from bridge.kafka.errors import Refusal
from bridge.stores.names import Sources
from bridge.wire import headers as h
from bridge.wire.reasons import RejectReason
from tests.entries import reject, rows_of, timer
from timerstore.rows.entry import Kind
from timerstore.rows.position import AT_MIN, Bools

NOW: Final = 1_800_000_000_000
NO_ROWS: Final = np.empty(0, dtype=np.intp)
SOURCES: Final = Sources([("delay", 0), ("delay", 1), ("other", 0)])
LETTERS: Final = {"delay": "delay.dlt", "other": "other.dlt"}
WELL: Final = Target(partitions=2, bytes_max=1_000)
GONE: Final = Target(partitions=0, bytes_max=None, refusal=Refusal(RejectReason.UNKNOWN_TARGET, "gone"))
DENIED: Final = Target(partitions=2, bytes_max=None, refusal=Refusal(RejectReason.TARGET_DENIED, "denied"))
HALF: Final = Target(partitions=2, bytes_max=1_000, down={0: "has no leader"})
LIMITS: Final = SizeLimits(record_bytes_max=100_000)
RETRY: Final = RetryPolicy(attempts=3, backoff_ms=1_000, backoff_max_ms=8_000)
WHY: Final = Refusal(RejectReason.TARGET_UNAVAILABLE, "why")
PAUSED: Final = Refusal(RejectReason.TARGET_PAUSED, "orders: paused by an operator")
OUR_CLOCK: Final = Refusal(RejectReason.CLOCK_AHEAD, "by a minute")


def cancel(offset: int, **more: Any) -> dict[str, Any]:
    """A cancel without a key."""
    return {**timer("delay", 0, offset, NOW, None, kind=int(Kind.CANCEL), id="i", **more), "at": AT_MIN}


def due_rows(*entries: dict[str, Any]) -> DueRows:
    """Rows as the store hands them out."""
    rows = rows_of([(e["at"], SOURCES.index(e["topic"], e["partition"]), e["offset"], e) for e in entries])
    return DueRows(rows, SourceColumns(SOURCES, {"delay": None, "other": "standard"}))


def timers(count: int, **more: Any) -> DueRows:
    """Timers that are due now."""
    return due_rows(*(timer("delay", 0, i, NOW, "orders", **more) for i in range(count)))


def mask(*rows: int, size: int) -> Bools:
    """Those of so many."""
    return np.isin(np.arange(size), rows)


def own_topics(rows: DueRows, topic: Target = WELL, letters: Target = WELL, **found: Any) -> OwnTopics:
    """Both delay topics are like `topic`, their dead-letter topics like `letters`."""
    known = dict.fromkeys(LETTERS, topic) | dict.fromkeys(LETTERS.values(), letters)
    return OwnTopics(rows, known, LETTERS, Findings(**found), LIMITS)


def told(fates: Fates) -> list[tuple[Fate, str | None]]:
    """Fate and reason of each row; None: its own, or none."""
    names = {OWN: None, LETTERS_FAIL: DEAD_LETTER_TOPIC}
    reasons = [names[code] if code < 0 else str(fates.refusals[code].reason) for code in fates.reason.tolist()]
    return list(zip(map(Fate, fates.fate.tolist()), reasons, strict=True))


def became(fate: Fate, *ids: int, rows: DueRows, reason: Refusal | int = OWN) -> Fates:
    """What the rows are by themselves, but these have that fate."""
    return passes.by_kind(rows, NOW).put(np.array(ids, dtype=np.intp), fate, [reason])


def test_each_row_begins_as_what_it_is() -> None:
    """By its kind, and a timer by its due time: what is due this very millisecond is delivered."""
    rows = due_rows(
        reject("delay", 0, 1, NOW, "no-time"),
        cancel(2),
        timer("delay", 0, 3, NOW + 1, "orders"),
        timer("delay", 0, 4, NOW, "orders"),
    )
    assert passes.by_kind(rows, NOW).fate.tolist() == [Fate.LETTER, Fate.NOTHING, Fate.ROLL, Fate.DELIVER]


def test_a_header_name_that_would_be_cut_makes_a_dead_letter_of_deliveries_and_rolls() -> None:
    """Rejects are dead letters already, and keep their own reason."""
    cut: dict[str, Any] = {"headers": [("a\0b", b"1")]}
    rows = due_rows(
        timer("delay", 0, 1, NOW, "orders", **cut),
        timer("delay", 0, 2, NOW + 1, "orders", **cut),
        reject("delay", 0, 3, NOW, "no-time", **cut),
        timer("delay", 0, 4, NOW, "orders", headers=[("ab", b"1")]),
    )
    bad = Fate.LETTER, "bad-header-name"
    assert told(passes.misnamed(rows, passes.by_kind(rows, NOW))) == [
        bad,
        bad,
        (Fate.LETTER, None),
        (Fate.DELIVER, None),
    ]


def test_what_aborts_have_shown_is_left_out() -> None:
    """Rejected records are dead letters, others wait; what would not have been delivered stays as it is."""
    rows = due_rows(*(timer("delay", 0, i, NOW + i // 3, "orders") for i in range(4)))
    keys = rows.keys.tolist()
    too_large = Refusal(RejectReason.TOO_LARGE, "by a byte")
    findings = Findings(rejected={keys[0]: too_large, keys[3]: too_large}, put_off={keys[0]: WHY, keys[1]: WHY})
    assert told(passes.after_aborts(rows, passes.by_kind(rows, NOW), findings)) == [
        (Fate.LETTER, "too-large"),
        (Fate.RETRY, "target-unavailable"),
        (Fate.DELIVER, None),
        (Fate.ROLL, None),
    ]


def test_what_is_overdue_is_a_dead_letter() -> None:
    """If it would have been delivered."""
    rows = due_rows(timer("delay", 0, 1, NOW, "orders"), timer("delay", 0, 2, NOW + 1, "orders"), cancel(3))
    fates = passes.overdue(passes.by_kind(rows, NOW), mask(0, 1, 2, size=3))
    assert told(fates) == [(Fate.LETTER, "overdue"), (Fate.ROLL, None), (Fate.NOTHING, None)]


def test_what_has_a_later_slot_is_deferred_to_it() -> None:
    """Slots of the next second are for now."""
    rows = timers(3)
    slots_ms = np.array([NOW + BURST_MS, NOW + BURST_MS + 1])
    fates = passes.deferred(passes.by_kind(rows, NOW), np.array([1, 2]), slots_ms, NOW)
    assert fates.fate.tolist() == [Fate.DELIVER, Fate.DELIVER, Fate.DEFER]
    assert fates.at_ms.tolist() == [0, 0, NOW + BURST_MS + 1]


def test_what_has_no_target_is_a_dead_letter() -> None:
    """Not even a default."""
    fates = passes.without_target(passes.by_kind(timers(2), NOW), mask(1, size=2))
    assert told(fates) == [(Fate.DELIVER, None), (Fate.LETTER, "no-target")]


def held_letter(topic: str, target: str) -> dict[str, Any]:
    """A copy of the record at offset 4 as the bridge writes it while a dead-letter topic fails."""
    where = h.Where(topic, 0, 4, 4, NOW)
    letter = h.dead_letter_headers([], RejectReason.NO_TIME, "why", where)
    return timer(topic, 0, 9, NOW, target, origin=4, headers=hold(letter))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (held_letter("delay", "delay.dlt"), None),
        (held_letter("other", "delay.dlt"), "forbidden-target"),
        (timer("delay", 0, 9, NOW, "delay.dlt"), "forbidden-target"),
        (timer("delay", 0, 9, NOW, "secret"), "forbidden-target"),
    ],
    ids=["its own", "of another topic", "any message", "any target"],
)
def test_only_held_dead_letters_go_to_a_dead_letter_topic(entry: dict[str, Any], reason: str | None) -> None:
    """To that of their own topic, for the reason that they carry; whatever else is not allowed is a dead letter."""
    rows = due_rows(entry)
    fates = passes.forbidden(rows, passes.by_kind(rows, NOW), mask(0, size=1), str(entry["target"]), LETTERS)
    assert told(fates) == [(Fate.LETTER, reason)]
    assert fates.rejected(rows) == {reason or "no-time": 1}


@pytest.mark.parametrize(
    ("entry", "target", "expected"),
    [
        ({"target_partition": 2}, WELL, (Fate.LETTER, "partition-out-of-range")),
        ({"target_partition": 1}, WELL, (Fate.DELIVER, None)),
        ({"value": b"v" * 1_000}, WELL, (Fate.LETTER, "too-large")),
        ({}, Target(partitions=2, bytes_max=None, needs_key=True), (Fate.LETTER, "no-key")),
        ({"key": b"k"}, Target(partitions=2, bytes_max=None, needs_key=True), (Fate.DELIVER, None)),
        ({"value": b"v" * 500}, Target(partitions=2, bytes_max=400, is_wary=True), (Fate.LETTER, "too-large")),
        ({"target_partition": 2}, GONE, (Fate.DELIVER, None)),
        ({"target_partition": 2}, DENIED, (Fate.LETTER, "partition-out-of-range")),
    ],
)
def test_what_its_target_cannot_take(entry: dict[str, Any], target: Target, expected: tuple[Fate, str | None]) -> None:
    """Is a dead letter at once; nothing is believed of a target that was not found."""
    rows = timers(2, **entry)
    fates = passes.by_kind(rows, NOW)
    after = passes.fitting(rows, fates, mask(0, size=2), "orders", target, LIMITS)
    assert told(after) == [expected, (Fate.DELIVER, None)]
    assert (after is fates) == (expected[0] is Fate.DELIVER)


def test_a_wary_target_gets_nothing_that_may_be_too_large() -> None:
    """Where only the brokers can tell, since records are compressed, it is put off."""
    rows, compressed = timers(1, value=b"v" * 500), SizeLimits(record_bytes_max=100_000, compressed=True)
    target = Target(partitions=2, bytes_max=400, is_wary=True)
    after = passes.fitting(rows, passes.by_kind(rows, NOW), mask(0, size=1), "orders", target, compressed)
    assert told(after) == [(Fate.RETRY, "too-large")]


def test_what_a_failing_target_would_get_is_retried() -> None:
    """With what is known of the target."""
    rows = timers(2)
    fates, going = passes.reachable(rows, passes.by_kind(rows, NOW), mask(1, size=2), "orders", DENIED, PARTITIONER)
    assert told(fates) == [(Fate.DELIVER, None), (Fate.RETRY, "target-denied")]
    assert not len(going.ids)


def test_what_belongs_into_a_partition_that_takes_nothing_is_retried() -> None:
    """By the partition that it names, or by its key; what has no key goes to another partition."""
    key = next(b"%d" % i for i in range(99) if not (murmur2(b"%d" % i) & 0x7FFFFFFF) % 2)
    entries: list[dict[str, Any]] = [{"target_partition": 0}, {"target_partition": 1}, {"key": key}, {}]
    rows = due_rows(*(timer("delay", 0, i, NOW, "orders", **entry) for i, entry in enumerate(entries)))
    fates, going = passes.reachable(rows, passes.by_kind(rows, NOW), mask(0, 1, 2, 3, size=4), "o", HALF, PARTITIONER)
    down, up = (Fate.RETRY, "target-unavailable"), (Fate.DELIVER, None)
    assert told(fates) == [down, up, down, up]
    assert going.partitions is not None
    assert (going.ids.tolist(), going.partitions.tolist()) == ([1, 3], [1, 1])


def test_a_roll_that_cannot_be_copied_is_a_dead_letter() -> None:
    """Since its copy is too large, or was rejected; where its partition takes nothing now, it waits for that."""
    rows = due_rows(
        timer("delay", 0, 1, NOW + 1, "orders"),
        timer("delay", 0, 2, NOW + 1, "orders", value=b"v" * 1_000),
        timer("delay", 1, 3, NOW + 1, "orders"),
    )
    fates = passes.by_kind(rows, NOW)
    letter, roll = (Fate.LETTER, "too-large"), (Fate.ROLL, None)
    no_copy = own_topics(rows, no_copy={int(rows.keys[2])})
    assert told(passes.rolls(rows, fates, no_copy)) == [roll, letter, letter]
    assert told(passes.rolls(rows, fates, own_topics(rows, HALF, no_copy={int(rows.keys[2])}))) == [roll, roll, letter]


def test_a_retry_without_another_attempt_is_a_dead_letter() -> None:
    """For its target's reason; an attempt that failed by our own clock is not counted, and a pause is none."""
    rows = due_rows(*(timer("delay", 0, i, NOW, "orders", attempt=i) for i in (1, 2)))
    for reason, last in ((WHY, Fate.LETTER), (OUR_CLOCK, Fate.RETRY), (PAUSED, Fate.RETRY)):
        fates = passes.given_up(rows, became(Fate.RETRY, 0, 1, rows=rows, reason=reason), own_topics(rows), RETRY)
        assert told(fates) == [(Fate.RETRY, str(reason.reason)), (last, str(reason.reason))]


def test_a_retry_that_cannot_be_copied_is_a_dead_letter() -> None:
    """Where it is too large for the delay topic, or the delay topic takes nothing for long."""
    rows = due_rows(timer("delay", 0, 1, NOW, "orders"), timer("delay", 0, 2, NOW, "orders", value=b"v" * 1_000))
    fates = became(Fate.RETRY, 0, 1, rows=rows, reason=WHY)
    after = [passes.given_up(rows, fates, own_topics(rows, topic), RETRY).fate.tolist() for topic in (WELL, DENIED)]
    assert after == [[Fate.RETRY, Fate.LETTER], [Fate.LETTER, Fate.LETTER]]


@pytest.mark.parametrize("letters", [DENIED, HALF], ids=["denied", "half down"])
def test_dead_letters_wait_for_their_topic(letters: Target) -> None:
    """A timer as a retry, what decoding rejected as the dead letter that it is; what cannot be copied does not wait."""
    rows = due_rows(
        timer("delay", 0, 1, NOW, "orders"),
        reject("delay", 0, 2, NOW, "no-time"),
        timer("delay", 0, 3, NOW, "orders", value=b"v" * 30_000),
    )
    before = became(Fate.LETTER, 0, 2, rows=rows, reason=WHY)
    large = Target(partitions=2, bytes_max=20_000)
    fates = passes.letters_down(rows, before, own_topics(rows, large, letters))
    expected = [(Fate.RETRY, DEAD_LETTER_TOPIC), (Fate.HOLD, DEAD_LETTER_TOPIC), (Fate.LETTER, "target-unavailable")]
    assert told(fates) == expected
    assert fates.retried() == {DEAD_LETTER_TOPIC: 2}
    assert fates.rejected(rows) == {"target-unavailable": 1}


def test_a_dead_letter_that_its_topic_rejected_is_retried() -> None:
    """The others are written."""
    rows = timers(2)
    fates = became(Fate.LETTER, 0, 1, rows=rows, reason=WHY)
    after = passes.letters_down(rows, fates, own_topics(rows, no_letter={int(rows.keys[1])}))
    assert after.fate.tolist() == [Fate.LETTER, Fate.RETRY]


def test_a_topic_that_no_broker_has_told_of_is_tried() -> None:
    """Silence puts nothing off."""
    unanswered = Target(partitions=0, bytes_max=None, refusal=WHY)
    rows = timers(1)
    fates = became(Fate.LETTER, 0, rows=rows, reason=WHY)
    assert passes.letters_down(rows, fates, own_topics(rows, letters=unanswered)).fate.tolist() == [Fate.LETTER]


def test_what_is_tried_again_waits_longer_each_time() -> None:
    """By its attempts; a held dead letter is looked at after the first wait, and what is paused when its roll window
    demands it."""
    rows = due_rows(
        *(timer("delay", 0, i, NOW, "orders", attempt=i) for i in range(3)), reject("delay", 0, 9, NOW, "no-time")
    )
    fates = became(Fate.RETRY, 0, 1, 2, rows=rows, reason=WHY).put(np.array([3]), Fate.HOLD, [LETTERS_FAIL])
    waits_ms = passes.timed(rows, fates, RETRY, NOW).at_ms - NOW
    full = np.array([1_000, 2_000, 4_000, 1_000])
    assert ((full * 3 // 4 <= waits_ms) & (waits_ms <= full)).all()
    assert fates.count_attempts(fates.ids(Fate.RETRY)).tolist() == [1, 1, 1]
    paused = became(Fate.RETRY, 0, rows=rows, reason=PAUSED).put(np.array([1, 2]), Fate.RETRY, [WHY])
    waits_ms = passes.timed(rows, paused, RETRY, NOW, {"delay": 8_000_000}).at_ms[:3] - NOW
    assert (waits_ms <= np.array([8_000_000, 2_000, 4_000])).all() and waits_ms[0] >= 6_000_000
    assert paused.count_attempts(np.array([0])).tolist() == [0]
    blameless = became(Fate.RETRY, 0, rows=rows, reason=OUR_CLOCK)
    assert blameless.count_attempts(np.array([0])).tolist() == [0]


def forwards_of(rows: DueRows, count: Callable[[str], int] = lambda _: 2) -> Forwards:
    """Where cancels go."""
    return Forwards(rows, count)


@pytest.mark.parametrize("fate", [Fate.ROLL, Fate.RETRY, Fate.HOLD])
def test_a_copy_has_one_place_to_go_to(fate: Fate) -> None:
    """Where that takes nothing its source is held; the sources of other partitions are not."""
    rows = due_rows(timer("delay", 0, 1, NOW, "orders"), timer("delay", 1, 2, NOW, "orders"))
    found = own_topics(rows, HALF).unwritable(became(fate, 0, 1, rows=rows), forwards_of(rows), NO_ROWS)
    assert {source: set(why.places) for source, why in found.items()} == {0: {("delay", 0)}}


def test_a_dead_letter_without_a_topic_holds_its_source() -> None:
    """It waits for the topic, not for a partition of its own."""
    rows = timers(1)
    fates, own = became(Fate.LETTER, 0, rows=rows), own_topics(rows, letters=GONE)
    found = own.unwritable(fates, forwards_of(rows), NO_ROWS)
    assert {source: set(why.places) for source, why in found.items()} == {0: {("delay.dlt", EVERY)}}


def test_a_cancel_needs_every_other_partition() -> None:
    """Where one takes nothing its source waits for it; where their number is not known, for the time."""
    here = due_rows(cancel(1))
    there = due_rows({**cancel(1), "partition": 1})
    fates = became(Fate.FORWARD, 0, rows=there)
    assert not own_topics(here, HALF).unwritable(fates, forwards_of(here), NO_ROWS)
    found = own_topics(there, HALF).unwritable(fates, forwards_of(there), NO_ROWS)
    assert {source: set(why.places) for source, why in found.items()} == {1: {("delay", 0)}}

    def unknown(_: str) -> int:
        raise EnvironmentFailure("no answer", hint="Wait.")

    found = own_topics(here).unwritable(fates, forwards_of(here, unknown), NO_ROWS)
    assert {source: (set(why.places), why.detail) for source, why in found.items()} == {0: (set(), "no answer")}


# -- all passes together -----------------------------------------------------------------------------------------------

TARGETS: Final = ("orders", "gone", "half", "small", "secret", "delay.dlt", None)


class Known:
    """Targets of which everything is known."""

    def __init__(self, **own: Target) -> None:
        self.found = {"gone": GONE, "half": HALF, "small": Target(partitions=1, bytes_max=300), **own}

    def resolve(self, names: Iterable[str]) -> Mapping[str, Target]:
        return {name: self.found.get(name, WELL) for name in names}

    renew = resolve

    def look_again(self, _names: object) -> frozenset[str]:
        return frozenset()

    def count_partitions(self, _name: str) -> int:
        return 2


def entries() -> st.SearchStrategy[dict[str, Any]]:
    """Rows of any kind."""
    return st.builds(
        lambda kind, target, value, due, attempt, key, partition, ago, schedule, tick: {
            **timer("delay", partition, 0, NOW + due, target, attempt=attempt, key=key, value=b"v" * value, id="i"),
            "kind": int(kind),
            "reason": "no-time" if kind is Kind.REJECT else None,
            "at": NOW - ago,
            "schedule": schedule if kind is Kind.TIMER else None,
            "tick": tick if kind is Kind.TIMER else 0,
        },
        st.sampled_from(Kind),
        st.sampled_from(TARGETS),
        st.sampled_from([0, 200, 2_000, 40_000]),
        st.sampled_from([-1, 0, 1]),
        st.integers(0, 3),
        st.sampled_from([None, b"k", b"l"]),
        st.integers(0, 1),
        st.sampled_from([0, 20_000, 100_000]),
        st.sampled_from([None, None, '{"every":"1h"}', '{"every":"1ms","missed":"none"}', '{"cron":"never"}']),
        st.sampled_from([0, 1, 7]),
    )


@given(
    st.lists(entries(), min_size=1, max_size=12),
    st.sampled_from([Target(partitions=2, bytes_max=30_000), WELL, DENIED]),
    st.sampled_from([WELL, DENIED, HALF]),
    st.sampled_from([OverduePolicy(), OverduePolicy(give_up_ms=50_000, rate=1)]),
)
def test_every_row_has_one_fate_and_is_written_as_often_as_that_says(
    drawn: list[dict[str, Any]], delay: Target, letters: Target, policy: OverduePolicy
) -> None:
    """Once; a cancel that is forwarded to the other partition, and a finished one never. What is counted is what is
    written, or else the sources are named that are to be held."""
    planner = Planner(
        targets=cast("Targets", Known(**{"delay": delay, "delay.dlt": letters})),
        permitted=lambda name: name != "secret",
        default_targets={"delay": None},
        dead_letter_topics=LETTERS,
        retry=RETRY,
        overdue=policy,
        limits=LIMITS,
    )
    planner.begin()
    taken = rows_of([(e["at"], e["partition"], i, {**e, "offset": i, "origin": i}) for i, e in enumerate(drawn)])
    try:
        plan = planner.plan(taken, SOURCES, NOW)
    except Unplannable as unplannable:
        held = set(unplannable.unwritable)
    else:
        held = set()
    assert held <= set(taken.source.tolist())
    if held:
        return
    batches = list(plan.batches())
    written = Counter(row for batch in batches for row in batch.ids.tolist())
    fates = [Fate(fate) for fate in plan.fates.fate.tolist()]
    following = set(plan.next_ids.tolist())
    assert {
        row: int(fate not in (Fate.NOTHING, Fate.ADVANCE)) + (row in following) for row, fate in enumerate(fates)
    } == {row: written[row] for row in range(len(drawn))}
    assert following >= set(plan.fates.ids(Fate.ADVANCE).tolist())
    assert plan.records == written.total()
    counts = plan.counts
    assert [counts.delivered.total(), counts.rejected.total(), counts.rolled, counts.deferred, counts.forwarded] == [
        fates.count(fate) for fate in (Fate.DELIVER, Fate.LETTER, Fate.ROLL, Fate.DEFER, Fate.FORWARD)
    ]
    assert counts.retried.total() == fates.count(Fate.RETRY) + fates.count(Fate.HOLD)
    delivered = {row for batch in batches if batch.origins is not None for row in batch.ids.tolist()}
    assert delivered == {row for row, fate in enumerate(fates) if fate is Fate.DELIVER}
    assert (plan.rows.due[plan.fates.ids(Fate.DELIVER)] <= NOW).all()
