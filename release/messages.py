"""The operator's messages, collected from the syntax trees of the source, and their tables in docs/messages.md.

Values of the run time become `…`. The document is written by hand, except the first cell of each row with a code,
`DB-3012`, which is generated: the code, and every message that is raised with it. After rewording an error, or adding
one with a code and a row:

    make messages
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Final

from bridge import errors as bridge_errors
from timerstore import errors as store_errors

ROOT: Final = Path(__file__).parents[1]
DOCUMENT: Final = "docs/messages.md"
FILLED_IN: Final = "…"

CLASSES: Final = {
    leaf.__name__
    for base in (bridge_errors.BridgeError, store_errors.TimerStoreError)
    for leaf in (*base.__subclasses__(), store_errors.DiskFull)
}
AROUND: Final = {
    "bug": (0, "{}"),
    "_failure": (0, "cannot {}: …"),
    "_result": (1, "cannot {}: …"),
    "_unless_missing": (1, "cannot {}: …"),
    "_unless_refused": (1, "cannot {}: …"),
    "failure": (0, "cannot {}: …"),
    "named_failure": (0, "Spark cannot {}"),
}
"""Functions that create an error: the position of the argument with the words, and the text around them."""
VALUES: Final = (
    "bridge/wire/commands.py",
    "bridge/wire/headers.py",
    "bridge/wire/cron.py",
    "bridge/wire/schedule.py",
    "bridge/settings/librdkafka.py",
    "bridge/settings/model.py",
    "bridge/settings/reserved.py",
    "bridge/settings/units.py",
)
"""Modules whose ValueErrors reach the operator, as part of a ConfigurationError."""
CHECKS: Final = tuple(f"bridge/checks/{name}.py" for name in ("brokers", "host", "topics"))
SAYING: Final = ("impediments", "alarms", "problems", "_problems")
"""Functions that return sentences for /readyz, /livez, or the problems of a map of properties."""


def possible_texts(node: ast.expr) -> list[str]:
    """All strings that an expression may yield, with `…` for unknown values."""
    match node:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.JoinedStr(values=parts):
            return ["".join(combination) for combination in product(*map(possible_texts, parts))]
        case ast.FormattedValue(value=ast.BinOp(op=ast.Mult(), left=ast.Constant(value=str(plural)))):
            return [f"({plural})"]
        case ast.FormattedValue(value=ast.IfExp() as choice):
            return possible_texts(choice)
        case ast.IfExp(body=one, orelse=other):
            return [*possible_texts(one), *possible_texts(other)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return ["".join(combination) for combination in product(possible_texts(left), possible_texts(right))]
        case ast.BoolOp(op=ast.Or(), values=[*_, ast.Constant(value=str(value))]):
            return [FILLED_IN, value]
    return [FILLED_IN]


def normal(text: str) -> str:
    """A text in the document's form: one line, adjacent gaps merged, no backticks, no quotes around gaps."""
    plain = " ".join(text.replace("`", "").split())
    return re.sub(rf"'?{FILLED_IN}'?(\s*{FILLED_IN})*", FILLED_IN, plain)


def has_words(text: str) -> bool:
    return re.search(r"[a-z]{2}", text) is not None


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))))


def modules() -> list[str]:
    paths = (path for package in ("bridge", "timerstore") for path in (ROOT / package).glob("**/*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def calls(module: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the last part of the called name."""
    for node in nodes(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.func.id if isinstance(node.func, ast.Name) else node.func.attr, node


def errors() -> Iterator[tuple[str, str]]:
    """Messages of the errors, with the places that raise them."""
    for module in modules():
        for name, call in calls(module):
            place, around = AROUND.get(name, (0, "{}"))
            if len(call.args) > place and (name in AROUND or name in CLASSES):
                yield from (
                    (around.format(text), f"{module}:{call.lineno}") for text in possible_texts(call.args[place])
                )


def values() -> Iterator[tuple[str, str]]:
    """The errors of the functions that parse values."""
    for module in VALUES:
        for name, call in calls(module):
            if name in ("ValueError", "TypeError") and call.args:
                yield from ((text, f"{module}:{call.lineno}") for text in possible_texts(call.args[0]))
    for node in nodes("bridge/settings/librdkafka.py"):
        if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.ListComp):
            yield from ((text, f"bridge/settings/librdkafka.py:{node.lineno}") for text in possible_texts(node.value))


def events(*levels: str) -> Iterator[tuple[str, str]]:
    """Names of the log's events."""
    for module in modules():
        for name, call in calls(module):
            place = 1 if name == "ErrorLog" and "warning" in levels else 0 if name in levels else None
            if place is not None and len(call.args) > place and isinstance(call.args[place], ast.Constant):
                yield from ((text, f"{module}:{call.lineno}") for text in possible_texts(call.args[place]))


def check_texts() -> Iterator[tuple[str, str]]:
    """The texts of `check` about problems: `detail` of findings that are not `ok`, and its parts."""
    for module in CHECKS:
        for node in nodes(module):
            match node:
                case ast.Call(func=ast.Name(id="warned" | "failed" | "expected"), args=[_, detail, *_]):
                    yield from ((text, f"{module}:{node.lineno}") for text in possible_texts(detail))
                case (
                    ast.Assign(targets=[ast.Name(id="detail" | "speaks")], value=value)
                    | ast.AugAssign(target=ast.Name(id="detail"), value=value)
                    | ast.Yield(value=ast.Tuple(elts=[value, _]))
                ):
                    yield from ((text, f"{module}:{node.lineno}") for text in possible_texts(value))


def states() -> Iterator[tuple[str, str]]:
    """Phases and reasons of /readyz and /livez."""
    for module in modules():
        for node in nodes(module):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                if name not in ("enter", "LongWork", "Phase"):
                    continue
                said = [*node.args, *(k.value for k in node.keywords if k.arg in ("name", "reasons"))]
                inside: Iterable[ast.AST] = [s for expression in said for s in ast.walk(expression)]
            elif isinstance(node, ast.FunctionDef) and node.name in SAYING:
                inside = [s for statement in node.body[1:] for s in ast.walk(statement)]
            else:
                continue
            inner = {id(part) for s in inside if isinstance(s, ast.JoinedStr) for part in ast.walk(s) if part is not s}
            for part in inside:
                if isinstance(part, ast.JoinedStr | ast.Constant) and id(part) not in inner:
                    yield from ((text, f"{module}:{node.lineno}") for text in possible_texts(part))


CODE: Final = re.compile(r"^\| `(DB-[0-9]{4})`")
UNCODED: Final = {"Corrupt", "Closed"}
"""Errors that no operator sees: a damaged file is set aside, and a closed store belongs to a stopped pipeline."""


def coded() -> Iterator[tuple[str, str, str]]:
    """Code, message and place of every raised error; the code may be empty."""
    for module in modules():
        for name, call in calls(module):
            place, around = AROUND.get(name, (0, "{}"))
            if name in UNCODED or not (len(call.args) > place and (name in AROUND or name in CLASSES)):
                continue
            given = {k.arg: k.value for k in call.keywords}.get("code")
            code = str(given.value) if isinstance(given, ast.Constant) else ""
            for text in possible_texts(call.args[place]):
                message = normal(around.format(text))
                if has_words(message) and (code or (name in CLASSES and given is None)):
                    yield code, message, f"{module}:{call.lineno}"


def generated(text: str) -> str:
    """The document with the first cells from the source."""
    messages: dict[str, dict[str, None]] = {}
    for code, message, _ in coded():
        messages.setdefault(code, {})[message] = None
    lines = []
    for line in text.splitlines():
        cell = CODE.match(line)
        if cell:
            said = ", ".join(f"`{message}`" for message in sorted(messages.get(cell[1], {})))
            line = f"| `{cell[1]}` {said} |" + line.split(" |", 1)[1]
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    path = ROOT / DOCUMENT
    path.write_text(generated(path.read_text(encoding="utf-8")), encoding="utf-8")
