"""The client's end of an export: the Arrow batches of `GET /api/v1/export`, and a Parquet file of them."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from bridge.api.peers.batches import MEDIA_TYPE, BrokenOffError, as_file, read_export
from bridge.commands.api_client import ApiClient, Parameters, media_type
from bridge.errors import EnvironmentFailure

ROW_GROUP_BYTES: Final = 64 << 20
BATCH_BYTES: Final = 4_096
"""Estimated bytes of a batch without its rows."""

log = structlog.get_logger("bridge.commands.export")


def export_batches(api: ApiClient, parameters: Parameters) -> Generator[pa.RecordBatch]:
    """All batches, at least one, some without rows. They are complete only at the end of the iteration; closing it
    earlier ends the export.

    Raises the errors of `ApiClient.get`, and EnvironmentFailure if the stream breaks off. The log names the instances
    that did not answer, and the partitions that are not read yet.
    """
    with api.opened("export", parameters) as response:
        if media_type(response) != MEDIA_TYPE:
            raise api.foreign()
        try:
            silent = yield from read_export(as_file(response.iter_raw()))
        except BrokenOffError as error:
            raise EnvironmentFailure(
                f"the export has broken off after {error.rows} messages",
                hint="Try again; the log of the bridge may say why.",
                reason=error.reason,
                code="DB-1020",
            ) from None
    if silent:
        log.warning("export-incomplete", reason="messages of these instances or partitions are missing", missing=silent)


def write_parquet(path: Path, batches: Iterable[pa.RecordBatch]) -> int:
    """Write a Parquet file of at least one batch, all of one schema; returns the number of rows. The file gets its name
    after it is complete and durable. Memory is bounded by a row group. Raises EnvironmentFailure, and the errors of
    `batches`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    rest = iter(batches)
    first = next(rest)
    written = 0
    try:
        with temporary.open("xb") as file:
            with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
                waiting, size = [first], first.nbytes
                for batch in rest:
                    waiting.append(batch)
                    size += batch.nbytes + BATCH_BYTES
                    if size >= ROW_GROUP_BYTES:
                        written += _write(writer, pa.Table.from_batches(waiting))
                        waiting, size = [], 0
                if waiting:
                    written += _write(writer, pa.Table.from_batches(waiting))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot write {path}",
            hint="Choose another --to, with room for all messages.",
            reason=error.strerror or str(error),
            code="DB-1021",
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return written


def _write(writer: pq.ParquetWriter, table: pa.Table) -> int:
    """Write a row group unless it is empty; returns the number of rows."""
    if len(table):
        writer.write_table(table)
    return len(table)
