"""bridge.kafka.leader_epochs: where a log was cut, found by the epochs of its records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bridge.kafka.leader_epochs import end_of_epoch, is_cut


@given(st.data())
def test_a_cut_is_found_where_later_epochs_begin(data: st.DataObject) -> None:
    """Whatever holds no record in between; a log that was not cut has none."""
    epochs = sorted(data.draw(st.lists(st.integers(0, 4), max_size=40)))
    start = data.draw(st.integers(0, 5))
    log = {start + i: epoch for i, epoch in enumerate(epochs) if data.draw(st.booleans())}
    end = start + len(epochs)
    known = data.draw(st.integers(0, 4))

    def probe(offset: int) -> int | None:
        return next((log[at] for at in range(offset, end) if at in log), None)

    found = end_of_epoch(probe, known, start, end)
    kept = [offset for offset, epoch in log.items() if epoch <= known]
    assert found == max(kept, default=start - 1) + 1
    assert is_cut(probe, known, found, end) == any(epoch > known for epoch in log.values())
