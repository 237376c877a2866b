"""bridge.start.identity_watch: which partitions are held, for how long, and what is mended. A scripted cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from structlog.testing import capture_logs

from bridge.errors import ConfigurationError, EnvironmentFailure, StateError
from bridge.ingest.batches.reading_mark import UNSEARCHED, ReadingMark
from bridge.kafka.admin import Topic, Watermarks
from bridge.kafka.leader_epochs import ReadStretch
from bridge.start.cut_search import CutSearch
from bridge.start.first_commits import SilentLogs, StartFacts, TopicFacts, another_topic
from bridge.start.identity import Looked
from bridge.start.identity_watch import LOOK_S, IdentityWatch
from bridge.stores.names import SourceName
from bridge.wire.committed_state import CommittedState, initial_state
from bridge.wire.decode_epochs import DecodeParameters
from tests.manual_clock import ManualClock
from timerstore.errors import DiskFailure

A, B, C = ("a", 0), ("a", 1), ("b", 0)
OWNED = frozenset({A, B, C})
PARAMETERS = DecodeParameters(max_delay_ms=1_000, roll_window_ms=4_000, has_default_target=False)


class Scripted:
    """A cluster, a group and a pipeline of three partitions, each read up to offset 60."""

    def __init__(self) -> None:
        self.ids = {"a": "id a", "b": "id b"}
        self.marks = {name: Watermarks(start=0, end=60, epoch=1) for name in OWNED}
        self.later: dict[SourceName, dict[int, int]] = {}
        """Where later leaders have begun to write, by epoch."""
        self.silent: set[SourceName] = set()
        """Their records cannot be read."""
        self.leaderless: set[SourceName] = set()
        self.searches: list[set[SourceName]] = []
        self.expected = dict.fromkeys(OWNED, 60)
        state = initial_state(offset=60, topic_id="id a", partitions=2, parameters=PARAMETERS)
        self.committed = dict.fromkeys(OWNED, replace(state, position=(99, 59)))
        self.answers = True
        self.clock = ManualClock()
        self.lost: list[tuple[str, int]] = []
        self.watch = IdentityWatch(self.clock, lambda topic, records: self.lost.append((topic, records)))
        self.store = mock.Mock()
        self.store.pending_from.return_value = 18
        self.look()

    # the cluster

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        if not self.answers:
            raise EnvironmentFailure("no answer", hint="Wait.")
        silent = {name: tuple(number for topic, number in self.leaderless if topic == name) for name in names}
        return {
            name: Topic(name=name, topic_id=self.ids[name], partitions=2, replicas=1, leaderless=silent[name])
            for name in names
            if name in self.ids
        }

    def watermarks(self, names: Sequence[SourceName], *, of_all: bool = True) -> dict[SourceName, Watermarks]:
        if names and not of_all and self.silent.issuperset(names):
            raise EnvironmentFailure("no answer", hint="Wait.")
        return {name: self.marks[name] for name in names if of_all or name not in self.silent}

    def cuts(self, wanted: Mapping[SourceName, ReadStretch], _: Callable[[], None]) -> dict[SourceName, int | None]:
        self.searches += [set(wanted)] if wanted else []
        found = dict[SourceName, int | None]()
        for name, each in wanted.items():
            later = [at for epoch, at in self.later.get(name, {}).items() if epoch > each.epoch and at < each.end]
            found[name] = min(later, default=None)
        return {name: at for name, at in found.items() if name not in self.silent}

    # the group

    def assignment(self) -> frozenset[SourceName]:
        return OWNED

    def read_committed_states(self, names: Collection[SourceName]) -> dict[SourceName, CommittedState]:
        return {name: self.committed[name] for name in names}

    def commit_states(self, states: Mapping[SourceName, CommittedState], owned: frozenset[SourceName]) -> bool:
        assert owned == OWNED
        self.committed |= states
        return True

    def facts(self, *owned: SourceName) -> StartFacts:
        """What a start finds of these partitions."""
        topics = {}
        for topic, count in (("a", 2), ("b", 1)):
            marks = tuple(self.marks[topic, partition] for partition in range(count))
            topics[topic] = TopicFacts(topic_id=f"id {topic}", logs=marks)
        committed = {name: replace(each, topic_id=f"id {name[0]}") for name, each in self.committed.items()}
        return StartFacts(owned=frozenset(owned), topics=topics, parameters={}, committed=committed)

    # looks

    def look(self, *, is_told: bool = False) -> bool:
        """One look of a pipeline that has given up what was held before it."""
        group: Any = self
        free = self.watch.without(OWNED) if any(self.expected) else ()
        looked = {name: Looked(expected=self.expected[name], marks=self.marks.get(name)) for name in free}
        self.clock.advance(int(LOOK_S * 1_000))
        ids = {"a": "id a", "b": "id b"}
        return self.watch.look(group, group, self.store, ids, looked, is_told=is_told)


@pytest.fixture
def site() -> Scripted:
    return Scripted()


def test_a_topic_that_is_created_again_is_held_for_good(site: Scripted) -> None:
    """All its partitions, whatever their offsets; /readyz and the gauge name it, and the others go on."""
    site.ids["a"] = "another"
    with capture_logs() as entries:
        assert site.look()
    assert [entry["event"] for entry in entries] == ["partition-in-doubt"] * 2
    assert site.watch.without(OWNED) == {C} and site.watch.replaced == {"a"}
    assert site.watch.counts() == {("a", "replaced"): 2}
    assert len(site.watch.alarms()) == 2 and "a/0 is held" in site.watch.alarms()[0]
    assert not site.look() and site.watch.without(OWNED) == {C}
    with pytest.raises(StateError) as raised:
        site.watch.without(frozenset({A, B}))
    assert raised.value.code == "DB-4014"


def test_a_topic_that_is_missing_is_held_until_it_is_there_again(site: Scripted) -> None:
    """A broker may not know of it for a moment. Another of its name is another."""
    found = site.ids.pop("a")
    assert site.look()
    assert site.watch.without(frozenset({A, B})) == frozenset(), "the process waits"
    site.ids["a"] = found
    assert site.look() and site.watch.without(OWNED) == OWNED
    del site.ids["a"]
    site.look()
    site.ids["a"] = "another"
    assert site.look() and site.watch.counts() == {("a", "replaced"): 2}


@pytest.mark.parametrize(("end", "cut"), [(40, 40), (45, 40), (200, 40)])
def test_a_log_that_was_cut_is_held_then_mended(site: Scripted, end: int, cut: int) -> None:
    """O goes back to the cut, however far the log has grown again by then; P stays, and the numbers are told."""
    site.marks[A] = Watermarks(start=0, end=end, epoch=2)
    if end > cut:
        site.later[A] = {2: cut}
    with capture_logs() as entries:
        assert site.look()
        assert site.watch.without(OWNED) == {B, C} and site.committed[A].offset == 60, "held before anything is moved"
        assert site.look()
    assert (site.committed[A].offset, site.committed[A].position) == (40, (99, 59))
    assert site.committed[B].offset == 60
    assert site.watch.without(OWNED) == OWNED and [at for _, at in site.committed[A].cuts] == [40]
    [told] = [entry for entry in entries if entry["event"] == "log-truncated"]
    assert (told["offset"], told["records"], told["dropped"]) == (40, 20, 18) and site.lost == [("a", 20)]
    assert "20 from offset 40 on; 18 pending messages" in site.watch.alarms()[0]


def test_without_epochs_a_log_was_cut_where_it_ended_when_that_was_seen(site: Scripted) -> None:
    """Brokers before 2.x tell none."""
    site.marks = {name: replace(mark, epoch=-1) for name, mark in site.marks.items()}
    site.look()
    site.marks[A] = Watermarks(start=0, end=40)
    assert site.look()
    site.marks[A] = Watermarks(start=0, end=75)
    assert site.look() and site.committed[A].offset == 40


def test_a_leader_that_did_not_know_its_end_costs_nothing(site: Scripted) -> None:
    """The end is there again with the next look: nothing is moved, nothing is told."""
    site.marks[A] = Watermarks(start=0, end=40, epoch=2)
    assert site.look()
    site.marks[A] = Watermarks(start=0, end=61, epoch=2)
    assert site.look()
    assert site.committed[A].offset == 60 and site.lost == [] and site.watch.alarms() == ()


def test_an_election_that_cuts_nothing_holds_nothing(site: Scripted) -> None:
    site.marks[A] = Watermarks(start=0, end=80, epoch=2)
    site.later[A] = {2: 60}
    assert not site.look()


def test_what_was_deleted_before_it_was_read_is_held(site: Scripted) -> None:
    """When a reader stands still in front of it; one that is at work may pass, since the ends of transactions are no
    records. It does not come back."""
    site.marks[A] = Watermarks(start=61, end=70, epoch=1)
    assert not site.look()
    site.expected[A] = 61
    assert not site.look()
    site.marks[A] = Watermarks(start=62, end=70, epoch=1)
    assert site.look(is_told=True)
    with pytest.raises(StateError) as raised:
        site.watch.without(frozenset({A}))
    assert raised.value.code == "DB-4011"


def test_what_a_start_refuses_is_held_while_others_are_delivered(site: Scripted) -> None:
    """Partitions that come with a state that must not be guessed at. With nothing else the process ends."""
    error = StateError("records are gone", hint="Choose.", topic="a", partition=1, code="DB-4002")
    assert not site.watch.refuse(error, {B})
    assert not site.watch.refuse(StateError("another cluster", hint="Choose.", code="DB-4015"), OWNED)
    assert site.watch.refuse(error, OWNED)
    assert site.watch.without(OWNED) == {A, C}
    assert "a/1 is held: records are gone" in site.watch.alarms()
    assert site.watch.without(frozenset({A, C})) == {A, C} and site.watch.counts() == {}, "it is another instance's"
    fresh = IdentityWatch(site.clock)
    assert not fresh.refuse(error, OWNED), "a process that starts is refused"


@pytest.mark.fault("records of pending messages that are gone, of one partition")
def test_a_partition_whose_messages_are_gone_is_held_alone_at_a_start(site: Scripted) -> None:
    """A start delivers all other partitions. Without any other, it is refused."""
    gone = StateError("records of pending messages are gone", hint="Restore.", topic="a", partition=1, code="DB-4012")
    fresh = IdentityWatch(site.clock)
    assert not fresh.refuse(gone, {B}) and fresh.refuse(gone, OWNED) and fresh.without(OWNED) == {A, C}
    upgrade = StateError("records of pending messages are gone", hint="Run the earlier version.", code="DB-4012")
    assert not IdentityWatch(site.clock).refuse(upgrade, OWNED), "the earlier version must be able to go on"


@pytest.mark.fault("a retention that becomes shorter than the roll window, at a rebalance")
def test_a_topic_that_keeps_its_records_too_briefly_is_held_alone(site: Scripted) -> None:
    """A running bridge goes on with its other topics; a start is refused."""
    error = ConfigurationError("roll.window is not shorter", hint="Raise it.", topic="a", code="DB-2013")
    assert site.watch.refuse(error, OWNED) and site.watch.without(OWNED) == {C}
    assert site.watch.counts() == {("a", "refused"): 2}
    other = ConfigurationError("something else", hint="Correct it.", topic="b", code="DB-2005")
    assert not site.watch.refuse(other, OWNED) and not IdentityWatch(site.clock).refuse(error, OWNED)


@pytest.mark.fault("brokers that do not answer about partitions that come to a running bridge")
def test_a_partition_that_comes_and_gets_no_answer_is_tried_again(site: Scripted) -> None:
    """The other partitions are delivered meanwhile. Where nothing is, as at a start, the process ends."""
    error = EnvironmentFailure("cannot look up offsets", hint="Check the brokers.", code="DB-3002")
    assert not site.watch.refuse(error, OWNED) and not site.watch.refuse(error, OWNED, OWNED)
    assert site.watch.refuse(error, OWNED, {C}) and site.watch.without(OWNED) == {C}
    assert site.watch.counts() == {("a", "no-answer"): 2} and site.watch.without(OWNED - {C}) == frozenset()
    assert site.look() and site.watch.without(OWNED) == OWNED, "it is tried again"


@pytest.mark.fault("a delay partition without a leader that a process has never delivered")
def test_a_silent_partition_is_held_until_its_leader_answers(site: Scripted) -> None:
    """Each look tries again, even if this process has delivered nothing else, and releases the partition when its
    leader answers."""
    cluster: Any = site
    site.watch, site.leaderless = IdentityWatch(site.clock), {A}

    def look() -> bool:
        site.clock.advance(int(LOOK_S * 1_000))
        return site.watch.look(cluster, cluster)

    assert site.watch.refuse(SilentLogs(frozenset({A})), OWNED) and site.watch.without(OWNED) == {B, C}
    assert site.watch.without(frozenset({A})) == frozenset(), "the process waits"
    assert not look(), "a rebuild for nothing would hold up the others"
    site.leaderless, site.silent = set(), {A}
    assert not look() and site.watch.counts() == {("a", "no-answer"): 1}
    site.silent = set()
    assert look() and site.watch.without(OWNED) == OWNED


def test_a_doubt_that_passes_keeps_the_process(site: Scripted) -> None:
    """Beside one that does not."""
    site.ids["b"] = "another"
    assert site.look() and site.watch.refuse(SilentLogs(frozenset({A})), {A, C})
    assert site.watch.without(frozenset({A, C})) == frozenset()
    with pytest.raises(StateError):
        site.watch.without(frozenset({C}))


def test_brokers_that_do_not_answer_change_nothing(site: Scripted) -> None:
    site.ids["a"] = "another"
    site.answers = False
    assert not site.look() and site.watch.without(OWNED) == OWNED
    site.answers = True
    assert site.look()


def test_a_cut_before_the_first_look_is_found_when_the_log_has_grown_again(site: Scripted) -> None:
    """No look has told under which leader it was read: it was an earlier one than that of the shorter log."""
    site.watch = IdentityWatch(site.clock)
    site.marks[A] = Watermarks(start=0, end=40, epoch=2)
    assert site.look()
    site.marks[A], site.later[A] = Watermarks(start=0, end=75, epoch=2), {2: 40}
    assert site.look() and site.committed[A].offset == 40


def test_a_partition_that_has_gone_meanwhile_is_not_moved_back(site: Scripted) -> None:
    """Its new owner may have committed already."""
    site.marks[A] = Watermarks(start=0, end=40, epoch=2)
    assert site.look()
    with mock.patch.object(site, "assignment", return_value=OWNED - {A}):
        assert not site.look()
    assert site.committed[A].offset == 60


def test_one_partition_that_cannot_be_read_hides_no_other(site: Scripted) -> None:
    """After an election: what is found of others counts, and it is asked about again until it answers."""
    for name in (A, B):
        site.marks[name], site.later[name] = Watermarks(start=0, end=80, epoch=2), {2: 40}
    site.ids["b"] = "another"
    site.silent = {A}
    assert site.look() and site.watch.counts() == {("a", "truncated"): 1, ("b", "replaced"): 1}
    site.silent = set()
    assert site.look() and site.watch.counts() == {("a", "truncated"): 1, ("b", "replaced"): 1}
    assert site.searches == [{A, B}, {A}, {B}], "of all partitions together"


def test_elections_are_looked_into_once(site: Scripted) -> None:
    """All partitions in one search; what was found of a leader is written down, so that no start asks again."""
    site.marks = {name: Watermarks(start=0, end=80, epoch=2) for name in OWNED}
    assert not site.look() and not site.look() and site.searches == [set(OWNED)]
    cluster = started(site, site.watch.read_under[A])
    assert not cluster.watch.holds_cut(cluster, site.facts(A)) and site.searches == [set(OWNED)]


@pytest.mark.fault("a former leader that answers after an election")
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_former_leader_moves_nothing_back(site: Scripted, epoch: int) -> None:
    """A former leader whose log ends too early holds no partition, and no message is delivered twice."""
    site.marks[A], site.later[A] = Watermarks(start=0, end=45, epoch=epoch), {2: 60}
    site.expected[A] = 70
    with capture_logs() as entries:
        assert not site.look() and site.watch.without(OWNED) == OWNED
    assert [entry["event"] for entry in entries] == ["identity-unknown"]
    site.marks[A] = Watermarks(start=0, end=80, epoch=2)
    assert not site.look() and site.watch.read_under[A] == (70, 2) and site.committed[A].offset == 60


def test_what_a_former_leader_says_mends_nothing(site: Scripted) -> None:
    """At a start, or where a reader says the same: the partition is held until a later leader answers. If that has all
    of it, nothing is moved."""
    cluster = started(site, (60, 2))
    site.marks[A] = Watermarks(start=0, end=45, epoch=1)
    assert cluster.watch.holds_cut(cluster, site.facts(A))
    site.clock.advance(int(LOOK_S * 1_000))
    assert not site.watch.look(cluster, cluster) and site.committed[A].offset == 60
    site.marks[A] = Watermarks(start=0, end=80, epoch=3)
    site.clock.advance(int(LOOK_S * 1_000))
    assert site.watch.look(cluster, cluster) and site.committed[A].offset == 60 and not site.lost


def test_what_leaders_between_two_looks_have_written_was_read(site: Scripted) -> None:
    """They are later than the one that was known, and their records not new: only those of the leader with the shorter
    log are."""
    site.expected[A] = 70
    site.marks[A], site.later[A] = Watermarks(start=0, end=65, epoch=3), {2: 60}
    assert site.look()
    site.marks[A] = Watermarks(start=0, end=90, epoch=3)
    site.later[A] = {2: 60, 3: 65}
    site.committed[A] = replace(site.committed[A], offset=70)
    assert site.look() and site.committed[A].offset == 65


def test_a_replaced_topic_that_comes_again_is_held_whole(site: Scripted) -> None:
    """The error names one partition of it, which may be another instance's; the index of the old one is known to be
    of no use even while nothing of it is owned."""
    site.ids["a"] = "another"
    site.look()
    assert site.watch.without(frozenset({C})) == {C} and site.watch.counts() == {}
    assert site.watch.replaced == {"a"}
    assert site.watch.refuse(another_topic(topic="a", partition=7), OWNED)
    assert site.watch.without(OWNED) == {C} and site.watch.counts() == {("a", "replaced"): 2}


def test_an_index_that_cannot_be_read_ends_no_look(site: Scripted) -> None:
    """How many messages are lost is told, as far as it is known."""
    site.store.pending_from.side_effect = DiskFailure("the disk fails", hint="Replace it.", code="DB-3027")
    site.marks[A] = Watermarks(start=0, end=40, epoch=2)
    assert site.look() and "pending messages" not in site.watch.alarms()[0]


def test_a_hold_takes_effect_though_another_cannot_be_mended(site: Scripted) -> None:
    """Else what is held now would be delivered on, as no later look tells of it."""
    site.marks[A] = Watermarks(start=0, end=40, epoch=2)
    assert site.look()
    site.ids["b"] = "another"
    with mock.patch.object(site, "commit_states", side_effect=EnvironmentFailure("no answer", hint="Wait.")):
        assert site.look() and site.watch.without(OWNED) == {B}
    assert site.look() and site.watch.without(OWNED) == {A, B}


@pytest.mark.fault("a committed state that is not the bridge's, of a partition whose log was cut")
def test_a_state_that_cannot_be_mended_holds_its_partition_alone(site: Scripted) -> None:
    """The partition stays held, with the reason; the bridge looks at the others and mends them."""
    for name in (A, B):
        site.marks[name] = Watermarks(start=0, end=40, epoch=2)
    assert site.look()
    read, error = site.read_committed_states, StateError("no state of the bridge", hint="Choose.", code="DB-4003")

    def refuse(names: Collection[SourceName]) -> dict[SourceName, CommittedState]:
        if A in names:
            raise error
        return read(names)

    with mock.patch.object(site, "read_committed_states", refuse):
        assert site.look()
    assert site.committed[B].offset == 40 and site.watch.without(OWNED) == {B, C}
    assert site.watch.counts() == {("a", "refused"): 1} and "a/0 is held: no state of the bridge" in site.watch.alarms()


def started(site: Scripted, read_under: tuple[int, int] | None) -> Any:
    """Another process, here or elsewhere, finds this in the committed state of A."""
    site.watch = IdentityWatch(site.clock, lambda topic, records: site.lost.append((topic, records)))
    site.committed[A] = replace(site.committed[A], read_under=read_under)
    return site


@pytest.mark.fault("acknowledged records that the brokers lose while no bridge runs, or another instance comes")
@pytest.mark.parametrize("committed", [60, 30])
@pytest.mark.parametrize(("end", "grown"), [(40, False), (45, True), (200, True)])
def test_a_log_that_was_cut_before_a_start_is_held_then_mended(
    site: Scripted, end: int, grown: bool, committed: int
) -> None:
    """The committed state contains the leaders of the records that were read, so a start of any instance recognises
    newer records as new. O goes back if it lies above; if not, an index may know cancels from above."""
    cluster = started(site, (60, 1))
    site.committed[A] = replace(site.committed[A], offset=committed)
    site.marks[A] = Watermarks(start=0, end=end, epoch=2)
    if grown:
        site.later[A] = {2: 40}
    assert cluster.watch.holds_cut(cluster, site.facts(A, C)) and not cluster.watch.holds_cut(cluster, site.facts(C))
    assert site.watch.without(frozenset({A, C})) == {C} and site.watch.without(frozenset({A})) == frozenset()
    assert site.watch.look(cluster, cluster), "nothing else is owned: nothing is delivered, it looks"
    assert site.watch.without(frozenset({A})) == {A}
    state = site.committed[A]
    assert (state.offset, state.read_under) == (min(40, committed), (40, 1)) and [at for _, at in state.cuts] == [40]
    assert not cluster.watch.holds_cut(cluster, site.facts(A, C)), "it is known now"


def test_a_log_that_is_not_searched_is_an_alarm(site: Scripted, tmp_path: Path) -> None:
    """The start goes on with it, /readyz tells of it while it is owned, and after the removal of the mark the cut is
    found."""
    ReadingMark(tmp_path, UNSEARCHED).distrust({A: 60})
    site.marks[A], site.later[A] = Watermarks(start=0, end=80, epoch=2), {2: 40}

    def start() -> bool:
        cluster = started(site, (60, 1))
        site.watch = IdentityWatch(site.clock, searches=CutSearch(directory=tmp_path))
        return bool(cluster.watch.holds_cut(cluster, site.facts(A, C)))

    for is_held in (start(), site.look()):
        told = f"a/0 was not searched for a cut: remove {UNSEARCHED} from store.directory"
        assert not is_held and site.watch.alarms() == (told,)
    assert site.watch.without(frozenset({C})) and site.watch.alarms() == ()
    (tmp_path / UNSEARCHED).unlink()
    assert start()


@pytest.mark.parametrize(
    ("read_under", "end", "epoch", "cut"),
    [
        pytest.param((60, 1), 80, 1, None, id="no election"),
        pytest.param((60, 1), 80, 2, 60, id="an election that cut nothing"),
        pytest.param((50, 1), 80, 2, 55, id="read under the later leader, for all that is known"),
        pytest.param(None, 80, 2, 40, id="an earlier version said nothing"),
        pytest.param(None, 40, 2, None, id="an earlier version said nothing, so that it is refused"),
    ],
)
def test_a_start_holds_nothing_that_was_not_cut(
    site: Scripted, read_under: tuple[int, int] | None, end: int, epoch: int, cut: int | None
) -> None:
    """Elections are common, and a partition that is moved back repeats what was delivered of it."""
    cluster = started(site, read_under)
    site.marks[A] = Watermarks(start=0, end=end, epoch=epoch)
    if cut is not None:
        site.later[A] = {2: cut}
    assert not cluster.watch.holds_cut(cluster, site.facts(A)) and site.watch.without(frozenset({A})) == {A}
    known = {} if read_under is None else {A: (60, epoch)}
    assert site.watch.read_under == known, "what was compared holds under this leader, too"


def test_a_look_tells_what_was_read_under_which_leaders(site: Scripted) -> None:
    """Of the look before where it is not sure, or the brokers did not answer; of what has gone nothing."""
    site.look()
    assert site.watch.read_under == dict.fromkeys(OWNED, (60, 1))
    site.expected[A] = site.expected[B] = 70
    site.marks = {name: Watermarks(start=0, end=90, epoch=1 if name == C else 2) for name in OWNED}
    with mock.patch.object(site, "cuts", side_effect=EnvironmentFailure("no answer", hint="Wait.")):
        site.look()
    assert site.watch.read_under == {A: (60, 1), B: (60, 1), C: (60, 1)}
    site.look()
    assert site.watch.read_under == {A: (70, 2), B: (70, 2), C: (60, 1)}
    started(site, (40, 1)).watch._before = {A: Looked(expected=60, marks=site.marks[A])}
    site.watch.holds_cut(site, site.facts(A))  # type: ignore[arg-type]
    assert site.watch.read_under == {A: (60, 2)}
    started(site, None).watch._before = {A: Looked(expected=99, marks=site.marks[A])}
    site.watch.holds_cut(site, site.facts(A))  # type: ignore[arg-type]
    assert site.watch.read_under == {}, "another instance may have moved it back since"


def test_what_is_below_the_committed_offset_was_read_though_it_is_read_again(site: Scripted) -> None:
    """A log that ends below it, or in which a later leader has written there, was cut."""
    looked = {A: Looked(expected=10, marks=Watermarks(start=0, end=45, epoch=2), committed=60)}
    cluster: Any = site
    site.watch = IdentityWatch(site.clock)
    assert site.watch.look(cluster, cluster, site.store, {"a": "id a"}, looked)
    assert "15 from offset 45" in site.watch.alarms()[0]


def test_a_topic_that_is_not_there_when_a_partition_comes_is_waited_for(site: Scripted) -> None:
    """As one that goes while it is delivered: a broker may not know of it yet. So it is with a topic of which nothing
    was owned before, and where nothing else is owned."""
    missing = StateError("a delay topic does not exist", hint="Create it.", topic="new", code="DB-4016")
    new = ("new", 0)
    assert not IdentityWatch(site.clock).refuse(missing, {new}), "a process that starts is refused"
    assert site.watch.refuse(missing, {new}) and site.watch.without(frozenset({new})) == frozenset()
    cluster: Any = site
    site.clock.advance(int(LOOK_S * 1_000))
    assert not site.watch.look(cluster, cluster) and site.watch.without(frozenset({new})) == frozenset()
    site.ids["new"] = "id new"
    site.clock.advance(int(LOOK_S * 1_000))
    assert site.watch.look(cluster, cluster) and site.watch.without(frozenset({new})) == {new}


def test_a_refused_partition_of_a_topic_that_was_not_owned_before_is_looked_at(site: Scripted) -> None:
    """What is known of its topic's id is what the refusal says."""
    error = StateError("records are gone", hint="Choose.", topic="new", partition=0, code="DB-4002")
    site.ids["new"] = "id new"
    assert site.watch.refuse(error, {A, ("new", 0)})
    cluster: Any = site
    site.clock.advance(int(LOOK_S * 1_000))
    assert not site.watch.look(cluster, cluster) and site.watch.counts() == {("new", "refused"): 1}
