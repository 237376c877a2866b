"""Dialects: the headers of other schedulers, read as if their producers had written ours.

A delay topic may be declared with a `dialect`; its records then get, before anything else is decoded, the native
headers that say the same. What they mean to the bridge is thereby decided in one place. Copies that the bridge wrote
itself carry native headers only and are left alone, and so is a record without any header of the dialect: native
headers work in every topic.

dialect   time                                             target                  id, and what else
etf1      scheduler-epoch (s)                              scheduler-target-topic  the record's key (`keyed`);
                                                                                   scheduler-target-key: key delivered
karafka   schedule_target_epoch (s)                        schedule_target_topic   as etf1, with schedule_target_key and
                                                                                   schedule_target_partition
rocketmq  TIMER_DELAY_SEC (s) > TIMER_DELAY_MS >           REAL_TOPIC              -
          TIMER_DELIVER_MS > __STARTDELIVERTIME > DELAY
wushilin  publish-after-ts (ms)                            the default target      -
cesium    cesium-delay-by, cesium-delay-until (ms)         the default target      -
rabbitmq  x-delay (ms)                                     the default target      -

`decode.py`'s rule against lambdas does not hold here: only topics with a dialect pay for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F

from bridge import headers as h

NATIVE: Final = "native"
_HEADER_TYPE: Final = "struct<key:string,value:binary>"
_HEADERS_TYPE: Final = f"array<{_HEADER_TYPE}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a scheduler's headers are read.

    `times` are (foreign header, native header, whether in seconds), the first that is there counts, all of them if
    `several_times` (then two are a mistake). `renamed` are other headers by their native names. `key` is the header
    with the key to be delivered. With `keyed`, the record's key is its id: a later record of the same key takes the
    earlier one's place, and one without a value, or with the header and text of `cancels`, cancels it.
    """

    times: tuple[tuple[str, str, bool], ...]
    renamed: Mapping[str, str]
    key: str | None = None
    keyed: bool = False
    cancels: tuple[str, str] | None = None
    also: tuple[str, ...] = ()
    several_times: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Every foreign header: none of them is delivered."""
        found = [name for name, _, _ in self.times] + list(self.renamed) + list(self.also)
        found += [name for name in (self.key, self.cancels and self.cancels[0]) if name]
        return tuple(dict.fromkeys(found))


DIALECTS: Final[Mapping[str, Dialect]] = {
    "etf1": Dialect(
        times=(("scheduler-epoch", h.UNTIL, True),),
        renamed={"scheduler-target-topic": h.TOPIC},
        key="scheduler-target-key",
        keyed=True,
    ),
    "karafka": Dialect(
        times=(("schedule_target_epoch", h.UNTIL, True),),
        renamed={"schedule_target_topic": h.TOPIC, "schedule_target_partition": h.PARTITION},
        key="schedule_target_key",
        keyed=True,
        cancels=("schedule_source_type", "cancel"),
        also=("schedule_schema_version", "schedule_target_partition_key"),
    ),
    "rocketmq": Dialect(
        times=(
            ("TIMER_DELAY_SEC", h.FOR, True),
            ("TIMER_DELAY_MS", h.FOR, False),
            ("TIMER_DELIVER_MS", h.UNTIL, False),
            ("__STARTDELIVERTIME", h.UNTIL, False),
            ("DELAY", h.LEVEL, False),
        ),
        renamed={"REAL_TOPIC": h.TOPIC},
    ),
    "wushilin": Dialect(times=(("publish-after-ts", h.UNTIL, False),), renamed={}),
    "cesium": Dialect(
        times=(("cesium-delay-by", h.FOR, False), ("cesium-delay-until", h.UNTIL, False)),
        renamed={},
        several_times=True,
    ),
    "rabbitmq": Dialect(times=(("x-delay", h.FOR, False),), renamed={}),
}


def native_headers(dialects: Sequence[str], in_force: Column) -> Column:
    """The headers of a record of Spark's Kafka source with those in front that say the same natively.

    `in_force` is the name of the record's dialect; `dialects` are all that occur.
    """
    headers = F.coalesce(F.col("headers"), F.array().cast(_HEADERS_TYPE))
    added = F.array().cast(_HEADERS_TYPE)
    for name in dialects:
        added = F.when(in_force == name, _added(DIALECTS[name])).otherwise(added)
    return F.when(_is_copy(), F.col("headers")).otherwise(F.concat(added, headers))


def delivered_key(dialects: Sequence[str], in_force: Column) -> Column:
    """The key to be delivered: the one that a header names, or the record's own; a copy carries it as its own."""
    key = F.col("key")
    for name in dialects:
        header = DIALECTS[name].key
        if header is not None:
            named = (in_force == name) & F.coalesce(_has(header), F.lit(False)) & ~_is_copy()
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
        cancelled = F.col("key").isNotNull() & F.col("value").isNull()
        if dialect.cancels is not None:
            name, text = dialect.cancels
            cancelled = cancelled | (F.col("key").isNotNull() & F.coalesce(_text(name) == text, F.lit(False)))
        headers.append(F.when(cancelled, _header(h.CANCEL, F.col("key"))))
    if dialect.several_times:
        chosen = [F.when(there, _header(native, value)) for there, native, value in times]
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
        replaces = ~cancelled & timed & F.col("key").isNotNull()
        headers += [
            F.when(replaces, _header(h.ID, F.col("key"))),
            F.when(replaces, _header(h.REPLACE, F.lit(b"true"))),
        ]
    return F.array_compact(F.array(*headers)).cast(_HEADERS_TYPE)


def _is_copy() -> Column:
    return F.coalesce(_has(h.COPY_ORIGIN), F.lit(False))


def _header(name: str, value: Column) -> Column:
    return F.struct(F.lit(name).alias("key"), value.cast("binary").alias("value")).cast(
        "struct<key:string,value:binary>"
    )


def _place(name: str) -> Column:
    return F.coalesce(F.array_position(F.col("headers")["key"], name).cast("int"), F.lit(0))


def _has(name: str) -> Column:
    return _place(name) > 0


def _value(name: str) -> Column:
    return F.get("headers", _place(name) - 1)["value"]


def _text(name: str) -> Column:
    return F.btrim(_value(name).cast("string"), F.lit(h.WHITE_SPACE))


def _milliseconds(name: str) -> Column:
    """Whole seconds as text of milliseconds; null, which decoding refuses, for anything else. (Milliseconds in place of
    seconds become too long a number, and are refused as well.)"""
    text = _text(name)
    return F.when(F.coalesce(text.rlike(r"^[0-9]+\z"), F.lit(False)), F.concat(text, F.lit("000")).cast("binary"))
