"""Records of other schedulers in the form of native headers (`wire.dialects`), as Catalyst columns.

The rule of decode.py against lambdas does not hold here: only topics with a dialect pay for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from typing import Final

from bridge.ingest import sql as F
from bridge.ingest.sql import Column
from bridge.wire import headers as h
from bridge.wire.dialects import DIALECTS, NOT_CANCELLING, Dialect

_HEADER_TYPE: Final = "struct<key:string,value:binary>"
_HEADERS_TYPE: Final = f"array<{_HEADER_TYPE}>"


def native_headers(dialects: Sequence[str], in_force: Column) -> Column:
    """The headers of a record of Spark's Kafka source, preceded by their native equivalents.

    `in_force` is the name of the record's dialect; `dialects` are all that occur.
    """
    headers = F.coalesce(F.col("headers"), F.array().cast(_HEADERS_TYPE))
    added = F.array().cast(_HEADERS_TYPE)
    for name in dialects:
        added = F.when(in_force == name, _added(DIALECTS[name])).otherwise(added)
    return F.when(_is_copy(), F.col("headers")).otherwise(F.concat(added, headers))


def delivered_key(dialects: Sequence[str], in_force: Column) -> Column:
    """The key for delivery: a header's, or the record's own; a copy has it as its own."""
    key = F.col("key")
    for name in dialects:
        header = DIALECTS[name].key
        if header is not None:
            named = (in_force == name) & F.coalesce(_has(header), False) & ~_is_copy()
            key = F.when(named, _value(header)).otherwise(key)
    return key


def _added(dialect: Dialect) -> Column:
    times = [
        (_has(name), native, _milliseconds(name) if seconds else _value(name))
        for name, native, seconds in dialect.times
    ]
    cancelled = F.lit(False)
    headers: list[Column] = []
    if dialect.keyed:
        cancelled = F.col("key").is_not_null() & F.col("value").is_null() & ~_has_any(NOT_CANCELLING)
        if dialect.cancels is not None:
            name, text = dialect.cancels
            cancelled = cancelled | (F.col("key").is_not_null() & F.coalesce(_text(name) == text, False))
        headers.append(F.when(cancelled, _header(h.CANCEL, F.col("key"))))
    if dialect.several_times:
        chosen: list[Column] = [F.when(there, _header(native, value)) for there, native, value in times]
    else:
        first = F.lit(None).cast(_HEADER_TYPE)
        for there, native, value in reversed(times):
            first = F.when(there, _header(native, value)).otherwise(first)
        chosen = [first]
    headers += [F.when(~cancelled, header) for header in chosen]
    headers += [
        F.when(~cancelled & _has(name), _header(native, _value(name))) for name, native in dialect.renamed.items()
    ]
    if dialect.keyed:
        timed = reduce(lambda a, b: a | b, (there for there, _, _ in times))
        replaces = ~cancelled & timed & F.col("key").is_not_null()
        headers += [
            F.when(replaces, _header(h.ID, F.col("key"))),
            F.when(replaces, _header(h.REPLACE, F.lit(b"true"))),
        ]
    return F.array_compact(F.array(*headers)).cast(_HEADERS_TYPE)


def _is_copy() -> Column:
    return F.coalesce(_has(h.COPY_ORIGIN), False)


def _header(name: str, value: Column) -> Column:
    return F.named_struct("key", name, "value", value.cast("binary")).cast(_HEADER_TYPE)


def _place(name: str) -> Column:
    return F.coalesce(F.array_position(F.col("headers")["key"], name).cast("int"), F.lit(0))


def _has(name: str) -> Column:
    return _place(name) > 0


def _has_any(names: Collection[str]) -> Column:
    return F.coalesce(F.arrays_overlap(F.col("headers")["key"], F.array(*sorted(names))), False)


def _value(name: str) -> Column:
    return F.get(F.col("headers"), _place(name) - 1)["value"]


def _text(name: str) -> Column:
    return F.btrim(_value(name).cast("string"), h.WHITE_SPACE)


def _milliseconds(name: str) -> Column:
    """Whole seconds as text of milliseconds; null, which decoding refuses, for any other text. (Milliseconds in place
    of seconds become too long a number, and are refused as well.)"""
    text = _text(name)
    return F.when(F.coalesce(F.rlike(text, r"^[0-9]+\z"), False), F.concat(text, "000").cast("binary"))
