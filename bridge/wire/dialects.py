"""Dialects: the headers of other schedulers, read as if their producers had written ours.

A delay topic may be declared with a `dialect`; its records then get, before anything else is decoded, the native
headers that say the same. What they mean to the bridge is thereby decided in one place. Copies that the bridge wrote
itself carry native headers only and are left alone, and so is a record without any header of the dialect: native
headers work in every topic. (Where the key is the id, a message without a value cannot be told from a cancel.)

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

This is the table; `ingest.dialect_columns` reads records by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bridge.wire import headers as h

NATIVE: Final = "native"
NOT_CANCELLING: Final = frozenset((*h.COMMANDS, h.COPY_FORWARDED))
"""Native headers with which a record without a value does not cancel its key: it is a command and says what it does, or
the bridge, or a client, has sent it on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a scheduler's headers are read.

    `times` are (foreign header, native header, whether in seconds), the first that is there counts, all of them if
    `several_times` (then two are a mistake). `renamed` are other headers by their native names. `key` is the header
    with the key to be delivered. With `keyed`, the record's key is its id: a later record of the same key takes the
    earlier one's place, and one without a value (that has none of `NOT_CANCELLING`), or with the header and text of
    `cancels`, cancels it.
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
