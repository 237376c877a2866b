"""release.sbom and release.audit: nothing that the image holds is left out, and nothing unknown passes for safe."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any, Final

import pyspark
import pytest

from release import audit, sbom
from tests.paths import ROOT

SPARK: Final = Path(pyspark.__file__).parent / "jars"
CONNECTOR: Final = ROOT / ".venv" / "share" / "delay-bridge" / "jars"


@pytest.fixture(scope="module")
def components() -> dict[str, sbom.Component]:
    """Of the jars that the image holds, by file name."""
    return {jar.name: sbom.jar_component(jar) for jar in sbom.image_jars(SPARK, CONNECTOR)}


def test_every_jar_of_the_image_is_listed(components: dict[str, sbom.Component]) -> None:
    """The connector's with the digests of its lock, Spark's but for those that are left out."""
    lock = [line.split() for line in (ROOT / "connector.lock").read_text().splitlines()]
    locked = {name: digest for digest, name in lock}
    listed = {name: component["hashes"][0]["content"] for name, component in components.items()}
    assert locked.items() <= listed.items()
    assert any(name.startswith("spark-core_") for name in listed)
    assert not any(name.startswith("hive-exec") for name in listed), "it is left out of the image"
    assert len({component["purl"] for component in components.values()}) == len(components)


def test_what_is_left_out_is_what_is_not_listed(tmp_path: Path) -> None:
    """One list serves both, and both look into directories."""
    names = [jar.relative_to(SPARK) for jar in SPARK.rglob("*.jar")]
    assert any(name.parent != Path() for name in names)
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    listed = sbom.image_jars(tmp_path, tmp_path / "none")
    subprocess.run([ROOT / "release" / "leave-out.sh", sbom.UNUSED, tmp_path], check=True)
    assert sorted(tmp_path.rglob("*.jar"), key=lambda jar: jar.name) == listed
    assert not any(path.is_dir() for path in tmp_path.iterdir()), "an empty folder is left"


def test_the_list_of_groups_has_no_more_than_it_needs(components: dict[str, sbom.Component]) -> None:
    """A jar that says its own coordinates, or that is gone, needs no line."""
    listed = {line.split()[0] for line in sbom.lines(sbom.COORDINATES)}
    needed = set()
    for jar in sbom.image_jars(SPARK, CONNECTOR):
        own = components[jar.name]
        if own["name"] not in {c.artifact for c in sbom.embedded(jar)}:
            needed.add(own["name"])
    assert listed == needed


def test_what_is_shaded_into_a_jar_is_listed_with_it(tmp_path: Path) -> None:
    """A vulnerable library is one inside of another's jar, too."""
    jar = tmp_path / "outer-1.2.jar"
    with zipfile.ZipFile(jar, "w") as archive:
        for name, version in (("outer", "1.2"), ("inner", "0.9")):
            text = f"#Generated\nversion={version}\r\ngroupId=org.{name}\nartifactId={name}\n"
            archive.writestr(f"META-INF/maven/org.{name}/{name}/pom.properties", text)
    component = sbom.jar_component(jar)
    assert component["purl"] == "pkg:maven/org.outer/outer@1.2"
    assert [inner["purl"] for inner in component["components"]] == ["pkg:maven/org.inner/inner@0.9"]


def test_a_jar_without_a_group_is_an_error(tmp_path: Path) -> None:
    """A new version of Spark brings new jars: a developer must name them."""
    jar = tmp_path / "unheard-of-1.0.jar"
    with zipfile.ZipFile(jar, "w") as archive:
        archive.writestr("a", "")
    with pytest.raises(LookupError, match=r"unheard-of-1\.0\.jar .* coordinates\.txt"):
        sbom.jar_component(jar)


def test_the_java_runtime_is_listed_with_the_images_version_or_without_one() -> None:
    """Before the image is built they are not known."""
    assert {"openjdk-17-jre-headless", "ca-certificates"} <= {c["name"] for c in sbom.named_packages()}
    [java] = sbom.debian_components(["openjdk-17-jre-headless 17.0.13+11-2~deb12u1 amd64"])
    assert java["purl"] == "pkg:deb/debian/openjdk-17-jre-headless@17.0.13+11-2~deb12u1?arch=amd64"


def ran(status: int, output: Any = None, error: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], status, "" if output is None else json.dumps(output), error)


@pytest.mark.parametrize(
    ("python", "java", "strict", "lenient"),
    [
        (ran(0, {"dependencies": [{"name": "a", "version": "1", "vulns": []}]}), ran(0, {"results": []}), 0, 0),
        (ran(1, {"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1"}]}]}), ran(0), 1, 1),
        (ran(0, {"dependencies": [{"name": "a", "skip_reason": "not found"}]}), ran(0, {"results": []}), 2, 0),
        (ran(1, None, "no network"), ran(127, None, "no network"), 2, 0),
        (
            ran(1, None, "no network"),
            ran(
                1,
                {
                    "results": [
                        {"packages": [{"package": {"name": "a:b", "version": "1"}, "vulnerabilities": [{"id": "X-2"}]}]}
                    ]
                },
            ),
            1,
            1,
        ),
    ],
    ids=["nothing", "a package", "not looked up", "no network", "a jar"],
)
def test_only_what_was_looked_up_is_safe(
    python: subprocess.CompletedProcess[str], java: subprocess.CompletedProcess[str], strict: int, lenient: int
) -> None:
    """A vulnerability fails in any case; a service that does not answer only without `--lenient`."""
    report = audit.AuditReport()
    audit.read_pip_audit(python, report)
    audit.read_osv_scanner(java, report) if java.stdout or java.returncode else None
    assert (report.status(lenient=False), report.status(lenient=True)) == (strict, lenient)
