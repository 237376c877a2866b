"""The bridge as the system tests start it: a log that tells everything, and a JVM that does not compile for long."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dev.harness.bridge import BridgeProcess, Tree, lay_over
from dev.harness.waiting import wait_until
from tests.java import SHORT_LIVED

AS_SHIPPED: Final[Tree] = {"spark": {"conf": {"spark.driver.extraJavaOptions": ""}}}
"""The JVM with both its compilers: where memory or throughput is looked at."""


SPARK_SERVES_S_MAX: Final = 180
"""Its JVM is niced: beside other tests it starts when they let it."""
LOOKS: Final = 8
"""Waits between two looks for threads of Java, which are many."""


class RunningBridge(BridgeProcess):
    """A BridgeProcess with the settings of the tests beneath `config`."""

    def __init__(
        self,
        directory: Path,
        bootstrap: str,
        *delay_topics: str,
        id: str | None = None,
        instance: str = "a",
        config: Mapping[str, Any] | None = None,
        spark: bool = True,
    ) -> None:
        """Without `spark` the plain reader reads throughout, for promises that do not depend on the reader: each start
        of Java takes ten seconds of a core."""
        tests: Tree = {
            "logs": {"level": "debug"},
            "spark": {"conf": {"spark.driver.extraJavaOptions": SHORT_LIVED}},
        }
        if not spark:
            tests["spark"]["start_after"] = "1h"
        lay_over(tests, config or {})
        super().__init__(directory, bootstrap, *delay_topics, id=id, instance=instance, config=tests)

    def reader(self) -> str:
        """Which reader serves, as /readyz tells."""
        return str(json.loads(self.http("/readyz")[1])["reader"])

    def wait_spark(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Until the plain reader has handed over to Spark's query; `meanwhile` is called every second or so."""

        looks = itertools.count()

        def serves() -> bool:
            if next(looks) % LOOKS == 0:
                self._let_java_run()
                meanwhile()
            return bool(self.events("query-serves"))

        wait_until(serves, SPARK_SERVES_S_MAX, lambda: f"Spark reads; {self.tail()}")

    def _let_java_run(self) -> None:
        """Take its niceness from it, where that is permitted: behind the processes of other tests it takes minutes."""
        for process in self.processes():
            with suppress(OSError):  # another user's session, or gone
                Path("/proc", str(process.pid), "autogroup").write_text("0")
                for task in Path("/proc", str(process.pid), "task").iterdir():
                    os.setpriority(os.PRIO_PROCESS, int(task.name), 0)
