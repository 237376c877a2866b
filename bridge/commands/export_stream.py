"""The client's end of an export: Arrow batches of `GET /api/v1/export`, and whether they are all."""

from __future__ import annotations

import http.client
from collections.abc import Generator
from typing import Final

import pyarrow as pa

from bridge.commands.api_client import ApiClient, Parameters
from bridge.errors import EnvironmentFailure

MEDIA_TYPE: Final = "application/vnd.apache.arrow.stream"


def batches(api: ApiClient, parameters: Parameters) -> Generator[pa.RecordBatch]:
    """All batches, some without rows; one at least. What was read counts only if this comes to its end;
    closed before, it ends the export.

    Raises as `ApiClient.get`, and EnvironmentFailure where the stream breaks off: the last batch says how many rows
    there were.
    """
    rows = 0
    end: int | None = None
    with api.opened("export", parameters) as response:
        if response.headers.get_content_type() != MEDIA_TYPE:
            raise api.foreign()
        try:
            stream = pa.ipc.open_stream(response)
            while end is None:
                batch, metadata = stream.read_next_batch_with_custom_metadata()
                end = None if metadata is None else int(metadata["rows"])
                rows += batch.num_rows
                yield batch
        except (pa.ArrowException, http.client.HTTPException, OSError, StopIteration, LookupError, ValueError) as error:
            raise _broken_off(rows, type(error).__name__) from None
    if rows != end:
        raise _broken_off(rows, f"{end} were announced")


def _broken_off(rows: int, reason: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"the export has broken off after {rows} messages",
        hint="Try again; the log of the bridge may say why.",
        reason=reason,
        code="DB-1020",
    )
