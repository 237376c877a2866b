"""Cancels without a key: the places of forwarded cancels, and the second row of a timer that replaces without a key."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    NewPartitions,
    NewTopic,
)

from bridge.delivery.plan.due_rows import DueRows, SourceColumns
from bridge.delivery.plan.forwarded_cancels import Forwards
from bridge.errors import EnvironmentFailure
from bridge.ingest.finish import with_cancels
from bridge.kafka.admin import Cluster
from bridge.stores.names import NAMED_ENTRY, Sources
from dev.harness.kafka import Topics, read_committed
from tests.broker.rig import DEADLINE_S, Rig
from tests.entries import rows_of, timer
from tests.system.broker import Broker
from timerstore.rows.entry import Kind
from timerstore.rows.position import AT_MIN

SOURCES = Sources([("one", 0), *(("many", p) for p in range(3)), ("two", 0), ("two", 1)])
PARTITIONS = {"one": 1, "many": 3, "two": 2}
FORWARDED = ("delay-copy-forwarded", b"many/1/5")


def cancel(topic: str, partition: int, offset: int, **more: Any) -> dict[str, Any]:
    """An entry of a cancel without a key."""
    entry = timer(topic, partition, offset, 1_000, None, kind=int(Kind.CANCEL), id=f"id-{offset}", **more)
    return {**entry, "at": AT_MIN}


def due_rows(*entries: dict[str, Any]) -> DueRows:
    rows = rows_of([(e["at"], SOURCES.index(e["topic"], e["partition"]), e["offset"], e) for e in entries])
    return DueRows(rows, SourceColumns(SOURCES, {}))


def table(*entries: dict[str, Any]) -> pa.Table:
    """Entries as a batch has them."""
    rows = [{**e, "headers": [{"key": k, "value": v} for k, v in e["headers"]]} for e in entries]
    return pa.Table.from_pylist(rows, schema=NAMED_ENTRY)


def test_a_cancel_without_a_key_goes_to_every_other_partition() -> None:
    """Once each, marked, without key and value; where there is no other partition, or it was sent on, not at all."""
    out = due_rows(
        cancel("many", 1, 5, headers=[("delay-cancel", b"id-5"), ("x", b"1")]),
        cancel("one", 0, 6),
        timer("many", 1, 7, 5, "orders", id="i"),
        cancel("many", 2, 8, key=b"k"),
        cancel("many", 0, 9, headers=[("delay-cancel", b"id-9"), FORWARDED]),
        cancel("two", 0, 10),
        cancel("many", 0, 11, key=b""),
    )
    found = Forwards(out, PARTITIONS.__getitem__)
    batches = list(found.batches())
    sent = [
        (batch.topic, partition, headers, value, key)
        for batch in batches
        for partition, headers, value, key in zip(
            batch.partitions or [], batch.headers or [], batch.values, batch.keys, strict=True
        )
    ]
    expected = [
        ("many", 0, [("delay-cancel", b"id-5"), FORWARDED], None, None),
        ("many", 2, [("delay-cancel", b"id-5"), FORWARDED], None, None),
        ("two", 1, [("delay-cancel", b"id-10"), ("delay-copy-forwarded", b"two/0/10")], None, None),
    ]
    assert sorted(sent, key=lambda record: record[:2]) == expected
    assert found.records == len(expected)
    assert {row for batch in batches for row in batch.ids.tolist()} == {0, 5}


def test_a_cancel_by_origin_goes_to_the_partition_that_it_names() -> None:
    """Once, marked; one for its own partition is not forwarded, and one for a foreign topic has no effect."""

    def by_origin(topic: str, partition: int, offset: int, named: str, origin: int, *more: Any) -> dict[str, Any]:
        headers = [("delay-cancel-origin", named.encode()), *more]
        return {**cancel(topic, partition, offset, headers=headers), "id": None, "origin": origin}

    out = due_rows(
        by_origin("many", 1, 5, "many/1/3", 3),
        by_origin("many", 1, 6, " many/2/4 ", -1),
        by_origin("one", 0, 7, "two/1/99", -1),
        by_origin("one", 0, 8, "two/2/99", -1),
        by_origin("one", 0, 9, "away/0/99", -1),
        by_origin("many", 0, 10, "many/2/4", -1, FORWARDED),
        cancel("two", 0, 11),
        by_origin("many", 0, 12, "many/02/7,04,7", -1),
        by_origin("many", 0, 13, "many/0/3,4", -2),
    )
    found = Forwards(out, PARTITIONS.__getitem__)
    sent = [
        (batch.topic, partition, dict(headers))
        for batch in found.batches()
        for partition, headers in zip(batch.partitions or [], batch.headers or [], strict=True)
    ]
    assert sorted(sent, key=str) == [
        ("many", 2, {"delay-cancel-origin": b"many/2/4", "delay-copy-forwarded": b"many/1/6"}),
        ("many", 2, {"delay-cancel-origin": b"many/2/4,7", "delay-copy-forwarded": b"many/0/12"}),
        ("two", 1, {"delay-cancel": b"id-11", "delay-copy-forwarded": b"two/0/11"}),
        ("two", 1, {"delay-cancel-origin": b"two/1/99", "delay-copy-forwarded": b"one/0/7"}),
    ]
    assert (found.records, found.ids.tolist()) == (4, [1, 2, 6, 7])
    assert found.places() == {
        SOURCES.index("many", 0): {("many", 2)},
        SOURCES.index("many", 1): {("many", 2)},
        SOURCES.index("one", 0): {("two", 1)},
        SOURCES.index("two", 0): {("two", 1)},
    }


def test_a_cancel_goes_to_partitions_that_were_added_since_the_store_was_opened() -> None:
    """It is asked how many there are when it is sent on; a broker that has not heard of the latest takes none away."""
    out = due_rows(cancel("many", 1, 5), cancel("one", 0, 6))
    asked: list[str] = []

    def count(topic: str) -> int:
        asked.append(topic)
        return {"many": 5, "one": 2}[topic]

    found = Forwards(out, count)
    sent = sorted((b.topic, p) for b in found.batches() for p in b.partitions or [])
    assert sent == [("many", 0), ("many", 2), ("many", 3), ("many", 4), ("one", 1)]
    assert found.records == len(sent)
    assert sorted(asked) == ["many", "one"], "once for each topic, and for no other"
    assert Forwards(out, lambda _: 1).records == 2


def test_nothing_is_sent_on_where_there_is_no_cancel() -> None:
    """The usual transaction pays nothing for it."""
    nothing = Forwards(
        due_rows(timer("many", 1, 7, 5, "orders"), cancel("many", 2, 8, key=b"k")), PARTITIONS.__getitem__
    )
    assert (nothing.records, nothing.bytes, list(nothing.batches())) == (0, 0, [])


def test_a_replacing_timer_without_a_key_is_a_cancel_too() -> None:
    """At once, at its own offset, also where there is no other partition yet; the timer does not change."""
    more: dict[str, Any] = {"id": "i", "replace": True, "headers": [("a", b"1")], "target_partition": 1}
    batch = table(
        timer("many", 1, 7, 5_000, "orders", **more),
        timer("many", 1, 8, 5_000, "orders", **more, key=b"k"),
        timer("one", 0, 9, 5_000, "orders", **more),
        timer("two", 1, 10, 5_000, None, id="i"),
        timer("two", 1, 11, 5_000, None, id="j", replace=True),
    )
    result = with_cancels(batch)
    assert result.schema == batch.schema
    assert result.slice(0, len(batch)).equals(batch)
    extra = result.slice(len(batch)).to_pylist()
    assert [(row["topic"], row["partition"], row["offset"], row["id"]) for row in extra] == [
        ("many", 1, 7, "i"),
        ("one", 0, 9, "i"),
        ("two", 1, 11, "j"),
    ]
    for row in extra:
        assert (row["kind"], row["at"], row["due"], row["replace"]) == (Kind.CANCEL, AT_MIN, row["ts"], False)
        assert (row["key"], row["value"], row["headers"], row["target"], row["target_partition"]) == (None,) * 5
        assert (row["origin"], row["rolls"], row["attempt"], row["reason"]) == (row["offset"], 0, 0, None)


def test_a_batch_without_such_timers_is_handed_on_as_it_is() -> None:
    """No copy is made of it."""
    plain, keyed = timer("many", 1, 7, 5, "orders"), timer("many", 1, 8, 5, "o", id="i", replace=True, key=b"k")
    for batch in (table(), table(plain), table(plain, keyed)):
        assert with_cancels(batch) is batch


@pytest.mark.system
@pytest.mark.parametrize("mode", ["exactly-once", "at-least-once"])
def test_a_cancel_without_a_key_reaches_a_partition_that_was_just_added(
    broker: Broker, topics: Topics, mode: str
) -> None:
    """Neither the bridge's group nor its producer knows of it yet."""
    delay, target = topics.delay(), topics.create()
    topics.admin.create_topics([NewTopic(f"{delay}.dlt", 1, 1)])[f"{delay}.dlt"].result(DEADLINE_S)
    with Rig(broker.bootstrap, delay, mode=mode) as rig:
        due_ms = rig.clock.now_ms() - 5
        rig.add([cancel(delay, 0, 0), timer(delay, 0, 1, due_ms, target, value=b"before")])
        rig.start()
        rig.wait_delivered()
        topics.admin.create_partitions([NewPartitions(delay, 3)])[delay].result(DEADLINE_S)
        Cluster(rig.settings).await_topics([delay])
        sent = cancel(delay, 0, 2, headers=[("delay-cancel", b"id-2")])
        rig.add([sent, timer(delay, 0, 3, due_ms, target, value=b"after")])
        rig.wait_delivered()
        records = read_committed(broker.bootstrap, delay)
        assert sorted((r.partition, r.header("delay-cancel")) for r in records) == [(1, b"id-2"), (2, b"id-2")]
        assert [r.value for r in read_committed(broker.bootstrap, target)] == [b"before", b"after"]
        assert rig.tally.aborted == 0 and not rig.tally.by_reason


def test_a_cancel_waits_until_it_is_known_where_it_must_go() -> None:
    """Without an answer its partition is held, those of other topics are not."""

    def count(topic: str) -> int:
        if topic == "many":
            raise EnvironmentFailure("no answer", hint="wait")
        return 2

    found = Forwards(due_rows(cancel("many", 1, 5), cancel("many", 1, 6), cancel("two", 0, 7)), count)
    assert found.unknown == {SOURCES.index("many", 1): "no answer"}
    assert found.records == 1
