"""bridge.arrival on a broker: `send --wait` ends when the sent messages have arrived, among any others."""

from __future__ import annotations

import pytest

from bridge.commands.arrivals import await_arrivals
from bridge.commands.tail import Tail
from bridge.errors import EnvironmentFailure
from bridge.wire import headers as h
from bridge.wire.reasons import RejectReason
from dev.harness.kafka import Outgoing, Topics, produce
from tests.system.broker import Broker
from tests.system.raw import RawRecord, produce_raw
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system]

WAIT_S = 60.0


def letter(topic: str, origin: int, *, own: h.Headers | None = None) -> Outgoing:
    """A dead letter of delay/0/`origin`, of a record with headers of its own."""
    where = h.Where("delay", 0, origin + 1_000, origin, 99)
    return Outgoing(topic=topic, headers=h.dead_letter_headers(own or [], RejectReason.FORBIDDEN_TARGET, "no", where))


def delivered(topic: str, origin: int, *, own: h.Headers | None = None) -> Outgoing:
    """The bridge's delivery of delay/0/`origin`."""
    return Outgoing(topic=topic, headers=[*(own or []), (h.ORIGIN, f"delay/0/{origin}".encode()), (h.DUE, b"99")])


def test_a_wait_ends_only_on_what_was_sent(broker: Broker, topics: Topics) -> None:
    """Not on dead letters of others, one that claims to be ours among them; nor on what others put into the target:
    headers that look like a dead letter's, times that are none, names that cannot be read."""
    target, dead = topics.create("orders"), topics.create("dead")
    properties = {"bootstrap.servers": broker.bootstrap, "group.id": "waits"}
    mine: h.Headers = [("delay-origin", b"delay/0/7"), ("delay-reason", b"mine"), ("delay-due", b"99")]
    with Tail(properties, [target, dead], SystemClock()) as tail:
        strangers = [
            letter(dead, 1),
            letter(dead, 2, own=mine),
            Outgoing(topic=dead, headers=[("delay-origin", b"delay/0/7")]),
            Outgoing(topic=target, headers=mine[1:2]),
            delivered(target, 3, own=mine),
            *(
                Outgoing(topic=target, headers=[mine[0], ("delay-due", due)])
                for due in (b"soon", b"9" * 5_000, b"", None)
            ),
        ]
        produce(broker.bootstrap, strangers)
        for topic in (target, dead):
            produce_raw(
                broker.bootstrap, topic, 0, [RawRecord(headers=[(b"\xff", b"1"), (b"delay-origin", b"delay/0/7")])]
            )
        produce(broker.bootstrap, [delivered(target, 7, own=mine[1:2]), delivered(target, 8)])
        found = await_arrivals(tail, ["delay/0/7", "delay/0/8"], WAIT_S, [dead])
    assert [each.origin for each in found] == ["delay/0/7", "delay/0/8"]


def test_a_wait_ends_on_its_own_dead_letter(broker: Broker, topics: Topics) -> None:
    """With the reason, also where the record had headers of that name."""
    target, dead = topics.create("orders"), topics.create("dead")
    properties = {"bootstrap.servers": broker.bootstrap, "group.id": "waits"}
    with Tail(properties, [target, dead], SystemClock()) as tail:
        own: h.Headers = [("delay-reason", b"other"), ("delay-origin", b"delay/0/8")]
        produce(broker.bootstrap, [letter(dead, 8), letter(dead, 7, own=own)])
        with pytest.raises(EnvironmentFailure, match=rf"delay/0/7 is a dead letter in {dead}: forbidden-target"):
            await_arrivals(tail, ["delay/0/7"], WAIT_S, [dead])
