"""The output of commands (timerstore/cancels/commands.py decides): copies of moved messages, commands in place of
others, and answers. The transaction that finishes a command writes its output.

    decision     a move by origin        a recall by origin   one by id                        answer
    act (now)    each row, delivered     "                                                     moved
    act          a copy of each row      nothing                                               moved, cancelled
    (pauses)     non-recurring message: an unchanged copy                                      moved, not-pending
                 ended schedule: a cancel by origin as well                                    cancelled
    (due)        due messages: unchanged, delivered now                                        moved, not-pending
    sent on      one by origin for each message, behind       one by origin for each message   none: these have it
                 its copy in transit
    passed       nothing: a later move of the same messages acts,                              moved
                 or, by id, is decided
    too large    nothing: the message stays unchanged                                          too-large
    left         nothing                                                                       delivered
    nothing      nothing                                                                       not-pending
    too many     nothing                                                                       too-many
    unknown      nothing                                                                       unknown

A message may have pending rows while a copy of it is in transit. The command then acts, and one by origin is also
written behind the copy, without an answer; for a recall a cancel.

A command for several messages has one answer for each outcome. The commands by origin that one by id has written are
answered together, with their number. A command without a key is sent on to every partition; there, the others answer
only where they cover messages. An unwritable answer is dropped and counted: nothing waits for it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa
import structlog

from bridge.delivery.doubt.findings import Findings
from bridge.delivery.plan.copies import copies
from bridge.delivery.plan.dead_letters import COPY_TOO_LARGE, dead_letters, held_rows
from bridge.delivery.plan.due_rows import Batch, DueRows, Ids
from bridge.delivery.plan.fates import OwnTopics, Unplannable, unreadable_copies
from bridge.delivery.plan.record_size import record_bytes
from bridge.delivery.plan.ticks import moved as moved_schedule
from bridge.delivery.targets.target import Target
from bridge.stores.loan import Rows
from bridge.stores.names import key_of
from bridge.wire import headers as h
from bridge.wire.answers import ORIGINS_MAX, Answer, Outcome
from bridge.wire.commands import key_sent_on, sent_on
from timerstore.cancels.cancels import NO_ORIGIN
from timerstore.cancels.commands import Decided, Decision
from timerstore.rows.entry import DECIDED, Kind
from timerstore.rows.position import Bools, Int64s

ANSWER_BYTES: Final = 600
"""Estimated bytes of the headers of an answer about one message, or of a command."""
_OUTCOMES: Final = {
    Decision.ACT: Outcome.CANCELLED,
    Decision.PASSED: Outcome.MOVED,
    Decision.LEFT: Outcome.DELIVERED,
    Decision.NOTHING: Outcome.NOT_PENDING,
    Decision.TOO_MANY: Outcome.TOO_MANY,
    Decision.UNCOPYABLE: Outcome.TOO_LARGE,
    Decision.UNKNOWN: Outcome.UNKNOWN,
}

log = structlog.get_logger("bridge.delivery.plan.commands")

Resolve = Callable[[Collection[str]], Mapping[str, Target]]
"""Looks up allowed targets; a name that is missing in the answer is not allowed."""

_Result = tuple[Outcome, Int64s, int | None]
"""A command's outcome, the origins of its messages, and their new due time."""
_NONE: Final = np.empty(0, np.int64)


@dataclass(slots=True, kw_only=True, eq=False)
class CommandOutput:
    """The output of the commands of a take. `ids` are their rows; batches refer to the same rows."""

    ids: Ids
    to_delay_topics: list[Batch] = field(default_factory=list)
    letters: list[Batch] = field(default_factory=list)
    to_repliers: list[Batch] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    """All answers of finished commands, written or not."""
    released: list[Rows] = field(default_factory=list)
    """Rows that moves have made due now. They are planned like taken rows, and need no copies."""
    copied: list[tuple[Int64s, pa.RecordBatch]] = field(default_factory=list)
    """The rows that moves copy: keys and payload."""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Commands by verb and outcome."""

    @property
    def records(self) -> int:
        """The number of records to write."""
        return sum(map(len, self.batches()))

    @property
    def bytes(self) -> int:
        """Their estimated size."""
        headers = int(sum(payload.column("headers").nbytes for _, payload in self.copied))
        return headers + sum(
            len(key or b"") + len(value or b"") + ANSWER_BYTES
            for batch in self.batches()
            for key, value in zip(batch.keys, batch.values, strict=True)
        )

    @property
    def writes_back(self) -> bool:
        """Whether a delay topic or a dead-letter topic gets a record."""
        return bool(self.to_delay_topics or self.letters)

    def batches(self) -> Iterator[Batch]:
        """All batches."""
        yield from self.to_delay_topics
        yield from self.letters
        yield from self.to_repliers


@dataclass(frozen=True, slots=True, eq=False)
class _Writing:
    """The output of a take's commands, and the facts about the topics."""

    out: CommandOutput
    own: Callable[[], OwnTopics]
    letter_topics: Mapping[str, str]
    findings: Findings
    now_ms: int


@dataclass(slots=True)
class _Told:
    """The outcomes of one move: the originals of its rows."""

    origins: set[int] = field(default_factory=set)
    fitting: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    dues: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def add(self, origin: int, due_ms: int | None, *, is_over: bool, fits: bool) -> None:
        """A row of an original, with its new due time (None: it is unchanged)."""
        self.origins.add(origin)
        if not fits:
            return
        self.fitting.add(origin)
        if due_ms is not None:
            self.changed.add(origin)
            self.dues[origin].add(due_ms)
        if is_over:
            self.over.add(origin)

    def results(self) -> list[_Result]:
        changed = self.changed - self.over
        dues = set().union(*(self.dues[origin] for origin in changed))
        due_ms = next(iter(dues)) if len(dues) == 1 and h.NEVER_MS not in dues else None
        parts = (
            (Outcome.MOVED, changed, due_ms),
            (Outcome.NOT_PENDING, self.fitting - self.over - changed, None),
            (Outcome.UNKNOWN, self.origins - self.fitting, None),
        )
        return [_result(outcome, np.array(sorted(some)), due) for outcome, some, due in parts if some]


class DueCommands:
    """The commands among due rows, and their content."""

    def __init__(self, rows: DueRows) -> None:
        self._rows = rows
        self.ids: Ids = np.flatnonzero(np.isin(rows.kind, DECIDED))
        self._headers = [dict(own) for own in rows.headers(self.ids).lists()] if len(self.ids) else []
        self._keys = [key_sent_on(key) for key in rows.column("key", self.ids)]
        self._reply_to: list[str | None] = rows.column("target", self.ids)
        self._due: list[int] = rows.column("due", self.ids)
        self._ts: list[int] = rows.column("ts", self.ids)
        self._moves: list[bool] = (rows.kind[self.ids] == Kind.MOVE).tolist()
        self._sources, self._offsets = rows.source[self.ids].tolist(), rows.offset[self.ids].tolist()
        self._at = {int(seq): n for n, seq in enumerate(rows.keys[self.ids].tolist())}

    @property
    def seqs(self) -> Int64s:
        """The commands, packed, in order."""
        return self._rows.keys[self.ids]

    def passed(self, no_copy: Collection[int] = ()) -> dict[int, int]:
        """Superseded moves, packed, each with the later move that acts in its place. Otherwise each move would wait for
        the copy of the one before. Moves of `no_copy` cannot be written again.

        By id, the later move covers all messages of the earlier ones. It writes its commands by origin in the
        transaction that finishes these, and a crash undoes both or neither: a move by id leaves no tombstone."""
        later, moves = dict[int, int](), defaultdict[tuple[object, ...], list[int]](list)
        origins, ids = (self._rows.column(name, self.ids) for name in ("origin", "id"))
        seqs = self.seqs.tolist()
        for n, id in enumerate(ids):
            if self._moves[n] and self._due[n] < h.AS_DUE_MS and (id is not None or origins[n] != NO_ORIGIN):
                named = self._names(n) if id is None else (id, self._command(n)[:2])
                moves[self._sources[n], named].append(n)
        for same in moves.values():
            # A move by origin that was written again is as old as its client's record. One by id that an earlier
            # version has written again is decided in its place. Moves from two partitions have no order.
            places = {self._command(n)[:2] for n in same}
            is_by_age = len(places) == 1 and ids[same[0]] is None
            age = {n: (self._command(n)[2] if is_by_age else 0, n) for n in same}
            last = max((n for n in same if seqs[n] not in no_copy), key=age.__getitem__, default=None)
            if last is not None:
                older = [n for n in same if age[n] < age[last]]
                later |= {seqs[n]: seqs[last] for n in older}
        return later

    def named_elsewhere(self) -> Iterator[tuple[int, str]]:
        """Commands by an origin of another partition: their rows, and the topics in those origins."""
        origins = self._rows.column("origin", self.ids)
        for n, row in enumerate(self.ids.tolist()):
            if origins[n] == NO_ORIGIN:
                yield row, self._names(n)[0]

    def output(
        self,
        decided: Sequence[tuple[int, Decided]],
        elsewhere: Mapping[int, Outcome],
        own: Callable[[], OwnTopics],
        letter_topics: Mapping[str, str],
        resolve: Resolve,
        limit_of: Callable[[Target], int],
        findings: Findings,
        known: dict[str, Target],
        now_ms: int,
    ) -> CommandOutput:
        """The commands' output. `elsewhere`: by row, the outcomes of commands for an origin outside the bridge's
        partitions; `limit_of`: the largest record of a target. Adds the targets of answers to `known`."""
        out = CommandOutput(ids=self.ids)
        writing = _Writing(out, own, letter_topics, findings, now_ms)
        replies: list[tuple[int, Answer]] = []
        numbered = [(self._at[key_of(number, made.effect.offset)], made) for number, made in decided]
        moves = [(n, made) for n, made in numbered if made.decision is Decision.ACT and made.effect.is_move]
        moved = iter(self._move(moves, writing) if moves else ())  # before all commands: these lie behind the copies
        for n, made in numbered:
            is_moved = made.decision is Decision.ACT and made.effect.is_move
            results = next(moved) if is_moved else self._results(n, made, writing)
            self._send_on(n, made, writing)
            for outcome, offsets, due_ms in results:
                is_nothing = outcome is Outcome.NOT_PENDING or (made.decision is Decision.PASSED and not len(offsets))
                if is_nothing and made.effect.named is None and not self._is_home(n):
                    continue
                source = self._rows.sources.name(self._sources[n])
                told = tuple((*source, offset) for offset in offsets.tolist())
                replies.append((n, self._answer(n, outcome, told, due_ms)))
        if unknown := [n for n, made in numbered if made.decision is Decision.UNKNOWN]:
            first = h.origin_text(*self._command(unknown[0]))
            log.warning("commands-without-effect", commands=len(unknown), first=first)
        for row, outcome in elsewhere.items():
            n = self._at[int(self._rows.keys[row])]
            topic, partition, named = self._names(n)
            told = tuple((topic, partition, offset) for offset in named)
            replies.append((n, self._answer(n, outcome, told, None)))
        for n, answer in replies:
            out.counts[self._verb(n), str(answer.outcome)] += 1
        replies = self._together(replies)
        out.answers = [answer for _, answer in replies]
        self._reply(out, replies, resolve, limit_of, findings, known)
        return out

    # ---- one command

    def _results(self, n: int, each: Decided, writing: _Writing) -> list[_Result]:
        """The results of one command that moves nothing; none where other commands have the answer."""
        if each.decision is Decision.SENT_ON:
            return [_result(Outcome.UNKNOWN, each.named)] if self._is_silent(n, writing) else []
        # A pause of a message that does not recur.
        is_kept = each.decision is Decision.UNCOPYABLE and self._due[n] >= h.NEXT_MS
        return [_result(Outcome.NOT_PENDING if is_kept else _OUTCOMES[each.decision], each.named)]

    def _is_silent(self, n: int, writing: _Writing) -> bool:
        """Whether no record can be written for a command."""
        return int(self._rows.keys[self.ids[n]]) in writing.findings.no_copy

    def _send_on(self, n: int, each: Decided, writing: _Writing) -> None:
        """Write commands by origin in place of one, or behind copies of messages on which it acts."""
        if not len(each.written) or self._is_silent(n, writing):
            return
        has_acted = each.decision is Decision.ACT
        ends = has_acted and not each.effect.is_move
        most = 1 if each.effect.is_move or each.effect.named is None else h.NAMED_MAX
        again = self._sent_on(n, each.written.tolist(), most, ends=ends, asks=not has_acted)
        writing.out.to_delay_topics.append(again)

    def _move(self, acting: Sequence[tuple[int, Decided]], writing: _Writing) -> list[list[_Result]]:
        """Write the output of moves by origin that act, except commands behind copies. Returns the results of each.
        Raises Unplannable where dead letters are needed, and their topic fails."""
        out = writing.out
        which = np.repeat(np.arange(len(acting)), [len(each.live) for _, each in acting])
        row = self.ids[[n for n, _ in acting]][which]
        origin = np.concatenate([each.effect.origin[each.live] for _, each in acting])
        moved, is_changed, is_over = self._moved(acting, which, writing.letter_topics)
        fits = is_changed & np.array([each.effect.is_now for _, each in acting])[which]
        if fits.any():
            out.released.append(_due_now(moved, fits, writing.now_ms))
        ids = np.flatnonzero(~fits)
        keys = self._rows.keys[row]
        is_copyable = writing.own().of(moved).copyable(ids) & ~np.isin(keys[ids], list(writing.findings.no_copy))
        unreadable = unreadable_copies(moved)
        refused = dict.fromkeys(ids[~is_copyable].tolist(), COPY_TOO_LARGE)
        refused |= {i: unreadable[i] for i in ids.tolist() if i in unreadable}
        copied = ids[~np.isin(ids, list(refused))]
        fits[copied] = True
        for batch in copies(moved, copied):
            out.to_delay_topics.append(replace(batch, ids=row[batch.ids]))
        if refused:
            for source in np.unique(moved.source[list(refused)]).tolist():
                if waits := writing.own().without_letters(source):
                    raise Unplannable({source: waits})
            cut = [i for i in refused if int(keys[i]) in writing.findings.cut]
            for batch in dead_letters(moved, np.flatnonzero(~fits), refused, writing.letter_topics, cut):
                out.letters.append(replace(batch, ids=row[batch.ids]))
        out.copied.append((moved.keys[copied], moved.payload.take(pa.array(copied))))
        columns = (each.tolist() for each in (which, origin, is_changed, is_over, fits, moved.due))
        told = [_Told() for _ in acting]
        for i, offset, has_changed, has_ended, has_fit, due_ms in zip(*columns, strict=True):
            told[i].add(offset, due_ms if has_changed else None, is_over=has_ended, fits=has_fit)
        for (n, _), each in zip(acting, told, strict=True):
            if each.over:
                out.to_delay_topics.append(self._sent_on(n, sorted(each.over), ends=True))
        return [each.results() for each in told]

    def _moved(
        self, acting: Sequence[tuple[int, Decided]], which: Ids, letter_topics: Mapping[str, str]
    ) -> tuple[DueRows, Bools, Bools]:
        """The rows that moves copy (`which` move each), with their new due times; a mask of those that are changed; a
        mask of those whose schedules have ended. A pause or its end leaves non-recurring messages unchanged. A move of
        due messages to now leaves their due times. No move changes held dead letters."""
        begins = np.cumsum([0, *(len(each.effect.rows) for _, each in acting)])[:-1]
        live = np.concatenate([begin + each.live for begin, (_, each) in zip(begins.tolist(), acting, strict=True)])
        table = pa.Table.from_batches([each.effect.payload for _, each in acting]).combine_chunks()
        payload = table.to_batches()[0].take(pa.array(live))
        number = np.array([self._sources[n] for n, _ in acting], dtype=np.int32)
        rows = Rows(
            at=np.concatenate([each.effect.rows.at[each.live] for _, each in acting]),
            source=number[which],
            offset=np.concatenate([each.effect.rows.offset[each.live] for _, each in acting]),
            payload=payload,
        )
        is_letter = held_rows(DueRows(rows, self._rows.columns), letter_topics)
        column = {name: payload.column(name).to_pylist() for name in ("due", "schedule", "tick", "attempt")}
        changed, over = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
        by = [acting[i][0] for i in which.tolist()]
        for i, (text, n) in enumerate(zip(column["schedule"], by, strict=True)):
            to_ms, now_ms = self._due[n], self._ts[n]
            if to_ms == h.AS_DUE_MS:
                changed[i] = not is_letter[i] and text is None and column["due"][i] <= now_ms
                continue
            if is_letter[i] or (text is None and to_ms >= h.NEXT_MS):
                continue
            column["attempt"][i] = 0
            after = (
                (None, to_ms)
                if text is None
                else moved_schedule(text, column["tick"][i], column["due"][i], to_ms, now_ms)
            )
            if after is None:
                over[i] = True
                continue
            column["schedule"][i], column["due"][i] = after
            changed[i] = True
        column["rolls"] = [0] * len(rows)
        for name, values in column.items():
            index = payload.schema.get_field_index(name)
            field = payload.schema.field(index)
            payload = payload.set_column(index, field, pa.array(values, field.type))
        return DueRows(replace(rows, payload=payload), self._rows.columns), changed, over

    def _sent_on(self, n: int, origins: list[int], most: int = 1, *, ends: bool = False, asks: bool = True) -> Batch:
        """Commands by origin in this one's place and partition, for up to `most` of these messages each; with `ends`,
        cancels. Each has an absolute time, and the place of the client's record."""
        topic, partition, _ = self._place(n)
        is_move = self._is_move(n) and not ends
        left_out = h.COMMANDS if asks else (*h.COMMANDS, h.REPLY_TO, h.CORRELATION)
        said = {name: text for name, text in self._headers[n].items() if name not in left_out}
        name, until_ms = (h.MOVE_ORIGIN, self._due[n]) if is_move else (h.CANCEL_ORIGIN, None)
        place = h.origin_text(*self._command(n))
        texts = [h.origins_text(topic, partition, origins[i : i + most]) for i in range(0, len(origins), most)]
        named = [{**said, name: text.encode()} for text in texts]
        return Batch(
            topic=topic,
            ids=np.full(len(texts), self.ids[n]),
            values=[None] * len(texts),
            keys=[self._keys[n]] * len(texts),
            headers=[sent_on(each, until_ms=until_ms, forwarded=place) for each in named],
            partitions=[partition] * len(texts),
        )

    # ---- answers

    def _answer(self, n: int, outcome: Outcome, origins: tuple[h.Origin, ...], due_ms: int | None) -> Answer:
        correlation = self._headers[n].get(h.CORRELATION)
        return Answer(
            command=self._command(n),
            outcome=outcome,
            count=max(len(origins), int(outcome is Outcome.DELIVERED)),
            origins=origins[:ORIGINS_MAX],
            due_ms=due_ms,
            correlation=None if correlation is None else h.text_of(correlation),
        )

    def _together(self, replies: Sequence[tuple[int, Answer]]) -> list[tuple[int, Answer]]:
        """One answer for each outcome of a client's command: several commands by origin may stand for one by id."""
        combined = dict[tuple[object, ...], tuple[int, Answer]]()
        for n, answer in replies:
            key = answer.command, answer.outcome, answer.correlation, self._reply_to[n], self._keys[n]
            first, before = combined.get(key, (n, None))
            combined[key] = first, answer if before is None else before.with_more(answer)
        return list(combined.values())

    def _reply(
        self,
        out: CommandOutput,
        replies: Sequence[tuple[int, Answer]],
        resolve: Resolve,
        limit_of: Callable[[Target], int],
        findings: Findings,
        known: dict[str, Target],
    ) -> None:
        """Write the requested answers, to topics that take them."""
        wanted = {name for n, _ in replies if (name := self._reply_to[n]) is not None}
        targets = resolve(wanted) if wanted else {}
        refused = [findings.rejected, findings.put_off, findings.no_letter]
        for n, answer in replies:
            name = self._reply_to[n]
            if name is None:
                continue
            target, key = targets.get(name), self._keys[n]
            headers, value = answer.record_headers(), answer.value()
            trouble = _trouble(target)
            if trouble is None and target is not None:
                if record_bytes(key, value, list(headers)) > limit_of(target):
                    trouble = "it exceeds the limit of its topic"
                elif target.needs_key and key is None:
                    trouble = "its topic needs a key, and the command has none"
                elif any(int(self._rows.keys[self.ids[n]]) in keys for keys in refused):
                    trouble = "its topic has refused it"
            if trouble is not None:
                out.counts[self._verb(n), "answer-dropped"] += 1
                log.warning("answer-dropped", command=h.origin_text(*answer.command), topic=name, reason=trouble)
                continue
            assert target is not None
            known[name] = target
            out.to_repliers.append(
                Batch(topic=name, ids=self.ids[n : n + 1], values=[value], keys=[key], headers=[headers])
            )

    # ---- content

    def _place(self, n: int) -> h.Origin:
        return *self._rows.sources.name(self._sources[n]), self._offsets[n]

    def _command(self, n: int) -> h.Origin:
        """The client's own record."""
        forwarded = self._headers[n].get(h.COPY_FORWARDED)
        text = "" if forwarded is None else forwarded.decode("utf-8", "replace")
        return h.parse_origin(text) if re.fullmatch(h.ORIGIN_PATTERN, text) else self._place(n)

    def _names(self, n: int) -> h.Origins:
        """The origins of a command by origin."""
        said = self._headers[n]
        return h.parse_origins(h.text_of(said[h.CANCEL_ORIGIN if h.CANCEL_ORIGIN in said else h.MOVE_ORIGIN]))

    def _is_home(self, n: int) -> bool:
        """Whether the client wrote it to this partition."""
        return self._command(n)[:2] == self._place(n)[:2]

    def _is_move(self, n: int) -> bool:
        return self._moves[n]

    def _verb(self, n: int) -> str:
        return "move" if self._is_move(n) else "cancel"


def _due_now(moved: DueRows, which: Bools, now_ms: int) -> Rows:
    """These rows as a take would return them: due now, regardless of the brokers' clock."""
    due, mask = np.minimum(moved.due[which], now_ms), pa.array(which)
    index = moved.payload.schema.get_field_index("due")
    payload = moved.payload.filter(mask)
    payload = payload.set_column(index, payload.schema.field(index), pa.array(due))
    return Rows(at=due, source=moved.source[which], offset=moved.offset[which], payload=payload)


def _result(outcome: Outcome, named: Int64s | None, due_ms: int | None = None) -> _Result:
    """A result for the originals `named`, or for an id."""
    return outcome, _NONE if named is None else named, due_ms


def _trouble(target: Target | None) -> str | None:
    """Why nothing can be written to a target."""
    if target is None:
        return "the configuration does not allow its topic"
    if target.refusal is not None:
        return target.refusal.detail
    return "a partition of its topic takes nothing now" if target.down else None
