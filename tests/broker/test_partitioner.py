"""bridge.placement: where a record goes when a part of its target is down."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.delivery.targets.partitioner import murmur2, place
from dev.harness.kafka import Outgoing, Topics, produce
from tests.system.broker import Broker

KEYS = [b"", b"a", b"ab", b"abc", b"abcd", b"\x00\xff", b"key", bytes(range(256)), *(b"%d" % i for i in range(50))]


@pytest.mark.parametrize(("data", "hashed"), [(b"21", -973932308), (b"foobar", -790332482), (b"abc", 479470107)])
def test_the_hash_is_kafkas(data: bytes, hashed: int) -> None:
    """Values of the tests of Kafka's own clients."""
    assert murmur2(data) == hashed % 2**32


@pytest.mark.system
def test_keys_are_placed_as_the_client_places_them(broker: Broker, topics: Topics) -> None:
    """With one partition down, exactly the keys wait that the client would send there."""
    topic = topics.create(partitions=7)
    sent = produce(broker.bootstrap, [Outgoing(topic=topic, key=k) for k in KEYS], partitioner="murmur2_random")
    placed, is_up = place(KEYS, np.full(len(KEYS), -1, np.int32), partitions=7, down={3}, partitioner="murmur2_random")
    assert is_up.tolist() == [record.partition != 3 for record in sent]
    assert set(placed.tolist()) == {-1}


def test_what_has_no_key_goes_where_it_can() -> None:
    """To partitions that are up, all of them, in runs."""
    placed, is_up = place(
        [None] * 300, np.full(300, -1, np.int32), partitions=3, down={1}, partitioner="murmur2_random"
    )
    assert is_up.all()
    assert placed.tolist() == [0] * 100 + [2] * 100 + [0] * 100


def test_a_partition_that_is_asked_for_is_waited_for() -> None:
    """A record that names a partition gets it, or none."""
    wanted = np.array([0, 1, 2, 1], np.int32)
    placed, is_up = place([b"k", None, None, b"k"], wanted, partitions=3, down={1}, partitioner="murmur2_random")
    assert placed.tolist() == [0, 1, 2, 1]
    assert is_up.tolist() == [True, False, True, False]


def test_another_partitioner_is_not_guessed_at() -> None:
    """Where it would send a record is not known here: records wait unless they name their partition."""
    wanted = np.array([-1, -1, 2], np.int32)
    _, is_up = place([b"k", None, b"k"], wanted, partitions=3, down={1}, partitioner="consistent_random")
    assert is_up.tolist() == [False, False, True]


def test_nothing_is_reached_when_everything_is_down() -> None:
    """A target without any leader takes no records, for any key."""
    _, is_up = place([None, b"k"], np.array([-1, 5], np.int32), partitions=2, down={0, 1}, partitioner="murmur2_random")
    assert not is_up.any()
