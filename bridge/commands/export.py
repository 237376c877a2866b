"""`delay-bridge pending export`: what is pending at one moment, as a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bridge.commands import pending
from bridge.commands.invocation import bundled, say
from bridge.errors import EnvironmentFailure

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROW_GROUP_BYTES: Final = 64 << 20
BATCH_BYTES: Final = 4_096
"""Of a batch, beside its rows."""


@bundled
def export(
    to: Annotated[Path, typer.Option("--to", metavar="FILE.parquet", help="Where to write them; it is replaced.")],
    search: pending.Search,
    connection: pending.Connection,
) -> None:
    """Write all pending messages of one moment into a Parquet file; there is none if it fails."""
    with connection.open() as api:
        from bridge.commands.export_stream import batches  # it takes Arrow, and a while

        with closing(batches(api, search.parameters())) as stream:
            rows = write(to, stream)
        say(f"{rows} messages written to {to}")


def write(path: Path, batches: Iterable[pa.RecordBatch]) -> int:
    """Write a Parquet file of one batch or more, which have one schema; returns how many rows it has. It has its name
    when it is whole and durable, and memory is bounded by a row group. Raises EnvironmentFailure, and what `batches`
    raises."""
    import pyarrow as pa
    import pyarrow.parquet as pq

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
            hint="Choose another --to; there must be room for all messages.",
            reason=error.strerror or str(error),
            code="DB-1021",
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return written


def _write(writer: pq.ParquetWriter, table: pa.Table) -> int:
    """Write a row group, if there are rows; returns how many."""
    if len(table):
        writer.write_table(table)
    return len(table)
