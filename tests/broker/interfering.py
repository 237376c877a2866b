"""A writer that fails where a test wants it to."""

from __future__ import annotations

from typing import Any, cast

from bridge.delivery.plan.due_rows import Batch
from bridge.delivery.producer.outcomes import OnStall
from bridge.delivery.producer.writer import Writer
from tests.broker.rig import Rig
from tests.system.broker import Broker


class Interfering:
    """Passes everything on to a writer, except where a test interferes."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.opened = self.given_up = 0
        self.before_commit: list[Any] = []
        self.after_commit: list[Any] = []
        self.on_send: list[Any] = []
        self.on_open: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def open(self) -> None:
        self.opened += 1
        _do_next(self.on_open)
        self.writer.open()

    def send(self, batch: Batch, *, first_id: int = 0, careful: bool = False) -> int:
        _do_next(self.on_send)
        return self.writer.send(batch, first_id=first_id, careful=careful)

    def commit(self, offsets: Any, group_metadata: object, on_stall: OnStall) -> None:
        _do_next(self.before_commit)
        self.writer.commit(offsets, group_metadata, on_stall)
        _do_next(self.after_commit)

    def abort(self, *, in_haste: bool = False) -> None:
        self.given_up += 1
        self.writer.abort(in_haste=in_haste)


def _do_next(acts: list[Any]) -> None:
    if acts:
        acts.pop(0)()


def raising(error: Exception) -> Any:
    """A function that raises."""

    def fail() -> None:
        raise error

    return fail


def rig_with_interference(broker: Broker, delay: str, **more: Any) -> tuple[Rig, Interfering]:
    made: list[Interfering] = []

    def make(writer: Writer) -> Writer:
        made.append(Interfering(writer))
        return cast("Writer", made[0])

    rig = Rig(broker.bootstrap, delay, make_writer=make, **more)
    return rig, made[0]
