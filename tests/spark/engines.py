"""Both decoders, Catalyst's and Python's: what one makes of a record, the other makes too, to the last column."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from bridge.ingest.decode import decode
from bridge.ingest.decode_records import decode_records
from bridge.ingest.finish import ControlHeaders, HeaderLimits, with_schedules
from bridge.stores.names import NAMED_ENTRY
from bridge.wire.decode_epochs import DecodeEpochs
from tests.decode_examples import as_record

Epochs = Mapping[tuple[str, int], DecodeEpochs]
SOURCE_SCHEMA: Final = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int, "
    "headers array<struct<key:string,value:binary>>"
)
"""Of Spark's Kafka source."""
_NAMES: Final = ("key", "value", "topic", "partition", "offset", "timestampType", "headers")


def decoded_by_both(spark: SparkSession, rows: Sequence[dict[str, Any]], all_epochs: Epochs) -> pa.Table:
    """The entries of the records, finished. Raises AssertionError where the two differ."""
    by_spark = _plan(spark, tuple(all_epochs.items())).of(rows)
    by_python = decode_records([as_record(row) for row in rows], all_epochs)
    for mine, other, row in zip(by_python.to_pylist(), by_spark.cast(NAMED_ENTRY).to_pylist(), rows, strict=True):
        assert mine == other, row
    finished = ControlHeaders(all_epochs).taken_out(with_schedules(HeaderLimits(all_epochs).applied(by_spark)))
    again = ControlHeaders(all_epochs).taken_out(with_schedules(HeaderLimits(all_epochs).applied(by_python)))
    assert again.to_pylist() == finished.to_pylist()
    return finished


def as_source_gives(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records in the columns of Spark's Kafka source."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return [
        {"timestamp": epoch + timedelta(milliseconds=row["ts"])} | {name: row[name] for name in _NAMES} for row in rows
    ]


class _Plan:
    """Decoding of whatever records are given: they are in a file, which is read each time. To make a plan takes more
    than a second of a core, to run it a tenth of that."""

    def __init__(self, spark: SparkSession, all_epochs: Epochs) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="records-")
        self._file = Path(self._directory.name, "records")
        records = spark.sparkContext.parallelize([str(self._file)], 1).flatMap(_read())
        frame = spark.createDataFrame(records, SOURCE_SCHEMA, verifySchema=False)
        self._entries: DataFrame = decode(frame, all_epochs)

    def of(self, rows: Sequence[dict[str, Any]]) -> pa.Table:
        """The entries of these records."""
        self._file.write_bytes(pickle.dumps(as_source_gives(rows)))
        return self._entries.toArrow()


@cache
def _plan(spark: SparkSession, all_epochs: tuple[tuple[tuple[str, int], DecodeEpochs], ...]) -> _Plan:
    return _Plan(spark, dict(all_epochs))


def _read() -> Callable[[str], Any]:
    """For a process of Spark's, which has nothing of the tests."""
    return lambda path: pickle.loads(Path(path).read_bytes())
