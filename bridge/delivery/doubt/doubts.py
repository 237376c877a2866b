"""Transactions that ended unasked: their records in Kafka, and their messages in doubt.

    1 note        the rows, and their destination topics, in memory and in a file (doubt_file.py); the rows go back. The
                  states that the transaction may have committed go to another file (torn_states.py)
    2 hold        the partitions of these rows; all others are delivered
    3 look up     a thread reads the topics (search.py), once the transaction's id has a new epoch: one look-up at a
                  time, which goes on for the partitions that stay while others come and go
    4 release     a partition whose topics are all read: a row with a record there is finished without another one, and
                  the others are delivered
    5 forget      rows that a committed state covers

    a topic cannot be read (no Read, no answer) ----------> its partitions stay held; it is read again, and again
    held -- `delay-bridge resolve --as aborted` ----------> the rows are pending: delivered messages are repeated
    held -- `delay-bridge resolve --as committed` --------> the rows are finished: undelivered messages are lost

A crash before step 1 leaves the (O, P) that Kafka holds; after it, each step is done again. Another instance that takes
the partition over has no record of all this, and goes by (O, P). Rows that it leaves pending are in doubt here when the
partition comes back."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import structlog

from bridge.delivery.doubt.doubt_file import Doubt, DoubtFile
from bridge.delivery.doubt.findings import Part
from bridge.delivery.doubt.log_notes import States
from bridge.delivery.doubt.records import Planned, Row
from bridge.delivery.doubt.search import DoubtSearch, Read, place_of
from bridge.delivery.doubt.torn_states import TornStates
from bridge.errors import EnvironmentFailure
from bridge.stores.names import OFFSET_BITS, SourceName, Sources
from bridge.telemetry.heartbeats import CALLS_S, Beat, Heartbeats
from bridge.telemetry.metrics import Metrics
from bridge.wire.committed_state import CommittedState
from timerstore.clock import Clock
from timerstore.rows.position import AT_MIN, OFFSET_MAX, Int64s

LOOK_S: Final = 1.0
"""Interval between looks at an operator's choices."""
AGAIN_S: Final = (5.0, 10.0, 30.0, 60.0, 300.0)
"""Intervals between look-ups of topics that could not be read."""
DOUBT: Final = "unasked-end"
"""The metrics' name for the doubt of a held partition."""
COMMITTED: Final = "committed"

log = structlog.get_logger("bridge.delivery.doubt.doubts")


class Choice(Protocol):
    """An operator's choices, by place; as `Choices`."""

    def take(self, names: Collection[SourceName]) -> Mapping[tuple[SourceName, int], str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output of a transaction: the plans with its rows; topic and row keys of each batch; and the committed states
    `after` it, if it may have sent them."""

    planned: Sequence[Planned]
    sent: Sequence[tuple[str, Int64s]]
    began_ms: int
    after: States


class Doubts:
    """See the module. For the dispatcher's thread; `held`, `counts` and `alarms` for any."""

    def __init__(
        self,
        *,
        read: Read,
        choices: Choice,
        letter_topics: Collection[str],
        file: DoubtFile,
        torn: TornStates,
        clock: Clock,
        metrics: Metrics,
        run: Callable[[Callable[[Beat], None]], None],
    ) -> None:
        """`run` runs a look-up beside delivery."""
        self._read = read
        self._choices = choices
        self._letter_topics = letter_topics
        self._file = file
        self.torn = torn
        self._clock = clock
        self._metrics = metrics
        self._run = run
        self.written: dict[int, Part] = {}
        """The rows' records in Kafka, by packed (source, offset); always the same object."""
        self._doubts: dict[SourceName, Doubt] = {}
        """Replaced, never changed: other threads read it."""
        self._here: frozenset[SourceName] = frozenset()
        """The partitions in delivery here."""
        self._told: frozenset[SourceName] = frozenset()
        """Held partitions that the log has reported."""
        self._is_loaded, self._is_kept = False, True
        self._search: DoubtSearch | None = None
        self._searches, self._search_s, self._look_s = 0, 0.0, 0.0
        self._is_released = False

    def note(self, output: Output, states: States, sources: Sources) -> frozenset[SourceName]:
        """A transaction with this output ended unasked: hold the partitions of its rows, which are returned, until its
        look-up. `states` are those from before it."""
        self.torn.note(states, output.after)
        new = _new_doubts(output, states, sources, self._letter_topics)
        self._take_choices(new)  # earlier choices do not concern this
        both = {name: self._doubts[name].joined(each) if name in self._doubts else each for name, each in new.items()}
        self._change({**self._doubts, **both}, sources)
        self._look_up_anew(new)
        return frozenset(new)

    # -- other partitions, other states

    def begin(self, states: States, sources: Sources) -> None:
        """A store was opened on these states. At the first call, read the doubts of the process before. Raises
        EnvironmentFailure if they cannot be read."""
        if not self._is_loaded:
            self._doubts = self._file.read()
            self._is_loaded = True
        self._here = frozenset()
        self.come(states, sources)

    def come(self, states: States, sources: Sources) -> None:
        """Add partitions that are delivered here from now on."""
        self._here |= states.keys()
        self.torn.forget(states)
        self._change(self._under(states), sources)
        self._look_up_anew(self.held() & states.keys())

    def go(self, names: Collection[SourceName], sources: Sources) -> None:
        """Remove partitions that belong to another instance, or are held: their doubts stay until they come back."""
        self._here -= frozenset(names)
        self._change(self._doubts, sources)

    def committed(self, states: States, sources: Sources) -> None:
        """Note states that Kafka holds: doubts about rows that these finish end."""
        self.torn.forget(states)
        if self._doubts.keys() & states.keys():
            left = self._under(states)
            if left != self._doubts:
                self._change(left, sources)

    def close(self) -> None:
        """End the look-up: the process ends."""
        if self._search is not None:
            self._search.end()

    def _under(self, states: States) -> dict[SourceName, Doubt]:
        left: dict[SourceName, Doubt] = {}
        for name, doubt in self._doubts.items():
            rest = doubt.under(states[name]) if name in states else doubt
            if rest is not None:
                left[name] = rest
            elif doubt.unread:
                log.warning("doubt-passed", place=_place(name, doubt), rows=len(doubt.in_doubt()))
        return left

    def _change(self, doubts: dict[SourceName, Doubt], sources: Sources) -> None:
        """Set the doubts, after a change of these or of the rows' numbers."""
        is_new = doubts != self._doubts
        before, self._doubts = self.held(), doubts
        self._is_released |= bool(before - self.held())
        self._told &= self.held()
        self.written.clear()
        for name in self._here & doubts.keys():
            first = sources.index(*name) << OFFSET_BITS
            self.written.update((first | offset, part) for offset, part in doubts[name].written.items())
        if is_new:
            self._keep()

    def _look_up_anew(self, names: Collection[SourceName]) -> None:
        """Look these partitions up anew: more may have been written since a look-up began."""
        if self._search is not None and not self._search.leave(names):
            self._search = None
        if names:
            self._searches, self._search_s = 0, 0.0

    def _keep(self) -> None:
        try:
            self._file.write(self._doubts)
            self._is_kept = True
        except EnvironmentFailure as failure:
            if self._is_kept:
                log.error("doubts-not-written", code=failure.code, reason=str(failure))
            self._is_kept = False

    # -- partitions that are held

    def held(self) -> frozenset[SourceName]:
        """Partitions without delivery for now."""
        return frozenset(name for name, each in self._doubts.items() if each.unread and name in self._here)

    @property
    def is_under_way(self) -> bool:
        """Whether a held partition still waits for the first result of its look-up, be it a failure."""
        return not self.held() <= self._told

    def counts(self) -> dict[tuple[str, str], int]:
        """The number of partitions that stay held after a look-up, by topic and doubt."""
        return dict(Counter((topic, DOUBT) for topic, _ in self.held() & self._told))

    def alarms(self) -> tuple[str, ...]:
        """Texts for the health."""
        doubts = self._doubts
        rows = {name: len(doubts[name].in_doubt()) for name in sorted(self.held() & doubts.keys())}
        return tuple(
            f"{topic}/{number} is held: whether {count} messages from offset {doubts[topic, number].offset} on "
            f"were delivered is not known (DB-4071)"
            for (topic, number), count in rows.items()
        )

    def look(self, sources: Sources) -> bool:
        """Look up, and follow an operator's choices. Returns whether a partition was released."""
        now_s = self._clock.monotonic_s()
        is_time = now_s - self._look_s >= LOOK_S
        if is_time:
            self._look_s = now_s
            self.torn.keep()
            if not self._is_kept:
                self._keep()
        if self._doubts:
            self._follow_search(sources)
            if is_time:
                self._follow_choices(sources)
            if self.held() and self._search is None and now_s >= self._search_s:
                self._search = DoubtSearch(self._read, {n: self._doubts[n] for n in self.held()}, self._letter_topics)
                self._run(self._search.run)
        is_released, self._is_released = self._is_released, False
        return is_released

    def _follow_search(self, sources: Sources) -> None:
        search = self._search
        if search is None:
            return
        is_done, doubts = search.is_done, dict(self._doubts)  # in this order
        names = [name for name in search.names if name in doubts and doubts[name].unread]
        for place, reason, seen in search.told():
            doubts |= {name: doubts[name].found(seen.get(name, {})) for name in search.names & doubts.keys()}
            for name in names:
                for topic in [topic for topic in doubts[name].unread if place_of(name, topic) == place]:
                    if reason:
                        self._tell(name, doubts[name], f"{topic}: {reason}")
                    else:
                        doubts[name] = doubts[name].read(topic)
        read = [name for name in names if not doubts[name].unread]
        for name in read:
            count = sum(Part.RECORD in part for part in doubts[name].written.values())
            self._metrics.rows_found.inc(count)
            rows = len(doubts[name].rows)
            log.warning("messages-looked-up", place=_place(name, doubts[name]), rows=rows, found=count)
        if is_done:
            self._search, self._searches = None, self._searches + 1
            if self.held() <= search.names:  # others have waited for the end of this look-up
                self._search_s = self._clock.monotonic_s() + AGAIN_S[min(self._searches, len(AGAIN_S)) - 1]
        if is_done or read:
            self._change(doubts, sources)
        self._doubts = doubts

    def _tell(self, name: SourceName, doubt: Doubt, reason: str) -> None:
        if name not in self._told:
            rows = len(doubt.in_doubt())
            log.error("messages-in-doubt", code="DB-4071", place=_place(name, doubt), rows=rows, reason=reason)
        self._told |= {name}

    def _follow_choices(self, sources: Sources) -> None:
        open_ = {(name, each.offset): name for name, each in self._doubts.items() if each.unread}
        chosen = self._take_choices(open_.values()) if open_ else {}
        doubts = dict(self._doubts)
        for place in chosen.keys() & open_.keys():
            held = doubts[place[0]]
            doubts[place[0]] = held.decided(place[0], is_committed=chosen[place] == COMMITTED)
            rows = len(held.in_doubt())
            log.warning("doubt-resolved", place=_place(place[0], held), rows=rows, ending=chosen[place])
        if chosen:
            self._change(doubts, sources)

    def _take_choices(self, names: Collection[SourceName]) -> Mapping[tuple[SourceName, int], str]:
        """All choices for these partitions, or none if they cannot be removed: each is followed once."""
        try:
            return self._choices.take(names)
        except EnvironmentFailure as failure:
            log.warning("choices-not-read", code=failure.code, reason=str(failure))
            return {}


def _new_doubts(
    output: Output, states: States, sources: Sources, letter_topics: Collection[str]
) -> dict[SourceName, Doubt]:
    commands = np.concatenate([np.empty(0, np.int64), *(piece.commands() for piece in output.planned)])
    sent: defaultdict[int, list[str]] = defaultdict(list)
    for topic, keys in output.sent:
        # Of the output of commands, only dead letters are looked for.
        for key in (keys if topic in letter_topics else np.setdiff1d(keys, commands)).tolist():
            sent[key].append(topic)
    rows: defaultdict[SourceName, list[tuple[int, int, Row, list[str]]]] = defaultdict(list)
    for key, at, row in (each for piece in output.planned for each in piece.rows() if each[0] in sent):
        rows[sources.name(key >> OFFSET_BITS)].append((key & OFFSET_MAX, at, row, sent[key]))
    return {name: _doubt(states[name], mine, output.began_ms) for name, mine in rows.items() if name in states}


def _doubt(state: CommittedState, rows: Sequence[tuple[int, int, Row, list[str]]], began_ms: int) -> Doubt:
    """A doubt about rows, each with offset, effective time, name, and destination topics."""
    unread: defaultdict[str, list[int]] = defaultdict(list)
    for offset, _, _, topics in rows:
        for topic in topics:
            unread[topic].append(offset)
    return Doubt(
        topic_id=state.topic_id,
        cut=state.cuts[-1][0] if state.cuts else 0,
        began_ms=began_ms,
        since=state.offset,
        last=max(((at, offset) for offset, at, _, _ in rows if at > AT_MIN), default=None),
        rows={offset: row for offset, _, row, _ in sorted(rows)},
        unread={topic: tuple(offsets) for topic, offsets in unread.items()},
        written={},
    )


def _place(name: SourceName, doubt: Doubt) -> str:
    return f"{name[0]}/{name[1]}/{doubt.offset}"


def look_up_in_thread(hearts: Heartbeats, look_up: Callable[[Beat], None]) -> None:
    """Run a look-up in a thread beside delivery."""

    def run() -> None:
        with hearts.watching("look-up", CALLS_S) as beat:
            look_up(beat)

    threading.Thread(target=run, name="look-up", daemon=True).start()
