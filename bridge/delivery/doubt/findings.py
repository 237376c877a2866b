"""Findings of earlier attempts about single rows, by packed (source, offset)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag

from bridge.kafka.errors import Refusal


class Part(IntFlag):
    """The records of a row that are already in Kafka."""

    NONE = 0
    RECORD = 1
    """Its delivery, its dead letter, or its copy."""
    NEXT = 2
    """The copy that continues its schedule."""


@dataclass(frozen=True, slots=True)
class Findings:
    """See the module."""

    rejected: dict[int, Refusal] = field(default_factory=dict)
    """Rows that their targets reject."""
    no_letter: set[int] = field(default_factory=set)
    no_copy: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    """Rows whose dead letters fit only if cut."""
    put_off: dict[int, Refusal] = field(default_factory=dict)
    """Rows among which one spoils transactions."""
    written: Mapping[int, Part] = field(default_factory=dict)
    """Records of a transaction that ended unasked."""
