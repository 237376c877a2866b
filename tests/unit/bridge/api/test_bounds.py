"""Every answer has a bound in bytes, whatever producers write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.api import cursor as cursors
from bridge.api.application import application
from bridge.api.dead_letters.models import DeadLetters
from bridge.api.models import ANSWER_BYTES_MAX, HEADERS_MAX, PREVIEW_BYTES_MAX
from bridge.api.peers import merge
from bridge.dead_letters.listing import LetterPage
from bridge.http.protection import Protection
from bridge.stores.search import Query
from bridge.wire import headers as h
from bridge.wire.letters import TEXT_LENGTH_MAX, RedriveReport, read_letter
from tests.model.stores import batch
from tests.unit.bridge.api import fakes
from tests.unit.bridge.api.fakes import NOW_MS, Bridge, Letters, Store, letter, message
from tests.unit.bridge.api.test_export import Bridge as StoreBridge
from tests.unit.bridge.stores.rig import ORDERS, Rig
from tests.unit.timerstore.entries import Record
from timerstore.limits import Limits
from timerstore.operations.find import KEY_BYTES_MAX

SLACK_BYTES = 32 << 10
"""Around a list: one item more, the cursor."""
LONG_KEY = 880_000
COUNT = 24
ESCAPED = b"\x01"
"""Six bytes of JSON for each."""


def client(bridge: fakes.Bridge, *, show_payloads: bool = False) -> TestClient:
    return TestClient(application(bridge, Protection(), show_payloads=show_payloads), base_url="http://localhost")


def all_of(api: TestClient, path: str, name: str) -> Iterator[dict[str, Any]]:
    """The rows of all pages, each of them within the bound."""
    following: str | None = None
    while True:
        answer = api.get(f"/api/v1/{path}?limit=1000", params=None if following is None else {"cursor": following})
        assert answer.status_code == 200 and len(answer.content) <= ANSWER_BYTES_MAX + SLACK_BYTES
        page = answer.json()
        yield from page[name]
        following = page["next"]
        if following is None:
            return


@pytest.mark.fault("keys of the size of a record in a list")
@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_list_has_a_bound_however_long_the_keys_are(tmp_path: Path, is_flushed: bool) -> None:
    """Keys are cut like values, from memory and from segments; the cursor leads through all messages."""
    rig = Rig(tmp_path / "store", limits=Limits(horizon_ms=1_000))
    records = [
        Record(*ORDERS, n, NOW_MS + 3_600_000 + n, key=b"%03d" % n + ESCAPED * LONG_KEY, value=b"")
        for n in range(COUNT)
    ]
    rig.stores.append(batch(records), {ORDERS: COUNT}, NOW_MS)
    if is_flushed:
        rig.logs[ORDERS] += records
        rig.deliver(NOW_MS)
        rig.stores.flush(NOW_MS)
        assert rig.stores.stats().segments == 1
    kept = rig.stores.find(Query(), NOW_MS, limit=1_000).rows
    assert {len(row.key or b"") for row in kept} == {KEY_BYTES_MAX + 1}
    rows = list(all_of(client(StoreBridge(index=rig.stores)), "messages", "messages"))
    assert [row["offset"] for row in rows] == list(range(COUNT))
    assert all(row["key"]["truncated"] and len(row["key"]["text"]) == PREVIEW_BYTES_MAX for row in rows)


SIZES = st.lists(st.tuples(st.integers(0, 5_000), st.sampled_from([b"x", ESCAPED, b"\xff"])), max_size=12)


@settings(max_examples=8)
@given(SIZES, st.integers(2_000, 60_000))
def test_pages_of_any_size_have_each_message_once(sizes: list[tuple[int, bytes]], bound: int) -> None:
    """Of messages, of schedules, and of dead letters, whatever the bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bridge.api.models.ANSWER_BYTES_MAX", bound)
        keys = [sign * size for size, sign in sizes]
        found = [message(n, key=key, schedule='{"every":"1h"}', tick=1) for n, key in enumerate(keys)]
        letters = Letters([letter(n, key=key) for n, key in enumerate(keys)])
        api = client(Bridge(Store(*found), letters=letters))
        for path, name in (("messages", "messages"), ("schedules", "schedules"), ("dead-letters", "letters")):
            expected = sorted(range(len(keys)), reverse=path == "dead-letters")
            assert [each["offset"] for each in all_of(api, path, name)] == expected


def test_letters_of_several_partitions_that_do_not_fit_come_with_the_next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, also those of partitions that are at their end."""
    monkeypatch.setattr("bridge.api.models.ANSWER_BYTES_MAX", 600)
    places = [("d", 0, 9), ("d", 1, 4), ("d", 0, 8), ("d", 1, 3), ("d", 0, 2)]
    page = LetterPage(letters=[replace(letter(1), place=place) for place in places], next={("d", 0): 2, ("d", 2): 7})
    shown = DeadLetters.of(page)
    left = places[len(shown.letters) :]
    assert 0 < len(shown.letters) < 4 and shown.next is not None
    highest = {place[:2]: max(each[2] for each in left if each[:2] == place[:2]) + 1 for place in left}
    assert cursors.decode_below(shown.next) == {("d", 2): 7} | highest


def test_a_merged_page_has_the_same_bound() -> None:
    """However many instances there are."""
    key = "k" * 9_000
    answers = [
        {"messages": [{"at": n, "topic": "t", "partition": i, "offset": n, "key": key} for n in range(i, 300, 3)]}
        for i in range(3)
    ]
    merged = merge.merge_messages([each | {"next": None} for each in answers], 1_000)
    offsets = [row["offset"] for row in merged["messages"]]
    assert len(json.dumps(merged)) <= ANSWER_BYTES_MAX + SLACK_BYTES and offsets == list(range(len(offsets)))
    assert cursors.decode_position(merged["next"])[3] == offsets[-1]


@pytest.mark.parametrize("path", ["messages/delay/0/0", "dead-letters/delay.dlt/0/1"])
def test_one_message_has_a_bound_however_many_headers_it_has(path: str) -> None:
    """Headers are cut in number, in the length of their names and of their values; the answer says how many are left
    out."""
    many: list[tuple[str, bytes | None]] = [("n" * 50_000 + str(n), ESCAPED * 50_000) for n in range(HEADERS_MAX * 3)]
    placed = letter(1)
    bridge = Bridge(
        Store(message(0, headers=tuple(many), value=ESCAPED * LONG_KEY)),
        letters=Letters([replace(placed, value=ESCAPED * LONG_KEY, letter=replace(placed.letter, headers=many))]),
    )
    answer = client(bridge, show_payloads=True).get(f"/api/v1/{path}")
    assert answer.status_code == 200 and len(answer.content) <= ANSWER_BYTES_MAX + 2 * SLACK_BYTES
    body = answer.json()
    assert 0 < len(body["headers"]) <= HEADERS_MAX
    assert body["headers_left_out"] == len(many) - len(body["headers"])


@pytest.mark.fault("a dead letter whose target is as long as a record")
def test_what_a_dead_letter_says_of_itself_is_cut() -> None:
    """Long texts of a dead letter are cut, since producers choose them."""
    long = b"t" * LONG_KEY
    written: h.Headers = [(name, long) for name in (h.TOPIC, h.REASON, h.REASON_DETAIL, h.ORIGIN)]
    found = read_letter([*written, (h.DLT_TOPIC, b"delay"), (h.DLT_PARTITION, b"\0\0\0\0")])
    assert found is not None
    texts = (found.target, found.reason, found.detail, found.origin)
    assert [len(text) for text in texts] == [TEXT_LENGTH_MAX] * 4
    report = RedriveReport()
    report.back[found.reason, found.target] += 1
    assert found.topic == "delay" and len(str(report)) < 4 * TEXT_LENGTH_MAX
