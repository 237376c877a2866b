"""bridge.client: what is sent is what the bridge understands, and nothing is lost in silence."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Final

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from bridge.client import DelayClient
from bridge.errors import EnvironmentFailure
from tests.manual_clock import ManualClock
from tests.paths import ROOT


class FakeProducer:
    """Stands in for confluent-kafka's Producer: `refuse` is what the brokers say to every record."""

    def __init__(self, refuse: KafkaError | None = None, full: int = 0, partitions: int = 3) -> None:
        self.sent: list[dict[str, Any]] = []
        self.refuse = refuse
        self.full = full
        self.partitions = partitions
        self.left = 0
        self.refuse_at_once: KafkaError | None = None

    def produce(
        self, topic: str, value: Any, key: Any, partition: int, on_delivery: Callable[..., None], *, headers: Any
    ) -> None:
        if self.full:
            self.full -= 1
            raise BufferError("full")
        if self.refuse_at_once is not None:
            raise KafkaException(self.refuse_at_once)
        self.sent.append({"topic": topic, "value": value, "key": key, "partition": partition, "headers": headers})
        on_delivery(self.refuse, None)

    def __len__(self) -> int:
        return self.full

    def poll(self, _: float) -> int:
        return 0

    def flush(self, _: float) -> int:
        return self.left

    def list_topics(self, topic: str, timeout: float) -> Any:  # noqa: ARG002 - the real one's signature
        partitions = dict.fromkeys(range(self.partitions))
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=partitions)})


def client(producer: FakeProducer) -> DelayClient:
    made: Any = producer
    return DelayClient(made, clock=ManualClock(now_ms=1_800_000_000_000))


def test_a_message_goes_to_the_delay_topic_with_its_own_headers_first() -> None:
    """Key, value and own headers as given, then where and when."""
    producer = FakeProducer()
    client(producer).send("orders", b"v", b"k", {"trace": b"1"}, after=timedelta(seconds=90), id="a", partition=2)
    (sent,) = producer.sent
    assert (sent["topic"], sent["value"], sent["key"], sent["partition"]) == ("delay", b"v", b"k", -1)
    assert sent["headers"][0] == ("trace", b"1")
    assert dict(sent["headers"][1:]) == {
        "delay-for": b"90000",
        "delay-topic": b"orders",
        "delay-id": b"a",
        "delay-partition": b"2",
    }


def test_an_absolute_time_is_a_datetime_or_milliseconds() -> None:
    """The same instant, the same header."""
    producer = FakeProducer()
    sender = client(producer)
    sender.send("t", b"", at=datetime(2027, 1, 31, 8, tzinfo=UTC))
    sender.send("t", b"", at=1_801_382_400_000)
    first, second = (dict(sent["headers"])["delay-until"] for sent in producer.sent)
    assert first == second == b"1801382400000"


def test_headers_may_repeat() -> None:
    """Kafka allows it, so a list of pairs does."""
    producer = FakeProducer()
    client(producer).send("t", b"", headers=[("a", b"1"), ("a", b"2")], after=timedelta(seconds=1))
    assert producer.sent[0]["headers"][:2] == [("a", b"1"), ("a", b"2")]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"at": 1_801_382_400_000, "after": timedelta(seconds=1)},
        {"at": 1_801_382_400},
        {"at": datetime(2027, 1, 1)},  # noqa: DTZ001 - the point of it
        {"after": timedelta(seconds=1), "replace": True},
        {"after": timedelta(seconds=1), "partition": -1},
        {"after": timedelta(seconds=1), "headers": {"delay-id": b"x"}},
    ],
)
def test_what_the_bridge_would_reject_is_refused_at_once(wrong: dict[str, Any]) -> None:
    """Seconds for milliseconds, two times, none, a time without a zone: the producer hears of it, not an operator."""
    producer = FakeProducer()
    with pytest.raises(ValueError, match=r"."):
        client(producer).send("t", b"", **wrong)
    assert producer.sent == []


def test_a_cancel_goes_to_its_targets_partition_or_to_all() -> None:
    """With the key the partitioner finds it; without, it may be anywhere."""
    producer = FakeProducer(partitions=3)
    sender = client(producer)
    sender.cancel("a", key=b"k")
    assert [(s["key"], s["partition"], s["headers"]) for s in producer.sent] == [(b"k", -1, [("delay-cancel", b"a")])]
    producer.sent.clear()
    sender.cancel("a")
    assert [(s["key"], s["partition"]) for s in producer.sent] == [(None, 0), (None, 1), (None, 2)]
    # The bridge need not send it on.
    assert {tuple(s["headers"]) for s in producer.sent} == {
        (("delay-cancel", b"a"), ("delay-copy-forwarded", b"client"))
    }


def test_a_cancel_by_origin_goes_where_its_message_is() -> None:
    """To its partition; of another delay topic to any, and the bridge sends it on."""
    producer = FakeProducer(partitions=3)
    sender = client(producer)
    sender.cancel_origin("delay", 2, 5)
    sender.cancel_origin("other", 2, [9, 5, 7])
    assert [(s["topic"], s["key"], s["value"], s["partition"]) for s in producer.sent] == [
        ("delay", None, None, 2),
        ("delay", None, None, -1),
    ]
    assert [s["headers"] for s in producer.sent] == [
        [("delay-cancel-origin", b"delay/2/5")],
        [("delay-cancel-origin", b"other/2/5,7,9")],
    ]


@pytest.mark.parametrize("offsets", [[], range(101), [-1]])
def test_a_command_by_origin_names_up_to_a_hundred_messages(offsets: Sequence[int]) -> None:
    """Others would be refused by the bridge."""
    with pytest.raises(ValueError, match="up to 100"):
        client(FakeProducer()).cancel_origin("delay", 2, offsets)


def test_a_command_that_asks_for_an_answer_is_one_record() -> None:
    """So that one record is what the answer names; without a key the bridge sends it on to the other partitions."""
    producer = FakeProducer(partitions=3)
    client(producer).cancel("a", reply_to="answers", correlation="7")
    assert [(s["key"], s["partition"], s["headers"]) for s in producer.sent] == [
        (None, -1, [("delay-cancel", b"a"), ("delay-reply-to", b"answers"), ("delay-correlation-id", b"7")])
    ]


def test_a_move_has_the_new_time_and_goes_where_its_message_is() -> None:
    """By id with its key, by origin to its partition; of another delay topic to any, and the bridge sends it on."""
    producer = FakeProducer(partitions=3)
    sender = client(producer)
    sender.move("a", key=b"k", after=timedelta(0))
    sender.move_origin("delay", 2, 5, at=1_801_382_400_000, reply_to="answers")
    sender.move_origin("other", 2, 5, after=timedelta(seconds=1))
    assert [(s["key"], s["partition"], s["headers"]) for s in producer.sent] == [
        (b"k", -1, [("delay-move", b"a"), ("delay-for", b"0")]),
        (
            None,
            2,
            [
                ("delay-move-origin", b"delay/2/5"),
                ("delay-until", b"1801382400000"),
                ("delay-reply-to", b"answers"),
            ],
        ),
        (None, -1, [("delay-move-origin", b"other/2/5"), ("delay-for", b"1000")]),
    ]


@pytest.mark.parametrize(
    "wrong", [{}, {"at": 1_801_382_400_000, "after": timedelta(0)}, {"at": 1_801_382_400}, {"reply_to": "a/b"}]
)
def test_a_command_that_the_bridge_would_reject_is_refused_at_once(wrong: dict[str, Any]) -> None:
    """No time, two, seconds for milliseconds, and an answer that no topic can take."""
    producer = FakeProducer()
    with pytest.raises(ValueError, match=r"."):
        client(producer).move("a", b"k", **wrong)
    assert producer.sent == []


def test_a_full_queue_is_waited_for() -> None:
    """A burst is slowed down, not refused."""
    producer = FakeProducer(full=3)
    client(producer).send("t", b"", after=timedelta(seconds=1))
    assert len(producer.sent) == 1


@pytest.mark.fault("a message larger than the queue of its producer")
def test_a_message_that_the_queue_never_has_room_for_is_refused() -> None:
    """A message that does not fit into the empty queue of its producer is an error; `send` does not wait for ever."""
    config = {"bootstrap.servers": "127.0.0.1:1", "queue.buffering.max.kbytes": 1, "log_level": 0}
    with pytest.raises(EnvironmentFailure, match="no room for it"):
        DelayClient(config).send("t", b"v" * 2_000, after=timedelta(seconds=1))


def test_flush_raises_for_what_was_not_taken_and_nobody_else_was_told_of() -> None:
    """Fire and forget must not forget a failure."""
    producer = FakeProducer(refuse=KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
    sender = client(producer)
    sender.send("t", b"", after=timedelta(seconds=1))
    with pytest.raises(EnvironmentFailure, match="1 of the records"):
        sender.flush()
    sender.flush()
    told: list[Any] = []
    sender.send("t", b"", after=timedelta(seconds=1), on_delivery=lambda error, _: told.append(error))
    sender.flush()
    assert told[0].code() == KafkaError.MSG_SIZE_TOO_LARGE


@pytest.mark.fault("a refusal during another thread's flush of the client")
def test_a_refusal_during_a_flush_of_another_thread_is_reported_once() -> None:
    """A refusal that arrives while another thread flushes is reported by that flush or by the next one."""
    sender = client(FakeProducer(refuse=KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)))
    reported: list[EnvironmentFailure] = []

    def flush() -> None:
        try:
            sender.flush()
        except EnvironmentFailure as failure:
            reported.append(failure)

    other = threading.Thread(target=flush)

    class Interrupted(list[KafkaError]):
        def append(self, error: KafkaError) -> None:
            other.start()
            other.join(0.05)  # without the lock it ends here
            super().append(error)

    sender._failures = Interrupted()
    sender.send("t", b"", after=timedelta(seconds=1))
    other.join()
    flush()
    assert len(reported) == 1


@pytest.mark.parametrize(
    ("code", "hint"),
    [(KafkaError._UNKNOWN_PARTITION, "Correct the topic"), (KafkaError.MSG_SIZE_TOO_LARGE, "Make it smaller")],
)
def test_a_refusal_by_the_producer_itself_is_an_error_with_advice(code: int, hint: str) -> None:
    """A producer that knows the topic's partitions refuses at once; one that does not know them yet, in its report."""
    producer = FakeProducer()
    producer.refuse_at_once = KafkaError(code)
    with pytest.raises(EnvironmentFailure, match="did not take the record") as refused:
        client(producer).cancel_origin("delay", 9, 5)
    assert hint in str(refused.value)


def test_flush_raises_when_the_time_is_up() -> None:
    """Returning as if all were well would be the loss."""
    producer = FakeProducer()
    producer.left = 2
    with pytest.raises(EnvironmentFailure, match="2 records"):
        client(producer).flush(1.0)


def test_a_configuration_makes_a_producer_with_javas_partitioner() -> None:
    """So that a cancel from a Java program meets a message from here."""
    made = DelayClient({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    assert isinstance(made.producer, Producer)


BARE: Final = """
import sys
import threading

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nothing())
{statement}
"""
HEAVY: Final = (
    *("pyspark", "py4j", "pyarrow", "numpy", "pydantic", "yaml"),
    *("structlog", "typer", "rich", "prometheus_client"),
)


def run_bare(statement: str) -> subprocess.CompletedProcess[str]:
    """A statement in an interpreter that has nothing of the extra `bridge`."""
    program = BARE.format(blocked=set(HEAVY), statement=statement)
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_producer_needs_nothing_but_the_kafka_client() -> None:
    """Two headers do not need Spark."""
    made = "from bridge.client import DelayClient; DelayClient({'bootstrap.servers': '127.0.0.1:1'})"
    result = run_bare(made)
    assert result.returncode == 0, result.stderr


def test_the_command_says_what_to_install() -> None:
    """Without the extra there is one line in place of a traceback."""
    result = run_bare("from bridge.__main__ import main; main()")
    assert result.returncode == 3
    assert "is not installed" in result.stderr and "delay-bridge[bridge]" in result.stderr
    assert len(result.stderr.splitlines()) == 1
