"""The committed state of one partition of a delay topic, and its text in Kafka.

Kafka holds (O, P) as the group's committed offset and that offset's metadata. The offset is O. The metadata is this
JSON, compact, ASCII, at most 4,095 characters; a broker refuses a longer text, and the whole transaction with it:

    {"v":3,"t":"<topic id>","n":8,"p":[1767225600000,4711,4800,2],"h":[[0,{...}],[9000,{...}]],"f":0}

    v   version: the lowest version that understands the text. A higher one or an unknown key comes from a newer
        bridge; a downgrade must not guess. In 1 and 2, P may be a position of another partition, as (at, topic,
        partition, offset): it is read as the largest position of this one at or below it, which finishes the same
    t   id of the topic: tells a topic that was deleted and created again from the one of this offset
    n   number of the topic's partitions with a commit: tells an added partition from a deleted commit
    p   P as (at, offset), followed by `e`; null: nothing is finished (minus infinity)
    h   the decode epochs: decode parameters, each with its first offset
    f   the first offset that the bridge delivers (absent: 0); `reset-offsets --to latest` gave up the records below
    g   unfinished records below this offset are gone from the topic (absent: 0); only an index that covers them still
        holds them
    c   the cuts of the log (absent: none), oldest first: [[number, offset], ...], both rising. An index that knows only
        earlier numbers holds records that no longer exist in the log. An operator's reset counts as a cut
    e   [offset, leader epoch]: no record below the offset was written under a later leader epoch (absent: the brokers
        do not report epochs). With a P these are its last two numbers
    s   frozen steps of the staircase after the clock was set back (absent: none), oldest first: [[O, at, offset], ...]
    x   pauses of targets (absent: none). A pause has its start, its end (0: until resumed) and its reason:
        ["orders",1767225600000,0,"repairs"]. A resume has its time: ["orders",1767229200000]. The newest entry for a
        target counts, in any partition: instances learn of each other's pauses, and no pause is lost when a partition
        moves
    m   the newest manifest on shared storage, as [name, its O_c] (absent: none). A manifest without its name here is
        garbage

If the text is too long, parts are left out in this order: `m`, and a start without an index reads the log; `e`, and the
next start does not look for a cut of the log; all cuts but the last, whose offset becomes that of the first, and an
index gives up more than necessary. The rest fits for any P and any log, or the start refuses.

Pure: no IO, no clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from bridge.errors import StateError
from bridge.stores.names import NamedStep, PlainPosition, SourceName
from bridge.wire.decode_epochs import DecodeEpoch, DecodeEpochs, DecodeParameters, NewerFormat
from bridge.wire.headers import check_topic
from timerstore.rows.cuts import Cuts
from timerstore.rows.position import AT_MAX, AT_MIN, OFFSET_MAX, ORIGIN, Position, Progress, Step

VERSION = 3
VERSION_OF_NAMED_POSITIONS = 2
"""Up to this one P names its partition."""
METADATA_CHARS_MAX = 4_095
"""The longest metadata that a broker accepts: `offset.metadata.max.bytes` defaults to 4,096, and brokers refuse a text
of exactly that length."""

STEPS_MAX = 16
"""Frozen steps of one partition. A step ends when the clock reaches its P again. If the clock was set back more often,
the bridge waits for it."""
SPARE_CHARS = 960
"""Metadata that frozen steps and pauses leave free for new decode parameters, a longer P, and cuts."""
_STEP_CHARS_MAX = 56
CUTS_MAX = 4
"""Cuts that are kept apart. Beyond it the two oldest become one, at the lower offset."""
PAUSES_CHARS_MAX = 1_600
"""Metadata that pauses may take."""

RESET = (
    "Choose the records to deliver: `delay-bridge reset-offsets --to earliest` (all that the topic still holds) "
    "or `--to latest` (none of them)"
)
"""The remedy where the bridge must not decide alone."""

RESET_TO_COMMITTED = "`delay-bridge reset-offsets --to committed`"
"""The remedy for a permanent loss, where going on repeats no delivery."""

_REQUIRED = {"v", "t", "n", "p", "h"}
_KNOWN = _REQUIRED | {"c", "e", "f", "g", "m", "s", "x"}
_MANIFEST: Final = re.compile("[0-9a-f]{16}")
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


WHY_CHARS_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The newest pause or resume of one target. Times are epoch milliseconds; `until_ms` None: until it is resumed."""

    name: str
    changed_ms: int
    is_paused: bool = True
    until_ms: int | None = None
    why: str = ""

    def __post_init__(self) -> None:
        check_topic(self.name)
        if len(self.why) > WHY_CHARS_MAX:
            raise ValueError(f"a reason has at most {WHY_CHARS_MAX} characters, this one {len(self.why)}")

    def is_in_force(self, now_ms: int) -> bool:
        return self.is_paused and (self.until_ms is None or now_ms < self.until_ms)

    def ended_ms(self, now_ms: int) -> int | None:
        """The end of the pause; None: it is still in force."""
        if self.is_in_force(now_ms):
            return None
        return self.changed_ms if not self.is_paused or self.until_ms is None else self.until_ms

    def to_json(self) -> list[Any]:
        """A list for the metadata, as short as possible."""
        if not self.is_paused:
            return [self.name, self.changed_ms]
        return [self.name, self.changed_ms, self.until_ms or 0, self.why]

    @classmethod
    def from_json(cls, fields: list[Any]) -> Pause:
        """The inverse of `to_json`. Raises ValueError, LookupError, TypeError."""
        name, changed_ms, *more = fields
        if not more:
            return cls(name=str(name), changed_ms=int(changed_ms), is_paused=False)
        until_ms, why = more
        return cls(name=str(name), changed_ms=int(changed_ms), until_ms=int(until_ms) or None, why=str(why))


Said = tuple[Pause, ...]
"""At most one pause for each target, by name."""


def merged(pauses: Iterable[Pause]) -> Said:
    """The newest pause or resume of each target. A resume wins over a pause of the same moment."""
    newest: dict[str, Pause] = {}
    for pause in pauses:
        earlier = newest.get(pause.name)
        if earlier is None or _age(pause) > _age(earlier):
            newest[pause.name] = pause
    return tuple(newest[name] for name in sorted(newest))


def _age(pause: Pause) -> tuple[int, bool, int, str]:
    return pause.changed_ms, not pause.is_paused, pause.until_ms or 0, pause.why


Manifest = tuple[str, int]
"""The name of a manifest, and the O_c of its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedState:
    """The committed state of one partition: O, P, and the values that their readers need.

    `offset` is O (exclusive), `position` is P (None: nothing finished), and `topic_id` is the topic's id as text.
    `partitions` counts the topic's partitions with a commit. `epochs` are the decode epochs. `first_offset` is the
    first offset that the bridge delivers. `frozen` are the steps from before the clock was set back. `pauses` are the
    newest pauses and resumes of targets. Below `gone_below` the topic has lost unfinished records. `cuts` are the cuts
    of its log; `read_under` is the (offset, leader epoch) of `e` above, `manifest` the (name, O_c) of `m`.
    """

    offset: int
    position: PlainPosition | None
    topic_id: str
    partitions: int
    epochs: DecodeEpochs
    first_offset: int = 0
    frozen: tuple[NamedStep, ...] = ()
    pauses: Said = ()
    gone_below: int = 0
    cuts: Cuts = ()
    read_under: tuple[int, int] | None = None
    manifest: Manifest | None = None

    def __post_init__(self) -> None:
        if min(self.offset, self.first_offset, self.gone_below) < 0 or self.partitions < 1:
            raise ValueError(f"not a committed state: {self}")
        for end, at_ms, offset in self.frozen:
            if end < 0 or not AT_MIN < at_ms <= AT_MAX or not 0 <= offset <= OFFSET_MAX:
                raise ValueError(f"not a step of a committed state: {self}")
        if any(a >= b or c >= d for (a, c), (b, d) in pairwise([(0, -1), *self.cuts])):
            raise ValueError(f"not the cuts of a log: {self.cuts}")
        if self.manifest is not None and (not _MANIFEST.fullmatch(self.manifest[0]) or self.manifest[1] < 0):
            raise ValueError(f"not a manifest: {self.manifest}")
        if self.position is not None:
            at_ms, offset = self.position
            if not AT_MIN < at_ms <= AT_MAX or not 0 <= offset <= OFFSET_MAX:
                raise ValueError(f"not a position: {self.position}")

    def progress(self) -> Progress:
        """(O, P) and the frozen steps."""
        position = ORIGIN if self.position is None else Position(*self.position)
        frozen = tuple(Step(end, Position(at_ms, offset)) for end, at_ms, offset in self.frozen)
        return Progress(self.offset, position, frozen)

    def moved(self, progress: Progress) -> CommittedState:
        """The same partition with another (O, P), and the frozen steps that go with it."""
        *frozen, last = ((step.offset, step.position.at_ms, step.position.offset) for step in progress.steps)
        position = None if progress.position == ORIGIN else last[1:]
        return replace(self, offset=progress.offset, position=position, frozen=tuple(frozen))

    def rewound(self, offset: int, now_ms: int) -> CommittedState:
        """The same partition after its log was cut at `offset`. O goes back there, nothing from there on is finished,
        and P stays: records that are written there now are delivered at any position. An index may hold records from
        above the cut, even above the old O: cancels that were read ahead."""
        epoch = None if self.read_under is None else (min(self.read_under[0], offset), self.read_under[1])
        state = replace(self, cuts=with_cut(self.cuts, offset, now_ms), read_under=epoch)
        return state if offset >= self.offset else state._before(offset)

    def _before(self, offset: int) -> CommittedState:
        kept = [step for step in self.frozen if step[0] < offset]
        cut = [(offset, at_ms, o) for end, at_ms, o in self.frozen if end >= offset][:1]
        epochs = tuple(epoch for epoch in self.epochs if epoch.offset < offset) or (replace(self.epochs[0], offset=0),)
        if epochs[-1].parameters != self.epochs[-1].parameters:
            epochs = (*epochs, replace(self.epochs[-1], offset=offset))
        return replace(
            self,
            offset=offset,
            frozen=(*kept, *cut) if offset else (),
            epochs=epochs if offset else (replace(self.epochs[-1], offset=0),),
            first_offset=min(self.first_offset, offset),
            gone_below=min(self.gone_below, offset),
        )

    def is_same_progress(self, other: CommittedState | None) -> bool:
        """Whether (O, P), the frozen steps and `gone_below` are the same. (The epochs may have been amended in memory
        only.)"""
        names = ("offset", "position", "frozen", "gone_below")
        return other is not None and all(getattr(self, name) == getattr(other, name) for name in names)

    def is_written_as(self, other: CommittedState | None) -> bool:
        """Whether `other`, read from Kafka, has the same progress and the same pauses."""
        return self.is_same_progress(other) and other is not None and other.pauses == self.pauses

    @property
    def roll_window_ms(self) -> int:
        """W of the records that are read now."""
        return self.epochs[-1].parameters.roll_window_ms

    def has_room_for(self, said: Said) -> bool:
        """Whether the metadata has room for these pauses."""
        return len(self._text(said)) <= METADATA_CHARS_MAX - SPARE_CHARS

    def saying(self, said: Said) -> CommittedState:
        """The same state with these pauses. Without room for all, it keeps its own targets and adds others, the oldest
        pauses first; other partitions hold the rest."""
        if said == self.pauses or self.has_room_for(said):
            return replace(self, pauses=said)
        names = {pause.name for pause in said}
        kept = {pause.name: pause for pause in self.pauses if pause.name in names}
        for pause in sorted(said, key=lambda pause: (pause.name not in kept, pause.changed_ms)):
            more = merged([*kept.values(), pause])
            if self.has_room_for(more) or len(self._text(more)) <= len(self._text(merged(kept.values()))):
                kept[pause.name] = pause
        return replace(self, pauses=merged(kept.values()))

    def has_room_for_a_step(self) -> bool:
        """Whether the metadata has room for one more frozen step."""
        chars = len(self.metadata()) + _STEP_CHARS_MAX
        return len(self.frozen) < STEPS_MAX and chars <= METADATA_CHARS_MAX - SPARE_CHARS

    def written_manifest(self) -> Manifest | None:
        """The manifest as the metadata has it: it is the first part that is left out."""
        return self.manifest if len(self._text(self.pauses)) <= METADATA_CHARS_MAX else None

    def metadata(self) -> str:
        """The text for Kafka; the module docstring names the optional parts. Raises StateError if it is too long."""
        if len(text := self._text(self.pauses)) <= METADATA_CHARS_MAX:  # hundreds of times a second
            return text
        without = replace(self, manifest=None)
        least = replace(without, read_under=None)
        for state in (without, least, least._with_one_cut()):
            if len(text := state._text(self.pauses)) <= METADATA_CHARS_MAX:
                return text
        raise _too_long(self)

    def must_fit(self, source: SourceName) -> None:
        """Raises StateError if the text can become too long as P moves on or the log is cut."""
        position = (AT_MIN + 1, OFFSET_MAX)
        cuts = ((1 << 40, OFFSET_MAX),)
        longest = replace(self, position=position, cuts=cuts, gone_below=OFFSET_MAX, read_under=None, manifest=None)
        if len(longest._text(self.pauses)) > METADATA_CHARS_MAX:
            raise _too_long(self, topic=source[0], partition=source[1])

    def _with_one_cut(self) -> CommittedState:
        return replace(self, cuts=((self.cuts[-1][0], self.cuts[0][1]),) if self.cuts else ())

    def _text(self, pauses: Said) -> str:
        fields: dict[str, Any] = {
            "v": VERSION,
            "t": self.topic_id,
            "n": self.partitions,
            "p": None if self.position is None else (*self.position, *(self.read_under or ())),
            "h": [[epoch.offset, epoch.parameters.to_json()] for epoch in self.epochs],
        }
        optional = {
            "f": self.first_offset,
            "g": self.gone_below,
            "c": self.cuts,
            "e": self.read_under if self.position is None else None,
            "s": self.frozen,
            "x": [pause.to_json() for pause in pauses],
            "m": self.manifest,
        }
        return _compact(fields | {key: value for key, value in optional.items() if value})


def _too_long(state: CommittedState, **fields: object) -> StateError:
    return StateError(
        "the committed metadata is too long: the decode parameters were changed too often within the retention",
        hint="Go back to the previous levels, maximum delay and roll window until the oldest records have "
        "expired, or resume targets that are paused.",
        **fields,
        characters=len(state._text(state.pauses)),
        characters_max=METADATA_CHARS_MAX,
        changes=len(state.epochs),
        code="DB-4006",
    )


def with_cut(cuts: Cuts, offset: int, now_ms: int) -> Cuts:
    """The cuts of a log after one more cut. Its number derives from the time, so numbers stay unique even when the
    offsets were reset meanwhile."""
    number = max(now_ms // 1_000, cuts[-1][0] + 1 if cuts else 1)
    lower = [cut for cut in cuts if cut[1] < offset]
    if len(lower) == CUTS_MAX:
        lower[:2] = [(lower[1][0], lower[0][1])]
    return (*lower, (number, offset))


def are_too_long(pauses: Said) -> bool:
    """Whether pauses exceed their share of the metadata."""
    return len(_compact([pause.to_json() for pause in pauses])) > PAUSES_CHARS_MAX


def _compact(value: object) -> str:
    return _ENCODER.encode(value)


def are_same_progress(states: Mapping[SourceName, CommittedState], others: Mapping[SourceName, CommittedState]) -> bool:
    """Whether both have the same progress for every common partition."""
    return all(states[name].is_same_progress(others[name]) for name in states.keys() & others.keys())


def decode_metadata(source: SourceName, offset: int, metadata: str | None) -> CommittedState:
    """The state of `source` from a committed offset and its metadata.

    Raises StateError for metadata that is missing (the group's offsets were reset), from a newer version, or
    unreadable.
    """
    if not metadata:
        raise StateError(
            "the committed offset was not written by the bridge: it carries no delivered position",
            hint=f"Another tool reset the group's offsets. {RESET}.",
            topic=source[0],
            partition=source[1],
            offset=offset,
            code="DB-4003",
        )
    try:
        fields = json.loads(metadata)
        _must_be_known(fields)
        return _decode_fields(source, offset, fields)
    except NewerFormat as newer:
        # The only remedy: the unknown parts may be those that prevent a second delivery.
        raise StateError(
            "the committed state was written by a newer version of the bridge",
            hint="Run that version, or a later one.",
            topic=source[0],
            partition=source[1],
            reason=str(newer),
            code="DB-4005",
        ) from newer
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise StateError(
            "the committed metadata cannot be read",
            hint=f"Another program commits offsets in this consumer group; stop it. {RESET}.",
            topic=source[0],
            partition=source[1],
            reason=str(error),
            code="DB-4004",
        ) from error


def _must_be_known(fields: dict[str, Any]) -> None:
    """Raises NewerFormat for a later version's fields, ValueError for fields that no version writes."""
    version = fields["v"]
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"version {version!r}")
    if version > VERSION:
        raise NewerFormat(f"version {version}")
    if missing := _REQUIRED - fields.keys():
        raise ValueError(f"missing {sorted(missing)}")
    if unknown := fields.keys() - _KNOWN:
        raise NewerFormat(f"unknown {sorted(unknown)}")


def _decode_fields(source: SourceName, offset: int, fields: dict[str, Any]) -> CommittedState:
    epochs = tuple(
        DecodeEpoch(offset=int(at), parameters=DecodeParameters.from_json(parameters)) for at, parameters in fields["h"]
    )
    _must_be_epochs(epochs)
    position, rest = _position(source, fields)
    under = fields.get("e") or rest
    frozen = tuple((int(end), int(at_ms), int(o)) for end, at_ms, o in fields.get("s", ()))
    _must_be_stairs(offset, position, frozen)
    return CommittedState(
        offset=offset,
        position=position,
        topic_id=str(fields["t"]),
        partitions=int(fields["n"]),
        epochs=epochs,
        first_offset=int(fields.get("f", 0)),
        frozen=frozen,
        pauses=merged(map(Pause.from_json, fields.get("x", ()))),
        gone_below=int(fields.get("g", 0)),
        cuts=tuple((int(number), int(at)) for number, at in fields.get("c", ())),
        read_under=(int(under[0]), int(under[1])) if under else None,
        manifest=(str(fields["m"][0]), int(fields["m"][1])) if fields.get("m") else None,
    )


def _position(source: SourceName, fields: dict[str, Any]) -> tuple[PlainPosition | None, list[Any]]:
    """P, and what stands behind it."""
    p = fields["p"]
    if p is None:
        return None, []
    if fields["v"] > VERSION_OF_NAMED_POSITIONS:
        return (int(p[0]), int(p[1])), p[2:4]
    at_ms, name, offset = int(p[0]), (str(p[1]), int(p[2])), int(p[3])
    if name == source:
        return (at_ms, offset), p[4:6]
    at_ms -= name < source
    return (at_ms, OFFSET_MAX) if at_ms > AT_MIN else None, p[4:6]


def _must_be_stairs(offset: int, position: PlainPosition | None, frozen: tuple[NamedStep, ...]) -> None:
    if not frozen:
        return
    ends = [end for end, _, _ in frozen]
    corners = [(at_ms, o) for _, at_ms, o in frozen] + ([] if position is None else [position])
    if any(a >= b for a, b in pairwise(ends)) or ends[-1] > offset or any(a <= b for a, b in pairwise(corners)):
        raise ValueError(f"frozen steps {frozen} are no stairs to {offset}, {position}")


def _must_be_epochs(epochs: DecodeEpochs) -> None:
    offsets = [epoch.offset for epoch in epochs]
    if not offsets or offsets[0] != 0 or any(a >= b for a, b in pairwise(offsets)):
        raise ValueError(f"decode epochs {offsets} do not start at 0 and rise")


def initial_state(
    *,
    offset: int,
    topic_id: str,
    partitions: int,
    parameters: DecodeParameters,
    first_offset: int = 0,
    cuts: Cuts = (),
) -> CommittedState:
    """The state of a partition before its first record is read: (offset, minus infinity)."""
    return CommittedState(
        offset=offset,
        position=None,
        topic_id=topic_id,
        partitions=partitions,
        epochs=(DecodeEpoch(offset=0, parameters=parameters),),
        first_offset=first_offset,
        cuts=cuts,
    )
