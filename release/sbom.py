"""`make sbom`: the contents of the image, as CycloneDX JSON.

`cyclonedx-py` lists the Python packages of the lock file. This program adds the jars of Spark in the image and those of
the connector, each with its digest and its shaded parts, and the Debian packages, including the Java runtime. Debian
versions come from the built image; without an image the packages have no versions, since the base image's distribution
determines them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, NamedTuple

HERE: Final = Path(__file__).parent
COORDINATES: Final = HERE / "coordinates.txt"
UNUSED: Final = HERE / "unused-jars.txt"
DOCKERFILE: Final = HERE.parent / "Dockerfile"

Component = dict[str, Any]


class Coordinates(NamedTuple):
    """The identity of a jar for Maven and for databases of vulnerabilities."""

    group: str
    artifact: str
    version: str
    classifier: str = ""

    @property
    def purl(self) -> str:
        """The package URL."""
        variant = f"?classifier={self.classifier}" if self.classifier else ""
        return f"pkg:maven/{self.group}/{self.artifact}@{self.version}{variant}"

    def of(self, jar: Path) -> Coordinates | None:
        """The coordinates with the classifier of the jar's name; None for a jar of another artifact."""
        head, mine, classifier = jar.stem.partition(f"{self.artifact}-{self.version}")
        if head or not mine or (classifier and classifier[0] != "-"):
            return None
        return self._replace(classifier=classifier[1:])


# ---- jars


def image_jars(spark: Path, connector: Path) -> list[Path]:
    """The third-party jars in the image: PySpark's, without those that the image omits, and the connector's."""
    patterns = [f"{pattern}.jar" for pattern in lines(UNUSED)]
    shipped = {jar.relative_to(spark).as_posix(): jar for jar in spark.rglob("*.jar")}
    kept = [jar for name, jar in shipped.items() if not any(fnmatch(name, pattern) for pattern in patterns)]
    others = [jar for jar in connector.glob("*.jar") if not jar.name.startswith("delay-bridge-")]
    return sorted([*kept, *others], key=lambda jar: jar.name)


def jar_component(jar: Path) -> Component:
    """One jar with its shaded parts. Raises LookupError for an unknown group."""
    inside = sorted(set(embedded(jar)))
    own = next((named for c in inside if (named := c.of(jar))), None) or by_name(jar)
    component = maven_component(own, ref=jar.name)
    component["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256(jar.read_bytes()).hexdigest()}]
    if shaded := [maven_component(c, ref=f"{jar.name}#{c.purl}") for c in inside if c.of(jar) is None]:
        component["components"] = shaded
    return component


def embedded(jar: Path) -> Iterator[Coordinates]:
    """The coordinates of all artifacts that Maven has built into a jar."""
    with zipfile.ZipFile(jar) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"META-INF/maven/.+/pom\.properties", name):
                text = archive.read(name).decode("utf-8", "replace")
                fields = dict(re.findall(r"^(groupId|artifactId|version)=(\S+)", text, re.MULTILINE))
                if len(fields) == 3:
                    yield Coordinates(fields["groupId"], fields["artifactId"], fields["version"])


def by_name(jar: Path) -> Coordinates:
    """The coordinates of a jar by the list of groups. Raises LookupError."""
    for artifact, group in (line.split() for line in lines(COORDINATES)):
        version = jar.stem.removeprefix(f"{artifact}-")
        if version != jar.stem and version[0].isdigit():
            return Coordinates(group, artifact, version)
    raise LookupError(f"{jar.name} does not name its Maven group: add it to {COORDINATES.name}")


def maven_component(coordinates: Coordinates, *, ref: str) -> Component:
    """A component for Maven coordinates; `ref` is its name within the document."""
    return {
        "type": "library",
        "bom-ref": ref,
        "group": coordinates.group,
        "name": coordinates.artifact,
        "version": coordinates.version,
        "purl": coordinates.purl,
    }


# ---- Debian packages


def debian_components(installed: Iterable[str]) -> list[Component]:
    """Components from the lines `package version architecture` of the image's dpkg."""
    return [
        {
            "type": "library",
            "bom-ref": f"debian {name}",
            "name": name,
            "version": version,
            "purl": f"pkg:deb/debian/{name}@{version.replace(':', '%3A')}?arch={architecture}",
        }
        for name, version, architecture in (line.split() for line in installed)
    ]


def named_packages() -> list[Component]:
    """The packages that the Dockerfile installs, without versions, which are unknown before the build."""
    final = DOCKERFILE.read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    words = re.findall(r"apt-get install --yes --no-install-recommends (.+?) \\", final)
    return [
        {"type": "library", "bom-ref": f"debian {name}", "name": name, "purl": f"pkg:deb/debian/{name}"}
        for name in sorted(name for line in words for name in line.split())
    ]


# ---- the document


def whole(python: Component, java: Sequence[Component], debian: Sequence[Component]) -> Component:
    """The document of the Python packages with all other components."""
    return {**python, "components": [*python.get("components", []), *java, *debian]}


def lines(path: Path) -> list[str]:
    """The lines of a list, without comments."""
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def must_be_valid(text: str) -> None:
    """Raises ValueError with the errors by CycloneDX's own schema."""
    from cyclonedx.schema import SchemaVersion  # type: ignore[import-not-found]
    from cyclonedx.validation.json import JsonStrictValidator  # type: ignore[import-not-found]

    version = SchemaVersion.from_version(json.loads(text)["specVersion"])
    if (problem := JsonStrictValidator(version).validate_str(text)) is not None:
        raise ValueError(str(problem))


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m release.sbom", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, metavar="JSON", help="the output of cyclonedx-py")
    parser.add_argument("--spark", type=Path, required=True, metavar="DIR", help="PySpark's jars")
    parser.add_argument("--connector", type=Path, required=True, metavar="DIR", help="the connector's jars")
    parser.add_argument("--packages", type=Path, metavar="FILE", help="package, version, architecture of each line")
    parser.add_argument("--output", type=Path, required=True, metavar="JSON")
    arguments = parser.parse_args()
    java = [jar_component(jar) for jar in image_jars(arguments.spark, arguments.connector)]
    installed = arguments.packages.read_text(encoding="utf-8").splitlines() if arguments.packages else []
    debian = debian_components(installed) if installed else named_packages()
    document = whole(json.loads(arguments.python.read_text(encoding="utf-8")), java, debian)
    text = json.dumps(document, indent=2)
    must_be_valid(text)
    arguments.output.write_text(text + "\n", encoding="utf-8")
    shaded = sum(len(jar.get("components", [])) for jar in java)
    versions = "of the image" if installed else "without versions: no image"
    print(
        f"{arguments.output}: {len(document['components'])} components: {len(java)} jars with {shaded} more inside, "
        f"{len(debian)} Debian packages ({versions}), the rest Python"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
