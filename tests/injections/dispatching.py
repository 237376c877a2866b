"""The process that delivers, without Java: a dispatcher that goes on where Kafka says that its predecessor was.

It gets lists of pieces (first number, rows, first due time, milliseconds between two); the first list has everything
that was ever there. It says how many rows there are, and how many are left.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaError

from bridge.delivery.producer.outcomes import Aborted, Failure
from bridge.delivery.producer.writer import Writer
from tests.broker.rig import Rig
from tests.entries import table_of
from tests.injections.coordinator import state_of
from tests.injections.rows import PARTITIONS, row

LOOK_S: Final = 0.05
LOG: Final = "log"
Piece = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The task of the process. `direct` is the broker, `bootstrap` the proxy in front of it; a transaction has up to
    `rows` rows; each `abort_each`th is aborted (0: none); without `renews` there are no new epochs."""

    bootstrap: str
    direct: str
    delay: str
    targets: tuple[str, ...]
    abort_each: int
    rows: int = 8
    renews: bool = True


def aborting(writer: Writer, each: int) -> Writer:
    """Each `each`th transaction is aborted, as after a rebalance."""
    commit, turns = writer.commit, itertools.count(1)

    def refuse(*arguments: Any) -> None:
        if each and next(turns) % each == 0:
            raise Aborted.by(Failure.of(KafkaError(KafkaError.REBALANCE_IN_PROGRESS, "a rebalance")), {})
        commit(*arguments)

    writer.commit = refuse  # type: ignore[method-assign, assignment]
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
    rig.store.start_at(dict.fromkeys(offsets, 0), offsets)
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
