"""bridge.dead_letters.listing on a broker: the listed fields of dead letters, and their order."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.dead_letters import listing
from bridge.dead_letters.listing import Letterbox, PlacedLetter
from bridge.errors import EnvironmentFailure
from bridge.wire.letters import LetterChoice, redriven
from dev.harness.kafka import Outgoing, Topics, produce
from tests.broker.letters import bury, dead_letter_topic
from tests.broker.rig import settings_for
from tests.system.broker import Broker
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system]


def letterbox(broker: Broker, *delay: str) -> Letterbox:
    return Letterbox(settings_for(broker.bootstrap, *delay), SystemClock())


def pages(box: Letterbox, limit: int, **choice: Any) -> list[list[PlacedLetter]]:
    found: list[list[PlacedLetter]] = []
    below = None
    while not found or below is not None:
        page = box.page(LetterChoice(**choice), below, limit)
        found.append(list(page.letters))
        below = page.next
        assert len(found) < 1_000
    return found


def numbers(box: Letterbox, limit: int, **choice: Any) -> list[int]:
    found = [each for page in pages(box, limit, **choice) for each in page]
    return [int(each.letter.origin.split("/")[2]) for each in found]


@pytest.mark.parametrize("piece", [2, 7, 1_000])
def test_pages_have_each_letter_once_the_newest_first(
    broker: Broker, topics: Topics, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Over two partitions, in pieces of any size; strangers' records are left out; filters choose."""
    monkeypatch.setattr(listing, "PIECE_ROWS", piece)
    monkeypatch.setattr(listing, "PIECE_ROWS_MIN", 1)
    delay = topics.delay(partitions=3)
    dead_letter_topic(topics, delay)
    for _ in range(3):
        bury(broker, delay, 12)
    box = letterbox(broker, delay)
    for limit in (3, 100):
        found = pages(box, limit)
        flat = [each for page in found for each in page]
        assert len({each.place for each in flat}) == len(flat) == 36 and max(map(len, found)) <= limit
        assert [each.ts_ms for each in flat] == sorted((each.ts_ms for each in flat), reverse=True)
    assert sorted(numbers(box, 4, targets=["t1"])) == sorted([1, 5, 9] * 3)
    assert sorted(numbers(box, 4, reasons=["too-large"])) == sorted([*range(0, 12, 2)] * 3)
    assert numbers(box, 4, topics=["another"]) == []
    newest = pages(box, 100)[0][0]
    assert newest.value is None and newest.letter.headers == [] and newest.redriven is False
    assert numbers(box, 100, since_ms=newest.ts_ms + 1) == []


def test_one_letter_with_its_value_and_what_has_gone_back(
    broker: Broker, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redrive of one letter puts back that one, once; where too much lies behind a letter, it is not said."""
    delay = topics.delay(partitions=3)
    dead_letter_topic(topics, delay)
    bury(broker, delay, 6)
    box = letterbox(broker, delay)
    shown = pages(box, 100)[0]
    chosen = next(each for each in shown if each.letter.origin.endswith("/3"))
    one = box.get(chosen.place)
    assert one is not None and (one.value, one.redriven) == (b"3", False)
    assert ("own", b"3") in one.letter.headers and (one.letter.detail, one.letter.attempts) == ("why", 16)
    choice = LetterChoice(places=[chosen.place])
    assert sum(box.redrive(choice, execute=False).back.values()) == 1
    assert sum(box.redrive(choice, execute=True).back.values()) == 1
    assert box.redrive(choice, execute=True).before == 1
    again = box.get(chosen.place)
    assert again is not None and again.redriven
    gone = {each.letter.origin: each.redriven for page in pages(box, 2) for each in page}
    assert [origin for origin, is_gone in gone.items() if is_gone] == [chosen.letter.origin] and len(gone) == 6
    produce(
        broker.bootstrap, [Outgoing(topic=f"{delay}.dlt", value=b"x", partition=p) for p in (0, 1) for _ in range(9)]
    )
    monkeypatch.setattr(listing, "ROWS_MAX", 5)
    other = next(each for each in shown if each.place != chosen.place)
    found = box.get(other.place)
    assert found is not None and found.redriven is None


def test_what_is_no_dead_letter_is_not_found(broker: Broker, topics: Topics) -> None:
    """Another topic, an offset that is not there, a stranger's record, a note; and a topic that does not exist."""
    delay = topics.delay(partitions=3)
    with pytest.raises(EnvironmentFailure, match="no dead-letter topic"):
        letterbox(broker, delay).page(LetterChoice(), None, 10)
    dead_letter_topic(topics, delay)
    box = letterbox(broker, delay)
    assert box.page(LetterChoice(), None, 10).letters == []
    headers, value = redriven("another", [0])
    produce(broker.bootstrap, [Outgoing(topic=f"{delay}.dlt", value=value, headers=headers, partition=0)])
    produce(broker.bootstrap, [Outgoing(topic=f"{delay}.dlt", value=b"stranger", partition=1)])
    places = [(delay, 0, 0), ("nowhere", 0, 0), (f"{delay}.dlt", 9, 0), (f"{delay}.dlt", 0, 99)]
    for place in [*places, (f"{delay}.dlt", 0, 0), (f"{delay}.dlt", 1, 0)]:
        assert box.get(place) is None
    bury(broker, delay, 2)
    known = {each.place[1]: each.redriven for each in pages(box, 10)[0]}
    assert known == {0: None, 1: False}, "notes in a copied topic refer to other offsets"
