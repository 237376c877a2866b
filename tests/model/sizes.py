"""How much an object keeps: the largest container that is reached from it by attributes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any

CONTAINERS = (list, tuple, dict, set, frozenset, deque)


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
        if isinstance(value, CONTAINERS):
            if len(value) > found[1]:
                found = (name, len(value))
            inside = [*value.values()] if isinstance(value, dict) else [*value]
            left += [(f"{name}[]", each) for each in inside[:1_000]]
        elif _is_of(type(value), package):  # type: ignore[arg-type]  # a type is hashable
            left += [(f"{name}.{attribute}", each) for attribute, each in _attributes(value)]
    return found


@cache
def _is_of(kind: type, package: str) -> bool:
    return any(base.__module__.startswith(package) for base in kind.__mro__)


@cache
def _slots(kind: type) -> tuple[str, ...]:
    found = (getattr(base, "__slots__", ()) for base in kind.__mro__)
    return tuple(name for slots in found for name in ((slots,) if isinstance(slots, str) else slots))


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for name in _slots(type(value)):  # type: ignore[arg-type]
        if hasattr(value, name):
            yield name, getattr(value, name)
