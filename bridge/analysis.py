"""Pending messages as a Spark DataFrame: a data source that reads the export of a running bridge.

    spark.dataSource.register(PendingDataSource)
    spark.read.format("delay-bridge").option("url", "http://bridge:8081").load()

Each action reads a new snapshot, in one partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from bridge.api.filters import Filters
from bridge.commands.api_client import ApiClient
from bridge.commands.export import export_batches
from bridge.errors import ConfigurationError
from bridge.settings.model import HttpSettings

SCHEMA: Final = """
    topic string, partition int, offset bigint, origin string, due timestamp, at timestamp, ts timestamp, state string,
    target string, target_partition int, key binary, id string, rolls int, attempts int, reason string,
    headers array<struct<key: string, value: binary>>, value binary
"""
FILTERS: Final = tuple(Filters.model_fields)
OPTIONS: Final = ("url", "user", "password_file", "certificate_file", "timeout", *FILTERS)
TIMEOUT_S: Final = 30.0


class PendingDataSource(DataSource):
    """The format `delay-bridge`. Options are `url`; `user` and `password_file`; `certificate_file` (PEM, of the bridge
    or of an authority); `timeout` (seconds for each wait); and the filters of the API, where `state` may have several
    values with commas. The machine that runs the task reads the files."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "delay-bridge"

    def schema(self) -> str:
        """The columns of the export; docs/api.md explains them."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark gives it
        """A reader with these options. Raises ConfigurationError for missing or unknown ones."""
        options = {name.lower(): text for name, text in self.options.items()}
        unknown = sorted(options.keys() - set(OPTIONS))
        if unknown or "url" not in options or ("user" in options) != ("password_file" in options):
            raise ConfigurationError(
                f"the data source has no option {unknown[0]}"
                if unknown
                else "the data source needs url, and user and password_file both or neither",
                hint=f"The options are {', '.join(OPTIONS)}.",
                code="DB-1022",
            )
        return PendingReader(options)


class PendingReader(DataSourceReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - there is one
        """The non-empty batches of the export. Raises BridgeError."""
        files: dict[str, Any] = {name: Path(self._options[name]) for name in OPTIONS[2:4] if name in self._options}
        http = HttpSettings.model_construct(user=self._options.get("user"), **files)
        api = ApiClient(http, self._options["url"], float(self._options.get("timeout", TIMEOUT_S)))
        filters: dict[str, Any] = {name: self._options[name] for name in FILTERS if name in self._options}
        if "state" in filters:
            filters["state"] = [state.strip() for state in filters["state"].split(",") if state.strip()]
        for batch in export_batches(api, filters):
            if batch.num_rows:
                yield batch
