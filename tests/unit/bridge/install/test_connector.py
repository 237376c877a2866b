"""Spark's Kafka connector: found where it was installed, refused where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

from bridge.errors import EnvironmentFailure
from bridge.install import connector, maven


def put(directory: Path, *names: str) -> None:
    """Empty files that are named like jars."""
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).touch()


def complete(version: str) -> tuple[str, ...]:
    """Names of the connector's jars for that version of Spark."""
    return (
        f"spark-sql-kafka-0-10_2.13-{version}.jar",
        f"spark-token-provider-kafka-0-10_2.13-{version}.jar",
        "kafka-clients-3.9.2.jar",
        "commons-pool2-2.12.0.jar",
        "hadoop-bare-naked-local-fs-0.1.0.jar",
    )


def test_the_environments_own_jars_are_found() -> None:
    """`make install` has put the connector beside the environment, and the query's sink."""
    assert {connector.artifact(jar) for jar in connector.jars()} == {*connector.NEEDED, connector.FRAME_WRITER}


def test_a_named_directory_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DELAY_BRIDGE_JARS names another directory, as in images."""
    put(tmp_path, *complete(pyspark.__version__), connector.FRAME_WRITER)
    monkeypatch.setenv(connector.JARS_VARIABLE, str(tmp_path))
    assert {jar.parent for jar in connector.jars()} == {tmp_path}


@pytest.mark.parametrize(
    "names",
    [
        (),
        complete(pyspark.__version__)[:4],
        complete(pyspark.__version__),
        (*complete("3.0.0"), connector.FRAME_WRITER),
    ],
)
def test_an_incomplete_or_foreign_directory_is_refused(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing jar, or the connector of another Spark, is an error with the remedy, not a failing first query."""
    put(tmp_path, *names)
    monkeypatch.setenv(connector.JARS_VARIABLE, str(tmp_path))
    with pytest.raises(EnvironmentFailure, match=r"bridge.install.connector install"):
        connector.jars()


def test_install_replaces_the_jars_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade of PySpark no old jar stays beside the new ones; what fits is not resolved again."""
    runs: list[Path] = []

    def resolve(_pom: str, into: Path, **_: object) -> list[Path]:
        if not into.exists():
            runs.append(into)
            put(into, *complete(pyspark.__version__))
        return sorted(into.glob("*.jar"))

    monkeypatch.setattr(maven, "resolve_jars", resolve)
    put(tmp_path / "jars", *complete("3.0.0"))
    for _ in range(2):
        installed = connector.install_connector(tmp_path / "jars")
        assert sorted(jar.name for jar in installed) == sorted(complete(pyspark.__version__))
    assert len(runs) == 1


def test_another_install_keeps_the_sink(tmp_path: Path) -> None:
    """Where the connector fits, nothing in the directory is touched: the compiled jar stays."""
    put(tmp_path, *complete(pyspark.__version__), connector.FRAME_WRITER)
    assert tmp_path / connector.FRAME_WRITER in connector.install_connector(tmp_path)


@pytest.mark.parametrize(
    ("jar", "name"),
    [
        ("spark-sql-kafka-0-10_2.13-4.0.0.jar", "spark-sql-kafka-0-10_2.13"),
        ("kafka-clients-3.9.0.jar", "kafka-clients"),
        ("zstd-jni-1.5.6-9.jar", "zstd-jni"),
    ],
)
def test_an_artifact_is_a_jar_without_its_version(jar: str, name: str) -> None:
    """Numbers in the middle of a name are no version."""
    assert connector.artifact(Path(jar)) == name
