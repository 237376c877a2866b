"""The process that delivers, without Java: a dispatcher that goes on where Kafka says that its predecessor was.

    python -m tests.injections.dispatching '{"bootstrap": ..., ...}'

Each line that it reads is a list of pieces [first number, rows, first due time, milliseconds between two]; the first
line has everything that was ever there. Each line that it writes says how many rows there are, and how many are left.
At the end of its input it stops.
"""

from __future__ import annotations

import itertools
import json
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from confluent_kafka import KafkaError

from bridge.delivery.producer.outcomes import Aborted, Failure
from bridge.delivery.producer.writer import Writer
from tests.broker.rig import Rig
from tests.entries import table_of
from tests.injections.coordinator import state_of
from tests.injections.rows import PARTITIONS, row

LOOK_S: Final = 0.02
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

    def text(self) -> str:
        return json.dumps(asdict(self))


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
    """A dispatcher behind the proxy, which is soon connected again."""
    return Rig(
        order.bootstrap,
        order.delay,
        transaction_rows=order.rows,
        ask=partial(state_of, order.direct),
        make_writer=partial(aborting, each=order.abort_each),
        properties={"reconnect.backoff.ms": 5, "reconnect.backoff.max.ms": 50},
        renews=order.renews,
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


def main() -> None:
    order = Order(**json.loads(sys.argv[1]))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    with rig_of(order) as rig:
        pieces = json.loads(sys.stdin.readline())
        begin(rig, order, pieces)
        threading.Thread(target=read, daemon=True).start()
        while not rig.fatal and not rig.listener.fatal:
            try:
                line = lines.get(timeout=LOOK_S)
            except queue.Empty:
                rig.load()
                print(end_of(pieces), rig.pending(), flush=True)
                continue
            if not line:
                return
            pieces = json.loads(line)
            add(rig, order, pieces)
        raise (rig.fatal + rig.listener.fatal)[0]


if __name__ == "__main__":
    main()
