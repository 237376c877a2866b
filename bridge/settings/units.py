"""Durations, sizes and rates in human notation, and the settings of these types. Pure.

A duration is `20ms`, `60s`, `1h30m` or `3650d`, in memory an int of milliseconds. A size is `512KiB`, `128MiB` or a
bare number of bytes, in memory an int of bytes. A bare number is not a duration: seconds that are mistaken for
milliseconds are a common cause of lost delays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

ANY_CASE: Final = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
"""Accepts the words of a setting in any case; log levels, for example, are often written in capitals."""
AUTO: Final = 0
"""The value of `auto` for a setting in milliseconds that allows it."""

_MS_PER_UNIT: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BYTES_PER_UNIT: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
                          "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_DURATION: Final = re.compile(r"(?:\d{1,12}(?:ms|s|m|h|d))+", re.ASCII)
_DURATION_PART: Final = re.compile(r"(\d+)(ms|s|m|h|d)", re.ASCII)
_SIZE: Final = re.compile(r"(\d{1,15})\s*([A-Za-z]*)", re.ASCII)


def parse_duration_ms(text: str) -> int:
    """Milliseconds of `250ms`, `90s`, `1h30m`, `7d`. Raises ValueError."""
    compact = text.replace(" ", "")
    if not _DURATION.fullmatch(compact):
        raise ValueError(f"{text!r} is not a duration; write a number and a unit, such as 20ms, 60s, 1h30m or 7d")
    return sum(int(number) * _MS_PER_UNIT[unit] for number, unit in _DURATION_PART.findall(compact))


def format_duration_ms(ms: int) -> str:
    """The shortest exact text in one unit: 60000 -> `1m`, 1500 -> `1500ms`."""
    return _shortest(ms, {unit: _MS_PER_UNIT[unit] for unit in ("d", "h", "m", "s")}, "ms")


def parse_bytes(text: str) -> int:
    """Bytes of `128MiB`, `1GB` or `4096`. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _BYTES_PER_UNIT:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number and a unit, such as 512KiB, 128MiB or 2GiB")
    return int(match[1]) * _BYTES_PER_UNIT[match[2]]


def format_bytes(size: int) -> str:
    """The shortest exact text in one binary unit: 134217728 -> `128MiB`."""
    return _shortest(size, {unit: _BYTES_PER_UNIT[unit] for unit in ("TiB", "GiB", "MiB", "KiB")}, "B")


def _shortest(number: int, units: dict[str, int], smallest: str) -> str:
    fitting = (f"{number // size}{unit}" for unit, size in units.items() if number and number % size == 0)
    return next(fitting, f"{number}{smallest}")


def parse_rate(text: str) -> int:
    """`1000/s`, or `1000`, or 0 for no limit. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,9})(?:/s)?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a rate; write it as 1000/s, or 0 for no limit")
    return int(match[1])


def format_rate(rate: int) -> str:
    """The inverse of `parse_rate`."""
    return f"{rate}/s" if rate else "0"


@dataclass(frozen=True, slots=True)
class Quantity:
    """Metadata of an int field with a unit: its parser, limits and format."""

    least: str
    most: str
    read: Callable[[str], int]
    show: Callable[[int], str]
    bare: bool
    pattern: str
    auto: bool = False
    """Whether the setting may be `auto`; in memory that is `AUTO`."""

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
        if isinstance(value, str) and value.strip().isdecimal() and not self.bare:
            raise ValueError(f"{value} has no unit and is not a duration; write it as {self.least} or {self.most}")
        number = self.read(str(value))
        if not self.read(self.least) <= number <= self.read(self.most):
            raise ValueError(f"{value} is outside {self.least} to {self.most}")
        return number


def duration(least: str, most: str, *, auto: bool = False) -> Quantity:
    """A duration from `least` to `most`; with `auto`, the word `auto` as well."""
    pattern = r"( *[0-9]+(ms|s|m|h|d))+"
    pattern = f"^(auto|{pattern})$" if auto else f"^{pattern}$"
    return Quantity(least, most, parse_duration_ms, format_duration_ms, False, pattern, auto)


def size(least: str, most: str) -> Quantity:
    """A size from `least` to `most`."""
    return Quantity(least, most, parse_bytes, format_bytes, True, r"^[0-9]+ *(B|[KMGT]iB|[kKMGT]B)?$")


def per_second(least: str, most: str) -> Quantity:
    """A rate from `least` to `most`."""
    return Quantity(least, most, parse_rate, format_rate, True, r"^[0-9]+(/s)?$")
