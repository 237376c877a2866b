"""Makes the archive of the native broker's classes (JEP 350), unless it is there: by a broker that starts and stops.

    python -m dev.broker.archive        (`make test`)

It fits the same Java and jars. Without it, or with another Java, a start takes longer, and nothing else differs.
"""

from __future__ import annotations

import os

from dev.broker import EmbeddedBroker
from dev.broker.embedded import class_archive


def make() -> None:
    """Raises EnvironmentFailure where no broker starts."""
    archive = class_archive()
    if archive.exists():
        return
    made = archive.with_name(f".{archive.name}.{os.getpid()}")
    options = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-XX:ArchiveClassesAtExit={made}", "-Xlog:disable"]
    with EmbeddedBroker(tmpfs=True, jvm_options=options) as broker:
        broker.stop()
    if made.exists():
        made.replace(archive)


if __name__ == "__main__":
    make()
