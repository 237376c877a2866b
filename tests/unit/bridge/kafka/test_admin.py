"""bridge.kafka.admin: what look-ups make of answers that are missing. The client is a script of the test's."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from bridge.errors import EnvironmentFailure
from bridge.kafka import admin
from bridge.kafka.admin import Cluster, Watermarks
from bridge.settings.model import Settings

A, B = ("delay", 0), ("delay", 1)


def list_offsets(
    code: int | None, asked: Mapping[TopicPartition, object], **_: object
) -> dict[TopicPartition, Future[Any]]:
    """B does not answer; without a code the answer lacks B."""
    futures = {}
    for place in asked:
        future = futures[place] = Future[Any]()
        if place.partition != B[1]:
            future.set_result(mock.Mock(offset=7, leader_epoch=3))
        elif code is None:
            future.set_result(mock.Mock(offset=OFFSET_INVALID, leader_epoch=None))
        else:
            future.set_exception(KafkaException(KafkaError(code)))
    return futures


@pytest.mark.parametrize("code", [KafkaError.LEADER_NOT_AVAILABLE, KafkaError._TIMED_OUT, None])
@pytest.mark.fault("a partition of a delay topic that has no leader")
def test_a_partition_without_a_leader_hides_no_other(monkeypatch: pytest.MonkeyPatch, code: int | None) -> None:
    """The periodic look at the logs reports the other partitions; a look-up that needs all of them fails with an
    error. A leader that does not answer counts as none; without any answer both fail."""
    client = mock.Mock(list_offsets=partial(list_offsets, code))
    monkeypatch.setattr(admin, "AdminClient", lambda *_, **__: client)
    monkeypatch.setattr(admin, "_ELECTION_S", -1.0)
    cluster = Cluster(Settings.of({}))
    assert cluster.watermarks([A, B], of_all=False) == {A: Watermarks(start=7, end=7, epoch=3)}
    with pytest.raises(EnvironmentFailure):
        cluster.watermarks([A, B])
    if code == KafkaError._TIMED_OUT:
        with pytest.raises(EnvironmentFailure):
            cluster.watermarks([B], of_all=False)
    else:
        assert cluster.watermarks([B], of_all=False) == {}


def test_of_no_partition_nothing_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client would refuse the request."""
    monkeypatch.setattr(admin, "AdminClient", lambda *_, **__: AdminClient({"bootstrap.servers": "127.0.0.1:1"}))
    assert Cluster(Settings.of({})).committed("group", []) == {}
