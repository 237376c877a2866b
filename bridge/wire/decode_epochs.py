"""The decode parameters, which together with a record determine its entry, and the offsets from which they hold.

They are part of the committed metadata. A record that is read again is therefore decoded as before, even after a change
of the configuration (`amend_epochs`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from bridge.wire import headers as h
from bridge.wire.dialects import DIALECTS, NATIVE

DEFAULT_LEVELS_MS: Final = h.parse_levels("1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h")
"""RocketMQ's levels. Never change them: stored parameters without levels mean these."""

_SPAN_MS_MAX: Final = 10**14  # 3,000 years: timestamp + span stays far below 2**63
_FIELDS: Final[Mapping[str, tuple[str, Any]]] = {
    "m": ("max_delay_ms", None),
    "w": ("roll_window_ms", None),
    "t": ("has_default_target", False),
    "l": ("levels_ms", DEFAULT_LEVELS_MS),
    "d": ("dialect", NATIVE),
    "v": ("version", 1),
    "c": ("copy_max_delay_ms", 0),
    "b": ("roll_bytes_max", 0),
    "n": ("headers_max", 0),
    "h": ("header_bytes_max", 0),
    "p": ("payload_bytes_max", 0),
}
"""The parameters by their keys in the committed metadata, and the value of an absent key (None: it is required)."""


class NewerFormat(ValueError):
    """Valid data of a later version of the bridge, with parts that this version does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeParameters:
    """The parameters that together with a record determine its entry. All spans are in ms.

    `copy_max_delay_ms` bounds copies. It is the largest maximum delay ever in force (0: the current one): a timer that
    was accepted under a longer maximum has copies that a shorter maximum must not refuse. `following` preserves it.
    `roll_bytes_max` bounds key, value and headers of a rolled message, uncompressed (0: no limit). `headers_max`,
    `header_bytes_max` and `payload_bytes_max` bound producers' records: the number of headers, the bytes of their names
    and values, the bytes of key and value (0: no limit, the meaning of older metadata). Raises ValueError.
    """

    levels_ms: tuple[int, ...] = DEFAULT_LEVELS_MS
    max_delay_ms: int
    roll_window_ms: int
    has_default_target: bool
    dialect: str = NATIVE
    version: int = 1
    copy_max_delay_ms: int = 0
    roll_bytes_max: int = 0
    headers_max: int = 0
    header_bytes_max: int = 0
    payload_bytes_max: int = 0

    def __post_init__(self) -> None:
        if self.dialect not in (NATIVE, *DIALECTS) or self.version != 1:
            raise NewerFormat(f"dialect {self.dialect!r} version {self.version} is not known to this decoder")
        if not self.levels_ms or not all(0 <= level <= _SPAN_MS_MAX for level in self.levels_ms):
            raise ValueError("levels must be one or more spans of 0 ms and longer")
        if not 0 < self.max_delay_ms <= _SPAN_MS_MAX or not 0 <= self.copy_max_delay_ms <= _SPAN_MS_MAX:
            raise ValueError("the maximum delay must be positive, and shorter than 3,000 years")
        if not 4 <= self.roll_window_ms <= _SPAN_MS_MAX:
            raise ValueError("the roll window must be at least 4 ms, and shorter than 3,000 years")
        if not 0 <= self.roll_bytes_max < 2**31:
            raise ValueError("the largest size of a rolled message must be 0 to 2 GiB")
        if not all(0 <= limit < 2**31 for limit in (self.headers_max, self.header_bytes_max, self.payload_bytes_max)):
            raise ValueError("limits of headers and payload must be 0 to 2 GiB")

    @property
    def longest_copy_ms(self) -> int:
        return max(self.max_delay_ms, self.copy_max_delay_ms)

    def following(self, earlier: DecodeParameters) -> DecodeParameters:
        """These parameters as the successors of `earlier`: copies of timers accepted under those stay acceptable."""
        longest = max(self.longest_copy_ms, earlier.longest_copy_ms)
        return replace(self, copy_max_delay_ms=longest if longest > self.max_delay_ms else 0)

    def to_json(self) -> dict[str, Any]:
        """The parameters as JSON for the committed metadata, as short as possible: defaults are left out."""
        values = ((key, getattr(self, name), default) for key, (name, default) in _FIELDS.items())
        compact = {key: value for key, value, default in values if value != default}
        return compact | ({"t": 1} if self.has_default_target else {})

    @classmethod
    def from_json(cls, compact: Mapping[str, Any]) -> DecodeParameters:
        """The inverse of `to_json`. Raises NewerFormat for an unknown key, KeyError for a missing one."""
        if unknown := compact.keys() - _FIELDS:
            raise NewerFormat(f"unknown decode parameters {sorted(unknown)}")
        given = {name: compact.get(key, default) for key, (name, default) in _FIELDS.items()}
        given |= {"max_delay_ms": compact["m"], "roll_window_ms": compact["w"]}
        has_default_target, levels_ms = bool(given.pop("has_default_target")), tuple(given.pop("levels_ms"))
        return cls(**given, has_default_target=has_default_target, levels_ms=levels_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeEpoch:
    """`parameters` are in force from `offset` on, up to the next epoch of the same partition."""

    offset: int
    parameters: DecodeParameters


DecodeEpochs = tuple[DecodeEpoch, ...]


def parameters_at(epochs: DecodeEpochs, offset: int) -> DecodeParameters:
    """The decode parameters at an offset."""
    return epochs[bisect_right(epochs, offset, key=lambda epoch: epoch.offset) - 1].parameters


def amend_epochs(
    epochs: DecodeEpochs, committed_offset: int, log_start: int, current: DecodeParameters
) -> DecodeEpochs:
    """The decode epochs under which a partition is read from now on.

    If the newest parameters are not `current`, an epoch is added at the committed O: no record from there on is
    finished, so they may all be read anew. The epoch need not be committed first: after a failure before the next
    transaction O is unchanged, and the next start decides again. Epochs without a record in the log are dropped, but
    for that of the last deleted record.
    """
    if not epochs:
        return (DecodeEpoch(offset=0, parameters=current),)
    amended = list(epochs)
    current = current.following(amended[-1].parameters)
    if amended[-1].parameters != current:
        amended = [epoch for epoch in amended if epoch.offset < committed_offset]
        if not amended or amended[-1].parameters != current:
            amended.append(DecodeEpoch(offset=committed_offset, parameters=current))
    return without_deleted(tuple(amended), log_start)


def without_deleted(epochs: DecodeEpochs, below: int) -> DecodeEpochs:
    """The decode epochs without those that end before this offset."""
    first = max(0, bisect_left(epochs, below, key=lambda epoch: epoch.offset) - 1)
    return (replace(epochs[first], offset=0), *epochs[first + 1 :])


def epochs_within(epochs: DecodeEpochs, begin: int, end: int) -> DecodeEpochs:
    """The decode epochs of the records from `begin` to below `end`; none without a record."""
    below = tuple(epoch for epoch in epochs if epoch.offset < end)
    return without_deleted(below, begin + 1) if below and begin < end else ()


def widest_deleted_ms(epochs: DecodeEpochs, log_start: int) -> int:
    """The largest roll window of a deleted record, in ms (0: none is deleted)."""
    return max((each.parameters.roll_window_ms for each in epochs if each.offset < log_start), default=0)


def goes_back(before: DecodeEpochs, amended: DecodeEpochs) -> bool:
    """Whether an epoch was added whose parameters an earlier one has, as with instances of different settings."""
    if not before or amended[-1] == before[-1]:
        return False
    new, *earlier = (replace(each.parameters, copy_max_delay_ms=0) for each in (amended[-1], *before[:-1]))
    return new in earlier


def largest_roll_window_ms(partitions: Iterable[DecodeEpochs]) -> int:
    """The largest roll window of any epoch, in ms (0 for no partitions)."""
    return max((each.parameters.roll_window_ms for epochs in partitions for each in epochs), default=0)
