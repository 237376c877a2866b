"""Commands and copies on their way: a delay topic in memory, its decoding, the store and the planner, one after the
other; what they write there is read again. No broker, no threads; time stands still between two rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.plan.fates import Unplannable
from bridge.delivery.plan.planner import Planner
from bridge.delivery.plan.record_size import record_bytes
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.target import Target
from bridge.ingest.decode_records import decode_records
from bridge.ingest.finish import Finish
from bridge.kafka.errors import Refusal
from bridge.stores.directory import StoreDirectory
from bridge.stores.stores import Life, Opening, Stores
from bridge.wire import headers as h
from bridge.wire.commands import cancel_headers, cancel_origin_headers, move_headers, move_origin_headers
from bridge.wire.decode_epochs import DecodeEpoch, DecodeParameters
from bridge.wire.reasons import RejectReason
from bridge.wire.received import Record
from tests.unit.timerstore.entries import gather
from timerstore.limits import Limits
from timerstore.rows.position import NOTHING_FINISHED

DELAY, ORDERS, ANSWERS, LETTERS = "delay", "orders", "answers", "delay.dlt"
SOURCE = (DELAY, 0)
BEGIN_MS = 1_800_000_000_000
WEEK_MS = 7 * 86_400_000
FAILS = Target(partitions=1, bytes_max=1_000_000, refusal=Refusal(RejectReason.TARGET_UNAVAILABLE, "it has no leader"))
KEY = b"k"
EPOCHS = {
    SOURCE: (
        DecodeEpoch(
            offset=0,
            parameters=DecodeParameters(
                max_delay_ms=100 * WEEK_MS, roll_window_ms=WEEK_MS, has_default_target=False, roll_bytes_max=990_000
            ),
        ),
    )
}

Delivered = dict[str, bytes | None]


class Chain:
    """See the module."""

    def __init__(self, directory: Path) -> None:
        self.now_ms = BEGIN_MS
        self.failing: set[str] = set()
        """Topics that take nothing for now."""
        self.bytes_max = 1_000_000
        """The largest record of every topic."""
        self.by_broker = True
        """Whether the delay topic has the brokers' timestamps."""
        self.log: list[Record] = []
        self.out: defaultdict[str, list[Delivered]] = defaultdict(list)
        """Headers of what was written to other topics."""
        self._finish = Finish(EPOCHS)
        self._directory = directory
        self._committed = NOTHING_FINISHED
        self._open()
        self._planner = Planner(
            targets=cast("Targets", self),
            permitted=lambda _: True,
            default_targets={DELAY: None},
            dead_letter_topics={DELAY: LETTERS},
            retry=RetryPolicy(),
        )

    def _open(self) -> None:
        directory = StoreDirectory.take(self._directory, "c", {DELAY: "t"})
        self._store = Stores(directory, [SOURCE], Limits())
        found = directory.find(SOURCE, self.now_ms)
        opening = Opening(found=found, committed=self._committed, log_start=0)
        prepared = self._store.prepare({SOURCE: opening}, self.now_ms)
        prepared.start_at({SOURCE: prepared.resume_offsets()[SOURCE] or 0}, {SOURCE: len(self.log)})
        self._store.add(prepared)

    def restart(self, sent_meanwhile: Callable[[], None]) -> None:
        """The bridge ends, and begins after something was sent."""
        self._store.close()
        sent_meanwhile()
        self._open()

    # ---- what is known of targets

    def resolve(self, names: Iterable[str]) -> Mapping[str, Target]:
        well = Target(partitions=1, bytes_max=self.bytes_max)
        return {name: FAILS if name in self.failing else well for name in names}

    renew = resolve

    def look_again(self, _names: object) -> frozenset[str]:
        return frozenset()

    def count_partitions(self, _name: str) -> int:
        return 1

    # ---- the way

    def send(self, headers: Iterable[tuple[str, bytes | None]], value: bytes | None = b"v") -> int:
        """Append a record to the delay topic; its offset."""
        self.log.append(Record(*SOURCE, len(self.log), self.now_ms, self.by_broker, KEY, value, [*headers]))
        return len(self.log) - 1

    def run(self, rounds: int = 1, *, step_ms: int = 0) -> None:
        """Rounds of reading everything, and one transaction, each some time after the one before."""
        for _ in range(rounds):
            self.now_ms += step_ms
            self.read()
            self.transact()

    def read(self, end: int | None = None) -> None:
        """The delay topic, up to an offset or its end."""
        read, end = self._store.next_offsets()[SOURCE], len(self.log) if end is None else end
        self._store.append(self._finish(decode_records(self.log[read:end], EPOCHS)), {SOURCE: end}, self.now_ms)
        while (reading := self._store.upkeep.next_window(self.now_ms)) is not None:
            self._store.upkeep.admit(reading, gather(reading.window))

    def flush(self) -> None:
        """What is far from due goes to disk."""
        self._store.upkeep.flush(self.now_ms)

    def transact(self) -> None:
        self._store.go_live(self._store.arrive())
        if not self._store.in_life(Life.LIVE):
            return
        transaction = self._store.begin(self.now_ms)
        rows = transaction.take(self.now_ms, 5_000)
        self._planner.begin()
        left, batches = [rows], list[Batch]()
        try:
            while left:
                plan = self._planner.plan(left.pop(), self._store.sources, self.now_ms, loan=transaction)
                left += plan.released
                batches += plan.batches()
        except Unplannable:
            transaction.rollback()
            raise
        for batch in batches:
            for value, headers in zip(batch.values, batch.all_headers(), strict=True):
                told = [(name, text.encode() if isinstance(text, str) else text) for name, text in headers]
                if batch.topic == DELAY:
                    self.send(told, value)
                else:
                    self.out[batch.topic].append(dict(told))
        self._committed = transaction.progress().get(0, self._committed)
        transaction.acknowledge()

    # ---- what came of it

    def ticks(self) -> list[int]:
        """The numbers of the ticks that were delivered, in order."""
        return sorted(int(each[h.TICK] or 0) for each in self.out[ORDERS])

    def outcomes(self) -> list[bytes | None]:
        return [each[h.OUTCOME] for each in self.out[ANSWERS]]

    def told(self) -> dict[str, list[str]]:
        """By command, what became of each of its messages."""
        told = defaultdict[str, list[str]](list)
        for each in self.out[ANSWERS]:
            told[(each[h.COMMAND] or b"").decode()] += [(each[h.OUTCOME] or b"").decode()] * max(
                1, int(each[h.COUNT] or 0)
            )
        return {command: sorted(outcomes) for command, outcomes in told.items()}


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path / "store")


@pytest.mark.parametrize("reply_to", [ANSWERS, None])
def test_a_pause_ends_the_ticks_whose_copy_is_under_way(chain: Chain, reply_to: str | None) -> None:
    """A retry is pending, and the next tick falls due in the transaction of the pause: its copy lies before the command
    that is written once more."""
    chain.failing = {ORDERS}
    chain.send([(h.EVERY, b"10s"), (h.TOPIC, ORDERS.encode()), (h.ID, b"r")])
    chain.run()
    chain.run(step_ms=10_000)
    chain.run(step_ms=10)
    chain.now_ms = BEGIN_MS + 19_980
    chain.run()
    chain.send(move_headers("r", at=h.NEVER_MS, reply_to=reply_to), None)
    chain.run()
    chain.run(step_ms=20)
    chain.run(5, step_ms=10)
    chain.failing = set()
    chain.run(12, step_ms=10_000)
    assert chain.ticks() == [1, 2]


def test_a_move_takes_the_next_tick_along(chain: Chain) -> None:
    """As above, by origin: nothing comes before the new time."""
    chain.failing = {ORDERS}
    origin = chain.send([(h.EVERY, b"10s"), (h.TOPIC, ORDERS.encode())])
    chain.run()
    chain.run(step_ms=10_000)
    chain.now_ms = BEGIN_MS + 19_980
    chain.run()
    chain.now_ms = BEGIN_MS + 20_000
    chain.send(move_origin_headers(f"{DELAY}/0/{origin}", after=timedelta(hours=1), reply_to=ANSWERS), None)
    chain.run(5, step_ms=10)
    chain.failing = set()
    chain.run(10, step_ms=10_000)
    assert chain.outcomes() == [b"moved"]
    assert not chain.out[ORDERS]
    chain.run(step_ms=3_600_000)
    assert {1, 2, 3} <= set(chain.ticks())


def test_a_dead_letter_that_waits_is_not_under_way_for_ever(chain: Chain) -> None:
    """The copy of a message whose header holds NUL would be rejected when it is read: it waits as the dead letter that
    it becomes, with its own reason, and a command about it is answered."""
    chain.failing = {LETTERS}
    chain.send([(h.FOR, b"1s"), (h.TOPIC, ORDERS.encode()), (h.ID, b"m"), (f"{h.TOPIC}\0", b"x")])
    chain.run()
    chain.run(step_ms=1_000)
    chain.send(cancel_headers("m", reply_to=ANSWERS), None)
    chain.run(3, step_ms=10)
    assert chain.outcomes() == [b"not-pending"]
    chain.failing = set()
    chain.run(3, step_ms=60_000)
    assert [each[h.REASON] for each in chain.out[LETTERS]] == [b"bad-header-name"]


def test_a_move_leaves_a_dead_letter_that_waits_as_it_is(chain: Chain) -> None:
    """It has no time of its own: its copy says why it is one."""
    chain.failing = {LETTERS}
    origin = chain.send([(h.FOR, b"1s"), (h.TOPIC, ORDERS.encode()), (f"{h.TOPIC}\0", b"x")])
    chain.run()
    chain.run(2, step_ms=1_000)
    chain.send(move_origin_headers(f"{DELAY}/0/{origin}", after=timedelta(hours=1), reply_to=ANSWERS), None)
    chain.run(3, step_ms=10)
    assert chain.outcomes() == [b"not-pending"]
    chain.failing = set()
    chain.run(3, step_ms=60_000)
    assert [each[h.REASON] for each in chain.out[LETTERS]] == [b"bad-header-name"]


def test_a_dead_letter_that_waits_is_written_only_if_its_topic_takes_it(chain: Chain) -> None:
    """It is larger than its message by what it says of it. One that does not fit holds its source."""
    chain.failing = {LETTERS}
    headers = [(h.FOR, b"1s"), (h.TOPIC, ORDERS.encode()), (f"{h.TOPIC}\0", b"x")]
    chain.bytes_max = 200_000
    for spared in (5_000, 600):
        chain.send(headers, b"v" * (chain.bytes_max - spared))
    chain.run()
    with pytest.raises(Unplannable):
        chain.run(step_ms=1_000)
    chain.bytes_max += 10_000
    chain.run(step_ms=10)
    assert all(record_bytes(each.key, each.value, [*each.headers]) <= chain.bytes_max for each in chain.log)
    assert len(chain.log) == 4


@pytest.mark.parametrize("reply_to", [ANSWERS, None])
def test_many_ticks_of_one_id_do_not_put_a_pause_off(chain: Chain, reply_to: str | None) -> None:
    """There is always a copy of one of them under way."""
    for _ in range(40):
        chain.send([(h.EVERY, b"1s"), (h.TOPIC, ORDERS.encode()), (h.ID, b"tenant")])
        chain.run(step_ms=25)
    chain.run(40, step_ms=40)
    chain.send(move_headers("tenant", at=h.NEVER_MS, reply_to=reply_to), None)
    chain.run(3, step_ms=40)
    before = len(chain.out[ORDERS])
    chain.run(40, step_ms=40)
    assert len(chain.out[ORDERS]) == before
    assert {*chain.outcomes()} == ({b"moved"} if reply_to else set())
    assert len(chain.outcomes()) <= 2
    assert sum(int(each[h.COUNT] or 0) for each in chain.out[ANSWERS]) == (40 if reply_to else 0)


def test_an_id_may_be_used_again_as_often_as_it_is_cancelled(chain: Chain) -> None:
    """Of many messages of one id, each with its cancel behind it, all are cancelled at once, each by its own."""
    for _ in range(50):
        chain.send([(h.FOR, b"1h"), (h.TOPIC, ORDERS.encode()), (h.ID, b"job")])
        chain.send(cancel_headers("job", reply_to=ANSWERS), None)
    chain.run(2)
    assert len(chain.log) == 100 + 50
    assert chain.outcomes() == [b"cancelled"] * 50


def test_a_stream_of_moves_by_one_id_acts_after_a_restart(chain: Chain) -> None:
    """One in each transaction: the first, which is written again, is passed by one that would wait for it."""
    chain.send([(h.FOR, b"1h"), (h.TOPIC, ORDERS.encode()), (h.ID, b"session")])
    chain.run()
    chain.send(move_headers("session", after=timedelta(hours=2)), None)

    def send_another() -> None:
        chain.send([(h.FOR, b"9h"), (h.TOPIC, ORDERS.encode())])

    chain.restart(send_another)
    chain.read(1)
    chain.read(2)
    for n in range(5):
        chain.send(move_headers("session", after=timedelta(hours=2, seconds=n)), None)
        chain.transact()
        chain.read()
    assert any(h.MOVE_ORIGIN in dict(each.headers) for each in chain.log)


@pytest.mark.parametrize("headers", [cancel_headers, partial(move_headers, after=timedelta(hours=9))])
def test_what_is_sent_after_a_command_by_id_is_left_alone(
    chain: Chain, headers: Callable[..., list[tuple[str, bytes]]]
) -> None:
    """A copy of the old message is under way when the command is decided: what it writes lies behind the new one."""
    message: list[tuple[str, bytes | None]] = [(h.TOPIC, ORDERS.encode()), (h.ID, b"job")]
    chain.failing = {ORDERS}
    old = chain.send([(h.FOR, b"1s"), *message])
    chain.run()
    chain.now_ms += 1_000
    chain.send(headers("job", reply_to=ANSWERS), None)
    chain.read()
    new = chain.send([(h.FOR, b"1s"), *message])
    chain.transact()
    chain.run(10, step_ms=20)
    chain.failing = set()
    chain.run(2, step_ms=100_000)
    assert old + 1 == new - 1
    assert [each[h.ORIGIN] for each in chain.out[ORDERS]] == [f"{DELAY}/0/{new}".encode()]
    assert chain.outcomes() == [b"cancelled" if headers is cancel_headers else b"moved"]


def test_what_is_sent_after_a_command_by_id_is_left_alone_after_a_restart(chain: Chain) -> None:
    """The command is read before it is known what an earlier process has written, and waits in its place."""
    message: list[tuple[str, bytes | None]] = [(h.FOR, b"1h"), (h.TOPIC, ORDERS.encode()), (h.ID, b"job")]
    chain.send(message)
    chain.run()

    def send() -> None:
        chain.send(cancel_headers("job", reply_to=ANSWERS), None)
        chain.send(message)

    chain.restart(send)
    chain.read(1)
    chain.read(2)
    chain.transact()
    assert len(chain.log) == 3
    chain.run(5, step_ms=20)
    assert [name for each in chain.log[3:] for name, _ in each.headers if name in h.COMMANDS] == [h.CANCEL_ORIGIN]
    assert chain.outcomes() == [b"cancelled"]
    chain.run(step_ms=3_600_000)
    assert [each[h.ORIGIN] for each in chain.out[ORDERS]] == [f"{DELAY}/0/2".encode()]


@pytest.mark.parametrize("reply_to", [ANSWERS, None])
@pytest.mark.parametrize(
    ("read", "is_restarted", "is_beside"),
    [(3, False, False), (4, False, False), (3, True, False), (4, True, False), (4, False, True)],
)
def test_the_move_that_was_sent_last_acts_after_a_restart(
    chain: Chain, read: int, reply_to: str | None, *, is_restarted: bool, is_beside: bool
) -> None:
    """The first one waits in its place, until all is known, or another restart; the second may be read meanwhile, and
    one that another partition has sent on may lie between them."""
    chain.send([(h.FOR, b"1h"), (h.TOPIC, ORDERS.encode()), (h.ID, b"session")])
    chain.run()

    def send(hours: int) -> None:
        chain.send(move_headers("session", after=timedelta(hours=hours), reply_to=reply_to), None)

    def send_another() -> None:
        chain.send([(h.FOR, b"9h"), (h.TOPIC, ORDERS.encode())])

    send(2)
    chain.restart(send_another)
    chain.read(1)
    chain.read(2)
    if is_beside:
        again = (h.COPY_FORWARDED, f"{DELAY}/1/7".encode())
        chain.send([*move_headers("session", after=timedelta(hours=2), reply_to=reply_to), again], None)
    send(3)
    chain.transact()
    assert len(chain.log) == 4 + is_beside
    if is_restarted:
        chain.restart(send_another)
    chain.read(read + is_beside)
    chain.transact()
    chain.run(5, step_ms=20)
    chain.run(2, step_ms=2 * 3_600_000 + 1_000)
    assert [each[h.DUE] for each in chain.out[ORDERS]] == [str(BEGIN_MS + 3 * 3_600_000).encode()]
    assert chain.outcomes() == ([b"moved"] * (2 + is_beside) if reply_to else [])


def test_a_move_by_id_that_an_earlier_version_wrote_again_acts_in_its_place(chain: Chain) -> None:
    """It covers the messages before it, and acts after the moves before it: its answer is true."""
    message = [(h.FOR, b"1h"), (h.TOPIC, ORDERS.encode()), (h.ID, b"m")]
    chain.send(message)
    chain.run()
    chain.send(move_headers("m", after=timedelta(hours=2), reply_to=ANSWERS), None)
    chain.send(message)
    again = (h.COPY_FORWARDED, f"{DELAY}/0/0".encode())
    chain.send([*move_headers("m", after=timedelta(hours=3), reply_to=ANSWERS), again], None)
    chain.run(5, step_ms=20)
    assert chain.told() == {f"{DELAY}/0/0": ["moved"] * 2, f"{DELAY}/0/1": ["moved"]}
    chain.run(2, step_ms=2 * 3_600_000)
    assert [each[h.DUE] for each in chain.out[ORDERS]] == [str(BEGIN_MS + 3 * 3_600_000).encode()] * 2


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("reply_to", "written"), [(None, 2), (ANSWERS, 101)])
def test_of_moves_by_one_id_that_wait_together_the_last_acts(
    chain: Chain, reply_to: str | None, written: int, *, is_split: bool
) -> None:
    """As when a timeout is put off again and again. Each that asks for an answer has one."""
    moves = 100
    chain.send([(h.FOR, b"1h"), (h.TOPIC, ORDERS.encode()), (h.ID, b"session")])
    chain.run()
    for n in range(moves):
        if is_split and n == moves // 2:
            chain.run()
        chain.send(move_headers("session", after=timedelta(hours=2, seconds=n), reply_to=reply_to), None)
    before = len(chain.log)
    chain.run(10, step_ms=20)
    assert len(chain.log) - before <= 2 * written
    assert chain.outcomes() == [b"moved"] * (moves if reply_to else 0)
    chain.run(step_ms=3_600_000 + 3_590_000)
    assert not chain.out[ORDERS]
    chain.run(3, step_ms=100_000)
    (delivered,) = chain.out[ORDERS]
    assert delivered[h.DUE] == str(BEGIN_MS + 7_200_000 + 1_000 * (moves - 1)).encode()


def test_commands_lie_behind_the_copies_of_their_transaction(chain: Chain) -> None:
    """So commands of an id reach messages that moves of the same transaction have moved. Each move is answered."""
    for minutes in (60, 90):
        chain.send([(h.FOR, f"{minutes}m".encode()), (h.TOPIC, ORDERS.encode()), (h.ID, b"m")])
    chain.run()
    chain.send(cancel_headers("m", reply_to=ANSWERS), None)
    for n, hours in ((0, 2), (1, 3)):
        chain.send(move_origin_headers(f"{DELAY}/0/{n}", after=timedelta(hours=hours), reply_to=ANSWERS), None)
    chain.run()
    written = [dict(each.headers) for each in chain.log[5:]]
    dues = [BEGIN_MS + hours * 3_600_000 for hours in (2, 3)]
    assert [int(each[h.COPY_DUE] or 0) for each in written[:2]] == dues
    assert [each[h.CANCEL_ORIGIN] for each in written[2:]] == [f"{DELAY}/0/{n}".encode() for n in (0, 1)]
    chain.run(3, step_ms=10)
    assert chain.told() == {f"{DELAY}/0/2": ["cancelled"] * 2, f"{DELAY}/0/3": ["moved"], f"{DELAY}/0/4": ["moved"]}
    chain.run(2, step_ms=4 * 3_600_000)
    assert not chain.out[ORDERS]


def sends_large(chain: Chain) -> int:
    """A message that the delay topic has taken compressed: its copy would be too large. Its offset."""
    return chain.send([(h.FOR, b"1m"), (h.TOPIC, ORDERS.encode()), (h.ID, b"m")], b"v" * 995_000)


@pytest.mark.fault("moves of messages too large for a copy")
@pytest.mark.parametrize("is_by_id", [False, True])
@pytest.mark.parametrize(
    ("until_ms", "outcome"),
    [(BEGIN_MS + 3_600_000, b"too-large"), (h.NEVER_MS, b"not-pending"), (h.NEXT_MS, b"not-pending")],
)
def test_what_is_too_large_for_a_copy_is_not_moved(
    chain: Chain, until_ms: int, outcome: bytes, *, is_by_id: bool
) -> None:
    """The message is delivered once, at its old due time, and the answer has the reason, also after a start without an
    index."""
    origin = sends_large(chain)
    chain.run()
    name = partial(move_headers, "m") if is_by_id else partial(move_origin_headers, f"{DELAY}/0/{origin}")
    chain.send(name(reply_to=ANSWERS, at=until_ms), None)
    chain.run(3, step_ms=10)
    assert chain.outcomes() == [outcome]
    chain.restart(lambda: None)
    if is_by_id:  # in two batches
        chain.read(1)
    chain.run(2, step_ms=60_000)
    assert len(chain.out[ORDERS]) == 1
    assert not chain.out[LETTERS]
    assert (chain.out[ORDERS][0][h.DUE] or b"").decode() == str(BEGIN_MS + 60_000)


@pytest.mark.parametrize("is_by_id", [False, True])
def test_what_is_too_large_for_a_copy_is_delivered_now(chain: Chain, *, is_by_id: bool) -> None:
    """That needs no copy, and happens once."""
    origin = sends_large(chain)
    chain.run()
    name = partial(move_headers, "m") if is_by_id else partial(move_origin_headers, f"{DELAY}/0/{origin}")
    chain.send(name(reply_to=ANSWERS, after=timedelta(0)), None)
    chain.run(3, step_ms=10)
    assert chain.outcomes() == [b"moved"]
    assert len(chain.out[ORDERS]) == 1
    assert len(chain.log) == 2 + is_by_id
    chain.restart(lambda: None)
    chain.run(3, step_ms=60_000)
    assert len(chain.out[ORDERS]) == 1


@pytest.mark.fault("moves by one id that wait together, of messages too large for a copy")
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    ("minutes", "outcomes", "delivered"),
    [
        ((0, 60), [["moved", "moved"], ["moved", "not-pending"]], 1),
        ((60, 120), [["moved", "too-large"], ["moved", "too-large"]], 0),
        ((60, 0), [["moved", "moved"], ["moved", "moved"]], 2),
    ],
)
def test_a_move_by_id_says_what_it_does_not_do(
    chain: Chain, minutes: tuple[int, int], outcomes: list[list[str]], delivered: int, *, is_split: bool
) -> None:
    """Of moves by one id that wait together, each answers for the messages that the last one cannot copy."""
    sends_large(chain)
    chain.send([(h.FOR, b"1m"), (h.TOPIC, ORDERS.encode()), (h.ID, b"m")])
    chain.run()
    chain.flush()
    for after in minutes:
        chain.send(move_headers("m", reply_to=ANSWERS, after=timedelta(minutes=after)), None)
        if is_split:
            chain.read()
    chain.run(4, step_ms=10)
    assert chain.told() == {f"{DELAY}/0/{2 + n}": told for n, told in enumerate(outcomes)}
    assert len(chain.out[ORDERS]) == delivered


@pytest.mark.parametrize("is_by_id", [False, True])
def test_a_move_by_id_does_not_say_that_it_moves_what_is_cancelled_before(chain: Chain, *, is_by_id: bool) -> None:
    """It waits together with a later one, and behind a cancel that is decided with both."""
    chain.send([(h.FOR, b"1h"), (h.TOPIC, ORDERS.encode()), (h.ID, b"m")])
    chain.run()
    cancel = cancel_headers("m", reply_to=ANSWERS)
    chain.send(cancel if is_by_id else cancel_origin_headers(f"{DELAY}/0/0", reply_to=ANSWERS), None)
    for hours in (2, 3):
        chain.send(move_headers("m", reply_to=ANSWERS, after=timedelta(hours=hours)), None)
    chain.run(6, step_ms=10)
    outcomes = ["cancelled"], ["not-pending"], ["not-pending"]
    assert chain.told() == {f"{DELAY}/0/{1 + n}": told for n, told in enumerate(outcomes)}


def test_a_tick_that_is_delivered_now_is_one_transaction(chain: Chain) -> None:
    """The next one is written with it, and the rhythm stays."""
    origin = chain.send([(h.EVERY, b"1h"), (h.TOPIC, ORDERS.encode())])
    chain.run(2)
    chain.now_ms += 60_000
    chain.send(move_origin_headers(f"{DELAY}/0/{origin}", after=timedelta(0), reply_to=ANSWERS), None)
    chain.run()
    assert chain.ticks() == [1]
    assert chain.outcomes() == [b"moved"]
    assert [dict(each.headers).get(h.COPY_DUE) for each in chain.log[-1:]] == [str(BEGIN_MS + 3_600_000).encode()]


@pytest.mark.fault("copies that come back as rejects")
def test_a_copy_that_is_rejected_is_under_way_no_more(chain: Chain) -> None:
    """While the delay topic has producers' timestamps, its copies come back as rejects; commands on the messages are
    answered afterwards."""
    chain.failing = {ORDERS}
    chain.send([(h.FOR, b"1s"), (h.TOPIC, ORDERS.encode()), (h.ID, b"m")])
    chain.run()
    chain.by_broker = False
    chain.run(3, step_ms=1_000)
    assert [each[h.REASON] for each in chain.out[LETTERS]] == [b"create-time"]
    chain.by_broker = True
    chain.send(cancel_headers("m", reply_to=ANSWERS), None)
    chain.send(cancel_origin_headers(f"{DELAY}/0/0", reply_to=ANSWERS), None)
    length = len(chain.log)
    chain.run(3, step_ms=10)
    assert chain.outcomes() == [b"not-pending"] * 2
    assert len(chain.log) == length


def test_a_dead_letter_whose_copy_would_be_rejected_waits_where_it_is(chain: Chain) -> None:
    """While its topic fails, too: else its copies would be held again and again, each larger than the one before."""
    chain.by_broker, chain.failing = False, {LETTERS}
    chain.send([(h.FOR, b"1s"), (h.TOPIC, ORDERS.encode())])
    for _ in range(3):
        with pytest.raises(Unplannable):
            chain.run(step_ms=1_000)
    assert len(chain.log) == 1
    chain.failing = set()
    chain.run()
    assert [each[h.REASON] for each in chain.out[LETTERS]] == [b"create-time"]


@pytest.mark.fault("commands about a schedule that catches up")
@pytest.mark.parametrize("is_by_id", [False, True])
@pytest.mark.parametrize(("verb", "outcome"), [("cancel", b"cancelled"), ("pause", b"moved"), ("move", b"moved")])
def test_a_schedule_that_makes_up_for_missed_ticks_obeys_at_once(
    chain: Chain, verb: str, outcome: bytes, *, is_by_id: bool
) -> None:
    """A command takes effect although ticks are due one after the other and their copies are in transit: one more tick
    at most, and one answer after a few transactions."""
    said = [(h.EVERY, b"1s"), (h.TOPIC, ORDERS.encode()), (h.ID, b"r"), (h.MISSED, b"all")]
    named = f"{DELAY}/0/{chain.send(said)}"
    chain.run()
    chain.now_ms += 1_000_000
    chain.run(10, step_ms=40)
    at = {"pause": h.NEVER_MS, "move": chain.now_ms + 86_400_000}.get(verb)
    if at is None:
        chain.send(
            cancel_headers("r", reply_to=ANSWERS) if is_by_id else cancel_origin_headers(named, reply_to=ANSWERS), None
        )
    elif is_by_id:
        chain.send(move_headers("r", at=at, reply_to=ANSWERS), None)
    else:
        chain.send(move_origin_headers(named, at=at, reply_to=ANSWERS), None)
    before = len(chain.out[ORDERS])
    chain.run(30, step_ms=40)
    assert len(chain.out[ORDERS]) <= before + 2
    assert chain.outcomes() == [outcome]


@pytest.mark.fault("answers and copies that multiply")
def test_a_flood_of_moves_by_one_id_costs_as_much_as_one(chain: Chain) -> None:
    """Each move is answered once, with the number of its messages and the first of them; the last one acts, and the
    records grow with the sum of messages and commands, not with their product."""
    messages, moves = 120, 50
    for _ in range(messages):
        chain.send([(h.FOR, b"1m"), (h.TOPIC, ORDERS.encode()), (h.ID, b"m")])
    chain.run()
    for n in range(moves):
        after = timedelta(hours=1, seconds=n)
        chain.send(move_headers("m", after=after, reply_to=ANSWERS, correlation=str(n)), None)
    sent = len(chain.log)
    chain.run(5, step_ms=10)
    assert len(chain.log) - sent <= 2 * messages
    assert chain.outcomes() == [b"moved"] * moves
    assert [each[h.COUNT] for each in chain.out[ANSWERS]] == [str(messages).encode()] * moves
    assert [each[h.CORRELATION] for each in chain.out[ANSWERS]] == [str(n).encode() for n in range(moves)]
    chain.run(2, step_ms=3_600_000 + moves * 1_000)
    assert len(chain.out[ORDERS]) == messages
    assert len({each[h.DUE] for each in chain.out[ORDERS]}) == 1


@pytest.mark.parametrize("verb", ["cancel", "move"])
def test_a_command_by_id_has_one_answer(chain: Chain, verb: str) -> None:
    """However many messages it reaches."""
    for _ in range(250):
        chain.send([(h.FOR, b"1m"), (h.TOPIC, ORDERS.encode()), (h.ID, b"m")])
    chain.run()
    said = move_headers("m", after=timedelta(hours=1), reply_to=ANSWERS) if verb == "move" else None
    chain.send(said or cancel_headers("m", reply_to=ANSWERS), None)
    chain.run(4, step_ms=10)
    assert [each[h.COUNT] for each in chain.out[ANSWERS]] == [b"250"]
