"""Predicts whether a redriven record would be rejected again: the plain reader's decoder judges it by the present
configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from bridge.ingest.decode_records import decode_records
from bridge.ingest.finish import with_schedules
from bridge.settings.model import Settings
from bridge.wire.decode_epochs import DecodeEpoch, DecodeEpochs
from bridge.wire.headers import Headers
from bridge.wire.letters import Letter
from bridge.wire.reasons import RejectReason
from bridge.wire.received import Record
from bridge.wire.schedule import schedule_of
from timerstore.rows.entry import Kind
from timerstore.rows.position import OFFSET_MAX

_COPIES: Final = {"copy_max_delay_ms": 10**14, "roll_window_ms": 86_400_000}
"""No limit for the delay of a copy: its original was accepted by the limit of that time. And any roll window: it has no
effect on a rejection."""
_REASONS: Final = {reason.value: reason for reason in RejectReason}
_COLUMNS: Final = ("reason", "schedule", "due", "tick")


class GoingBack(NamedTuple):
    """A letter, and its redriven record."""

    letter: Letter
    headers: Headers
    key: bytes | None
    value: bytes | None


class Rejection:
    """The judge of redriven records, by the configuration of all delay topics."""

    def __init__(self, settings: Settings) -> None:
        self._epochs: Mapping[str, DecodeEpochs] = {
            name: (DecodeEpoch(offset=0, parameters=settings.decode_parameters(name, **_COPIES)),)
            for name in settings.delay_topics
        }
        self._every_min_ms = settings.limits.every_min

    def reasons(self, records: Sequence[GoingBack], now_ms: int) -> list[RejectReason | None]:
        """The reason of each record for a rejection if it were written now; None: the record itself is valid. Only
        dispatch learns whether its target takes it."""
        written = [
            Record(letter.topic, letter.partition, OFFSET_MAX, now_ms, True, key, value, headers)
            for letter, headers, key, value in records
        ]
        epochs = {(record.topic, record.partition): self._epochs[record.topic] for record in written}
        entries = with_schedules(decode_records(written, epochs)).select(["kind", *_COLUMNS]).to_pylist()
        return [self._reason(entry, now_ms) for entry in entries]

    def _reason(self, entry: Mapping[str, Any], now_ms: int) -> RejectReason | None:
        if entry["kind"] == Kind.REJECT:
            return _REASONS[entry["reason"]]
        if entry["schedule"] is None or entry["tick"]:
            return None
        try:
            schedule, is_start_given = schedule_of(entry["schedule"], self._every_min_ms)
        except ValueError:
            return RejectReason.BAD_SCHEDULE
        first_ms = schedule.first(now_ms, entry["due"] if is_start_given else None)
        return RejectReason.BAD_SCHEDULE if first_ms is None else None
