"""The suspect partitions, which ingest reads batch by batch, created from the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bridge.ingest.batches.choices import BATCHES, Choices
from bridge.ingest.batches.reader import BatchReader
from bridge.ingest.batches.reading_mark import ReadingMark
from bridge.ingest.batches.suspects import Suspects
from bridge.ingest.decode_records import decode_records, unread_entry
from bridge.settings.clients import java_client, system_properties
from bridge.settings.model import Settings
from bridge.stores.names import SourceName
from bridge.wire.decode_epochs import DecodeEpochs
from timerstore.clock import Clock


def make_suspects(
    settings: Settings,
    all_epochs: Mapping[SourceName, DecodeEpochs],
    jars: Callable[[], Sequence[Path]],
    clock: Clock,
) -> Suspects:
    """The suspects: partitions with a mark of the process before. `jars` are Kafka's client and the reader of
    batches."""
    return Suspects(
        read=BatchReader(lambda: java_client(settings), jars, lambda: system_properties(settings)).read,
        decode=lambda records: decode_records(records, all_epochs),
        unread=unread_entry,
        skips=Choices(settings.store.directory, BATCHES),
        mark=ReadingMark(settings.store.directory),
        clock=clock,
    )
