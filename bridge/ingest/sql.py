"""Column expressions and queries as SQL text, written with PySpark's words: `F.coalesce(F.col("a"), 0) > 1`.

PySpark's own `Column` calls the JVM for every node of an expression, and again when Python releases it: 24,000 times
for the plan of decoding, which kept the interpreter from delivery for seconds of every start. Text is parsed there in
one call, into the same plan, in less than half of the time.

A text among the arguments is a literal; a column is named by `col`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

OR, AND, NOT, COMPARISON, SUM, PRODUCT, ATOM = range(7)
"""Precedence of an expression, from loose to tight."""

Value = Any
"""A Column, or the value of a literal: None, bool, int, str, bytes."""


def _operator(symbol: str, binds: int) -> Callable[[Column, Value], Column]:
    """Operands of equal precedence get brackets, but for the first one: all operators are left-associative."""

    def apply(first: Column, second: Value) -> Column:
        left = first.within(SUM if binds == COMPARISON else binds)
        return Column(f"{left} {symbol} {lit(second).within(binds + 1)}", binds)

    return apply


class Column:
    """An expression with its precedence, `binds`: in a place of higher precedence it gets brackets."""

    __slots__ = ("binds", "sql")
    __hash__ = None  # type: ignore[assignment]  # `==` makes an expression

    def __init__(self, sql: str, binds: int = ATOM) -> None:
        self.sql = sql
        self.binds = binds

    __add__ = _operator("+", SUM)
    __sub__ = _operator("-", SUM)
    __mul__ = _operator("*", PRODUCT)
    div = _operator("DIV", PRODUCT)
    """The whole part of the quotient, of type bigint."""
    __eq__ = _operator("=", COMPARISON)  # type: ignore[assignment]
    __ne__ = _operator("!=", COMPARISON)  # type: ignore[assignment]
    __lt__ = _operator("<", COMPARISON)
    __le__ = _operator("<=", COMPARISON)
    __gt__ = _operator(">", COMPARISON)
    __ge__ = _operator(">=", COMPARISON)
    __and__ = _operator("AND", AND)
    __or__ = _operator("OR", OR)

    def __invert__(self) -> Column:
        return Column(f"NOT {self.within(ATOM)}", NOT)

    def __bool__(self) -> bool:
        raise TypeError(f"neither true nor false: {self.sql}; use &, | and ~")

    def __getitem__(self, key: Value) -> Column:
        """A field of a struct, or of each struct in an array."""
        return Column(f"{self.within(ATOM)}[{lit(key).sql}]")

    def between(self, low: Value, high: Value) -> Column:
        result: Column = (self >= low) & (self <= high)
        return result

    def isin(self, *values: Value) -> Column:
        return Column(f"{self.within(SUM)} IN ({_listed(values)})", COMPARISON)

    def is_null(self) -> Column:
        return Column(f"{self.within(SUM)} IS NULL", COMPARISON)

    def is_not_null(self) -> Column:
        return Column(f"{self.within(SUM)} IS NOT NULL", COMPARISON)

    def cast(self, to: str) -> Column:
        return Column(f"CAST({self.sql} AS {to})")

    def try_cast(self, to: str) -> Column:
        return Column(f"try_cast({self.sql} AS {to})")

    def alias(self, name: str) -> Column:
        return Column(f"{self.sql} AS {name}")

    def within(self, binds: int) -> str:
        """The text, in brackets if its precedence is lower."""
        return self.sql if self.binds >= binds else f"({self.sql})"


class Case(Column):
    """The value of the first condition that holds; null without one."""

    __slots__ = ("_branches",)

    def __init__(self, branches: str) -> None:
        super().__init__(f"CASE {branches} END")
        self._branches = branches

    def when(self, condition: Column, value: Value) -> Case:
        return Case(f"{self._branches} WHEN {condition.sql} THEN {lit(value).sql}")

    def otherwise(self, value: Value) -> Column:
        return Column(f"CASE {self._branches} ELSE {lit(value).sql} END")


def col(name: str) -> Column:
    return Column(f"`{name}`")


def lit(value: Value) -> Column:
    """A literal; a column unchanged. Whole numbers are of type int if they fit, otherwise bigint. Raises TypeError."""
    if isinstance(value, Column):
        return value
    if isinstance(value, bytes):
        return Column(f"X'{value.hex()}'")
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return Column(f"'{escaped}'")
    if value is None:
        return Column("NULL")
    if not isinstance(value, int):
        raise TypeError(f"no literal: {value!r}")
    return Column(str(value))


def long(value: int) -> Column:
    """A literal of type bigint."""
    return Column(f"{value}L")


def when(condition: Column, value: Value) -> Case:
    return Case(f"WHEN {condition.sql} THEN {lit(value).sql}")


def call(function: str, *arguments: Value) -> Column:
    return Column(f"{function}({_listed(arguments)})")


def __getattr__(name: str) -> Callable[..., Column]:
    """Any other function of Spark's SQL, by its name."""
    if name.startswith("_"):
        raise AttributeError(name)
    return partial(call, name)


@dataclass(frozen=True, slots=True)
class Relation:
    """The source of a query: the name of a view, or another query in brackets."""

    sql: str

    def select(self, *columns: Column) -> Relation:
        return Relation(f"(SELECT {_listed(columns)} FROM {self.sql})")

    def with_columns(self, columns: Mapping[str, Column], without: Collection[str] = ()) -> Relation:
        """All present columns but those `without`, and these."""
        there = Column(f"* EXCEPT ({_listed(map(col, without))})" if without else "*")
        return self.select(there, *(column.alias(name) for name, column in columns.items()))


def _listed(values: Any) -> str:
    return ", ".join(lit(value).sql for value in values)
