"""bridge.delivery.open_transaction: the committed states after it."""

from __future__ import annotations

from pathlib import Path

from bridge.delivery.doubt.log_notes import LogNotes
from bridge.delivery.open_transaction import OpenTransaction
from bridge.wire.committed_state import initial_state
from bridge.wire.decode_epochs import DecodeParameters
from tests.unit.bridge.stores.rig import BILLS, NOW_MS, ORDERS, Rig

PARAMETERS = DecodeParameters(max_delay_ms=86_400_000, roll_window_ms=86_400_000, has_default_target=True)


def test_a_second_look_makes_the_states_anew_only_after_another_take(tmp_path: Path) -> None:
    """The client recognises the offsets that it has sent early by the same object."""
    rig = Rig(tmp_path / "store", (ORDERS, BILLS))
    states = {
        name: initial_state(offset=0, topic_id="id", partitions=2, parameters=PARAMETERS, first_offset=0)
        for name in rig.logs
    }
    for name in rig.logs:
        rig.produce(name, NOW_MS - 2, NOW_MS - 1)
    rig.ingest()
    rig.load()
    transaction = OpenTransaction(rig.stores.begin(NOW_MS), opened_s=0.0, opened_ms=NOW_MS)

    def look() -> list[tuple[str, int, int]]:
        transaction.look_ahead(states, rig.stores.sources, (), LogNotes())
        return [(each.topic, each.partition, each.offset) for each in transaction.offsets]

    assert len(transaction.loan.take(NOW_MS, 2)) == 2
    assert look() == [(*ORDERS, 2), (*BILLS, 2)]
    first = transaction.offsets
    look()
    assert transaction.offsets is first
    assert [transaction.states[name].position for name in (ORDERS, BILLS)] == [(NOW_MS - 2, 0)] * 2
    assert len(transaction.loan.take(NOW_MS, 2)) == 2
    look()
    assert transaction.offsets is not first
    assert [transaction.states[name].position for name in (ORDERS, BILLS)] == [(NOW_MS - 1, 1)] * 2
