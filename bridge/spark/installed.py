"""The installed PySpark, found without importing it: a start must not wait for the import if Java starts later."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


@cache
def spark_version() -> str:
    """Spark's version."""
    return metadata.version("pyspark")


@cache
def home() -> Path:
    """The directory of PySpark, which is also Spark's home."""
    spec = find_spec("pyspark")
    assert spec is not None and spec.origin is not None, "it is installed with the bridge"
    return Path(spec.origin).parent


def shipped() -> list[Path]:
    """The jars inside PySpark."""
    return sorted((home() / "jars").glob("*.jar"))
