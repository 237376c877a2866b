"""Transactions that end without being asked to, on a scripted Kafka: whatever of one is visible, nothing is doubled or
lost. And committed states that Kafka does not hold as they were committed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError

from bridge.delivery.doubt.doubt_file import FILE, DoubtFile
from bridge.delivery.doubt.doubts import DOUBT
from bridge.delivery.doubt.torn_states import FILE as STATES
from bridge.delivery.states import Event
from bridge.delivery.targets.stall import StallWatch
from bridge.errors import EnvironmentFailure
from bridge.stores.names import SourceName
from bridge.wire import headers as h
from tests.model.dispatch_rig import DELAY, LETTERS, SOURCES, WINDOW_MS, DispatchRig
from tests.model.scripted_kafka import Fault

OUTPUTS = ("orders", "bills", "audit", LETTERS)
ENDS = [
    (before, end)
    for before, records in enumerate((3, 5, 2))  # commands and rejects, messages, a tick
    for end in (*(("report", count) for count in range(1, records + 1)), ("offsets", 0), ("commit", 0))
]


@pytest.fixture
def rig() -> Iterator[DispatchRig]:
    """A bridge on a Kafka that does as it is told, with a record in each batch. Its judge has no word for what half of
    a transaction has written."""
    made = DispatchRig()
    made.kafka.batch_rows = 1
    made.kafka.on_commit = lambda _: None
    yield made
    made.close()


def schedule(rig: DispatchRig) -> int:
    """One of each kind of output, due together but for a roll. Returns how many records the topics get in the end."""
    rig.timer(0, 5, "orders")
    rig.timer(1, 5, "orders", key=None)
    rig.timer(2, 5, "bills")
    rig.timer(0, 5, "nowhere")
    rig.timer(1, WINDOW_MS + 2_000, "orders")
    rig.produce(2, ("own", "1"), value=b"no time")
    rig.recurring(0, 300, "audit")
    rig.timer(1, 30_000, "orders", (h.ID, "a"))
    rig.produce(1, (h.CANCEL, "a"), key=None)
    return 8 + 1


def found(rig: DispatchRig) -> Counter[tuple[str, bytes | None, bytes | None]]:
    """What the topics hold, by topic, origin and tick."""
    return Counter(
        (topic, dict(record.headers).get(h.ORIGIN), dict(record.headers).get(h.TICK))
        for (topic, _), log in rig.kafka.logs.items()
        for record in log
        if topic in OUTPUTS
    )


def run(rig: DispatchRig, steps: int = 400) -> None:
    """Until nothing is pending."""
    for _ in range(steps):
        rig.step()
        if not rig.store.stats([]).pending and rig.store.next_offsets() == rig.log_ends(SOURCES):
            break
        wakeup_ms = rig.store.next_wakeup_ms()
        rig.pass_ms(500 if wakeup_ms is None else max(1, wakeup_ms - rig.clock.now_ms()))


@pytest.mark.parametrize(("before", "end"), ENDS)
@pytest.mark.fault("a transaction that ends without being asked to")
def test_nothing_is_doubled_or_lost_whatever_of_it_is_visible(
    rig: DispatchRig, before: int, end: tuple[str, int]
) -> None:
    """Records that are already in their topics are not written again, all others are; then (O, P) include them, also
    for the next process."""
    rig.kafka.is_prompt = end[1] % 2 == 0
    expected = schedule(rig)
    while rig.tally.transactions < before:
        rig.step()
    rig.kafka.tears_at = end
    run(rig)
    assert rig.kafka.torn, "it has not ended"
    once = found(rig)
    assert set(once.values()) == {1} and len(once) == expected, once
    rig.crash()
    run(rig, 20)
    assert found(rig) == once


@pytest.mark.fault("such a transaction that is left for a partition that does not answer")
def test_a_transaction_that_is_left_for_a_silent_partition_is_looked_up_too(
    rig: DispatchRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator is asked for the abort, and has answered before the transaction's messages are planned again."""
    monkeypatch.setattr(StallWatch, "is_explained", lambda *_, **__: True)
    rig.kafka.is_prompt = True
    rig.kafka.inject(Fault(step="silence", code=KafkaError._MSG_TIMED_OUT, topic="bills"))
    rig.timer(0, 5, "orders")
    rig.timer(1, 5, "bills")
    rig.kafka.tears_at = ("report", 1)
    while not rig.kafka.torn:
        rig.step()
    rig.kafka.faults.clear()
    run(rig)
    assert rig.tally.aborted == 1 and rig.tally.found == 1
    assert found(rig) == {("orders", b"delay/0/0", None): 1, ("bills", b"delay/1/0", None): 1}


def held(rig: DispatchRig, *unreadable: str) -> set[SourceName]:
    """A transaction for two partitions is ended whole, and the topic of one of them may not be read."""
    rig.unreadable = set(unreadable or {"orders"})
    rig.timer(0, 5, "orders")
    rig.timer(1, 5, "bills")
    rig.kafka.tears_at = ("commit", 0)
    for _ in range(60):
        rig.step()
    return set(rig.dispatcher.doubts.held())


@pytest.mark.parametrize(("choice", "delivered"), [("aborted", 2), ("committed", 1)])
@pytest.mark.fault("such a transaction whose target may not be read")
def test_an_operator_chooses_what_cannot_be_looked_up(rig: DispatchRig, choice: str, delivered: int) -> None:
    """The partition is held and reported; all others go on. `aborted` repeats its messages, `committed` does not."""
    assert held(rig) == {(DELAY, 0)}
    assert "delay/0 is held" in rig.dispatcher.doubts.alarms()[0] and rig.tally.held == 1
    assert rig.dispatcher.doubts.counts() == {(DELAY, DOUBT): 1}
    rig.timer(0, 5, "orders")
    rig.timer(2, 5, "bills")
    run(rig, 60)
    assert found(rig).total() == 3, "of the partition that is held nothing is delivered"
    rig.chosen[(DELAY, 0), 0] = choice
    run(rig)
    assert found(rig)["orders", b"delay/0/0", None] == delivered
    assert found(rig).total() == 3 + delivered and rig.tally.held == 0
    assert not rig.dispatcher.doubts.written and not rig.chosen, "what is finished is forgotten"
    rig.crash()
    run(rig, 20)
    assert found(rig).total() == 3 + delivered


def test_choices_are_followed_all_or_none(rig: DispatchRig) -> None:
    """A file that cannot be written keeps what is chosen, and the partitions stay held."""
    assert held(rig, "orders", "bills") == {(DELAY, 0), (DELAY, 1)}
    rig.chosen |= {((DELAY, 0), 0): "committed", ((DELAY, 1), 0): "committed"}
    rig.chosen.failure = EnvironmentFailure("cannot write it", hint="Look.", code="DB-3062")
    run(rig, 60)
    assert rig.dispatcher.doubts.held() == {(DELAY, 0), (DELAY, 1)} and len(rig.chosen) == 2
    rig.chosen.failure = None
    run(rig)
    assert not rig.dispatcher.doubts.held() and found(rig).total() == 2


@pytest.mark.fault("brokers that do not answer such a look-up")
def test_a_look_up_is_made_again_until_it_succeeds(rig: DispatchRig) -> None:
    """The partitions of the transaction are held until the look-up succeeds, and all others are delivered."""
    rig.is_answering = False
    assert held(rig) == {(DELAY, 0), (DELAY, 1)}
    rig.timer(2, 5, "audit")
    run(rig, 60)
    assert found(rig).total() == 3
    rig.is_answering, rig.unreadable = True, set()
    run(rig)
    assert found(rig).total() == 3 and not rig.dispatcher.doubts.held()


@pytest.mark.fault("a rebalance during such a look-up")
def test_nothing_waits_for_a_look_up(rig: DispatchRig) -> None:
    """Neither other partitions nor a revocation wait for a look-up; its findings count when the partition is back."""
    rig.looks_up = False
    assert held(rig) == {(DELAY, 0), (DELAY, 1)} and len(rig.searches) == 1
    rig.timer(2, 5, "audit")
    run(rig, 60)
    assert found(rig).total() == 3
    rig.follow(set(SOURCES) - {(DELAY, 0)})
    rig.unreadable = set()
    rig.searches.pop()()
    run(rig, 60)
    rig.follow(SOURCES)
    run(rig)
    assert found(rig).total() == 3 and not rig.dispatcher.doubts.held()


@pytest.mark.fault("partitions that come and go faster than a look-up reads")
def test_a_look_up_goes_on_for_partitions_that_stay(rig: DispatchRig) -> None:
    """A look-up goes on for partitions that stay; a partition that comes back is looked up anew, since another instance
    may have written meanwhile."""
    rig.looks_up = False
    assert held(rig, "nothing") == {(DELAY, 0), (DELAY, 1)}
    for _ in range(2):
        rig.follow(set(SOURCES) - {(DELAY, 0)})
        rig.follow(SOURCES)
        run(rig, 20)
    assert len(rig.searches) == 1, "one at a time"
    rig.searches.pop()()
    run(rig, 20)
    assert rig.dispatcher.doubts.held() == {(DELAY, 0)} and len(rig.searches) == 1
    rig.searches.pop()()
    run(rig)
    assert found(rig).total() == 2 and not rig.dispatcher.doubts.held()


def test_choices_for_other_partitions_are_kept(rig: DispatchRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that ends unasked just after an operator has chosen makes only choices for its own rows void."""
    assert held(rig) == {(DELAY, 0)}
    note = rig.dispatcher.doubts.note

    def noted(*args: Any) -> frozenset[SourceName]:
        rig.chosen |= {((DELAY, 0), 0): "aborted", ((DELAY, 2), 0): "committed"}
        return note(*args)

    monkeypatch.setattr(rig.dispatcher.doubts, "note", noted)
    rig.timer(2, 5, "orders")
    rig.kafka.tears_at = ("commit", 0)
    for _ in range(60):
        rig.step()
    assert rig.dispatcher.doubts.held() == {(DELAY, 2)} and not rig.chosen
    assert found(rig)["orders", b"delay/0/0", None] == 2


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.fault("messages in doubt whose partition is left out for a while")
def test_a_partition_that_comes_back_is_in_doubt_still(rig: DispatchRig, restarts: bool) -> None:
    """A partition that joins an instance again stays held, also after a start without it."""
    held(rig)
    rig.follow(set(SOURCES) - {(DELAY, 0)})
    assert not rig.dispatcher.doubts.held() and not rig.dispatcher.doubts.alarms()
    if restarts:
        rig.crash()
    rig.follow(SOURCES)
    run(rig, 60)
    assert rig.dispatcher.doubts.held() == {(DELAY, 0)} and found(rig).total() == 2
    rig.unreadable = set()
    run(rig, 2_000)
    assert found(rig).total() == 2 and not rig.dispatcher.doubts.held()


def torn(rig: DispatchRig, end: tuple[str, int], prompt: bool) -> None:
    """A transaction of three messages is ended unasked, and nothing has begun since."""
    rig.kafka.is_prompt = prompt
    for partition, topic in ((0, "orders"), (0, "bills"), (1, "bills")):
        rig.timer(partition, 5, topic)
    rig.kafka.tears_at = end
    while not rig.kafka.torn:
        rig.step()


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("end", [("offsets", 0), ("report", 1), ("report", 2), ("commit", 0)])
@pytest.mark.fault("a process that ends before the states of such a transaction are taken back")
def test_a_start_takes_the_states_of_a_torn_transaction_back(
    rig: DispatchRig, end: tuple[str, int], prompt: bool
) -> None:
    """The next start goes on from the states before the transaction, and looks its messages up, since its offsets may
    count without all of its output."""
    torn(rig, end, prompt)
    rig.crash()
    run(rig)
    assert found(rig).total() == 3 and not rig.dispatcher.doubts.held()
    assert json.loads((rig.directory / STATES).read_text())["states"] == []
    rig.crash()
    run(rig, 20)
    assert found(rig).total() == 3


def test_another_store_takes_them_back_as_well(rig: DispatchRig) -> None:
    """An index that is opened anew meanwhile is opened on the states before the transaction."""
    torn(rig, ("offsets", 0), prompt=True)
    rig.dispatcher._life.advance(Event.OPENED)
    rig.dispatcher.quiesce()
    rig.store.close()
    rig.open_store()
    run(rig)
    assert found(rig).total() == 3


def test_states_are_written_again_before_anything_else(rig: DispatchRig) -> None:
    """No target that takes nothing, and no message, delays that."""
    before = dict(rig.kafka.offsets)
    torn(rig, ("offsets", 0), prompt=True)
    rig.timer(2, 0, "audit")
    rig.dispatcher._narrowing.is_careful = True
    while not rig.tally.transactions:
        rig.step()
    assert rig.kafka.offsets[DELAY, 0][1] == before[DELAY, 0][1] and not found(rig)["audit", b"delay/2/0", None]
    assert rig.dispatcher._narrowing.is_careful, "it tells nothing of messages"


def another_store(rig: DispatchRig) -> None:
    """As after damage to the index."""
    rig.dispatcher.quiesce()
    rig.dispatcher._life.advance(Event.HOLD)
    rig.store.close()
    rig.open_store()


def test_doubts_outlive_a_store(rig: DispatchRig) -> None:
    """What is known of rows, and what is held, is not forgotten with the index."""
    held(rig)
    another_store(rig)
    run(rig, 60)
    assert rig.dispatcher.doubts.held() == {(DELAY, 0)} and found(rig).total() == 2


@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.fault("a restart while messages are in doubt")
def test_doubts_outlive_the_process(rig: DispatchRig, looks_up: bool) -> None:
    """Their partition stays held until they are looked up or an operator has chosen."""
    rig.looks_up = looks_up
    held(rig)
    rig.looks_up = True
    rig.crash()
    run(rig, 60)
    assert rig.dispatcher.doubts.held() == {(DELAY, 0)} and found(rig).total() == 2
    rig.chosen[(DELAY, 0), 0] = "committed"
    run(rig)
    assert found(rig).total() == 2 and not rig.dispatcher.doubts.held()
    rig.crash()
    assert not rig.dispatcher.doubts.held() and not rig.dispatcher.doubts.written


def test_what_was_found_outlives_the_process(rig: DispatchRig) -> None:
    """A crash between the look-up and the commit of the rows: they are not written again."""
    rig.timer(0, 5, "orders")
    rig.timer(1, 5, "bills")
    rig.kafka.tears_at = ("commit", 0)
    while not rig.kafka.torn or rig.dispatcher.doubts.held():
        rig.step()
    assert rig.dispatcher.doubts.written
    rig.crash()
    run(rig)
    assert found(rig).total() == 2 and not rig.dispatcher.doubts.written


def test_doubts_of_rows_that_are_finished_are_forgotten(rig: DispatchRig) -> None:
    """An owner in between has delivered what was in doubt: its committed P covers it."""
    held(rig)
    text = rig.kafka.offsets[DELAY, 0][1].replace('"p":null', '"p":[2000000000,0]')
    rig.kafka.offsets[DELAY, 0] = (1, text)
    rig.crash()
    assert not rig.dispatcher.doubts.held()
    assert not DoubtFile(rig.directory).read()


@pytest.mark.parametrize("file", [FILE, STATES])
def test_a_file_of_doubts_that_cannot_be_read_ends_a_start(rig: DispatchRig, file: str) -> None:
    """Without it messages would be delivered again, or lost, and nobody would have said so."""
    (rig.directory / file).write_text("{")
    for _ in range(2):
        with pytest.raises(EnvironmentFailure) as raised:
            rig.crash()
        assert raised.value.code == "DB-3061"
        rig.opened = 0


# -- committed states


def settled(rig: DispatchRig) -> dict[SourceName, tuple[int, str]]:
    """What Kafka holds when a busy period is over."""
    rig.timer(0, 5, "orders")
    run(rig)
    before = dict(rig.kafka.offsets)
    rig.timer(0, 5, "orders")
    rig.timer(1, 5, "bills")
    run(rig)
    rig.read_back = 0
    return before


def rest(rig: DispatchRig, steps: int = 6) -> None:
    for _ in range(steps):
        rig.pass_ms(700)
        rig.step()


@pytest.mark.fault("a committed state that goes back, without an error")
def test_a_state_that_went_back_is_written_again(rig: DispatchRig) -> None:
    """A second after the last commit the bridge reads the committed offsets back, and writes them again if a late
    request has replaced them. Nothing is delivered twice then."""
    before, after = settled(rig), dict(rig.kafka.offsets)
    rig.kafka.offsets.update(before)
    rest(rig)
    assert rig.kafka.offsets == after and rig.tally.rewritten == sum(before[n] != after[n] for n in after) > 0
    delivered = found(rig).total()
    rig.crash()
    run(rig, 20)
    assert found(rig).total() == delivered


def test_a_quiet_bridge_reads_its_states_back_once(rig: DispatchRig) -> None:
    """There is no polling: one question for each busy period."""
    settled(rig)
    rest(rig, 60)
    assert rig.read_back == 1 and rig.tally.rewritten == 0


def test_states_are_read_back_before_the_partitions_go(rig: DispatchRig) -> None:
    """The next owner goes on from what Kafka holds."""
    before, after = settled(rig), dict(rig.kafka.offsets)
    rig.kafka.offsets.update(before)
    rig.dispatcher.quiesce()
    rig.dispatcher._before_rest()
    assert rig.kafka.offsets == after


def test_what_another_owner_has_committed_stays(rig: DispatchRig) -> None:
    """After a revocation the difference is the new owner's."""
    before = settled(rig)
    rig.kafka.offsets.update(before)
    rig.revocations += 1
    rest(rig, 1)
    assert rig.kafka.offsets == {**rig.kafka.offsets, **before} and rig.tally.rewritten == 0


def test_states_that_no_bridge_has_written_are_written_again(rig: DispatchRig) -> None:
    """Another tool has committed offsets under the group's name while the bridge owns the partitions."""
    settled(rig)
    after = dict(rig.kafka.offsets)
    rig.kafka.offsets[DELAY, 0] = (0, "")
    rest(rig)
    assert rig.kafka.offsets == after


def test_brokers_that_do_not_answer_a_look_back_are_asked_later(rig: DispatchRig) -> None:
    """Delivery waits for half a second at most, and goes on."""
    before, after = settled(rig), dict(rig.kafka.offsets)
    rig.kafka.offsets.update(before)
    rig.is_answering = False
    rest(rig, 3)
    assert rig.read_back == 1 and rig.kafka.offsets != after
    rig.is_answering = True
    rest(rig, 20)
    assert rig.kafka.offsets == after
