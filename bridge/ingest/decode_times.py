"""The forms of time in headers, as column expressions (`headers.py` has the same as functions).

None raises, for any text: every cast is a `try_cast` behind a pattern that limits the digits.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

from bridge.ingest import sql as F
from bridge.ingest.sql import Column, long
from bridge.wire import headers as h


def matches(text: Column, pattern: str) -> Column:
    """Whether the whole text matches; null counts as no."""
    return F.coalesce(F.rlike(text, rf"^(?:{pattern})\z"), False)


def whole_number(text: Column) -> Column:
    """A whole number without sign; null for any other text."""
    return F.when(matches(text, h.NUMBER_PATTERN), text.try_cast("bigint"))


def instant_ms(text: Column) -> Column:
    """Epoch ms of RFC 3339, rounded up. Spark keeps microseconds; `tiny` tells of the digits below."""
    micros = F.unix_micros(F.translate(text, "tz", "TZ").try_cast("timestamp"))
    tiny = F.rlike(text, r"\.[0-9]{6}[0-9]*[1-9]").cast("int")
    fits = (F.octet_length(text) <= h.TIME_LENGTH_MAX) & matches(text, h.INSTANT_PATTERN)
    return F.when(fits, (micros + tiny + 999).div(long(1000)))


def one_unit_ms(text: Column) -> Column:
    """Ms of a text that matches ONE_UNIT_PATTERN. Its numbers are too small to overflow."""
    end = F.length(text) - F.when(F.endswith(text, "ms"), 2).otherwise(1)
    unit_ms = (
        F.when(F.endswith(text, "ms"), long(1))
        .when(F.endswith(text, "s"), long(1_000))
        .when(F.endswith(text, "m"), long(60_000))
        .when(F.endswith(text, "h"), long(3_600_000))
        .otherwise(long(86_400_000))
    )
    return F.substr(text, 1, end).try_cast("bigint") * unit_ms


_FIELDS_MS: Final = (*h.ISO_MS, 1)
"""Weeks to milliseconds."""


def duration_fields(text: Column) -> Column:
    """The numbers of a duration in the order of `_FIELDS_MS`, as texts, or null. One replacement and one split, rather
    than a match for each group."""
    units = F.regexp_replace(text, rf"^(?:{h.UNITS_PATTERN})\z", ",$1,$2,$3,$4,$5")
    iso = F.regexp_replace(text, rf"^(?:{h.ISO_PATTERN})\z", "$1,$2,$3,$4,$5,")
    return F.split(F.when(matches(text, h.UNITS_PATTERN), units).when(matches(text, h.ISO_PATTERN), iso), ",")


def fields_ms(text: Column, fields: Column) -> Column:
    """The sum of the fields and of the fraction that ISO 8601 allows, rounded up. Too small to overflow."""
    numbers = (F.coalesce(F.get(fields, i).try_cast("bigint"), long(0)) * ms for i, ms in enumerate(_FIELDS_MS))
    fraction = F.regexp_extract(text, r"\.([0-9]+)S", 1)
    milli = F.coalesce(F.rpad(fraction, 3, "0").try_cast("bigint"), long(0))
    tiny = F.rlike(fraction, "^[0-9]{3}[0-9]*[1-9]").cast("bigint")
    return F.when(fields.is_not_null(), reduce(lambda a, b: a + b, numbers) + milli + tiny)
