"""The committed metadata: what is written is read again, and what cannot be understood is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import StateError
from bridge.wire.committed_state import (
    CUTS_MAX,
    METADATA_CHARS_MAX,
    SPARE_CHARS,
    STEPS_MAX,
    CommittedState,
    Pause,
    decode_metadata,
    initial_state,
    merged,
    with_cut,
)
from bridge.wire.decode_epochs import (
    DecodeEpoch,
    DecodeEpochs,
    DecodeParameters,
    amend_epochs,
    epochs_within,
    goes_back,
    largest_roll_window_ms,
)
from timerstore.rows.cuts import Cuts, unseen_cut
from timerstore.rows.position import AT_MAX, AT_MIN, OFFSET_MAX, ORIGIN, Position, Progress

SOURCE = ("delay", 3)


def parameters(max_delay_ms: int = 1_000, **more: object) -> DecodeParameters:
    values: dict[str, object] = {"max_delay_ms": max_delay_ms, "roll_window_ms": 4_000, "has_default_target": False}
    return DecodeParameters(**{**values, **more})  # type: ignore[arg-type]


A, B, C = parameters(1_000), parameters(2_000), parameters(3_000)


def epochs(*epochs: tuple[int, DecodeParameters]) -> DecodeEpochs:
    return tuple(DecodeEpoch(offset=offset, parameters=each) for offset, each in epochs)


decode_parameters = st.builds(
    DecodeParameters,
    levels_ms=st.lists(st.integers(0, 10**10), min_size=1, max_size=18).map(tuple),
    max_delay_ms=st.integers(1, 10**12),
    roll_window_ms=st.integers(4, 10**12),
    roll_bytes_max=st.integers(0, 2**31 - 1),
    headers_max=st.integers(0, 2**31 - 1),
    header_bytes_max=st.integers(0, 2**31 - 1),
    payload_bytes_max=st.integers(0, 2**31 - 1),
    has_default_target=st.booleans(),
)
positions = st.none() | st.tuples(
    st.integers(AT_MIN + 1, AT_MAX),
    st.integers(0, OFFSET_MAX),
)
all_epochs = st.lists(decode_parameters, min_size=1, max_size=4).map(
    lambda all_: tuple(DecodeEpoch(offset=1_000 * i, parameters=each) for i, each in enumerate(all_))
)
states = st.builds(
    CommittedState,
    offset=st.integers(0, OFFSET_MAX),
    position=positions,
    topic_id=st.text("abcXYZ019-_", min_size=1, max_size=22),
    partitions=st.integers(1, 10_000),
    epochs=all_epochs,
    first_offset=st.integers(0, OFFSET_MAX),
)


@given(states)
def test_metadata_is_ascii_within_the_limit_and_reads_back(state: CommittedState) -> None:
    """What Kafka gives back is the state that was committed."""
    text = state.metadata()
    assert text.isascii() and "\0" not in text
    assert len(text) <= METADATA_CHARS_MAX
    assert decode_metadata(SOURCE, state.offset, text) == state


def test_decode_epochs_that_do_not_fit_are_refused_before_kafka_refuses_them() -> None:
    """Too many changes of the parameters raise a StateError that says what to do; the broker would abort everything."""
    epochs = tuple(DecodeEpoch(offset=i, parameters=parameters(levels_ms=tuple(range(i, i + 60)))) for i in range(20))
    state = replace(initial_state(offset=5, topic_id="id", partitions=1, parameters=A), epochs=epochs)
    with pytest.raises(StateError, match="too long") as refused:
        state.metadata()
    assert "Go back" in refused.value.hint


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("", "not written by the bridge"),
        (None, "not written by the bridge"),
        ("somebody's note", "cannot be read"),
        ("[1]", "cannot be read"),
        ("[" * 4_000, "cannot be read"),
        ('"v"', "cannot be read"),
        ('{"v":1}', "cannot be read"),
        ('{"v":1,"x":0}', "cannot be read"),
        ('{"v":0}', "cannot be read"),
        ('{"v":"1"}', "cannot be read"),
    ],
)
def test_metadata_of_others_is_refused(metadata: str | None, message: str) -> None:
    """A reset by an admin and another program's commit stop the bridge, with a remedy."""
    with pytest.raises(StateError, match=message) as refused:
        decode_metadata(SOURCE, 7, metadata)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", math.inf),
        ("p", [1, -1]),
        ("p", [AT_MIN, 0]),
        ("p", [1]),
        ("h", []),
        ("h", [[5, A.to_json()]]),
        ("h", [[0, {}]]),
    ],
)
def test_metadata_with_a_damaged_field_is_refused(field: str, value: object) -> None:
    """No field is guessed at."""
    fields = json.loads(initial_state(offset=5, topic_id="id", partitions=1, parameters=A).metadata())
    with pytest.raises(StateError, match="cannot be read"):
        decode_metadata(SOURCE, 5, json.dumps({**fields, field: value}))


@pytest.mark.parametrize(
    "fields",
    [
        {"v": 4},
        {"v": 4, "h": "in another form"},
        {"q": 1},
        {"h": [[0, A.to_json()], [9, {**A.to_json(), "z": 1}]]},
        {"h": [[0, {**A.to_json(), "d": "a dialect to come"}]]},
        {"h": [[0, {**A.to_json(), "v": 2}]]},
    ],
)
def test_metadata_of_a_newer_version_is_refused_and_nothing_else_is_suggested(fields: dict[str, object]) -> None:
    """After a downgrade, a reset would repeat or lose: the only remedy is the version that wrote it. Status 4."""
    ours = json.loads(initial_state(offset=5, topic_id="id", partitions=1, parameters=A).metadata())
    with pytest.raises(StateError, match="written by a newer version") as refused:
        decode_metadata(SOURCE, 5, json.dumps({**ours, **fields}))
    assert refused.value.exit_code == 4
    assert "reset-offsets" not in str(refused.value) and "Something else" not in str(refused.value)


def test_progress_is_that_of_the_store() -> None:
    """Both ways."""
    state = initial_state(offset=0, topic_id="id", partitions=2, parameters=A)
    moved = state.moved(Progress(9, Position(1_000, 8)))
    assert (moved.offset, moved.position) == (9, (1_000, 8))
    assert moved.progress() == Progress(9, Position(1_000, 8)) and moved.moved(moved.progress()) == moved
    assert state.progress() == Progress(0, ORIGIN)


NAMES = st.tuples(st.sampled_from(["a", "delay", "z"]), st.integers(0, 3))


@pytest.mark.fault("an upgrade from a version whose positions name partitions")
@given(
    name=NAMES,
    last=st.tuples(st.integers(0, 5), NAMES, st.integers(0, 5)) | st.none(),
    frozen=st.lists(st.tuples(st.integers(6, 9), st.integers(0, 5)), max_size=3, unique=True),
    offset=st.integers(0, 6),
)
def test_what_an_earlier_version_has_finished_is_finished(
    name: tuple[str, int], last: Any, frozen: list[tuple[int, int]], offset: int
) -> None:
    """The same records, whatever partition its P is of; and the text that is written from then on says the same."""
    steps = [[i, at, o] for i, (at, o) in enumerate(sorted(frozen, reverse=True))]
    state = initial_state(offset=offset, topic_id="id", partitions=1, parameters=A)
    p = None if last is None else [last[0], *last[1], last[2]]
    fields = {**json.loads(state.metadata()), "v": 2 if steps else 1, "p": p}
    if steps and offset >= len(steps) - 1:
        fields["s"] = steps
    read = decode_metadata(name, offset, json.dumps(fields))
    for at, o in product(range(10), range(7)):
        passed = last is not None and (at, name, o) <= last
        old = (o < offset and passed) or any(o < end and (at, o) <= (ms, p) for end, ms, p in fields.get("s", []))
        assert read.progress().finishes(o + 1, Position(at, o)) == old
    assert decode_metadata(name, offset, read.metadata()) == read


@pytest.mark.parametrize(
    ("before", "committed", "log_start", "configured", "after"),
    [
        pytest.param(epochs(), 5, 0, A, epochs((0, A)), id="none yet"),
        pytest.param(epochs((0, A)), 5, 0, A, epochs((0, A)), id="unchanged"),
        pytest.param(epochs((0, A)), 5, 0, B, epochs((0, A), (5, B)), id="changed at the committed offset"),
        pytest.param(epochs((0, A)), 0, 0, B, epochs((0, B)), id="changed before anything was read"),
        pytest.param(epochs((0, A), (5, B)), 5, 0, C, epochs((0, A), (5, C)), id="changed twice at one offset"),
        pytest.param(epochs((0, B), (5, C)), 9, 6, C, epochs((0, C)), id="the log has passed the epoch"),
        pytest.param(epochs((0, B), (5, C)), 9, 5, C, epochs((0, B), (5, C)), id="the last deleted record is its"),
        pytest.param(epochs((0, A), (5, B), (7, C)), 9, 7, C, epochs((0, B), (7, C)), id="passed one of two"),
    ],
)
def test_decode_epochs_are_amended_at_the_committed_offset(
    before: DecodeEpochs, committed: int, log_start: int, configured: DecodeParameters, after: DecodeEpochs
) -> None:
    """New parameters hold from O on, never below it; epochs of expired records go."""
    assert amend_epochs(before, committed, log_start, configured) == after


def test_a_shorter_maximum_keeps_accepting_copies_of_what_was_accepted() -> None:
    """Parameters that follow others know the longest delay there was, and are not taken for changed the next time."""
    amended = amend_epochs(epochs((0, B)), 5, 0, A)
    assert amended[-1].parameters == A.following(B)
    assert amend_epochs(amended, 8, 0, A) == amended


def test_a_return_to_earlier_parameters_is_told_from_a_change() -> None:
    """Also if copies of longer timers stay acceptable; neither the first parameters nor the same ones are a return."""
    once = amend_epochs(epochs((0, A)), 5, 0, B)
    twice = amend_epochs(once, 9, 0, A)
    again = amend_epochs(twice, 12, 0, B)
    assert goes_back(once, twice) and goes_back(twice, again)
    assert not goes_back((), epochs((0, A))) and not goes_back(epochs((0, A)), once)
    assert not goes_back(twice, amend_epochs(twice, 12, 0, A)) and not goes_back(twice, amend_epochs(twice, 12, 0, C))


@pytest.mark.parametrize(
    ("begin", "end", "within"),
    [
        pytest.param(0, 20, epochs((0, A), (5, B), (7, C)), id="all"),
        pytest.param(0, 7, epochs((0, A), (5, B)), id="an epoch at the end has none of the records"),
        pytest.param(5, 7, epochs((0, B)), id="one that begins at the first of them has it"),
        pytest.param(4, 6, epochs((0, A), (5, B)), id="the first of them has the epoch before"),
        pytest.param(9, 9, (), id="no records"),
        pytest.param(9, 7, (), id="the log begins behind them"),
    ],
)
def test_the_epochs_of_records(begin: int, end: int, within: DecodeEpochs) -> None:
    """The parameters of each, and no others."""
    assert epochs_within(epochs((0, A), (5, B), (7, C)), begin, end) == within


@given(all_epochs, st.integers(0, 5_000), st.integers(0, 5_000), st.integers(0, 5_000), decode_parameters)
def test_an_owner_changes_no_epochs_of_records_that_others_read(
    before: DecodeEpochs, begin: int, read_to: int, further: int, configured: DecodeParameters
) -> None:
    """An amendment leaves the epochs from a place in the log up to an earlier committed offset alone."""
    amended = amend_epochs(before, read_to + further, begin, configured)
    assert epochs_within(amended, begin, read_to) == epochs_within(before, begin, read_to)


@given(all_epochs, st.integers(0, 5_000), st.integers(0, 5_000), decode_parameters)
def test_records_below_the_committed_offset_keep_their_parameters(
    before: DecodeEpochs, committed: int, log_start: int, configured: DecodeParameters
) -> None:
    """For every record still in the log below O, both agree; from O on, the configured parameters hold."""
    amended = amend_epochs(before, committed, log_start, configured)

    def in_force(of: DecodeEpochs, offset: int) -> DecodeParameters:
        return [each.parameters for each in of if each.offset <= offset][-1]

    newest = before[-1]
    epochs = {b.offset for b in (*before, *amended)}
    offsets = {o for b in epochs for o in (b - 1, b, b + 1)} | {log_start, committed - 1}
    for offset in offsets:
        if log_start <= offset < min(committed, newest.offset) or (
            log_start <= offset < committed and committed > newest.offset
        ):
            assert in_force(amended, offset) == in_force(before, offset)
    assert amended[-1].parameters == configured.following(newest.parameters)
    assert amended[0].offset == 0


def test_largest_roll_window_is_over_all_epochs_and_partitions() -> None:
    """The retention guard must look at every window that is still in force somewhere."""
    wide = parameters(roll_window_ms=9_000)
    narrow = initial_state(offset=0, topic_id="id", partitions=1, parameters=A)
    assert largest_roll_window_ms([narrow.epochs, epochs((0, wide), (4, A))]) == 9_000
    assert largest_roll_window_ms([]) == 0


def stepped(steps: int) -> CommittedState:
    """A state after the clock was set back that many times."""
    progress = Progress(10, Position(10**13, 7))
    for step in range(1, steps + 1):
        progress = progress.stepped_back(Position(10**13 - step * 10**6, OFFSET_MAX))
        progress = progress.moved(10 + step, Position(progress.position.at_ms + 5, 4))
    return initial_state(offset=0, topic_id="id", partitions=2, parameters=A).moved(progress)


@pytest.mark.parametrize("steps", [1, 2, STEPS_MAX])
def test_frozen_steps_are_read_back(steps: int) -> None:
    """The staircase in Kafka is the one in memory; a version whose positions name partitions refuses the text."""
    state = stepped(steps)
    assert len(state.frozen) == steps
    text = state.metadata()
    assert decode_metadata(SOURCE, state.offset, text) == state
    assert json.loads(text)["v"] == 3


def test_steps_stop_before_the_metadata_is_full() -> None:
    """What is allowed always fits, with room for a change of parameters."""
    assert stepped(STEPS_MAX - 1).has_room_for_a_step() and not stepped(STEPS_MAX).has_room_for_a_step()
    epochs = tuple(DecodeEpoch(offset=i, parameters=parameters(levels_ms=tuple(range(i, i + 60)))) for i in range(17))
    long = replace(stepped(2), epochs=epochs)
    assert len(long.metadata()) > METADATA_CHARS_MAX - 1_000
    assert not long.has_room_for_a_step()
    assert long.is_same_progress(stepped(2)) and not long.is_same_progress(stepped(3))


@pytest.mark.parametrize("steps", [[[9, 5, 1]], [[2, 50, 1], [2, 40, 1]], [[2, 10, 1]], [[2, 50]], [[-1, 50, 1]]])
def test_steps_that_are_no_stairs_are_refused(steps: list[list[int]]) -> None:
    """Offsets rise to O, positions fall to P; anything else was not written by the bridge."""
    state = replace(initial_state(offset=5, topic_id="id", partitions=1, parameters=A), position=(20, 1))
    with pytest.raises(StateError, match="cannot be read"):
        decode_metadata(SOURCE, 5, json.dumps({**json.loads(state.metadata()), "s": steps}))


def test_a_log_that_was_cut_takes_what_is_committed_back() -> None:
    """O, the steps, the epochs and the marks, as far as they reach beyond the cut; nothing of P."""
    state = CommittedState(
        offset=60, position=(10, 59), topic_id="t", partitions=1, epochs=epochs((0, A), (50, B)),
        first_offset=45, frozen=((30, 40, 1), (50, 30, 2), (60, 20, 3)), gone_below=55, read_under=(58, 3),
    )  # fmt: skip
    cut = state.rewound(40, 9_000)
    assert (cut.offset, cut.position, cut.first_offset, cut.gone_below) == (40, state.position, 40, 40)
    assert cut.frozen == ((30, 40, 1), (40, 30, 2))
    assert [epoch.offset for epoch in cut.epochs] == [0, 40] and cut.epochs[-1].parameters == B
    assert (cut.cuts, cut.read_under) == (((9, 40),), (40, 3))
    above = state.rewound(61, 9_000)
    assert replace(above, cuts=()) == state and above.cuts == ((9, 61),), "cancels may have been read ahead"
    nothing = state.rewound(0, 9_000)
    assert (nothing.frozen, [epoch.parameters for epoch in nothing.epochs]) == ((), [B])
    for each in (cut, nothing):
        assert decode_metadata(("d", 0), each.offset, each.metadata()) == each


def test_what_is_gone_is_part_of_what_is_committed() -> None:
    """A transaction that says nothing else is told from the one before it."""
    state = initial_state(offset=5, topic_id="t", partitions=1, parameters=A)
    gone = replace(state, gone_below=3)
    assert decode_metadata(("d", 0), 5, gone.metadata()) == gone
    assert not gone.is_same_progress(state)
    assert '"g"' not in state.metadata()


def test_whoever_knows_some_cuts_learns_from_where_on_the_log_is_another() -> None:
    """Of any that it has not seen the lowest; or one that is lower, where there were more than are told apart. Numbers
    rise, also where they are written in one second, and through a reset that has forgotten the cuts before."""
    for offsets in product(range(1, 4), repeat=CUTS_MAX + 2):
        cuts: Cuts = ()
        numbers = [0]
        for offset in offsets:
            cuts = with_cut(cuts, offset, 7_000)
            numbers.append(cuts[-1][0])
        assert numbers == sorted(set(numbers)) and len(cuts) <= CUTS_MAX
        assert unseen_cut(cuts, numbers[-1]) is None
        for known, number in enumerate(numbers[:-1]):
            assert unseen_cut(cuts, number) == min(offsets[known:])
    many: Cuts = ()
    for offset in range(1, 3 * CUTS_MAX):
        many = with_cut(many, offset, 7_000)
    assert len(many) == CUTS_MAX and unseen_cut(many, 0) == 1 and unseen_cut(many, many[-2][0]) == offset
    assert unseen_cut((), 5) == 0, "a state that knows of fewer cuts is not of this log"


def test_cuts_and_epochs_are_read_back() -> None:
    """A state without them says what it always did."""
    state = initial_state(offset=5, topic_id="t", partitions=1, parameters=A)
    assert not {"c", "e"} & json.loads(state.metadata()).keys()
    told = replace(state, cuts=((3, 1), (8, 4)), read_under=(5, 2))
    assert decode_metadata(("d", 0), 5, told.metadata()) == told
    delivered = replace(told, position=(9, 3))
    assert decode_metadata(("d", 0), 5, delivered.metadata()) == delivered
    assert decode_metadata(("d", 0), 5, told.metadata().replace("null", "[9,3]")) == delivered
    assert told.is_same_progress(state), "neither is progress"
    with pytest.raises(StateError, match="cannot be read"):
        decode_metadata(("d", 0), 5, told.metadata().replace("[8,4]", "[3,4]"))


@pytest.mark.fault("pauses of targets near the limit of the metadata")
def test_a_pause_that_was_written_does_not_vanish() -> None:
    """With too little room a partition keeps the newest version of its pauses; only new ones go to other partitions."""
    epochs = tuple(DecodeEpoch(offset=i, parameters=parameters(levels_ms=tuple(range(i, i + 60)))) for i in range(14))
    state = replace(initial_state(offset=5, topic_id="t", partitions=1, parameters=A), epochs=epochs)
    said = tuple(Pause(name=f"orders-{number:03}", changed_ms=1_000 - number) for number in range(60))
    full = state.saying(said)
    assert 0 < len(full.pauses) < len(said) and not full.has_room_for(said)
    assert {each.name for each in full.pauses} == {each.name for each in said[-len(full.pauses) :]}, "the oldest first"
    assert len(full.metadata()) <= METADATA_CHARS_MAX - SPARE_CHARS
    older = Pause(name="before" + "-" * 50, changed_ms=1)
    assert full.saying(merged([*said, older])).pauses == full.pauses
    ended = replace(full.pauses[0], changed_ms=2_000, is_paused=False, until_ms=None, why="")
    told = full.saying(merged([*said, ended]))
    assert ended in told.pauses and {each.name for each in full.pauses} <= {each.name for each in told.pauses}
    changed = replace(told, epochs=(*epochs, DecodeEpoch(offset=90, parameters=A)))
    assert changed.saying(changed.pauses) == changed and changed.is_written_as(told), "a change of parameters, too"
    assert told.saying(()).pauses == ()


def long_state(size: int) -> CommittedState:
    """With decode epochs for a text of about this many characters."""
    few = tuple(DecodeEpoch(offset=i, parameters=parameters(1_000 + i)) for i in range(3))
    state = replace(initial_state(offset=90, topic_id="t" * 22, partitions=1, parameters=A), epochs=few)
    levels = (0,) * ((size - len(state.metadata()) - 60) // 2)
    return replace(state, epochs=(*few, DecodeEpoch(offset=8, parameters=parameters(levels_ms=levels))))


def test_a_start_refuses_a_partition_whose_text_may_become_too_long() -> None:
    """That one: the others are delivered. In the middle of a transaction it would stop them all."""
    long_state(METADATA_CHARS_MAX - 500).must_fit(SOURCE)
    with pytest.raises(StateError) as raised:
        long_state(METADATA_CHARS_MAX - 50).must_fit(SOURCE)
    told = raised.value.fields
    assert (raised.value.code, told["topic"], told["partition"]) == ("DB-4006", *SOURCE)


@pytest.mark.fault("metadata near the limit, as cuts, marks and steps come")
@given(st.data())
def test_what_a_start_accepts_fits_whatever_comes(data: st.DataObject) -> None:
    """After moves to a longer topic, cuts, trims, clock steps and new leaders no metadata is too long, and only leader
    epochs, and cuts except the last, are left out."""
    state = long_state(data.draw(st.integers(2_900, METADATA_CHARS_MAX - 100)))
    try:
        state.must_fit(SOURCE)
    except StateError:
        return
    for _ in range(data.draw(st.integers(1, 8))):
        at, end = data.draw(st.integers(1, AT_MAX - 1)), data.draw(st.integers(10, OFFSET_MAX))
        what = data.draw(st.sampled_from(["moved", "read", "cut", "gone", "step", "said"]))
        if what == "moved":
            state = replace(state, offset=end, position=(at, OFFSET_MAX), frozen=())
        elif what == "read":
            state = replace(state, read_under=(end, (1 << 31) - 1))
        elif what == "cut":
            state = state.rewound(end, 1_767_225_600_000)
        elif what == "gone":
            state = replace(state, gone_below=end)
        elif what == "step" and state.has_room_for_a_step() and state.position is not None and not state.frozen:
            state = replace(state, frozen=((state.offset, AT_MAX, OFFSET_MAX),))
        elif what == "said":
            state = state.saying((Pause(name="y" * 249, changed_ms=at, until_ms=at + 1, why="z" * 100),))
        text = state.metadata()
        assert len(text) <= METADATA_CHARS_MAX
        read = decode_metadata(SOURCE, state.offset, text)
        assert replace(read, read_under=None, cuts=()) == replace(state, read_under=None, cuts=())
        assert read.read_under in (state.read_under, None)
        merged_cut = ((state.cuts[-1][0], state.cuts[0][1]),) if state.cuts else ()
        assert read.cuts in (state.cuts, merged_cut)


def test_a_manifest_is_part_of_the_state_and_left_out_first() -> None:
    """A bridge without shared storage writes none, and names that nobody writes are refused."""
    state = initial_state(offset=5, topic_id="t", partitions=1, parameters=A)
    named = replace(state, manifest=("0123456789abcdef", 5))
    assert '"m":[' not in state.metadata()
    assert decode_metadata(("delay", 0), 5, named.metadata()) == named
    crowded = replace(named, topic_id="t" * (METADATA_CHARS_MAX - len(named.metadata()) + 2))
    assert decode_metadata(("delay", 0), 5, crowded.metadata()) == replace(crowded, manifest=None)
    assert named.written_manifest() == named.manifest and crowded.written_manifest() is None
    for name in ("../../else", "", "0123456789ABCDEF"):
        with pytest.raises(StateError, match="DB-4004"):
            decode_metadata(("delay", 0), 5, named.metadata().replace("0123456789abcdef", name))
