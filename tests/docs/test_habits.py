"""Habits of the code that a machine can check: the reader of the clock, pure modules, a docstring for every module."""

from __future__ import annotations

import ast
import re
from typing import Final

import pytest

from tests.docs.imports import imports, modules, parse
from tests.paths import ROOT

PACKAGES: Final = ("bridge", "timerstore")
PROGRAMS: Final = (*PACKAGES, "dev", "demo", "bench", "release")

# Without IO, threads and processes: results depend on the arguments alone, so tests need only values.
PURE: Final = (
    *(
        "bridge/wire/headers.py",
        "bridge/wire/reasons.py",
        "bridge/settings/units.py",
        "bridge/errors.py",
        "bridge/settings/java.py",
        "bridge/ingest/decode.py",
    ),
    *(
        "bridge/wire/committed_state.py",
        "bridge/kafka/errors.py",
        "bridge/settings/time_budgets.py",
        "bridge/delivery/plan/record_size.py",
        "bridge/delivery/plan/due_rows.py",
        "bridge/delivery/plan/copies.py",
        "bridge/delivery/plan/dead_letters.py",
    ),
    *(
        "bridge/delivery/plan/backoff.py",
        "bridge/delivery/plan/overdue.py",
        "bridge/delivery/targets/partitioner.py",
        "bridge/delivery/plan/fates.py",
    ),
    *(
        "timerstore/rows/position.py",
        "bridge/stores/names.py",
        "timerstore/rows/entry.py",
        "timerstore/memory/pending.py",
    ),
    *(
        "timerstore/memory/sorted_runs.py",
        "timerstore/memory/overtaken.py",
        "timerstore/memory/pending.py",
        "timerstore/memory/chunks.py",
    ),
    *("timerstore/memory/resident.py", "timerstore/log/timerlog.py", "timerstore/errors.py"),
)
IMPURE: Final = frozenset(
    {"asyncio", "fcntl", "http", "io", "logging", "multiprocessing", "os", "queue", "random", "secrets", "shutil"}
    | {"signal", "socket", "structlog", "subprocess", "sys", "tempfile", "threading", "time", "urllib"}
)
CLOCKS: Final = frozenset({"now", "today", "utcnow"})  # of datetime and date


def test_one_module_reads_the_clock() -> None:
    """Time is an argument or a Clock; only timerstore/clock.py imports `time`, and nobody asks datetime for now."""
    wrong = []
    for module in modules(*PROGRAMS):
        if module == "timerstore/clock.py":
            continue
        wrong += [f"{module} imports {name}" for name in imports(module) if name.partition(".")[0] == "time"]
        wrong += [
            f"{module}:{node.lineno} calls {ast.unparse(node.func)}"
            for node in ast.walk(parse(module))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CLOCKS
            and ast.unparse(node.func.value).split(".")[-1] in {"datetime", "date"}
        ]
    assert not wrong, wrong


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_stay_pure(module: str) -> None:
    """No files, no threads, no clock, no log: neither imported nor, for files, opened."""
    found = (name for name in imports(module) if not name.startswith("urllib.parse."))  # which only handles text
    wrong = sorted(name for name in found if name.partition(".")[0] in IMPURE)
    calls = (node.func for node in ast.walk(parse(module)) if isinstance(node, ast.Call))
    wrong += sorted(
        {"open()" for call in calls if isinstance(call, ast.Name) and call.id in {"open", "print", "input"}}
    )
    assert not wrong, f"{module} uses {wrong}"


def test_loggers_have_the_names_of_their_modules() -> None:
    """The `logger` of a log line leads to its source."""
    wrong = {
        f"{module}: {name}"
        for module in modules(*PACKAGES)
        for name in re.findall(
            r'^\w+ = structlog.get_logger\("(.*)"\)', (ROOT / module).read_text("utf-8"), re.MULTILINE
        )
        if name != module.removesuffix(".py").replace("/", ".")
    }
    assert not wrong, wrong


def test_every_module_says_what_it_is() -> None:
    """A docstring at the top of each, and nothing put off until later."""
    wrong = [
        module for module in modules(*PROGRAMS, "tests") if _has_code(module) and not ast.get_docstring(parse(module))
    ]
    assert not wrong, f"without a docstring: {wrong}"
    later = re.compile(r"#.*\b(?:TOD[O]|FIXM[E]|XX[X])\b")
    put_off = [
        f"{module}:{number}"
        for module in modules(*PROGRAMS, "tests")
        for number, line in enumerate((ROOT / module).read_text(encoding="utf-8").splitlines(), 1)
        if later.search(line)
    ]
    assert not put_off, put_off


def _has_code(module: str) -> bool:
    return bool(parse(module).body)
