"""The client's end of an export: Arrow batches of `GET /api/v1/export`, and whether they are all."""

from __future__ import annotations

from collections.abc import Generator

import pyarrow as pa
import structlog

from bridge.api.peers.batches import MEDIA_TYPE, BrokenOffError
from bridge.api.peers.batches import batches as all_of
from bridge.commands.api_client import ApiClient, Parameters
from bridge.errors import EnvironmentFailure

log = structlog.get_logger("bridge.commands.export_stream")


def batches(api: ApiClient, parameters: Parameters) -> Generator[pa.RecordBatch]:
    """All batches, some without rows; one at least. What was read counts only if this comes to its end;
    closed before, it ends the export.

    Raises as `ApiClient.get`, and EnvironmentFailure where the stream breaks off. Instances that did not answer are in
    the log.
    """
    with api.opened("export", parameters) as response:
        if response.headers.get_content_type() != MEDIA_TYPE:
            raise api.foreign()
        try:
            silent = yield from all_of(response)
        except BrokenOffError as error:
            raise EnvironmentFailure(
                f"the export has broken off after {error.rows} messages",
                hint="Try again; the log of the bridge may say why.",
                reason=error.reason,
                code="DB-1020",
            ) from None
    if silent:
        log.warning(
            "export-incomplete", reason="these instances did not answer: what they have is missing", instances=silent
        )
