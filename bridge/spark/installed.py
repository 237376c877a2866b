"""PySpark as it is installed. It is not imported for that: where Java starts later, or never, a start does not wait for
it.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


@cache
def version() -> str:
    """Spark's."""
    return metadata.version("pyspark")


@cache
def home() -> Path:
    """Its directory, which is Spark's own as well."""
    found = find_spec("pyspark")
    assert found is not None and found.origin is not None, "it is installed with the bridge"
    return Path(found.origin).parent


def shipped() -> list[Path]:
    """The jars inside it."""
    return sorted((home() / "jars").glob("*.jar"))
