"""Dialects: the headers of other schedulers, translated into the native ones.

A delay topic may be declared with a `dialect`. Decoding first adds the equivalent native headers to its records, so a
single place defines their meaning. The bridge's own copies carry native headers only and need no translation, nor does
a record without headers of the dialect: native headers work in every topic. (Where the key is the id, a message without
a value is the same as a cancel.)

dialect   time                                             target                  id and others
etf1      scheduler-epoch (s)                              scheduler-target-topic  the record's key (`keyed`);
                                                                                   scheduler-target-key: key delivered
karafka   schedule_target_epoch (s)                        schedule_target_topic   as etf1, with schedule_target_key and
                                                                                   schedule_target_partition
rocketmq  TIMER_DELAY_SEC (s) > TIMER_DELAY_MS >           REAL_TOPIC              -
          TIMER_DELIVER_MS > __STARTDELIVERTIME > DELAY
wushilin  publish-after-ts (ms)                            the default target      -
cesium    cesium-delay-by, cesium-delay-until (ms)         the default target      -
rabbitmq  x-delay (ms)                                     the default target      -

`ingest.dialect_columns` decodes records by this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bridge.wire import headers as h

NATIVE: Final = "native"
NOT_CANCELLING: Final = frozenset((*h.COMMANDS, h.COPY_FORWARDED))
"""Native headers that keep a record without a value from cancelling its key: it is an explicit command, or was
forwarded by the bridge or a client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The translation of one scheduler's headers.

    `times` are (foreign header, native header, whether in seconds). The first one present counts; with `several_times`
    all count, and two are an error. `renamed` maps other headers to their native names. `key` is the header with the
    delivered key. With `keyed`, the record's key is its id: a later record of the same key replaces the earlier one. A
    record without a value (and without any of `NOT_CANCELLING`), or with the header and text of `cancels`, cancels it.
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
        """All foreign headers; the bridge removes them before delivery."""
        names = [name for name, _, _ in self.times] + list(self.renamed) + list(self.also)
        names += [name for name in (self.key, self.cancels and self.cancels[0]) if name]
        return tuple(dict.fromkeys(names))


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
