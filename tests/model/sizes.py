"""How much an object keeps: the largest container that is reached from it by attributes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


def largest_container(root: object, package: str) -> tuple[str, int]:
    """Name and size of the largest list, dictionary, set or queue that `root` and the objects of the package's own
    classes that it leads to hold."""
    seen: set[int] = set()
    found = ("nothing", 0)
    left: list[tuple[str, Any]] = [(type(root).__name__, root)]
    while left:
        name, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, list | tuple | dict | set | frozenset | deque):
            found = max(found, (name, len(value)), key=lambda each: each[1])
            inside = [*value.values()] if isinstance(value, dict) else [*value]
            left += [(f"{name}[]", each) for each in inside[:1_000]]
        elif any(base.__module__.startswith(package) for base in type(value).__mro__):
            left += [(f"{name}.{attribute}", each) for attribute, each in _attributes(value)]
    return found


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        slots = getattr(base, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)
