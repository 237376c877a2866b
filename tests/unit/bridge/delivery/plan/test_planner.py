"""The plan of what is due, with targets of which everything is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from bridge.delivery.plan.backoff import RetryPolicy
from bridge.delivery.plan.fates import Unplannable
from bridge.delivery.plan.planner import Plan, Planner
from bridge.delivery.targets.cache import Targets
from bridge.delivery.targets.target import Target
from bridge.errors import EnvironmentFailure
from bridge.stores.names import Sources
from bridge.wire import headers as h
from bridge.wire.commands import KEY_BYTES_MAX
from tests.entries import reject, rows_of, timer
from timerstore.cancels.cancels import NO_ORIGIN
from timerstore.rows.entry import Kind

SOURCES = Sources([("delay", 0)])
NOW = 1_800_000_000_000


class Well:
    """Targets that take everything."""

    def resolve(self, names: Iterable[str]) -> Mapping[str, Target]:
        return {name: Target(partitions=3, bytes_max=1_000_000) for name in names}

    def count_partitions(self, _name: str) -> int:
        return 3


class Unanswered(Well):
    """The brokers do not say how many partitions there are."""

    def count_partitions(self, _name: str) -> int:
        raise EnvironmentFailure("no answer", hint="Look.")


def elsewhere(kind: Kind) -> dict[str, Any]:
    """A command about a message of another partition."""
    name = h.MOVE_ORIGIN if kind is Kind.MOVE else h.CANCEL_ORIGIN
    row = timer("delay", 0, 20, NOW, None, kind=int(kind), headers=[(name, b"delay/1/7")])
    return {**row, "origin": NO_ORIGIN}


def planned(*entries: dict[str, Any], targets: Well | None = None) -> tuple[Plan, dict[str, list[int]]]:
    """The plan of these entries, and the offsets of the rows that go to each topic."""
    planner = Planner(
        targets=cast("Targets", targets or Well()),
        permitted=lambda _: True,
        default_targets={"delay": None},
        dead_letter_topics={"delay": "delay.dlt"},
        retry=RetryPolicy(),
    )
    rows = rows_of([(e["at"], 0, e["offset"], e) for e in entries])
    plan = planner.plan(rows, SOURCES, NOW)
    sent: dict[str, list[int]] = {}
    for batch in plan.batches():
        plan.counts.are_unreadable(batch.unreadable)
        sent.setdefault(batch.topic, []).extend(np.asarray(rows.offset)[batch.ids].tolist())
    return plan, sent


def test_a_name_that_the_client_would_cut_is_neither_delivered_nor_copied() -> None:
    """A message with a header whose name holds NUL is a dead letter, also where it would only have been rolled."""
    cut: dict[str, Any] = {"headers": [("x", b"1"), ("delay-origin\0", b"forged")]}
    fine: dict[str, Any] = {"headers": [("x", b"1"), ("delay-origins", None)]}
    far = {"at": NOW}
    plan, sent = planned(
        timer("delay", 0, 1, NOW, "orders", **fine),
        timer("delay", 0, 2, NOW, "orders", **cut),
        timer("delay", 0, 3, NOW, "orders"),
        {**timer("delay", 0, 4, NOW + 9, "orders", **cut), **far},
        {**timer("delay", 0, 5, NOW + 9, "orders", **fine), **far},
        timer("delay", 0, 6, NOW, "missing", **cut),
        reject("delay", 0, 7, NOW, "no-time", **cut),
    )
    assert sent == {"orders": [1, 3], "delay": [5], "delay.dlt": [2, 4, 6, 7]}
    assert plan.counts.rejected == {"bad-header-name": 3, "no-time": 1}
    assert plan.records == 7


@pytest.mark.parametrize("kind", [Kind.CANCEL, Kind.RECALL])
def test_a_command_waits_while_the_partitions_cannot_be_counted(kind: Kind) -> None:
    """Alone in its take, and without an answer, too."""
    with pytest.raises(Unplannable) as raised:
        planned(elsewhere(kind), targets=Unanswered())
    assert [each.detail for each in raised.value.unwritable.values()] == ["no answer"]


@pytest.mark.parametrize(("size", "is_kept"), [(KEY_BYTES_MAX, True), (KEY_BYTES_MAX + 1, False)])
@pytest.mark.parametrize("kind", [Kind.CANCEL, Kind.RECALL, Kind.MOVE])
def test_a_large_key_is_not_forwarded(kind: Kind, size: int, is_kept: bool) -> None:
    """With a header more the record might fit nowhere, and its partition would wait for ever."""
    key = b"k" * size
    plan, _ = planned({**elsewhere(kind), "key": key})
    (batch,) = plan.batches()
    assert (batch.topic, batch.partitions, batch.keys) == ("delay", [1], [key if is_kept else None])


def test_a_row_that_cannot_become_a_letter_is_counted_as_what_it_becomes() -> None:
    """Once its batch says so, the count by reason is that of the letters, and the log names the record; the others are
    delivered."""
    with capture_logs() as logs:
        plan, sent = planned(
            reject("delay", 0, 1, NOW, "of-a-later-version"),
            reject("delay", 0, 2, NOW, "no-time"),
            timer("delay", 0, 3, NOW, "orders"),
        )
    assert sent == {"orders": [3], "delay.dlt": [1, 2]}
    assert {reason: count for reason, count in plan.counts.rejected.items() if count} == {"unreadable": 1, "no-time": 1}
    assert plan.records == 3
    assert [(line["event"], line["offset"]) for line in logs] == [("dead-letter-plain", 1)]
