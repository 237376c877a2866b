"""A record of a delay topic -> the columns of an entry, as SQL expressions of Spark: no Python per record.

Invariants. No record raises, with any bytes: Spark 4 is in ANSI mode, where one poison record would stop the query for
ever. So every cast is a `try_cast` behind a pattern that limits the digits, and every look-up a `get`. The result is a
function of the record and of the parameters in force at its offset, never of the session (its time zone, say) nor of
the moment.

Speed. Each `select` is a stage whose columns the next one uses more than once, so the optimizer keeps the stages apart
and computes nothing twice. `array_position` looks headers up. There is no lambda: it would keep its stage out of
whole-stage code, and be interpreted for each record. Arrow does the work that would need one, the removal of control
headers from a record's own (`own_headers`), and the measuring of headers, which would copy each of them
(`header_limits`). Groups of stages become methods of their own (`_bounded`), short enough for HotSpot to compile. Cheap
patterns precede expensive ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Final

from bridge.ingest import sql as F
from bridge.ingest.decode_in_force import Parameters, in_force
from bridge.ingest.decode_times import duration_fields, fields_ms, instant_ms, matches, one_unit_ms, whole_number
from bridge.ingest.dialect_columns import delivered_key, native_headers
from bridge.ingest.sql import Column, Relation, long
from bridge.wire import headers as h
from bridge.wire.commands import CORRELATION_LENGTH_MAX
from bridge.wire.decode_epochs import DecodeEpochs
from bridge.wire.dialects import NATIVE
from bridge.wire.reasons import RejectReason
from bridge.wire.schedule import TICK_DELAY_MS_MAX, TICK_MAX
from timerstore.cancels.cancels import NO_ORIGIN, SEVERAL
from timerstore.rows.entry import UNCOPYABLE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AT_MIN: Final = -(2**63)
"""`at` of rejects and commands: minus infinity."""

_SMALLINT_MAX: Final = 32_767
_HEADER_BYTES: Final = 10
"""Upper bound of a header's framing: three varints."""


def decode(records: DataFrame, all_epochs: Mapping[tuple[str, int], DecodeEpochs]) -> DataFrame:
    """The entry of every record, in the entry schema's columns and order; `header_limits` and `own_headers` finish it.

    `records` has the columns of Spark's Kafka source with `includeHeaders`. `all_epochs` has every (topic, partition)
    of the records; a record of any other stops the query, since its position would be a guess. Raises ValueError for a
    partition without epochs, or whose epochs do not begin at offset 0 or are not in order of offset."""
    methods = (
        (_native, _record, _common_headers),
        (_other_headers,),
        (_own_headers,),
        (_repeats,),
        (_texts,),
        (_numbers, _fields, _times),
        (_judged,),
        (_verdict,),
    )
    parameters, view = in_force(all_epochs), f"records_{uuid.uuid4().hex}"
    first, *others = methods
    rows = _staged(Relation(view), first, parameters)
    for stages in others:
        rows = _staged(_bounded(rows), stages, parameters)
    session = records.sparkSession
    records.createTempView(view)
    try:
        return session.sql(rows.sql)
    finally:
        session.catalog.dropTempView(view)


def _staged(rows: Relation, stages: Sequence[_Stage], parameters: Parameters) -> Relation:
    return reduce(lambda above, stage: stage(above, parameters), stages, rows)


def _bounded(rows: Relation) -> Relation:
    """The same rows, as a boundary between two methods of generated code.

    Otherwise all of decoding would be one method of 27,000 bytecodes: HotSpot only interprets methods of more than
    8,000, and forced to compile, it takes more than ten seconds of a core. Among the operators that keep rows
    unchanged, only Expand (of which UNPIVOT is made) asks for every column of its input at once, which is Spark's
    condition for a method. The optimizer does not look through it either, so it has less to try."""
    unpivoted = Relation(f"{rows.sql} UNPIVOT INCLUDE NULLS (`partition` FOR unused IN (`partition`))")
    return unpivoted.with_columns({}, without=["unused"])


_Stage = Callable[[Relation, Parameters], Relation]


# -- stages ----------------------------------------------------------------------------------------------------------


def _native(records: Relation, parameters: Parameters) -> Relation:
    """Parameters that differ by record. For topics with a dialect also the native form of headers and key, as the
    bridge's own producers would have written them, beside the original form for rejects."""
    if parameters.row is not None and parameters.lookup is not None:
        records = records.with_columns({"p_row": parameters.row}).with_columns({"p": parameters.lookup})
    if not parameters.dialects:
        return records
    native = {
        "raw_headers": F.col("headers"),
        "raw_key": F.col("key"),
        "headers": native_headers(parameters.dialects, parameters.dialect),
        "key": delivered_key(parameters.dialects, parameters.dialect),
    }
    return records.with_columns(native, without=["headers", "key"])


def _record(records: Relation, parameters: Parameters) -> Relation:
    """The record's own columns, the names of its headers, and its parameters."""
    kept = ["topic", "partition", "offset", "key", "value", "headers"]
    kept += ["p"] if parameters.lookup is not None else []
    kept += ["raw_headers", "raw_key"] if parameters.dialects else []
    return records.select(
        *map(F.col, kept),
        F.coalesce(F.unix_millis(F.col("timestamp")), long(0)).alias("ts"),
        F.coalesce(F.col("timestampType") == 1, False).alias("by_broker"),
        F.coalesce(F.col("headers")["key"], F.array().cast("array<string>")).alias("names"),
    )


_COMMON: Final = (h.UNTIL, h.FOR, h.LEVEL, h.CANCEL, h.TOPIC, h.ID)
_OTHER: Final = tuple(name for name in h.STRIPPED if name not in _COMMON)
_TIMES: Final = (h.UNTIL, h.FOR, h.LEVEL, h.CANCEL, h.CANCEL_ORIGIN)


def _common_headers(rows: Relation, _: Parameters) -> Relation:
    """The places of the common control headers: `at_<name>`, counted from 1; 0 without the header."""
    return rows.with_columns({"size": F.size(F.col("names"))} | {_place(name): _position(name) for name in _COMMON})


def _other_headers(rows: Relation, _: Parameters) -> Relation:
    """The places of the other control headers; 0 for all if the record has common ones only."""
    rest = F.col("size") > _count(_COMMON)
    return rows.with_columns({_place(name): F.when(rest, _position(name)).otherwise(long(0)) for name in _OTHER})


def _own_headers(rows: Relation, _: Parameters) -> Relation:
    """The headers of a record with own headers; otherwise null. And, if names are repeated, the names without half of
    the control headers (`_repeats` removes the other half)."""
    more = F.col("size") > F.col("controls")
    repeats = more & (F.size(F.array_distinct(F.col("names"))) < F.col("size"))
    others = reduce(F.array_remove, h.CONTROL[::2], F.col("names"))
    return rows.with_columns({"controls": _count(h.STRIPPED)}).with_columns(
        {"own": F.when(more, F.col("headers")), "others": F.when(repeats, others)}
    )


def _repeats(rows: Relation, _: Parameters) -> Relation:
    """Whether a control header is repeated, and the facts about a schedule."""
    others = reduce(F.array_remove, h.CONTROL[1::2], F.col("others"))
    twice = F.coalesce(F.col("size") - F.size(others) > _count(h.CONTROL), False)
    schedules = _count((h.EVERY, h.CRON))
    one = (schedules == 1) & (_count((h.LEVEL, *h.COMMANDS)) == 0)
    beside = _count(tuple(name for name in h.SCHEDULE if name not in (h.EVERY, h.CRON))) > 0
    return rows.with_columns(
        {
            "twice": F.when(F.col("others").is_not_null(), twice).otherwise(False),
            "recurs": schedules > 0,
            "is_one_schedule": one,
            "is_beside_none": (schedules == 0) & beside,
        }
    )


def _texts(rows: Relation, _: Parameters) -> Relation:
    """The texts of the headers. At most one time is legal: that one is `time`, `number`, `until`."""
    time_at = reduce(lambda a, b: a + b, (_at(name) for name in _TIMES))
    columns = {
        "times": _count(_TIMES),
        "time": F.when(_count(_TIMES) == 1, _text(time_at)),
        "named_text": _text(F.when(_at(h.MOVE_ORIGIN) > 0, _at(h.MOVE_ORIGIN)).otherwise(_at(h.CANCEL_ORIGIN))),
        "topic_text": _text(F.when(_is_command(), _at(h.REPLY_TO)).otherwise(_at(h.TOPIC))),
        "id_text": F.try_validate_utf8(
            _text(F.when(_at(h.CANCEL) > 0, _at(h.CANCEL)).when(_at(h.MOVE) > 0, _at(h.MOVE)).otherwise(_at(h.ID)))
        ),
        "correlation_text": F.try_validate_utf8(_text(F.when(_is_command(), _at(h.CORRELATION)))),
        "replace_text": F.lower(_text(_at(h.REPLACE))),
        "is_copy": _at(h.COPY_ORIGIN) > 0,
    }
    for name in (h.PARTITION, h.COPY_ORIGIN, h.COPY_DUE, h.COPY_ROLLS, h.COPY_ATTEMPT, h.COPY_AT, h.COPY_TICK):
        columns[_number_name(name)] = F.when(_at(name) > 0, whole_number(_text(_at(name))))
    return rows.with_columns(columns)


def _numbers(rows: Relation, _: Parameters) -> Relation:
    """`number`; `until` (epoch ms); `duration`, the text of one that is no bare number; and `named`, the offset in a
    command by origin: SEVERAL for more than one, NO_ORIGIN for those of another partition. Each is null for a time of
    another form."""
    rows = rows.with_columns({"number": whole_number(F.col("time"))})
    time, number, named = F.col("time"), F.col("number"), F.col("named_text")
    moment = F.when(number.is_not_null(), number)
    for word, ms in h.MOVED_TO.items():
        moment = moment.when(_is_move() & (F.lower(time) == word), long(ms))
    until = moment.otherwise(instant_ms(time))
    is_named = matches(named, h.ORIGINS_PATTERN) & (~_is_move() | matches(named, h.MOVED_PATTERN))
    return rows.with_columns(
        {
            "until": F.when(_at(h.UNTIL) > 0, until),
            "duration": F.when((_at(h.FOR) > 0) & number.is_null(), time),
            "named": F.when(_names_origin(), F.when(is_named, _named_origin(named))),
        }
    )


def _fields(rows: Relation, _: Parameters) -> Relation:
    """`duration_ms` of one number with a unit; `fields` of any other duration, the numbers W D H M S ms as texts."""
    duration = F.col("duration")
    simple = matches(duration, h.ONE_UNIT_PATTERN)
    fits = F.octet_length(duration) <= h.TIME_LENGTH_MAX
    return rows.with_columns(
        {
            "duration_ms": F.when(simple, one_unit_ms(duration)),
            "fields": F.when(duration.is_not_null() & ~simple & fits, duration_fields(duration)),
        }
    )


def _times(rows: Relation, parameters: Parameters) -> Relation:
    """`delay`: due - ts in ms; null if invalid."""
    number, ts = F.col("number"), F.col("ts")
    until = F.col("until")  # from an earlier stage: the four uses here compute it once
    sane = until.between(long(0), long(h.UNTIL_MS_MAX)) & (until >= ts - h.PAST_MS_MAX)
    delay = (
        F.when(F.col("is_copy"), F.col(_number_name(h.COPY_DUE)) - ts)
        .when(_at(h.FOR) > 0, F.coalesce(number, F.col("duration_ms"), fields_ms(F.col("duration"), F.col("fields"))))
        .when(_at(h.UNTIL) > 0, F.when(sane, until) - ts)
        .when(_at(h.LEVEL) > 0, F.when(number >= 1, parameters.level_ms(number)))
        .when(_is_cancel() | ((F.col("times") == 0) & F.col("recurs")), long(0))
    )
    return rows.with_columns({"delay": delay})


def _judged(rows: Relation, parameters: Parameters) -> Relation:
    """The reason of a reject, or null."""
    return rows.with_columns({"reason": _reason(parameters)})


def _verdict(rows: Relation, parameters: Parameters) -> Relation:
    kind = (
        F.when(F.col("reason").is_not_null(), 2).when(_is_cancel(), _cancel_kind()).when(_is_command(), 3).otherwise(0)
    )
    due = F.col("ts") + F.when(F.col("kind").isin(0, 3), F.col("delay")).otherwise(long(0))
    return rows.with_columns({"kind": kind.cast("tinyint")}).with_columns({"due": due}).select(*_entry(parameters))


def _reason(parameters: Parameters) -> Column:
    """The first applicable reason, in the order of `RejectReason`."""
    delay, own_times = F.col("delay"), F.col("times")
    copy = {name: F.col(_number_name(name)) for name in h.COPY if name != h.COPY_FORWARDED}
    longest_ms = parameters.copy_max_delay_ms
    longest_ms = F.when(F.col("recurs"), F.greatest(longest_ms, long(TICK_DELAY_MS_MAX))).otherwise(longest_ms)
    good_copy = (
        (own_times == 0)
        & ~_is_command()
        & (_at(h.REPLACE) == 0)
        & F.coalesce(copy[h.COPY_ORIGIN] < F.col("offset"), False)
        & F.coalesce((delay <= longest_ms) | (F.col("recurs") & (copy[h.COPY_DUE] == h.NEVER_MS)), False)
        & F.coalesce(copy[h.COPY_ROLLS] <= _SMALLINT_MAX, False)
        & F.coalesce(copy[h.COPY_ATTEMPT] <= _SMALLINT_MAX, False)
        & ((_at(h.COPY_AT) == 0) | copy[h.COPY_AT].is_not_null())
        & ((_at(h.COPY_TICK) > 0) | ~F.col("recurs"))
        & ((_at(h.COPY_TICK) == 0) | F.coalesce(copy[h.COPY_TICK] <= TICK_MAX, False))
    )
    original, timer = ~F.col("is_copy"), ~_is_command()
    has_id = (timer & (_at(h.ID) > 0)) | (_at(h.CANCEL) > 0) | (_at(h.MOVE) > 0)
    bad_topic = ~matches(F.col("topic_text"), h.TOPIC_PATTERN)
    correlates = F.coalesce(F.length(F.col("correlation_text")) <= CORRELATION_LENGTH_MAX, False)
    id_length = F.coalesce(F.length(F.col("id_text")), 0)
    replaces = F.coalesce(F.col("replace_text"), "")
    partition = F.coalesce(F.col(_number_name(h.PARTITION)), long(-1))
    sent = F.col("raw_headers" if parameters.dialects else "headers")
    rules: list[tuple[RejectReason, Column]] = [
        (RejectReason.CREATE_TIME, ~F.col("by_broker")),
        (RejectReason.DUPLICATE_HEADER, F.col("twice")),
        (RejectReason.BAD_COPY, F.col("is_copy") & ~good_copy),
        (RejectReason.NO_TIME, original & (own_times == 0) & ~F.col("recurs")),
        (
            RejectReason.TWO_TIMES,
            (own_times > 1) | (_count(h.COMMANDS) > 1) | (original & F.col("recurs") & ~F.col("is_one_schedule")),
        ),
        (RejectReason.BAD_SCHEDULE, F.col("is_beside_none")),
        (RejectReason.BAD_UNTIL, delay.is_null() & (_at(h.UNTIL) > 0)),
        (RejectReason.BAD_FOR, delay.is_null() & (_at(h.FOR) > 0)),
        (RejectReason.BAD_LEVEL, delay.is_null()),
        (RejectReason.BEYOND_MAX, original & (delay > parameters.max_delay_ms) & ~_is_moved_to()),
        (RejectReason.NO_TARGET, timer & (_at(h.TOPIC) == 0) & ~parameters.has_default_target),
        (RejectReason.BAD_TARGET, timer & (_at(h.TOPIC) > 0) & bad_topic),
        (RejectReason.BAD_PARTITION, timer & (_at(h.PARTITION) > 0) & ~partition.between(long(0), long(2**31 - 1))),
        (RejectReason.BAD_ID, has_id & ~id_length.between(1, h.ID_LENGTH_MAX)),
        (RejectReason.BAD_ORIGIN, _names_origin() & F.col("named").is_null()),
        (
            RejectReason.BAD_REPLY,
            ~timer & (((_at(h.REPLY_TO) > 0) & bad_topic) | ((_at(h.CORRELATION) > 0) & ~correlates)),
        ),
        (
            RejectReason.BAD_REPLACE,
            timer & (_at(h.REPLACE) > 0) & ~((replaces == "false") | ((replaces == "true") & (_at(h.ID) > 0))),
        ),
        # Limits of producers' records: a copy is the bridge's own, and its original was within the limits.
        (RejectReason.TOO_MANY_HEADERS, original & (F.coalesce(F.size(sent), 0) > parameters.headers_max)),
        (RejectReason.PAYLOAD_TOO_LARGE, original & (_payload_bytes() > parameters.payload_bytes_max)),
        (
            RejectReason.TOO_LARGE_TO_ROLL,
            # In this order: the size is computed only for rolled records. A copy was as large before.
            original
            & timer
            & ((delay > parameters.roll_window_ms) | F.col("recurs"))
            & (_bytes() > parameters.roll_bytes_max),
        ),
    ]
    if parameters.dialects:  # `header_limits` covers the others
        large = _header_bytes(sent) > parameters.header_bytes_max
        rules.append((RejectReason.HEADERS_TOO_LARGE, original & (parameters.dialect != NATIVE) & large))
    (first, applies), *others = rules
    reason = F.when(applies, first.value)
    for code, applies in others:
        reason = reason.when(applies, code.value)
    return reason


def _entry(parameters: Parameters) -> list[Column]:
    """The columns of `names.NAMED_ENTRY`, in its order."""
    timer, rejected = F.col("kind") == 0, F.col("kind") == 2
    ts, due, window = F.col("ts"), F.col("due"), parameters.roll_window_ms
    # The last quarter of (ts, ts + W], spread so that records of one schedule do not roll together.
    spread = F.xxhash64(F.col("topic"), F.col("partition"), F.col("offset"))
    rolls_at = ts + window - F.pmod(spread, window.div(long(4)))
    # A recurring message comes up at once, and its first tick is written as a copy (plan/ticks.py).
    at = F.when(F.col("recurs") & ~F.col("is_copy"), ts).when(due - ts <= window, due).otherwise(rolls_at)
    # A forged backoff must not outlive the topic's retention. (`least` and `greatest` pass over nulls, hence the
    # condition.)
    copy_at = F.col(_number_name(h.COPY_AT))
    backoff = F.when(copy_at.is_not_null(), F.least(copy_at, ts + window))
    copied = timer & F.col("is_copy")
    own = F.when(F.col("recurs"), F.col("headers")).otherwise(F.col("own"))  # finish.py reads the schedule from them
    key, headers = F.col("key"), F.when(timer, own).otherwise(F.col("headers"))
    if parameters.dialects:
        key = F.when(rejected, F.col("raw_key")).otherwise(key)
        headers = F.when(timer, own).when(rejected, F.col("raw_headers")).otherwise(F.col("headers"))
    return [
        F.col("topic"),
        F.col("partition"),
        F.col("offset"),
        F.when(timer, F.greatest(at, backoff)).otherwise(long(AT_MIN)).alias("at"),
        ts,
        due,
        F.col("kind"),
        F.when(~rejected, F.col("topic_text")).alias("target"),
        F.when(timer, F.col(_number_name(h.PARTITION)).try_cast("int")).alias("target_partition"),
        key.alias("key"),
        F.when(~rejected & (F.col("named") == SEVERAL), _named_offsets(F.col("named_text")).cast("binary"))
        .otherwise(F.col("value"))
        .alias("value"),
        headers.alias("headers"),
        F.when(~(rejected | _names_origin()), F.col("id_text")).alias("id"),
        (timer & F.coalesce(F.col("replace_text") == "true", False)).alias("replace"),
        F.when(copied, F.col(_number_name(h.COPY_ORIGIN)))
        .when(rejected, F.col("offset"))
        .otherwise(F.coalesce(F.col("named"), F.col("offset")))
        .alias("origin"),
        _smallint(F.when(copied, F.col(_number_name(h.COPY_ATTEMPT)))).alias("attempt"),
        _smallint(
            F.when(copied, F.col(_number_name(h.COPY_ROLLS))).when(timer & _is_uncopyable(parameters), long(UNCOPYABLE))
        ).alias("rolls"),
        F.col("reason"),
        F.when(timer & F.col("recurs"), "").alias("schedule"),
        F.coalesce(F.when(copied, F.col(_number_name(h.COPY_TICK))).try_cast("int"), 0).alias("tick"),
    ]


# -- expressions -----------------------------------------------------------------------------------------------------


def _place(name: str) -> str:
    return "at_" + name.replace("-", "_")


def _number_name(name: str) -> str:
    return "number_" + name.replace("-", "_")


def _at(name: str) -> Column:
    return F.col(_place(name))


def _position(name: str) -> Column:
    return F.array_position(F.col("names"), name)


def _count(names: Sequence[str]) -> Column:
    """The number of different headers present among these."""
    return reduce(lambda a, b: a + b, ((_at(name) > 0).cast("int") for name in names))


def _is_cancel() -> Column:
    return (_at(h.CANCEL) > 0) | (_at(h.CANCEL_ORIGIN) > 0)


def _cancel_kind() -> Column:
    """A cancel with an answer is another kind."""
    return F.when((_at(h.REPLY_TO) > 0) | (_at(h.CORRELATION) > 0), 4).otherwise(1)


def _is_command() -> Column:
    return _is_cancel() | _is_move()


def _is_move() -> Column:
    return (_at(h.MOVE) > 0) | (_at(h.MOVE_ORIGIN) > 0)


def _is_moved_to() -> Column:
    """Whether a recurring message is paused or resumed, or put-off messages are brought forward."""
    return _is_move() & F.coalesce((F.col("until") >= h.NEXT_MS) | (F.col("until") == h.AS_DUE_MS), False)


def _names_origin() -> Column:
    return (_at(h.CANCEL_ORIGIN) > 0) | (_at(h.MOVE_ORIGIN) > 0)


def _named_origin(text: Column) -> Column:
    is_own = F.startswith(text, F.concat_ws("/", F.col("topic"), F.col("partition"), ""))
    offset = F.when(F.contains(text, ","), long(SEVERAL)).otherwise(_named_offsets(text).try_cast("bigint"))
    return F.when(is_own, offset).otherwise(long(NO_ORIGIN))


def _named_offsets(text: Column) -> Column:
    return F.substring_index(text, "/", -1)


def _bytes() -> Column:
    """Size of key, value and headers, uncompressed."""
    framing = F.coalesce(F.size(F.col("names")) * _HEADER_BYTES, 0)
    return _payload_bytes() + _header_bytes(F.col("headers")) + framing


def _is_uncopyable(parameters: Parameters) -> Column:
    """Whether it is too large for a copy. In this order: headers are counted only for records that are large without
    them."""
    most = parameters.roll_bytes_max
    return (_payload_bytes() > most.div(long(2))) & (_bytes() > most)


def _payload_bytes() -> Column:
    return F.coalesce(F.octet_length(F.col("key")), 0) + F.coalesce(F.octet_length(F.col("value")), 0)


def _header_bytes(headers: Column) -> Column:
    """Size of all names and values. No lambda: it would keep its stage out of generated code."""
    texts = F.concat_ws("", headers["key"], headers["value"].cast("array<string>"))
    return F.coalesce(F.octet_length(texts), 0)


def _text(position: Column) -> Column:
    """The value of the header at `position` as text without surrounding white space; the bytes may not be UTF-8."""
    return F.btrim(F.get(F.col("headers"), position.cast("int") - 1)["value"].cast("string"), h.WHITE_SPACE)


def _smallint(number: Column) -> Column:
    return F.coalesce(number.try_cast("smallint"), F.lit(0).cast("smallint"))
