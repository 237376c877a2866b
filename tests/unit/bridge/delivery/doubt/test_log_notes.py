"""bridge.delivery.doubt.log_notes: what of the logs is written down with a transaction, and what makes one."""

from __future__ import annotations

from dataclasses import replace

from bridge.delivery.doubt.log_notes import LogNotes
from bridge.wire.committed_state import initial_state
from bridge.wire.decode_epochs import DecodeParameters

A, B = ("delay", 0), ("delay", 1)
PARAMETERS = DecodeParameters(max_delay_ms=1_000, roll_window_ms=4_000, has_default_target=False)
STATE = initial_state(offset=5, topic_id="a", partitions=2, parameters=PARAMETERS)


def test_what_was_read_under_which_leaders_is_written_down_as_far_as_it_is_committed() -> None:
    """At once where the committed state tells less, so that a quiet partition is known, too; else with the next
    transaction, whatever that is for."""
    notes, states = LogNotes(), {A: STATE, B: STATE}
    assert not notes.is_news(states) and notes.within({}, states) == {}
    notes.note_read({A: (7, 2), ("gone", 0): (9, 1)})
    assert notes.is_news(states) and not notes.is_news({A: replace(STATE, offset=0)}), "where something is committed"
    notes.note_read({A: (7, 2), ("gone", 0): (9, 1)})
    written = notes.within({}, states)
    assert written == {A: replace(STATE, read_under=(7, 2))}
    states |= written
    assert not notes.is_news(states) and notes.within({}, states) == {}
    notes.note_read({A: (8, 2)})
    assert not notes.is_news(states), "nothing more is committed"
    notes.note_read({A: (7, 3)})
    assert notes.is_news(states), "a later leader has what was read"
    states |= notes.within({}, states)
    assert states[A].read_under == (7, 3) and not notes.is_news(states)
    notes.note_read({A: (6, 4)})
    assert not notes.is_news(states), "of less is no news"
    states[A] = replace(states[A], offset=8)
    assert not notes.is_news(states), "it was no news when it was noted: the next look tells"
    notes.note_read({A: (8, 3)})
    assert notes.is_news(states)
    after = {A: replace(states[A], offset=9)}
    assert notes.within(after, states) == {A: replace(after[A], read_under=(8, 3))}


def test_changed_epochs_of_a_quiet_partition_are_committed_once() -> None:
    """At once, as soon as it has arrived; a transaction that moves it has them anyway."""
    notes, c = LogNotes(), ("delay", 2)
    planned = {A: STATE, B: replace(STATE, offset=6), c: replace(STATE, offset=7)}
    notes.note_plan({A: 3}, planned)
    states = {A: STATE, B: planned[B]}
    assert notes.is_news(states)
    after = notes.within({B: replace(STATE, offset=9)}, states)
    assert after == {A: replace(STATE, gone_below=3), B: replace(STATE, offset=9)}
    states |= after
    assert not notes.is_news(states) and notes.within({}, states) == {}
    states[c] = planned[c]
    assert notes.is_news(states) and notes.within({}, states) == {c: planned[c]}
    states |= notes.within({}, states)
    assert not notes.is_news(states)


def test_what_is_gone_is_written_down_at_once() -> None:
    """Beside what else is noted of the partition."""
    notes, states = LogNotes(), {A: replace(STATE, read_under=(5, 1))}
    notes.note_read({A: (5, 1)})
    notes.note_gone({A: 3, B: 4})
    assert notes.is_news(states)
    assert notes.within({}, states) == {A: replace(states[A], gone_below=3)}
    notes.note_gone({A: 0})
    assert not notes.is_news(states)


def test_a_manifest_is_written_down_once_and_dropped_without_shared_storage() -> None:
    """A quiet partition gets one transaction for it; the notes of other partitions have no effect."""
    notes, states = LogNotes(), {A: STATE, B: STATE}
    notes.note_manifests({A: None, B: None})
    assert not notes.is_news(states) and notes.within({}, states) == {}
    notes.note_manifests({A: ("1" * 16, 5), ("gone", 0): ("2" * 16, 5)})
    assert notes.is_news(states)
    states |= notes.within({}, states)
    assert states == {A: replace(STATE, manifest=("1" * 16, 5)), B: STATE} and not notes.is_news(states)
    notes.note_manifests({A: None})
    assert notes.is_news(states) and notes.within({}, states) == {A: STATE}
