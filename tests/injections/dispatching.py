"""The process that delivers, without Java: a dispatcher that goes on where Kafka says that its predecessor was.

It gets lists of pieces (first number, rows, first due time, milliseconds between two); the first list has everything
that was ever there. It says how many rows there are, and how many are left.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, Final

from confluent_kafka import KafkaError

from bridge.delivery.producer.outcomes import Aborted, Failure
from bridge.delivery.producer.writer import Writer
from tests.broker.rig import Rig
from tests.entries import table_of
from tests.injections.coordinator import state_of
from tests.injections.rows import PARTITIONS, row

LOOK_S: Final = 0.05
JOINING_S: Final = 0.02
"""Enough for offsets to join a transaction."""
LOG: Final = "log"
Piece = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The task of the process. `direct` is the broker, `bootstrap` the proxy in front of it; a transaction has up to
    `rows` rows; one of `abort_each` is aborted (0: none); without `renews` there are no new epochs."""

    bootstrap: str
    direct: str
    delay: str
    targets: tuple[str, ...]
    abort_each: int
    rows: int = 8
    renews: bool = True


def aborting(writer: Writer, each: int) -> Writer:
    """One transaction of `each` is aborted, at random, as after a rebalance, when its offsets are on their way."""
    commit, send, random = writer.commit, writer.send_offsets, Random(each)
    pause, are_sent = threading.Event(), False

    def send_offsets(offsets: Any, metadata: object) -> None:
        nonlocal are_sent
        are_sent = True
        send(offsets, metadata)

    def refuse(offsets: Any, metadata: object, on_stall: Any) -> None:
        nonlocal are_sent
        were_sent, are_sent = are_sent, False
        if each and random.randrange(each) == 0:
            if not were_sent:
                send(offsets, metadata)
            pause.wait(JOINING_S)
            raise Aborted.by(Failure.of(KafkaError(KafkaError.REBALANCE_IN_PROGRESS, "a rebalance")), {})
        commit(offsets, metadata, on_stall)

    writer.commit, writer.send_offsets = refuse, send_offsets  # type: ignore[method-assign, assignment]
    return writer


def rig_of(order: Order) -> Rig:
    """A dispatcher behind the proxy, which is soon connected again, and opens its producer with the membership, as the
    bridge does: else it would wait until the transaction of a killed predecessor has timed out."""
    return Rig(
        order.bootstrap,
        order.delay,
        transaction_rows=order.rows,
        ask=partial(state_of, order.direct),
        make_writer=partial(aborting, each=order.abort_each),
        properties={"reconnect.backoff.ms": 5, "reconnect.backoff.max.ms": 50},
        renews=order.renews,
        is_opened_early=True,
    )


def begin(rig: Rig, order: Order, pieces: Sequence[Piece]) -> None:
    """Take in all rows, and deliver the unfinished ones."""
    assert rig.store is not None
    offsets = {name: state.offset for name, state in rig.states.items()}
    for name, store in rig.store.by_name.items():
        store.start_at(0, offsets[name])
    add(rig, order, pieces)
    rig.start()


def add(rig: Rig, order: Order, pieces: Sequence[Piece]) -> None:
    """Take in these rows."""
    assert rig.store is not None
    rows = [
        row(order.delay, order.targets, first + i, due_ms + i * gap_ms)
        for first, count, due_ms, gap_ms in pieces
        for i in range(count)
    ]
    ends = {
        (order.delay, p): sum(1 for _ in range(p, pieces[-1][0] + pieces[-1][1], PARTITIONS)) for p in range(PARTITIONS)
    }
    rig.store.append(table_of(rows), ends, rig.clock.now_ms())
    rig.load()


def end_of(pieces: Sequence[Piece]) -> int:
    """How many rows there are with these."""
    first, count, *_ = pieces[-1]
    return first + count


def deliver(order: Order, connection: Connection, directory: Path) -> None:
    """Deliver the pieces that come, until the other end is gone; files and output go to `directory`."""
    tempfile.tempdir = str(directory)
    with (directory / LOG).open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    said: tuple[int, int] | None = None
    with suppress(EOFError), rig_of(order) as rig:
        pieces = connection.recv()
        begin(rig, order, pieces)
        while not rig.fatal and not rig.listener.fatal:
            if connection.poll(LOOK_S):
                pieces = connection.recv()
                add(rig, order, pieces)
                continue
            rig.load()
            said, before = (end_of(pieces), rig.pending()), said
            if said != before:
                connection.send(said)
        raise (rig.fatal + rig.listener.fatal)[0]
