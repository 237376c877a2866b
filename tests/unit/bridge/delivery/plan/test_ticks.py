"""What becomes of the schedules of rows that come up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.plan.fates import Fate, Unplannable
from bridge.delivery.plan.overdue import OverduePolicy
from bridge.delivery.plan.planner import Plan, Planner
from bridge.delivery.plan.ticks import ScheduleLimits, moved
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.target import Target
from bridge.kafka.errors import Refusal
from bridge.stores.loan import Loan
from bridge.stores.names import Sources
from bridge.wire import headers as h
from bridge.wire.reasons import RejectReason
from bridge.wire.schedule import packed
from tests.entries import rows_of, timer

SOURCES = Sources([("delay", 0)])
NOW = 1_800_000_000_000
MINUTE = 60_000
LIMITS = ScheduleLimits(every_min_ms=1_000, delay_max_ms=3650 * 86_400_000)
WELL = Target(partitions=3, bytes_max=1_000_000)
FAILS = Target(partitions=3, bytes_max=1_000_000, refusal=Refusal(RejectReason.TARGET_UNAVAILABLE, "no leader"))


class Known:
    """Targets of which everything is known; what is not named takes everything."""

    def __init__(self, targets: Mapping[str, Target]) -> None:
        self._targets = targets

    def resolve(self, names: Iterable[str]) -> Mapping[str, Target]:
        return {name: self._targets.get(name, WELL) for name in names}

    renew = resolve

    def look_again(self, _names: object) -> frozenset[str]:
        return frozenset()

    def count_partitions(self, _name: str) -> int:
        return 1


def planned(
    *entries: dict[str, Any],
    targets: Mapping[str, Target] | None = None,
    schedules: ScheduleLimits = LIMITS,
    loan: Loan | None = None,
    **options: Any,
) -> tuple[Plan, dict[str, list[dict[str, str]]]]:
    """The plan of these entries, and the headers of what is written to each topic."""
    planner = Planner(
        targets=cast("Targets", Known(targets or {})),
        permitted=lambda name: name != "secret",
        default_targets={"delay": "default"},
        dead_letter_topics={"delay": "delay.dlt"},
        retry=RetryPolicy(),
        schedules=schedules,
        **options,
    )
    planner.begin()
    plan = planner.plan(rows_of([(e["at"], 0, e["offset"], e) for e in entries]), SOURCES, NOW, loan=loan)
    batches: list[Batch] = list(plan.batches())
    assert sum(map(len, batches)) == plan.records
    written: dict[str, list[dict[str, str]]] = {}
    for batch in batches:
        for headers in batch.all_headers():
            texts = {name: value if isinstance(value, str) else value.decode("latin-1") for name, value in headers}
            written.setdefault(batch.topic, []).append(texts)
    return plan, written


def begins(is_start_given: bool = False, due: int = NOW, target: str | None = "orders", **texts: str) -> dict[str, Any]:
    """The row of the record of a recurring message, written now."""
    schedule = packed(
        {f"delay-{name.replace('_', '-')}": text for name, text in texts.items()}, is_start_given=is_start_given
    )
    return {**timer("delay", 0, 7, due, target, at=NOW), "ts": NOW, "schedule": schedule}


def tick(number: int, due: int, offset: int = 9, **texts: str) -> dict[str, Any]:
    """The row of a tick."""
    schedule = packed({f"delay-{name.replace('_', '-')}": text for name, text in texts.items()}, is_start_given=False)
    row = timer("delay", 0, offset, due, "orders", tick=number, schedule=schedule, headers=[("own", b"1")], id="a")
    return {**row, "origin": 7}


@pytest.mark.parametrize("is_start_given", [False, True])
def test_a_schedule_that_was_paused_before_it_began_stays_paused(is_start_given: bool) -> None:
    """When its copy comes up, it is no more than rolled."""
    row = {**begins(is_start_given, every="1h", due=h.NEVER_MS), "offset": 9, "origin": 7}
    _, written = planned(row)
    (copy,) = written["delay"]
    assert (copy[h.COPY_DUE], copy[h.COPY_TICK], copy[h.COPY_ROLLS]) == (str(h.NEVER_MS), "0", "1")
    resumed = moved(row["schedule"], 0, h.NEVER_MS, h.NEXT_MS, NOW)
    assert resumed is not None and resumed[1] == NOW
    _, written = planned({**row, "schedule": resumed[0], "due": NOW})
    assert int(written["delay"][0][h.COPY_DUE]) in (NOW, NOW + 60 * MINUTE) and written["delay"][0][h.COPY_TICK] == "1"


def test_the_record_of_a_recurring_message_begins_its_schedule() -> None:
    """Nothing is delivered; the first tick is written, with all that the record says."""
    plan, written = planned(begins(every="1h", times="3"))
    copy = {
        h.COPY_ORIGIN: "7",
        h.COPY_DUE: str(NOW + 60 * MINUTE),
        h.COPY_ROLLS: "0",
        h.COPY_ATTEMPT: "0",
        h.COPY_TICK: "1",
        h.TOPIC: "orders",
        h.EVERY: "1h",
        h.TIMES: "3",
    }
    assert written == {"delay": [copy]}
    assert plan.counts.delivered.total() == 0


def test_a_tick_is_delivered_and_the_next_one_written() -> None:
    """Both in one plan, with the same origin; the next one is due after this one was, however late this is."""
    plan, written = planned(tick(4, NOW - 300, every="1h"))
    assert written["orders"] == [{"own": "1", h.ORIGIN: "delay/0/7", h.DUE: str(NOW - 300), h.TICK: "4"}]
    (copy,) = written["delay"]
    assert (copy[h.COPY_TICK], copy[h.COPY_DUE], copy[h.COPY_ORIGIN]) == ("5", str(NOW - 300 + 60 * MINUTE), "7")
    assert (copy["own"], copy[h.EVERY], copy[h.ID]) == ("1", "1h", "a")
    assert (plan.counts.ticks, plan.counts.delivered) == (1, {"orders": 1})


def test_beside_others() -> None:
    """A tick among messages that do not recur: each has the headers that it should."""
    _, written = planned(timer("delay", 0, 1, NOW - 400, "orders"), tick(4, NOW - 300, every="1h"))
    assert written["orders"] == [
        {h.ORIGIN: "delay/0/1", h.DUE: str(NOW - 400)},
        {"own": "1", h.ORIGIN: "delay/0/7", h.DUE: str(NOW - 300), h.TICK: "4"},
    ]


def test_the_last_tick() -> None:
    """It is delivered, and nothing follows."""
    _, written = planned(tick(4, NOW, every="1h", times="4"))
    assert list(written) == ["orders"]
    _, written = planned(tick(4, NOW, every="1h", end=str(NOW + 60 * MINUTE - 1)))
    assert list(written) == ["orders"]


@pytest.mark.parametrize(
    ("missed", "delivered", "following"),
    [
        ("last", (NOW - 5 * MINUTE, "4"), (NOW + 5 * MINUTE, "5")),
        ("all", (NOW - 35 * MINUTE, "4"), (NOW - 25 * MINUTE, "5")),
        ("none", None, (NOW + 5 * MINUTE, "4")),
    ],
)
def test_ticks_that_were_missed(missed: str, delivered: tuple[int, str] | None, following: tuple[int, str]) -> None:
    """By policy; numbers are those of deliveries, so that they have no gaps."""
    plan, written = planned(tick(4, NOW - 35 * MINUTE, every="10m", missed=missed))
    found = [(int(headers[h.DUE]), headers[h.TICK]) for headers in written.get("orders", [])]
    assert found == ([delivered] if delivered else [])
    (copy,) = written["delay"]
    assert (int(copy[h.COPY_DUE]), copy[h.COPY_TICK]) == following
    assert plan.counts.missed == {missed: 1}


def test_missed_to_the_end() -> None:
    """A schedule that ended while nothing was delivered leaves nothing, if missed ticks are left out."""
    plan, written = planned(tick(4, NOW - 35 * MINUTE, every="10m", missed="none", end=str(NOW - MINUTE)))
    assert written == {}
    assert plan.own is None


def test_a_tick_whose_target_fails_is_retried_by_itself() -> None:
    """Its copy has left the schedule, which goes on."""
    _, written = planned(tick(4, NOW, every="1h"), targets={"orders": FAILS})
    retry, following = written["delay"]
    assert (retry[h.COPY_TICK], retry[h.COPY_ATTEMPT], retry[h.COPY_DUE]) == ("4", "1", str(NOW))
    assert h.EVERY not in retry and h.COPY_AT in retry
    assert (following[h.COPY_TICK], following[h.COPY_ATTEMPT], following[h.EVERY]) == ("5", "0", "1h")


def test_both_copies_of_a_tick_that_is_retried_are_under_way() -> None:
    """Its own, and the next tick."""
    told: list[int] = []
    loan = SimpleNamespace(copied=lambda _seq, origin, _ids: told.extend(origin.tolist()))
    _, written = planned(tick(3, NOW - 5_000, every="1h"), targets={"orders": FAILS}, loan=cast("Loan", loan))
    assert len(written["delay"]) == 2
    assert told == [7, 7]


def test_a_retried_tick_keeps_its_number() -> None:
    """When it comes up again it is delivered as that tick, and begins nothing."""
    again = {**tick(4, NOW), "schedule": None, "attempt": 1}
    _, written = planned(again)
    assert written == {"orders": [{"own": "1", h.ORIGIN: "delay/0/7", h.DUE: str(NOW), h.TICK: "4"}]}


def test_a_dead_letter_of_a_tick_does_not_end_the_schedule() -> None:
    """It is a message for itself, and the next tick is written."""
    _, written = planned({**tick(4, NOW, every="1h"), "target_partition": 5})
    assert written["delay.dlt"][0][h.REASON] == "partition-out-of-range"
    assert written["delay.dlt"][0][h.UNTIL] == str(NOW) and h.EVERY not in written["delay.dlt"][0]
    assert written["delay"][0][h.COPY_TICK] == "5"


def test_a_tick_that_is_not_due_is_rolled_with_its_schedule() -> None:
    """One more roll, the same number, and no next one."""
    row = {**tick(4, NOW + 60 * MINUTE, cron="0 9 * * *", time_zone="Europe/Berlin"), "at": NOW}
    _, written = planned(row)
    (copy,) = written["delay"]
    assert (copy[h.COPY_TICK], copy[h.COPY_ROLLS], copy[h.CRON]) == ("4", "1", "0 9 * * *")
    assert copy[h.TIME_ZONE] == "Europe/Berlin"


def test_ticks_count_against_the_catch_up_rate() -> None:
    """Also those whose copies are new: a deferred tick keeps its schedule, and the next one waits for it."""
    late = [{**tick(4, NOW - 90 * MINUTE, offset=10 + i, every="10m", missed="all"), "ts": NOW - 1} for i in range(4)]
    plan, written = planned(*late, overdue=OverduePolicy(rate=1))
    assert len(written["orders"]) == 2
    deferred = [copy for copy in written["delay"] if h.COPY_AT in copy]
    assert [(copy[h.COPY_TICK], copy[h.EVERY]) for copy in deferred] == [("4", "10m")] * 2
    assert plan.counts.deferred == 2
    assert len(written["delay"]) == 4


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        (begins(cron="0 9 * * FOO"), "bad-schedule", "delay-cron: "),
        (begins(cron="0 0 30 2 *"), "bad-schedule", "delay-cron: "),
        (begins(cron="0 9 * * *", time_zone="Mars/Base"), "bad-schedule", "delay-time-zone: "),
        (begins(every="999ms"), "bad-schedule", "delay-every: 999 ms is less than the minimum of 1000 ms"),
        (begins(every="1h", end=str(NOW + 1)), "bad-schedule", "it names no moment"),
        (begins(every="1h", missed="some"), "bad-schedule", "delay-missed: "),
        (begins(every="4000d"), "beyond-max", ""),
        (begins(every="4000d", is_start_given=True), "beyond-max", ""),
        (begins(every="1h", target="secret"), "forbidden-target", ""),
        ({**begins(every="1h"), "headers": [("x\0", b"1")]}, "bad-header-name", ""),
        ({**begins(every="1h"), "value": b"v" * 1_000_000}, "too-large", ""),
        (tick(4, NOW, cron="nonsense"), "bad-schedule", "delay-cron: "),
    ],
)
def test_no_schedule(row: dict[str, Any], reason: str, detail: str) -> None:
    """What can never be delivered is one dead letter, with the schedule as it was, and nothing else."""
    _, written = planned(row)
    assert list(written) == ["delay.dlt"]
    (letter,) = written["delay.dlt"]
    assert letter[h.REASON] == reason
    assert letter[h.REASON_DETAIL].startswith(detail)
    assert (h.CRON in letter or h.EVERY in letter) == (row["tick"] == 0)


def test_no_schedule_begins_without_transactions() -> None:
    """A crash would leave two next ticks, for ever. One that has begun goes on."""
    limits = ScheduleLimits(is_exact=False)
    _, written = planned(begins(every="1h"), schedules=limits)
    assert list(written) == ["delay.dlt"]
    assert written["delay.dlt"][0][h.REASON_DETAIL] == "recurring messages need delivery.mode exactly-once"
    _, written = planned(tick(4, NOW, every="1h"), schedules=limits)
    assert set(written) == {"orders", "delay"}


def test_a_letter_that_must_wait_keeps_what_is_no_schedule() -> None:
    """Where the dead-letter topic fails, the record comes up again as it was: it is never delivered as a message."""
    plan, written = planned(begins(cron="nonsense"), targets={"delay.dlt": FAILS})
    (copy,) = written["delay"]
    assert (copy[h.COPY_TICK], copy[h.CRON]) == ("0", "nonsense")
    assert plan.fates.fate.tolist() == [Fate.RETRY]


def test_a_delay_partition_that_takes_nothing_holds_its_source() -> None:
    """A tick is not delivered before the next one can be written with it."""
    down = Target(partitions=1, bytes_max=1_000_000, down={0: "has no leader"})
    with pytest.raises(Unplannable):
        planned(tick(4, NOW, every="1h"), targets={"delay": down})
    _, written = planned(tick(4, NOW, every="1h", times="4"), targets={"delay": down})
    assert list(written) == ["orders"]


def test_a_schedule_whose_copy_is_too_large_ends_with_a_letter() -> None:
    """Where the delay topic has come to take less than it did. Put back, the letter is what is left of the schedule."""
    row = {**tick(4, NOW, every="1h", times="7"), "value": b"v" * 2_000}
    _, written = planned(row, targets={"delay": Target(partitions=1, bytes_max=1_500)})
    assert list(written) == ["delay.dlt"]
    (letter,) = written["delay.dlt"]
    assert (letter[h.REASON], letter[h.EVERY], letter[h.TIMES]) == ("too-large", "1h", "4")


def test_copies_do_not_grow() -> None:
    """The copy of the ten thousandth tick is as large as that of the first, but for four digits."""
    sizes = []
    for number in (1, 10_000):
        _, written = planned(tick(number, NOW, cron="0 9 * * MON-FRI", time_zone="Europe/Berlin", missed="all"))
        sizes.append(sum(len(name) + len(value) for name, value in written["delay"][0].items()))
    assert sizes[1] - sizes[0] == 4


@pytest.mark.parametrize(
    ("text", "tick", "due", "to", "expected"),
    [
        # One tick is moved: an interval keeps its rhythm, cron has it anyway.
        ('{"every":"1h"}', 3, NOW + 5, NOW + 99, (f'{{"every":"1h","anchor":"{NOW + 5}"}}', NOW + 99)),
        ('{"every":"1h","anchor":"7"}', 3, NOW + 5, NOW + 99, ('{"every":"1h","anchor":"7"}', NOW + 99)),
        ('{"cron":"0 9 * * *"}', 3, NOW + 5, NOW + 99, ('{"cron":"0 9 * * *"}', NOW + 99)),
        ('{"every":"1h","given":true}', 0, NOW + 5, NOW + 99, ('{"every":"1h","given":true}', NOW + 99)),
        # A pause, and its end: at the next regular time, which may be now.
        ('{"every":"1h"}', 3, NOW + 5, h.NEVER_MS, (f'{{"every":"1h","anchor":"{NOW + 5}"}}', h.NEVER_MS)),
        ('{"every":"1h","anchor":"7"}', 3, h.NEVER_MS, h.NEVER_MS, ('{"every":"1h","anchor":"7"}', h.NEVER_MS)),
        ('{"every":"1h","anchor":"7"}', 3, h.NEVER_MS, h.NEXT_MS, ('{"every":"1h","anchor":"7"}', NOW + 7)),
        ('{"every":"1h","anchor":"0"}', 3, h.NEVER_MS, h.NEXT_MS, ('{"every":"1h","anchor":"0"}', NOW)),
        ('{"cron":"0 9 * * *"}', 3, h.NEVER_MS, h.NEXT_MS, ('{"cron":"0 9 * * *"}', NOW + 60 * MINUTE)),
        ('{"cron":"0 9 * * *"}', 3, h.NEVER_MS, NOW + 99, ('{"cron":"0 9 * * *"}', NOW + 99)),
        # Nothing to resume; not begun; over; no schedule at all.
        ('{"every":"1h"}', 3, NOW + 5, h.NEXT_MS, ('{"every":"1h"}', NOW + 5)),
        ('{"every":"1h"}', 0, h.NEVER_MS, h.NEXT_MS, ('{"every":"1h"}', NOW)),
        (f'{{"cron":"0 9 * * *","end":"{NOW}"}}', 3, h.NEVER_MS, h.NEXT_MS, None),
        ('{"cron":"x"}', 0, NOW, h.NEVER_MS, ('{"cron":"x"}', NOW)),
    ],
)
def test_moves(text: str, tick: int, due: int, to: int, expected: tuple[str, int] | None) -> None:
    """What a move, a pause and its end make of a schedule."""
    assert moved(text, tick, due, to, NOW) == expected


def test_what_follows_a_moved_tick() -> None:
    """The first regular time after it: earlier, it is one tick more; later, those in between are left out."""
    for due, following in ((NOW - 7 * MINUTE, NOW + 5 * MINUTE), (NOW - 1, NOW + 5 * MINUTE)):
        _, written = planned(tick(4, due, every="1h", anchor=str(NOW + 5 * MINUTE)))
        assert [copy[h.COPY_DUE] for copy in written["delay"]] == [str(following)]


def test_a_paused_schedule_stays_paused_when_it_rolls() -> None:
    """Its copy has the same due time, number and rhythm."""
    plan, written = planned({**tick(4, h.NEVER_MS, every="1h", anchor="7"), "at": NOW})
    (copy,) = written["delay"]
    assert (copy[h.COPY_DUE], copy[h.COPY_TICK], copy[h.ANCHOR]) == (str(h.NEVER_MS), "4", "7")
    assert plan.counts.delivered.total() == 0


@pytest.mark.fault("forged copies of schedules")
def test_a_schedule_that_has_begun_passes_the_bound_on_its_interval() -> None:
    """A forged copy with an interval that is too short ends, and its letter names the bound."""
    plan, written = planned(tick(4, NOW - 3_650 * 86_400_000, every="1ms", missed="all"))
    assert list(written) == ["delay.dlt"]
    (letter,) = written["delay.dlt"]
    assert letter["delay-reason"] == RejectReason.BAD_SCHEDULE and "1000 ms" in letter["delay-reason-detail"]
    assert plan.records == 1
