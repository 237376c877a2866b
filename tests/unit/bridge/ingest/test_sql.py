"""Expressions as text: literals, and brackets only where they are needed, but there always."""

from __future__ import annotations

import pytest

from bridge.ingest import sql as F
from bridge.ingest.sql import Column, Relation

a, b, c = (F.col(name) for name in "abc")


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (a - (b - c), "`a` - (`b` - `c`)"),
        (a - b - c, "`a` - `b` - `c`"),
        ((a + b) * 2, "(`a` + `b`) * 2"),
        ((a * b).div(c * 2), "`a` * `b` DIV (`c` * 2)"),
        ((a == b) == c, "(`a` = `b`) = `c`"),
        (a + 1 != b - 1, "`a` + 1 != `b` - 1"),
        ((a | b) & ~(b & c), "(`a` OR `b`) AND NOT (`b` AND `c`)"),
        (a & b | c, "`a` AND `b` OR `c`"),
        (a | (b | c), "`a` OR (`b` OR `c`)"),
        (~(a > 1), "NOT (`a` > 1)"),
        ((~a).is_null(), "(NOT `a`) IS NULL"),
        ((a == b).is_not_null(), "(`a` = `b`) IS NOT NULL"),
        ((a + b).isin(1, 2), "`a` + `b` IN (1, 2)"),
        ((a + b).between(1, c), "`a` + `b` >= 1 AND `a` + `b` <= `c`"),
        ((a + b)["key"], "(`a` + `b`)['key']"),
        ((a | b).try_cast("int"), "try_cast(`a` OR `b` AS int)"),
        (F.when(a, 1).when(b, "x").otherwise(None) == c, "CASE WHEN `a` THEN 1 WHEN `b` THEN 'x' ELSE NULL END = `c`"),
        (F.when(a, b), "CASE WHEN `a` THEN `b` END"),
        (F.coalesce(a, False), "coalesce(`a`, False)"),
    ],
)
def test_what_binds_less_tightly_is_in_brackets(expression: Column, text: str) -> None:
    assert expression.sql == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (r"it's \d", r"'it\'s \\d'"),
        (b"\x00'", "X'0027'"),
        (True, "True"),
        (None, "NULL"),
        (-(2**63), "-9223372036854775808"),
    ],
)
def test_literals(value: object, text: str) -> None:
    assert F.lit(value).sql == text


def test_what_is_no_literal_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no literal: 1\.5"):
        F.lit(1.5)


def test_a_long_is_one_whatever_its_size() -> None:
    assert [F.long(value).sql for value in (0, -(2**63))] == ["0L", "-9223372036854775808L"]


def test_an_expression_is_neither_true_nor_false() -> None:
    with pytest.raises(TypeError, match="neither true nor false"):
        assert a == b


def test_relations() -> None:
    rows = Relation("t").with_columns({"b": a + 1}).with_columns({"a": b}, without=["a", "c"]).select(a, b)
    inner = "(SELECT *, `a` + 1 AS b FROM t)"
    assert rows.sql == f"(SELECT `a`, `b` FROM (SELECT * EXCEPT (`a`, `c`), `b` AS a FROM {inner}))"
