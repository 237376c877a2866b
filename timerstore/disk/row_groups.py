"""The row groups of a Parquet file, one at a time, for indexes that are derived from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from timerstore.disk import files


def tables(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Some columns of each row group; page checksums are verified. Raises Corrupt, DiskFailure."""
    with files.reading(path, pa.ArrowException), pq.ParquetFile(path, page_checksum_verification=True) as parquet:
        for group in range(parquet.num_row_groups):
            yield parquet.read_row_group(group, columns=list(columns))
