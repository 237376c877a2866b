"""A second opinion on records: the pure readers of headers.py and nothing else; and records as Hypothesis thinks of
them."""

from __future__ import annotations

import re
from datetime import datetime

from hypothesis import strategies as st

from bridge.wire import headers as h
from bridge.wire.commands import check_correlation
from bridge.wire.decode_epochs import DecodeParameters
from bridge.wire.headers import Headers
from bridge.wire.reasons import RejectReason
from bridge.wire.schedule import packed
from tests.decode_examples import DAY, OFFSET, TS, Row, record, rejected


def oracle(row: Row, parameters: DecodeParameters) -> Row:
    """What an original record decodes to, by the readers of headers.py and nothing else."""
    headers: Headers = row["headers"] or []
    names = [name for name, _ in headers]
    found = dict(headers)
    times: list[str] = [name for name in (h.UNTIL, h.FOR, h.LEVEL, h.CANCEL, h.CANCEL_ORIGIN) if name in found]
    if any(names.count(name) > 1 for name in h.CONTROL):
        return rejected(row, RejectReason.DUPLICATE_HEADER)
    if h.COPY_ORIGIN in found:
        return _copy_oracle(row, found, len(times), parameters)
    said: dict[str, bytes | None] = {name: found[name] for name in h.SCHEDULE if name in found}
    commands = [name for name in h.COMMANDS if name in found]
    if h.EVERY in said or h.CRON in said:
        if commands:
            return rejected(row, RejectReason.TWO_TIMES)
        return _recurring_oracle(row, times, said, parameters)
    if len(times) != 1 or len(commands) > 1:
        return rejected(row, RejectReason.TWO_TIMES if times else RejectReason.NO_TIME)
    if said:
        return rejected(row, RejectReason.BAD_SCHEDULE)
    reason, ts = RejectReason.BAD_ID, row["ts"]
    entry = {**rejected(row, reason), "reason": None}
    try:
        if times[0] in (h.CANCEL, h.CANCEL_ORIGIN):
            return _command_oracle(row, found, {**entry, "kind": 4 if {h.REPLY_TO, h.CORRELATION} & set(found) else 1})
        text = found[times[0]]
        if times == [h.UNTIL]:
            reason = RejectReason.BAD_UNTIL
            word = h.MOVED_TO.get(h.text_of(text).lower()) if {h.MOVE, h.MOVE_ORIGIN} & set(commands) else None
            due = h.check_until(h.parse_until(h.text_of(text)), ts) if word is None else word
        elif times == [h.FOR]:
            reason = RejectReason.BAD_FOR
            due = ts + h.parse_duration(h.text_of(text))
        else:
            reason = RejectReason.BAD_LEVEL
            due = ts + h.parse_level(h.text_of(text), parameters.levels_ms)
        is_pause = (
            bool({h.MOVE, h.MOVE_ORIGIN} & set(commands))
            and times == [h.UNTIL]
            and (due >= h.NEXT_MS or due == h.AS_DUE_MS)
        )
        if due - ts > parameters.max_delay_ms and not is_pause:
            return rejected(row, RejectReason.BEYOND_MAX)
        if commands:
            return _command_oracle(row, found, {**entry, "kind": 3, "due": due})
        if h.TOPIC not in found and not parameters.has_default_target:
            return rejected(row, RejectReason.NO_TARGET)
        reason = RejectReason.BAD_TARGET
        target = h.check_topic(h.text_of(found[h.TOPIC])) if h.TOPIC in found else None
        reason = RejectReason.BAD_PARTITION
        partition = h.parse_partition(h.text_of(found[h.PARTITION])) if h.PARTITION in found else None
        reason = RejectReason.BAD_ID
        id = h.check_id(h.text_of(found[h.ID])) if h.ID in found else None
        reason = RejectReason.BAD_REPLACE
        replaces = h.parse_replace(h.text_of(found[h.REPLACE])) if h.REPLACE in found else False
        if replaces and id is None:
            return rejected(row, RejectReason.BAD_REPLACE)
    except ValueError:
        return rejected(row, reason)
    own = [header for header in headers if header[0] not in h.STRIPPED] or None
    entry |= {
        "kind": 0,
        "due": due,
        "target": target,
        "target_partition": partition,
        "id": id,
        "replace": replaces,
        "headers": own,
    }
    return {**entry, "at": due if due - ts <= parameters.roll_window_ms else None}


def _recurring_oracle(row: Row, times: list[str], said: dict[str, bytes | None], p: DecodeParameters) -> Row:
    """A recurring message is one that is due now, or not before its time, and comes up now."""
    if len(times) > 1 or (h.EVERY in said and h.CRON in said) or set(times) - {h.UNTIL, h.FOR}:
        return rejected(row, RejectReason.TWO_TIMES)
    rest = [header for header in row["headers"] if header[0] not in h.SCHEDULE]
    entry = oracle({**row, "headers": rest if times else [*rest, (h.FOR, b"0")]}, p)
    if entry["kind"] == 2:
        return {**entry, "headers": row["headers"]}
    try:
        texts = {name: h.text_of(value) for name, value in said.items()}
    except ValueError:
        return rejected(row, RejectReason.BAD_SCHEDULE)
    return {**entry, "at": row["ts"], "schedule": packed(texts, is_start_given=bool(times))}


def _command_oracle(row: Row, found: dict[str, bytes | None], entry: Row) -> Row:
    """The decoded row of a record with a valid time."""
    [command] = [name for name in h.COMMANDS if name in found]
    reason = RejectReason.BAD_ID
    try:
        if command in (h.CANCEL, h.MOVE):
            entry["id"] = h.check_id(h.text_of(found[command]))
        else:
            reason = RejectReason.BAD_ORIGIN
            origin = h.text_of(found[command])
            topic, number, offsets = h.parse_origins(origin)
            if command == h.MOVE_ORIGIN and origin.count(",") >= h.MOVED_MAX:
                raise ValueError(offsets)
            # One that is written in another way is sent on, to this partition.
            is_own = (topic, number) == (row["topic"], row["partition"]) and f"/{number}/" in origin
            named = origin.rpartition("/")[2]
            entry["origin"] = -1 if not is_own else -2 if "," in named else int(named)
            if entry["origin"] == -2:
                entry["value"] = named.encode()
        reason = RejectReason.BAD_REPLY
        if h.CORRELATION in found:
            check_correlation(h.text_of(found[h.CORRELATION]))
        return {**entry, "target": h.check_topic(h.text_of(found[h.REPLY_TO])) if h.REPLY_TO in found else None}
    except ValueError:
        return rejected(row, reason)


def _number(value: bytes | None) -> int | None:
    try:
        text = h.text_of(value)
    except ValueError:
        return None
    return int(text) if re.fullmatch(h.NUMBER_PATTERN, text) else None


def _copy_oracle(row: Row, found: dict[str, bytes | None], times: int, parameters: DecodeParameters) -> Row:
    """The decoded row of a record that claims to be a copy, from any writer: bounded like an original."""
    ts, window = row["ts"], parameters.roll_window_ms
    numbers = {name: _number(found[name]) if name in found else None for name in h.COPY}
    origin, due, rolls, attempt, at, *_ = numbers.values()
    bad = times or h.REPLACE in found or (h.COPY_AT in found and at is None) or set(found) & set(h.COMMANDS)
    if bad or origin is None or due is None or rolls is None or attempt is None:
        return rejected(row, RejectReason.BAD_COPY)
    if origin >= row["offset"] or max(rolls, attempt) > 32_767 or due - ts > parameters.longest_copy_ms:
        return rejected(row, RejectReason.BAD_COPY)
    # The rest is what an original says, with its time in another header.
    original = {name: value for name, value in found.items() if name not in h.COPY}
    original[h.UNTIL] = str(max(due, ts)).encode()
    entry = oracle({**row, "headers": list(original.items())}, parameters)
    if entry["kind"] == 2:
        return {**entry, "headers": row["headers"]}
    rolled = due - ts > window
    assert rolled == (entry["at"] is None)
    own = [header for header in row["headers"] if header[0] not in h.STRIPPED] or None
    entry |= {"headers": own, "due": due, "origin": origin, "rolls": rolls, "attempt": attempt}
    return {**entry, "at": None if rolled else max(due, min(at or 0, ts + window))}


_JUNK = st.one_of(
    st.none(),
    st.binary(max_size=12),
    st.text(max_size=12).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text("0123456789.:-+TZtzPWDHMSsmhd \t\n\x85\u2028", max_size=24).map(str.encode),
    st.integers(-(10**20), 10**20).map(lambda number: str(number).encode()),
)
_INSTANT = st.builds(
    lambda at, fraction, zone, t: f"{at:%Y-%m-%d}{t}{at:%H:%M:%S}{fraction}{zone}".encode(),
    st.datetimes(datetime(2016, 1, 1), datetime(2040, 1, 1)),  # noqa: DTZ001 (the zone is drawn below)
    st.from_regex(r"\A(\.[0-9]{1,12})?\Z"),
    st.one_of(st.sampled_from(["Z", "z", ""]), st.from_regex(r"\A[+-][01][0-9]:[0-6][0-9]\Z")),
    st.sampled_from(["T", "t", " "]),
)
_MILLIS = st.integers(TS - 4000 * DAY, TS + 4000 * DAY).map(lambda number: str(number).encode())
_UNITS = st.lists(st.tuples(st.integers(0, 10**10), st.sampled_from(["d", "h", "m", "s", "ms"])), max_size=4).map(
    lambda parts: "".join(f"{number}{unit}" for number, unit in parts).encode()
)
_ISO = st.from_regex(
    r"\AP([0-9]{1,3}W)?([0-9]{1,3}D)?(T([0-9]{1,3}H)?([0-9]{1,3}M)?([0-9]{1,3}(\.[0-9]{1,6})?S)?)?\Z"
).map(lambda text: text.encode("utf-8"))
_LEVEL = st.integers(-1, 30).map(lambda number: str(number).encode())
_ID = st.text(max_size=8).map(lambda text: text.encode("utf-8", "surrogatepass"))
_WORDS = st.sampled_from([b"never", b" Next\n", b"Due", b"253402300799998", b"9999-12-31T23:59:59.999Z", b"nevermore"])
_NAMED = st.from_regex(r"\A ?(delay|b)/[0-1]{1,2}/[0-9]{1,3}(,[0-9]{1,3}){0,3}[,/ ]?\Z").map(str.encode)
_HEADERS = {
    h.UNTIL: st.one_of(_MILLIS, _INSTANT, _INSTANT, _JUNK, _WORDS),
    h.FOR: st.one_of(_UNITS, _UNITS, _ISO, _JUNK),
    h.LEVEL: st.one_of(_LEVEL, _JUNK),
    h.CANCEL: st.one_of(_ID, _JUNK),
    h.CANCEL_ORIGIN: st.one_of(
        _NAMED,
        st.from_regex(r"\A(delay|other)/0?[01]/[0-9]{1,16}[ \n]?\Z").map(str.encode),
        st.just(b"delay/0/7"),
        st.from_regex(r"\A[a./]{1,8}/[0-9]{0,10}/[0-9]{0,3}\Z").map(str.encode),
        _JUNK,
    ),
    h.MOVE: st.one_of(_ID, _JUNK),
    h.MOVE_ORIGIN: st.one_of(st.just(b"delay/0/7"), _NAMED, _JUNK),
    h.REPLY_TO: st.one_of(st.just(b"answers"), _JUNK),
    h.CORRELATION: st.one_of(_ID, _JUNK),
    h.TOPIC: st.one_of(st.just(b"orders"), st.from_regex(r"\A[a-c./ ]{1,3}\Z").map(str.encode), _JUNK),
    h.PARTITION: st.one_of(_LEVEL, _JUNK),
    h.ID: st.one_of(_ID, _JUNK),
    h.REPLACE: st.one_of(st.sampled_from([b"true", b"FALSE", b" True\n"]), _JUNK),
    h.EVERY: st.one_of(_UNITS, _JUNK),
    h.CRON: st.one_of(st.just(b"0 9 * * *"), _JUNK),
    h.ANCHOR: st.one_of(_MILLIS, _JUNK),
    h.TIMES: _JUNK,
    h.MISSED: _JUNK,
    h.DUE: _JUNK,
    "x": _JUNK,
}


def _header(name: str) -> st.SearchStrategy[tuple[str, bytes | None]]:
    return st.tuples(st.just(name), _HEADERS[name])


@st.composite
def records(draw: st.DrawFn) -> Row:
    """One time and a target as a rule, anything beside them."""
    headers = [
        draw(
            _header(
                draw(
                    st.sampled_from(
                        [h.UNTIL, h.UNTIL, h.FOR, h.FOR, h.LEVEL, h.CANCEL, h.CANCEL_ORIGIN, h.CRON, h.EVERY]
                    )
                )
            )
        )
    ]
    if draw(st.integers(0, 4)):
        headers.append((h.TOPIC, b"t"))
    if not draw(st.integers(0, 4)):
        if draw(st.booleans()):
            headers = [(h.UNTIL, draw(_WORDS))]
        names = [h.MOVE, h.MOVE_ORIGIN], [h.REPLY_TO, h.CORRELATION]
        headers += [draw(_header(draw(st.sampled_from(each)))) for each in names]
    if draw(st.booleans()):
        headers += draw(st.lists(st.sampled_from(sorted(_HEADERS)).flatmap(_header), max_size=4))
    return record(*draw(st.permutations(headers)), key=draw(st.none() | st.binary(max_size=3)))


_FORGED = {
    h.COPY_ORIGIN: st.one_of(st.integers(0, 2 * OFFSET).map(lambda n: str(n).encode()), _JUNK),
    h.COPY_DUE: st.one_of(
        _MILLIS,
        _MILLIS,
        st.just(str(h.NEVER_MS).encode()),
        st.integers(0, 10**15).map(lambda n: str(n).encode()),
        _JUNK,
    ),
    h.COPY_ROLLS: st.one_of(st.integers(0, 33_000).map(lambda n: str(n).encode()), _JUNK),
    h.COPY_ATTEMPT: st.one_of(st.just(b"1"), st.just(b"1"), _JUNK),
    h.COPY_AT: st.one_of(_MILLIS, _JUNK),
}


@st.composite
def copies(draw: st.DrawFn) -> Row:
    """Mostly whole copies, with one header of an original beside them now and then."""
    names = [name for name in _FORGED if name == h.COPY_ORIGIN or draw(st.integers(0, 9))]
    headers = [(name, draw(_FORGED[name])) for name in names]
    headers += [(h.TOPIC, b"t"), *draw(st.lists(st.sampled_from([h.ID, "x", h.FOR]).flatmap(_header), max_size=1))]
    return record(*draw(st.permutations(headers)))
