"""Durations and sizes as people write them, and back. Pure.

A duration is `20ms`, `60s`, `1h30m` or `3650d`, in memory an int of milliseconds; a size is `512KiB`, `128MiB` or a
bare number of bytes, in memory an int of bytes. A bare number is not a duration: taking seconds for milliseconds is how
delays get lost.
"""

from __future__ import annotations

import re
from typing import Final

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
    for unit in ("d", "h", "m", "s"):
        if ms and ms % _MS_PER_UNIT[unit] == 0:
            return f"{ms // _MS_PER_UNIT[unit]}{unit}"
    return f"{ms}ms"


def parse_bytes(text: str) -> int:
    """Bytes of `128MiB`, `1GB` or `4096`. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _BYTES_PER_UNIT:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number and a unit, such as 512KiB, 128MiB or 2GiB")
    return int(match[1]) * _BYTES_PER_UNIT[match[2]]


def format_bytes(size: int) -> str:
    """The shortest exact text in one binary unit: 134217728 -> `128MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _BYTES_PER_UNIT[unit] == 0:
            return f"{size // _BYTES_PER_UNIT[unit]}{unit}"
    return f"{size}B"


def parse_rate(text: str) -> int:
    """`1000/s`, or `1000`, or 0 for no limit. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,9})(?:/s)?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a rate; write it as 1000/s, or 0 for none")
    return int(match[1])


def format_rate(rate: int) -> str:
    """The inverse of `parse_rate`."""
    return f"{rate}/s" if rate else "0"
