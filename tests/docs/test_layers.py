"""The layers of the code: folders in one order, and imports that only go down."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

from tests.docs.imports import imports, modules, parse
from tests.paths import ROOT

STORE: Final = (
    *("clock", "errors", "limits", "budget", "rows", "disk", "memory", "cancels", "log", "operations", "store"),
    "rebuild",
)
DELIVERY: Final = ("delivery/targets", "delivery/doubt", "delivery/plan", "delivery/producer", "delivery")
BRIDGE: Final = (
    *("errors", "json_file", "stores", "wire", "settings", "telemetry", "http", "kafka", "client", "spark"),
    *("ingest/watch", "ingest/batches", "ingest", "dead_letters"),
    *(*DELIVERY, "start", "remote", "install", "checks", "api", "runtime", "commands", "analysis", "__main__"),
)
LAYERS: Final = tuple(f"timerstore/{name}" for name in STORE) + tuple(f"bridge/{name}" for name in BRIDGE)
"""From the lowest to the highest: folders, and the modules that stand beside them."""
PROGRAMS: Final = {"dev", "demo", "bench", "release", "tests"}
"""Unknown to the installed packages."""
FOREIGN: Final = {"pyspark", "py4j", "confluent_kafka", "bridge"} | PROGRAMS
"""Unknown to the store."""

WITH_SPARK: Final = {"bridge/analysis.py", "bridge/install/class_archive.py"}
"""Modules that load PySpark with themselves."""


def layer_of(path: str) -> str:
    """The layer of a module, given as `bridge/kafka/admin.py` or `bridge.kafka.admin.Cluster`; "" for a package."""
    parts = path.removesuffix(".py").replace(".", "/").split("/")
    names = ["/".join(parts[:length]) for length in range(len(parts), 1, -1)]
    return next((name for name in names if name in LAYERS), "")


def test_imports_go_down() -> None:
    """A module imports from its own folder and from the layers below it, for its types too."""
    wrong = [
        f"{module} imports {name}"
        for module in modules("bridge", "timerstore")
        for name in imports(module)
        if (lower := layer_of(name)) and LAYERS.index(lower) > LAYERS.index(layer_of(module))
    ]
    assert not wrong, wrong


def test_the_store_and_the_product_know_nothing_above_them() -> None:
    """timerstore knows neither Kafka nor Spark nor the bridge; neither knows the programs around it and the tests."""
    forbidden = {"timerstore": FOREIGN, "bridge": PROGRAMS}
    names = [
        (package, module, name) for package in forbidden for module in modules(package) for name in imports(module)
    ]
    wrong = [f"{module} imports {name}" for package, module, name in names if name.split(".")[0] in forbidden[package]]
    assert not wrong, wrong


def test_what_starts_loads_spark_when_it_needs_it() -> None:
    """A start, and every command, is there before PySpark is loaded, which takes a tenth of a start."""
    loads = {
        module
        for module in modules("bridge")
        for node in parse(module).body
        if (isinstance(node, ast.Import) and any(each.name.startswith("pyspark") for each in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyspark"))
    }
    assert loads == WITH_SPARK


def test_folders_can_be_read() -> None:
    """No folder has more than twelve files, no file more than 500 lines, and each folder is a layer."""
    files = [Path(module) for module in modules("bridge", "timerstore") if not module.endswith("__init__.py")]
    folders = [str(file.parent) for file in files]
    assert not {folder for folder in folders if folders.count(folder) > 12}
    assert not [str(f) for f in files if len((ROOT / f).read_text(encoding="utf-8").splitlines()) > 500]
    assert not [str(file) for file in files if not layer_of(str(file))]


@pytest.mark.fault("an image whose first step lacks a module")
def test_the_image_resolves_the_jars_with_the_modules_that_it_copies() -> None:
    """The step of the image that resolves the connector's jars has all modules that it imports."""
    copied = {
        name
        for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
        if line.startswith("COPY bridge/")
        for name in line.split()[1:-1]
    }
    needed = {
        path
        for module in copied
        for name in imports(module)
        for path in (f"{name.replace('.', '/')}.py", f"{name.rpartition('.')[0].replace('.', '/')}.py")
        if path.startswith("bridge/") and (ROOT / path).is_file()
    }
    assert "bridge/install/maven.py" in needed <= copied
