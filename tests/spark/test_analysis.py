"""bridge.analysis: a real Spark reads the export of a real store behind a real listener."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from bridge.analysis import PendingDataSource
from bridge.api.listener import Listener
from bridge.http.protection import Protection
from bridge.stores.search import SCHEMA, Query
from tests.model.stores import batch
from tests.unit.bridge.api import fakes
from tests.unit.bridge.api.test_export import Bridge
from tests.unit.bridge.stores.rig import ORDERS, Rig
from tests.unit.timerstore.entries import Record
from timerstore.limits import Limits

LATER_MS = fakes.NOW_MS + 3_600_000
ROWS = 1_000


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """A thousand messages, half of them in memory."""
    rig = Rig(tmp_path_factory.mktemp("analysis") / "store", limits=Limits(horizon_ms=1_000))
    for first in (0, ROWS // 2):
        offsets = range(first, first + ROWS // 2)
        records = [Record(*ORDERS, n, LATER_MS + n, target="orders" if n % 4 else "bills") for n in offsets]
        rig.stores.append(batch(records), {ORDERS: first + ROWS // 2}, fakes.NOW_MS)
        if first == 0:
            rig.deliver(fakes.NOW_MS)
            rig.stores.flush(fakes.NOW_MS)
    return rig


@pytest.fixture(scope="module")
def served(rig: Rig) -> Iterator[Listener]:
    protection = Protection(user="analyst", password="secret")
    with Listener(
        "127.0.0.1", 0, source=Bridge(index=rig.stores), protection=protection, show_payloads=True
    ) as serving:
        yield serving


@pytest.fixture(scope="module")
def password(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secrets") / "password"
    path.write_text("secret\n")
    path.chmod(0o600)
    return path


def pending(spark: SparkSession, served: Listener, password: Path, **filters: str) -> DataFrame:
    spark.dataSource.register(PendingDataSource)
    where = {"url": f"http://127.0.0.1:{served.port}", "user": "analyst", "password_file": str(password)}
    return spark.read.format("delay-bridge").options(**where, **filters).load()


def test_a_data_frame_of_what_is_pending(spark: SparkSession, served: Listener, password: Path, rig: Rig) -> None:
    """It has what the store counts, and all columns of the export; filters go along."""
    frame = pending(spark, served, password)
    assert frame.columns == SCHEMA.names
    assert frame.count() == rig.stores.count_where(Query(), fakes.NOW_MS).rows == ROWS
    by_target = {row["target"]: row["count"] for row in frame.groupBy("target").count().collect()}
    assert by_target == {"orders": 750, "bills": 250}
    row = frame.where("offset = 700").selectExpr("*", "unix_millis(due) AS due_ms").collect()[0]
    assert (row["due_ms"], row["origin"], row["state"]) == (LATER_MS + 700, "delay/0/700", "waiting")
    assert (bytes(row["key"]), bytes(row["value"])) == (b"0-700", b"payload")
    assert [(header["key"], bytes(header["value"])) for header in row["headers"]] == [("h", b"v")]
    assert pending(spark, served, password, target="bills", state="waiting,rolled").count() == 250
    assert pending(spark, served, password, state="overdue").count() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [({"targt": "a"}, "has no option targt"), ({"id": "", "timeout": "1"}, "refuses the request")],
)
def test_what_cannot_be_read_is_told(
    spark: SparkSession, served: Listener, password: Path, options: dict[str, str], said: str
) -> None:
    """An option that does not exist before anything is read, and what the bridge refuses."""
    with pytest.raises(PySparkException, match=said):
        pending(spark, served, password, **options).count()
