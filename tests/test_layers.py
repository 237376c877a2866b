"""The shape of the code, as a test: who may import what, who reads a clock, what is pure, how long modules may be."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("bridge", "timerstore")
PROGRAMS: Final = (*PACKAGES, "embedded", "demo", "bench")

LINES_MAX: Final = 500
LONGER: Final = {  # module: its own limit, and why it is one thing all the same
    "bridge/dispatcher.py": 600,  # one thread: what may follow what is understood by reading it in one place
    "bridge/headers.py": 560,  # the contract in both directions, so that they cannot drift apart
    "bridge/settings.py": 520,  # every key once
    "bridge/writer.py": 600,  # the two modes side by side: what each step means in one and in the other
}

# Without IO, threads and processes: what they do depends on their arguments alone, so tests need nothing but values.
PURE: Final = (
    *("bridge/headers.py", "bridge/units.py", "bridge/errors.py", "bridge/java_client.py", "bridge/decode.py"),
    *(
        "bridge/progress.py",
        "bridge/kafkaerrors.py",
        "bridge/budgets.py",
        "bridge/sizes.py",
        "bridge/outgoing.py",
        "bridge/copies.py",
        "bridge/deadletter.py",
    ),
    *("bridge/retry.py", "bridge/catchup.py", "bridge/placement.py", "bridge/sorting.py"),
    *("timerstore/position.py", "timerstore/sources.py", "timerstore/entry.py", "timerstore/wheel.py"),
    *("timerstore/runs.py", "timerstore/late.py", "timerstore/pending.py", "timerstore/chunks.py"),
    *("timerstore/resident.py", "timerstore/timerlog.py", "timerstore/errors.py"),
)
IMPURE: Final = frozenset(
    {"asyncio", "fcntl", "http", "io", "logging", "multiprocessing", "os", "queue", "random", "secrets", "shutil"}
    | {"signal", "socket", "structlog", "subprocess", "sys", "tempfile", "threading", "time", "urllib"}
)
CLOCKS: Final = frozenset({"now", "today", "utcnow"})  # of datetime and date


def modules(*packages: str) -> list[str]:
    """Paths of all modules of these packages, relative to the repository."""
    found = (path for package in packages for path in (ROOT / package).glob("**/*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def parse(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"), module)


def imports(module: str, *, with_types: bool = False) -> Iterator[str]:
    """Dotted names that a module imports, `from x import y` as x.y; what only a type checker sees only `with_types`."""
    stack: list[ast.AST] = [parse(module)]
    while stack:
        node = stack.pop()
        is_for_types = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        if is_for_types and not with_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        stack.extend(ast.iter_child_nodes(node))


def owner(name: str) -> str:
    """The module of ours that a dotted name of ours is in, as `bridge.kafka` or `timerstore`."""
    package, _, rest = name.partition(".")
    if package == "timerstore":
        return package
    first = rest.partition(".")[0]
    return f"{package}.{first}" if (ROOT / package / f"{first}.py").is_file() else package


def layers() -> list[tuple[str, list[str], set[str]]]:
    """The table of docs/architecture.md: name, modules and libraries of each layer, top first."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("\n## Layers\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [
        (name, re.findall(r"`([^`]+)`", listed), set(re.findall(r"`([^`]+)`", libraries)))
        for name, listed, libraries in rows[2:]
    ]


def test_every_module_is_in_one_layer() -> None:
    """docs/architecture.md names each module of the bridge once, and none that does not exist."""
    named = [module for _, listed, _ in layers() for module in listed if module != "timerstore.*"]
    there = [Path(module).stem for module in modules("bridge") if not module.endswith("__init__.py")]
    assert sorted(named) == sorted(there), "the table of layers in docs/architecture.md and bridge/ differ"


def test_imports_go_up_the_table_of_layers() -> None:
    """A module knows its own layer and those above it, and the libraries that its layer names."""
    above: set[str] = {"bridge"}  # the package itself holds the version and nothing else
    wrong = []
    for name, listed, libraries in layers():
        is_store = listed == ["timerstore.*"]
        above |= {"timerstore"} if is_store else {f"bridge.{module}" for module in listed}
        for module in modules("timerstore") if is_store else [f"bridge/{module}.py" for module in listed]:
            for imported in imports(module):
                package = imported.partition(".")[0]
                if package in PACKAGES:
                    allowed = owner(imported) in above
                else:
                    allowed = package in sys.stdlib_module_names or package in libraries
                if not allowed:
                    wrong.append(f"{module} ({name}) imports {imported}")
    assert not wrong, wrong


def test_the_store_knows_neither_kafka_nor_spark_nor_the_bridge() -> None:
    """timerstore stands alone, type annotations included."""
    foreign = {"pyspark", "py4j", "confluent_kafka", "bridge", "embedded", "demo", "bench", "tests"}
    wrong = [
        f"{module} imports {name}"
        for module in modules("timerstore")
        for name in imports(module, with_types=True)
        if name.partition(".")[0] in foreign
    ]
    assert not wrong, wrong


def test_the_products_know_nothing_of_demo_bench_and_tests() -> None:
    """What is installed imports only what is installed."""
    wrong = [
        f"{module} imports {name}"
        for module in modules(*PACKAGES)
        for name in imports(module, with_types=True)
        if name.partition(".")[0] in {"embedded", "demo", "bench", "tests"}
    ]
    assert not wrong, wrong


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


def test_modules_are_short() -> None:
    """At most 500 lines; what is longer says why in this file, and is not much longer."""
    sizes = {module: len((ROOT / module).read_text(encoding="utf-8").splitlines()) for module in modules(*PACKAGES)}
    too_long = {module: size for module, size in sizes.items() if size > LONGER.get(module, LINES_MAX)}
    assert not too_long, f"split them, or say in LONGER why not: {too_long}"


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
