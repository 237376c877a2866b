"""The outcome of a commit without an answer, according to the committed states. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bridge.errors import StateError
from bridge.stores.names import SourceName
from bridge.wire.committed_state import CommittedState


def was_committed(
    before: Mapping[SourceName, CommittedState],
    after: Mapping[SourceName, CommittedState],
    found: Mapping[SourceName, CommittedState | None],
    wrong: Collection[SourceName] = (),
) -> bool:
    """Whether Kafka holds (`found`) the states `after` a transaction, rather than those `before` it; for `wrong`
    partitions, it held others before. Raises StateError if it holds neither."""
    committed = {name for name, state in after.items() if state.is_written_as(found[name])}
    unchanged = {name for name in after if name in wrong or before[name].is_written_as(found[name])}
    is_same = committed == unchanged == after.keys()  # but perhaps for manifests
    if committed == after.keys() and not (is_same and _lacks_manifest(after, found)):
        return True
    if unchanged == after.keys():
        return False
    raise StateError(
        "the committed offsets are neither those before the last transaction nor those after it",
        hint="Something else commits under this bridge's id: stop it, then start again.",
        partitions=sorted(after.keys() - committed - unchanged),
        code="DB-4010",
    )


def _lacks_manifest(
    after: Mapping[SourceName, CommittedState], found: Mapping[SourceName, CommittedState | None]
) -> bool:
    return any((state := found[name]) and each.written_manifest() != state.manifest for name, each in after.items())
