"""Settings that are written with a unit: an int of ms or of bytes in memory, `60s` or `128MiB` in YAML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from bridge.settings.units import (
    format_bytes,
    format_duration_ms,
    format_rate,
    parse_bytes,
    parse_duration_ms,
    parse_rate,
)

AUTO: Final = 0
"""`auto`, where a setting may be that instead of a number of milliseconds."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """Metadata of an int field that is written with a unit: how it is read, its limits, how it is shown."""

    least: str
    most: str
    read: Callable[[str], int]
    show: Callable[[int], str]
    bare: bool
    pattern: str
    auto: bool = False
    """Whether `auto` may stand for it; in memory that is `AUTO`."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        shown = core_schema.plain_serializer_function_ser_schema(self._show, when_used="json")
        return core_schema.no_info_plain_validator_function(self._validate, serialization=shown)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        text = {"type": "string", "pattern": self.pattern}
        return {"anyOf": [{"type": "integer", "minimum": 0}, text]} if self.bare else text

    def _show(self, value: int) -> str:
        return "auto" if self.auto and value == AUTO else self.show(value)

    def _validate(self, value: object) -> int:
        if self.auto and value == "auto":
            return AUTO
        if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, int) and not self.bare):
            raise ValueError(f"{value!r} has no unit; write it as {self.least} or {self.most}")
        number = self.read(str(value))
        if not self.read(self.least) <= number <= self.read(self.most):
            raise ValueError(f"{value} is outside of {self.least} to {self.most}")
        return number


def duration(least: str, most: str) -> Quantity:
    """A duration between these."""
    return Quantity(least, most, parse_duration_ms, format_duration_ms, False, r"^( *[0-9]+(ms|s|m|h|d))+$")


def duration_or_auto(least: str, most: str) -> Quantity:
    """A duration between these, or `auto`."""
    pattern = r"^(auto|( *[0-9]+(ms|s|m|h|d))+)$"
    return Quantity(least, most, parse_duration_ms, format_duration_ms, False, pattern, auto=True)


def size(least: str, most: str) -> Quantity:
    """A size between these."""
    return Quantity(least, most, parse_bytes, format_bytes, True, r"^[0-9]+ *(B|[KMGT]iB|[kKMGT]B)?$")


def per_second(least: str, most: str) -> Quantity:
    """A number a second between these."""
    return Quantity(least, most, parse_rate, format_rate, True, r"^[0-9]+(/s)?$")
