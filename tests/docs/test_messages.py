"""docs/messages.md is whole: every message that the source can end or complain with is in it, and no other.

Messages are collected from the syntax tree, not from runs: what is filled in at run time becomes `…`, as in the
document.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from typing import Final

import pytest

from bridge import errors as bridge_errors
from tests.paths import ROOT
from timerstore import errors as store_errors

DOCUMENT: Final = "docs/messages.md"
FILLED_IN: Final = "…"

CLASSES: Final = {
    leaf.__name__
    for base in (bridge_errors.BridgeError, store_errors.TimerStoreError)
    for leaf in (*base.__subclasses__(), store_errors.DiskFull)
}
AROUND: Final = {
    "_bug": (0, "{}"),
    "_failure": (0, "cannot {}: …"),
    "_result": (1, "cannot {}: …"),
    "_unless_missing": (1, "cannot {}: …"),
    "failure": (0, "cannot {}: …"),
    "failures_named": (0, "Spark cannot {}"),
    "named_failure": (0, "Spark cannot {}"),
}
"""Functions that make an error: which argument holds the words, and what is put around them."""
VALUES: Final = (
    "bridge/wire/headers.py",
    "bridge/settings/librdkafka.py",
    "bridge/settings/quantity.py",
    "bridge/settings/model.py",
    "bridge/settings/units.py",
)
"""Modules whose ValueErrors reach the operator: as part of a ConfigurationError."""
CHECKS: Final = ("bridge/checks/run.py", "bridge/checks/host.py", "bridge/checks/topics.py")
SAYING: Final = ("impediments", "alarms", "problems", "_problems")
"""Functions that return sentences for /readyz, /livez, or for what is wrong with a map of properties."""


def texts(node: ast.expr) -> list[str]:
    """All that an expression may yield as a string, with `…` for what is not in the source."""
    match node:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.JoinedStr(values=parts):
            return ["".join(found) for found in product(*map(texts, parts))]
        case ast.FormattedValue(value=ast.BinOp(op=ast.Mult(), left=ast.Constant(value=str(plural)))):
            return [f"({plural})"]
        case ast.FormattedValue(value=ast.IfExp() as choice):
            return texts(choice)
        case ast.IfExp(body=one, orelse=other):
            return [*texts(one), *texts(other)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return ["".join(found) for found in product(texts(left), texts(right))]
        case ast.BoolOp(op=ast.Or(), values=[*_, ast.Constant(value=str(value))]):
            return [FILLED_IN, value]
    return [FILLED_IN]


def normal(text: str) -> str:
    """As the document has it: one line, neighbouring gaps as one, without backticks, and without quotes around gaps."""
    plain = " ".join(text.replace("`", "").split())
    return re.sub(rf"'?{FILLED_IN}'?(\s*{FILLED_IN})*", FILLED_IN, plain)


def has_words(text: str) -> bool:
    return re.search(r"[a-z]{2}", text) is not None


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))))


def modules() -> list[str]:
    return sorted(
        p.relative_to(ROOT).as_posix() for package in ("bridge", "timerstore") for p in ROOT.glob(f"{package}/**/*.py")
    )


def calls(module: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the last part of what is called."""
    for node in nodes(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node


def errors() -> Iterator[tuple[str, str]]:
    """Messages of the errors, and where they are raised."""
    for module in modules():
        for name, call in calls(module):
            place, around = AROUND.get(name, (0, "{}"))
            if len(call.args) > place and (name in AROUND or name in CLASSES):
                yield from ((around.format(text), f"{module}:{call.lineno}") for text in texts(call.args[place]))


def values() -> Iterator[tuple[str, str]]:
    """What is wrong with a value, in the words of those who read it."""
    for module in VALUES:
        for name, call in calls(module):
            if name in ("ValueError", "TypeError") and call.args:
                yield from ((text, f"{module}:{call.lineno}") for text in texts(call.args[0]))
    for node in nodes("bridge/settings/librdkafka.py"):
        if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.ListComp):
            yield from ((text, f"bridge/settings/librdkafka.py:{node.lineno}") for text in texts(node.value))


def events(*levels: str) -> Iterator[tuple[str, str]]:
    """Names of events in the log."""
    for module in modules():
        for name, call in calls(module):
            place = 1 if name == "ErrorLog" and "warning" in levels else 0 if name in levels else None
            if place is not None and len(call.args) > place and isinstance(call.args[place], ast.Constant):
                yield from ((text, f"{module}:{call.lineno}") for text in texts(call.args[place]))


def findings() -> Iterator[tuple[str, str]]:
    """What `check` says of what is not as it must be: `detail` of findings that are not `ok`, and its parts."""
    for module in CHECKS:
        for node in nodes(module):
            match node:
                case ast.Call(func=ast.Name(id="Finding"), keywords=keywords):
                    given = {k.arg: k.value for k in keywords}
                    if not isinstance(status := given["status"], ast.Constant) or status.value != "ok":
                        yield from ((text, f"{module}:{node.lineno}") for text in texts(given["detail"]))
                case (
                    ast.Assign(targets=[ast.Name(id="detail" | "speaks")], value=value)
                    | ast.AugAssign(target=ast.Name(id="detail"), value=value)
                    | ast.Yield(value=ast.Tuple(elts=[value, _]))
                ):
                    yield from ((text, f"{module}:{node.lineno}") for text in texts(value))


def states() -> Iterator[tuple[str, str]]:
    """Phases and reasons of /readyz and /livez."""
    for module in modules():
        for node in nodes(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                if name not in ("enter", "LongWork", "Phase"):
                    continue
                said = [*node.args, *(k.value for k in node.keywords if k.arg in ("name", "reasons"))]
                found: Iterable[ast.AST] = [s for expression in said for s in ast.walk(expression)]
            elif isinstance(node, ast.FunctionDef) and node.name in SAYING:
                found = [s for statement in node.body[1:] for s in ast.walk(statement)]
            else:
                continue
            inner = {id(part) for s in found if isinstance(s, ast.JoinedStr) for part in ast.walk(s) if part is not s}
            for each in found:
                if isinstance(each, ast.JoinedStr | ast.Constant) and id(each) not in inner:
                    yield from ((text, f"{module}:{node.lineno}") for text in texts(each))


def documented(*headings: str) -> dict[str, int]:
    """What is set as code in the document, with its line; with `headings` only in a table's columns of such names."""
    found: dict[str, int] = {}
    columns: list[int] = []
    for number, line in enumerate((ROOT / DOCUMENT).read_text(encoding="utf-8").splitlines(), start=1):
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        named = [i for i, cell in enumerate(cells) if cell in headings]
        if not cells or named:
            columns = named
        elif headings:
            line = " ".join(cells[column] for column in columns)
        if not headings or (cells and columns):
            found |= {normal(span): number for span in re.findall(r"`([^`]+)`", line)}
    return found


@pytest.mark.parametrize(
    "collect",
    [errors, values, lambda: events("warning", "error", "exception", "critical"), findings, states],
    ids=["errors", "values", "events", "findings", "states"],
)
def test_every_message_is_explained(collect: Callable[[], Iterator[tuple[str, str]]]) -> None:
    """Whoever searches the document for what the bridge has said finds it."""
    said = {normal(text): place for text, place in collect() if has_words(text)}
    assert len(said) > 20, "the collector no longer finds them"
    absent = {text: place for text, place in said.items() if text not in documented()}
    assert not absent, f"not in {DOCUMENT}: {absent}"


def test_no_message_is_explained_that_nobody_says() -> None:
    """What was reworded or removed goes from the document, too."""
    collectors = (errors, values, lambda: events("info", "warning", "error", "exception"), findings, states)
    said = {normal(text) for collect in collectors for text, _ in collect()}
    listed = documented("message", "event", "detail", "reasons", "phase")
    assert len(listed) > 150
    stale = {text: line for text, line in listed.items() if text not in said}
    assert not stale, f"of {DOCUMENT}, nowhere in the source: {stale}"


@pytest.mark.parametrize("code", ["f'{a!r} is no {b}{c}'", "'… is no ' + x", "f'{a} is ' + ('no ' if b else 'a ') + d"])
def test_the_collector_reads_all_ways_of_writing(code: str) -> None:
    """The document cannot be held to what the collector does not see."""
    assert "… is no …" in [normal(text) for text in texts(ast.parse(code, mode="eval").body)]
