"""What earlier attempts have shown of single rows, by packed (source, offset)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag

from bridge.kafka.errors import Refusal


class Part(IntFlag):
    """The records of a row that are in Kafka already."""

    NONE = 0
    RECORD = 1
    """Its delivery, its dead letter, or its copy."""
    NEXT = 2
    """The copy that goes on with its schedule."""


@dataclass(frozen=True, slots=True)
class Findings:
    """See the module."""

    rejected: dict[int, Refusal] = field(default_factory=dict)
    """Their targets reject them."""
    no_letter: set[int] = field(default_factory=set)
    no_copy: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    """Their dead letters fit only if cut."""
    put_off: dict[int, Refusal] = field(default_factory=dict)
    """One of these spoils transactions."""
    written: Mapping[int, Part] = field(default_factory=dict)
    """A transaction that ended without being asked to has written these."""
