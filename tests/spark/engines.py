"""Both decoders, Catalyst's and Python's: what one makes of a record, the other makes too, to the last column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from bridge.ingest.decode import decode
from bridge.ingest.decode_records import decode_records
from bridge.ingest.finish import ControlHeaders, HeaderLimits, with_schedules
from bridge.wire.decode_epochs import DecodeEpochs
from tests.decode_examples import as_record
from timerstore.rows.entry import ENTRY

Epochs = Mapping[tuple[str, int], DecodeEpochs]


def decoded_by_both(records: DataFrame, rows: Sequence[dict[str, Any]], all_epochs: Epochs) -> pa.Table:
    """The entries of the records (`rows` are the same), finished. Raises AssertionError where the two differ."""
    by_spark = decode(records, all_epochs).toArrow()
    by_python = decode_records([as_record(row) for row in rows], all_epochs)
    for mine, other, row in zip(by_python.to_pylist(), by_spark.cast(ENTRY).to_pylist(), rows, strict=True):
        assert mine == other, row
    finished = ControlHeaders(all_epochs).taken_out(with_schedules(HeaderLimits(all_epochs).applied(by_spark)))
    again = ControlHeaders(all_epochs).taken_out(with_schedules(HeaderLimits(all_epochs).applied(by_python)))
    assert again.to_pylist() == finished.to_pylist()
    return finished
