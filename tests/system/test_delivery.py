"""What one running bridge does with records: headers in, headers out, order, rejects, and the metrics."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Final

import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # public, but not marked as exported
from typer.testing import CliRunner

from bridge.commands import cli
from bridge.spark.jvm import NICE
from bridge.wire.reasons import RejectReason
from dev.harness.kafka import Headers, Outgoing, ReadRecord, TopicReader, Topics, produce, produce_with, read_committed
from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from tests.paths import ROOT
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from tests.system.collector import Collector
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow]

DELIVERED_S_MAX: Final = 60
LATE_MS_MAX: Final = 20_000
PARTITIONS: Final = 3
LEVELS_MS: Final = (1_000, 2_000, 3_000)
PAYLOAD_BYTES: Final = 600_000
DENIED: Final = "denied"
TRACE: Final = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NOBODY: Final = "nobody-made-this"


class Site:
    """The running bridge with its delay topic, and a second one that has a default target."""

    def __init__(
        self, broker: Broker, topics: Topics, bridge: RunningBridge, delay: str, other: str, target: str
    ) -> None:
        self.bootstrap = broker.bootstrap
        self.topics = topics
        self.bridge = bridge
        self.delay = delay
        self.other = other
        self.default_target = target

    def send(self, *messages: Outgoing) -> list[ReadRecord]:
        """Produce; returns the written records."""
        return produce(self.bootstrap, messages)

    def receive(self, topic: str, count: int) -> list[ReadRecord]:
        """All records of `topic` in order of partition and offset, when there are `count`; there must not be more."""
        with TopicReader(self.bootstrap, [topic]) as reader:
            reader.wait_for(count, DELIVERED_S_MAX)
            records = reader.to_end()
        assert len(records) == count
        return sorted(records, key=lambda record: (record.partition, record.offset))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Where the bridge sends its spans."""
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def site(
    broker: Broker, topics: Topics, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """One bridge for this whole module; every test has targets of its own."""
    delay, other, target = topics.delay(partitions=PARTITIONS), topics.delay("other"), topics.create("default")
    config = {
        "delay_topics": {other: {"target": target}},
        "targets": {"deny": [f"{DENIED}.*"]},
        "delivery": {"retry": {"attempts": 2, "backoff": "500ms"}},
        "tracing": {"endpoint": collector.endpoint},
        "limits": {"payload_bytes": PAYLOAD_BYTES},
        "delay": {"levels": " ".join(f"{ms}ms" for ms in LEVELS_MS), "max": "1h"},
    }
    directory = tmp_path_factory.mktemp("site")
    with RunningBridge(directory, broker.bootstrap, delay, other, config=config) as bridge:
        bridge.start()
        yield Site(broker, topics, bridge, delay, other, target)


def now_ms() -> int:
    """The clock that broker and bridge have, too."""
    return SystemClock().now_ms()


# ---- time


FOR: Final = {
    "1500": 1_500,
    "1200ms": 1_200,
    "2s": 2_000,
    "0d0h0m1s500ms": 1_500,
    "PT2S": 2_000,
    "PT0M1.5S": 1_500,
    "P0DT1S": 1_000,
    "0": 0,
    " 1s\n": 1_000,
}
LEVEL: Final = {"1": 1_000, "2": 2_000, "3": 3_000, "4": 3_000, "999999": 3_000}


def test_every_form_of_time_is_kept(site: Site) -> None:
    """Each form of delay-for, delay-level and delay-until leads to the due time that it says, and to delivery then."""
    target = site.topics.create("forms")
    until_ms = now_ms() + 3_000
    moment = datetime.fromtimestamp(until_ms / 1000, UTC)
    shifted = moment.astimezone(timezone(timedelta(hours=5, minutes=30)))
    whole_ms = -(-until_ms // 1_000) * 1_000
    whole = datetime.fromtimestamp(whole_ms / 1000, UTC)
    absolute = {
        str(until_ms): until_ms,
        moment.isoformat(timespec="milliseconds"): until_ms,
        moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{until_ms % 1000:03}Z": until_ms,
        shifted.isoformat(timespec="milliseconds"): until_ms,
        moment.strftime("%Y-%m-%dt%H:%M:%S.") + f"{until_ms % 1000:03}0001z": until_ms + 1,
        whole.strftime("%Y-%m-%d %H:%M:%SZ"): whole_ms,
    }
    forms = [("delay-for", text) for text in FOR] + [("delay-level", text) for text in LEVEL]
    forms += [("delay-until", text) for text in absolute]
    to = ("delay-topic", target.encode())
    written = site.send(
        *(
            Outgoing(topic=site.delay, value=f"{name}={text}".encode(), headers=[(name, text.encode()), to])
            for name, text in forms
        )
    )
    due_ms = {}
    for (name, text), record in zip(forms, written, strict=True):
        relative = FOR.get(text) if name == "delay-for" else LEVEL.get(text)
        due_ms[f"{name}={text}"] = absolute[text] if relative is None else record.timestamp_ms + relative
    arrived = site.receive(target, len(forms))
    assert {(r.value or b"").decode(): int(r.header("delay-due") or b"") for r in arrived} == due_ms
    for record in arrived:
        lateness_ms = record.timestamp_ms - due_ms[(record.value or b"").decode()]
        assert 0 <= lateness_ms < LATE_MS_MAX, record


def test_what_is_past_due_is_delivered_at_once(site: Site) -> None:
    """A due time in the past delivers the message now, with the due time that it had."""
    target = site.topics.create("past")
    past_ms = now_ms() - 86_400_000
    headers = [("delay-until", b"%d" % past_ms), ("delay-topic", target.encode())]
    (sent,) = site.send(Outgoing(topic=site.delay, headers=headers))
    (arrived,) = site.receive(target, 1)
    assert arrived.header("delay-due") == b"%d" % past_ms
    assert arrived.timestamp_ms - sent.timestamp_ms < LATE_MS_MAX


def test_equal_due_times_arrive_in_the_order_of_their_offsets(site: Site) -> None:
    """Messages due at the same millisecond arrive by partition and offset, as a position says."""
    target = site.topics.create("equal")
    headers = [("delay-until", b"%d" % (now_ms() + 8_000)), ("delay-topic", target.encode())]
    count = 100 * PARTITIONS
    written = site.send(
        *(
            Outgoing(topic=site.delay, value=b"%d" % i, headers=headers, partition=(i * 7) % PARTITIONS)
            for i in range(count)
        )
    )
    expected = [record.value for record in sorted(written, key=lambda record: (record.partition, record.offset))]
    assert [record.value for record in site.receive(target, count)] == expected


# ---- where to, and what with


def test_a_message_keeps_everything_but_the_control_headers(site: Site) -> None:
    """Key, value and the producer's headers arrive as sent: in order, duplicates and nulls kept; two are added."""
    target = site.topics.create("kept", partitions=4)
    own: list[tuple[str, bytes | None]] = [
        ("b", b"1"),
        ("a", b"\x00\xff\xfe"),
        ("b", b"2"),
        ("null", None),
        ("empty", b""),
        ("delayed", b"not ours"),
        ("näme", "ü".encode()),
        ("b", b"1"),
    ]
    control = [("delay-for", b"500ms"), ("delay-topic", target.encode()), ("delay-id", b"id-1")]
    mixed: Headers = [own[0], control[0], *own[1:4], control[1], *own[4:], control[2]]
    bodies = [(None, None), (b"", b""), (b"key", None), (None, b"value"), (b"\x00\xff", bytes(range(256)) * 100)]
    written = site.send(*(Outgoing(topic=site.delay, key=key, value=value, headers=mixed) for key, value in bodies))
    arrived = {record.header("delay-origin"): record for record in site.receive(target, len(bodies))}
    for sent, (key, value) in zip(written, bodies, strict=True):
        origin = f"{site.delay}/{sent.partition}/{sent.offset}".encode()
        record = arrived[origin]
        assert (record.key, record.value) == (key, value)
        assert record.headers == (*own, ("delay-origin", origin), ("delay-due", b"%d" % (sent.timestamp_ms + 500)))


def test_a_message_goes_to_its_partition(site: Site) -> None:
    """delay-partition names the real partition; without it a key goes where Java's partitioner puts it."""
    target = site.topics.create("placed", partitions=5)
    to = ("delay-topic", target.encode())
    placed = [
        Outgoing(topic=site.delay, key=b"any", headers=[("delay-for", b"0"), to, ("delay-partition", b"%d" % i)])
        for i in range(5)
    ]
    keys = [b"key-%d" % i for i in range(20)]
    keyed = [Outgoing(topic=site.delay, key=key, headers=[("delay-for", b"0"), to]) for key in keys]
    site.send(*placed, *keyed)
    arrived = site.receive(target, 25)
    assert sorted(record.partition for record in arrived if record.key == b"any") == [0, 1, 2, 3, 4]
    same = site.topics.create("placed-directly", partitions=5)
    direct = produce(site.bootstrap, [Outgoing(topic=same, key=key) for key in keys], partitioner="murmur2_random")
    expected = {record.key: record.partition for record in direct}
    assert {record.key: record.partition for record in arrived if record.key != b"any"} == expected


def test_a_delay_topic_may_have_a_default_target(site: Site) -> None:
    """A record without delay-topic goes to the target that the configuration maps its delay topic to."""
    value = uuid.uuid4().hex.encode()
    site.send(Outgoing(topic=site.other, value=value, headers=[("delay-for", b"100")]))
    assert [record.value for record in site.receive(site.default_target, 1)] == [value]


def test_a_delivered_message_can_be_delayed_again(site: Site) -> None:
    """A consumer that forwards a delivered message with its headers gets it again, with the new origin and due time."""
    target = site.topics.create("again")
    to: Headers = [("delay-for", b"100"), ("delay-topic", target.encode())]
    site.send(Outgoing(topic=site.delay, value=b"v", headers=[*to, ("own", b"1")]))
    (first,) = site.receive(target, 1)
    (sent,) = site.send(Outgoing(topic=site.delay, value=first.value, headers=[*first.headers, *to]))
    _, second = site.receive(target, 2)
    assert [name for name, _ in second.headers] == ["own", "delay-origin", "delay-due"]
    assert second.header("delay-origin") == f"{site.delay}/{sent.partition}/{sent.offset}".encode()


# ---- rejects


def rejected(target: str) -> list[tuple[RejectReason, Headers]]:
    """Headers that cannot be understood, each with the reason."""
    to = ("delay-topic", target.encode())
    soon: tuple[str, bytes] = ("delay-for", b"1s")
    r = RejectReason
    return [
        (r.NO_TIME, [to]),
        (r.NO_TIME, []),
        (r.TWO_TIMES, [soon, ("delay-level", b"1"), to]),
        (r.DUPLICATE_HEADER, [soon, soon, to]),
        (r.BAD_FOR, [("delay-for", b"soon"), to]),
        (r.BAD_FOR, [("delay-for", b"-1s"), to]),
        (r.BAD_FOR, [("delay-for", None), to]),
        (r.BAD_FOR, [("delay-for", b"\xff\xfe"), to]),
        (r.BAD_FOR, [("delay-for", b"9999999999999999999999"), to]),
        (r.BAD_UNTIL, [("delay-until", b"2027-01-31T08:00:00"), to]),
        (r.BAD_UNTIL, [("delay-until", b"2027-02-30T08:00:00Z"), to]),
        (r.BAD_UNTIL, [("delay-until", b"%d" % (now_ms() // 1000)), to]),
        (r.BAD_LEVEL, [("delay-level", b"0"), to]),
        (r.BAD_LEVEL, [("delay-level", b"one"), to]),
        (r.BEYOND_MAX, [("delay-for", b"2h"), to]),
        (r.NO_TARGET, [soon]),
        (r.BAD_TARGET, [soon, ("delay-topic", b"no/slash")]),
        (r.BAD_PARTITION, [soon, to, ("delay-partition", b"-1")]),
        (r.BAD_ID, [soon, to, ("delay-id", b"")]),
        (r.BAD_REPLACE, [soon, to, ("delay-replace", b"perhaps")]),
        (r.BAD_COPY, [to, ("delay-copy-origin", b"99999999"), ("delay-copy-due", b"%d" % now_ms())]),
        (r.TOO_MANY_HEADERS, [soon, to, *[("many", b"%d" % i) for i in range(20_000)]]),
        (r.HEADERS_TOO_LARGE, [soon, to, ("large", b"x" * 900_000)]),
        (r.PAYLOAD_TOO_LARGE, [soon, to]),
    ]


def test_what_cannot_be_understood_becomes_a_dead_letter(site: Site) -> None:
    """A reject arrives byte for byte in the dead-letter topic, once, with its reason and origin, and nowhere else."""
    target = site.topics.create("never")
    cases = rejected(target)
    marks = [uuid.uuid4().hex.encode() for _ in cases]
    messages = [
        Outgoing(
            topic=site.delay,
            key=b"k",
            value=mark + b"\x00\xff" + b"x" * (PAYLOAD_BYTES if reason is RejectReason.PAYLOAD_TOO_LARGE else 0),
            headers=[("x", None), *headers, ("x", b"\xfe")],
        )
        for mark, (reason, headers) in zip(marks, cases, strict=True)
    ]
    written = site.send(*messages)
    letters = dead_letters(site, marks)
    for mark, message, sent, (reason, _) in zip(marks, messages, written, cases, strict=True):
        letter = letters[mark]
        assert (letter.key, letter.value) == (message.key, message.value)
        assert letter.headers[: len(message.headers)] == tuple(message.headers)
        assert letter.header("delay-reason") == reason.value.encode(), f"{message.headers}: {letter.headers}"
        assert letter.header("delay-origin") == f"{site.delay}/{sent.partition}/{sent.offset}".encode()
        assert letter.header("kafka_dlt-original-topic") == site.delay.encode()
        assert letter.header("kafka_dlt-original-partition") == struct.pack(">i", sent.partition)
        assert letter.header("kafka_dlt-original-offset") == struct.pack(">q", sent.offset)
        assert letter.header("kafka_dlt-original-timestamp") == struct.pack(">q", sent.timestamp_ms)
    assert read_committed(site.bootstrap, target) == []


def test_a_target_that_cannot_take_a_message_stops_no_other(site: Site) -> None:
    """Forbidden, too small or short of the partition: the message becomes a dead letter when it is due; where the topic
    is missing, after the attempts that are configured. The others arrive.
    """
    good, small = site.topics.create("good"), site.topics.create("small", config={"max.message.bytes": "2000"})
    forbidden = site.topics.create(DENIED)
    r = RejectReason
    cases: list[tuple[RejectReason | None, str, Headers, int]] = [
        (r.FORBIDDEN_TARGET, forbidden, [], 10),
        (r.FORBIDDEN_TARGET, site.delay, [], 10),
        (r.FORBIDDEN_TARGET, "__consumer_offsets", [], 10),
        (r.UNKNOWN_TARGET, NOBODY, [], 10),
        (r.TOO_LARGE, small, [], 10_000),
        (r.PARTITION_OUT_OF_RANGE, good, [("delay-partition", b"7")], 10),
        (None, small, [], 10),
        (None, good, [], 10_000),
    ]
    marks = [uuid.uuid4().hex.encode() for _ in cases]
    due = ("delay-until", b"%d" % (now_ms() + 2_000))
    site.send(
        *(
            Outgoing(
                topic=site.delay,
                value=mark + b"." * size,
                headers=[("x", b"1"), due, ("delay-topic", topic.encode()), *more],
            )
            for mark, (_, topic, more, size) in zip(marks, cases, strict=True)
        )
    )
    refused = {mark: case for mark, case in zip(marks, cases, strict=True) if case[0] is not None}
    letters = dead_letters(site, list(refused))
    for mark, (reason, topic, more, size) in refused.items():
        letter = letters[mark]
        assert reason is not None
        assert letter.header("delay-reason") == reason.value.encode(), letter.headers
        assert letter.value == mark + b"." * size
        assert letter.headers[0] == ("x", b"1")
        assert {due, ("delay-topic", topic.encode()), *more} <= set(letter.headers), "it can be sent again unchanged"
    assert [len(record.value or b"") for record in site.receive(small, 1)] == [32 + 10]
    assert [len(record.value or b"") for record in site.receive(good, 1)] == [32 + 10_000]


def test_a_dead_letter_that_fits_nowhere_is_cut_and_holds_nothing_up(site: Site) -> None:
    """Small when compressed, and larger than any topic takes: it names the missing parts."""
    target, to_all = site.topics.create("behind"), ("delay-for", b"1s")
    mark = uuid.uuid4().hex.encode()
    squeezing = Producer(
        {"bootstrap.servers": site.bootstrap, "compression.type": "zstd", "message.max.bytes": 8 << 20}
    )
    squeezing.produce(
        site.delay, b"\0" * (5 << 20), key=mark, headers=[("delay-topic", target.encode()), to_all, ("a", b"1")]
    )
    assert squeezing.flush(DELIVERED_S_MAX) == 0
    site.send(*(Outgoing(topic=site.delay, headers=[("delay-topic", target.encode()), to_all]) for _ in range(9)))
    site.receive(target, 9)
    with TopicReader(site.bootstrap, [f"{site.delay}.dlt"]) as reader:

        def found() -> list[ReadRecord]:
            reader.poll()
            return [record for record in reader.records if record.key == mark]

        wait_until(found, DELIVERED_S_MAX, "the dead letter")
        reader.to_end()
        (letter,) = found()
    assert letter.value is None
    assert letter.headers[2] == ("a", b"1")
    assert letter.header("delay-reason") == RejectReason.PAYLOAD_TOO_LARGE.value.encode()
    assert letter.header("delay-omitted") == b"value (5242880 bytes)"
    assert site.bridge.events("dead-letter-cut")


def test_dead_letters_that_are_put_back_are_delivered_once(site: Site) -> None:
    """When the topic is there, `redrive` puts its letters back, and a second run finds none."""
    target = f"made-after-{uuid.uuid4().hex[:8]}"
    mark = uuid.uuid4().hex.encode()
    (sent,) = site.send(
        Outgoing(
            topic=site.delay, key=b"k", value=mark, headers=[("delay-for", b"100"), ("delay-topic", target.encode())]
        )
    )
    letter = dead_letters(site, [mark])[mark]
    assert (letter.header("delay-reason"), letter.header("delay-attempts")) == (b"unknown-target", b"2")
    new = NewTopic(target, num_partitions=1, replication_factor=1)
    site.topics.admin.create_topics([new])[target].result(DELIVERED_S_MAX)
    command = ["redrive", "--config", str(site.bridge.config_file), "--target", target]
    assert "1 dead letter would go back" in CliRunner().invoke(cli.app, command).output
    assert "1 dead letter put back" in CliRunner().invoke(cli.app, [*command, "--execute"]).output
    assert "0 dead letters put back" in CliRunner().invoke(cli.app, [*command, "--execute"]).output
    (arrived,) = site.receive(target, 1)
    assert (arrived.key, arrived.value) == (b"k", mark)
    assert arrived.header("delay-due") == b"%d" % (sent.timestamp_ms + 100)
    assert [name for name, _ in arrived.headers] == ["delay-origin", "delay-due"]


def dead_letters(site: Site, marks: list[bytes]) -> dict[bytes, ReadRecord]:
    """The dead letters whose values begin with these marks of 32 bytes, when all are there; none may be there twice."""
    found: dict[bytes, ReadRecord] = {}
    with TopicReader(site.bootstrap, [f"{site.delay}.dlt"]) as reader:

        def mine() -> list[ReadRecord]:
            reader.poll()
            return [record for record in reader.records if (record.value or b"")[:32] in marks]

        wait_until(lambda: len(mine()) >= len(marks), DELIVERED_S_MAX, lambda: f"{len(mine())} of {len(marks)}")
        reader.to_end()
        for record in mine():
            mark = (record.value or b"")[:32]
            assert mark not in found, f"twice: {record}"
            found[mark] = record
    return found


# ---- transactions of others


@pytest.mark.fault("an aborted transaction of a producer")
def test_an_aborted_transaction_is_never_delivered(site: Site) -> None:
    """Records of a producer's aborted transaction are never delivered, in any surroundings; committed ones are."""
    target = site.topics.create("transactions")
    producer = Producer({"bootstrap.servers": site.bootstrap, "transactional.id": f"tests-{target}"})
    producer.init_transactions(30)
    headers = [("delay-for", b"500"), ("delay-topic", target.encode())]
    kept = []
    for i in range(12):
        producer.begin_transaction()
        messages = [
            Outgoing(topic=site.delay, value=b"%d/%d" % (i, p), headers=headers, partition=p) for p in range(PARTITIONS)
        ]
        produce_with(producer, messages)
        if i % 3 == 0:
            producer.commit_transaction(30)
            kept += [message.value for message in messages]
        else:
            producer.abort_transaction(30)
    site.send(Outgoing(topic=site.delay, value=b"last", headers=[("delay-for", b"3s"), headers[1]]))
    arrived = site.receive(target, len(kept) + 1)
    assert sorted(record.value or b"" for record in arrived) == sorted([*(value or b"" for value in kept), b"last"])
    site.bridge.wait_idle(DELIVERED_S_MAX)


# ---- metrics and states


def test_the_metrics_add_up(site: Site) -> None:
    """Ingested, delivered, rejected, pending and lateness say what happened; nothing was ever early."""
    target = site.topics.create("counted")
    before = site.bridge.wait_idle(DELIVERED_S_MAX)
    to = ("delay-topic", target.encode())
    site.send(*(Outgoing(topic=site.delay, headers=[("delay-for", b"10s"), to]) for _ in range(50)))
    site.send(*(Outgoing(topic=site.delay, headers=[("delay-level", b"x"), to]) for _ in range(7)))
    waiting = f'pending_messages_by_topic{{topic="{target}"}}'
    wait_until(lambda: site.bridge.metrics().get(waiting) == 50, 9, "50 pending messages")
    assert len(site.receive(target, 50)) == 50
    after = site.bridge.wait_idle(DELIVERED_S_MAX)

    def gained(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert gained(f'records_ingested_total{{topic="{site.delay}"}}') == 57
    assert gained(f'records_delivered_total{{topic="{target}"}}') == 50
    assert gained('records_rejected_total{reason="bad-level"}') == 7
    assert gained("lateness_seconds_count") == 50
    assert 0 <= gained("lateness_seconds_sum") <= 50 * LATE_MS_MAX / 1000
    assert after["early_deliveries_total"] == 0
    assert after.get(waiting, 0) == 0
    assert after["oldest_overdue_seconds"] == 0


def test_the_probes_answer(site: Site) -> None:
    """A running bridge is alive and ready, and says in which phase it is."""
    assert site.bridge.http("/livez")[0] == 200
    status, body = site.bridge.http("/readyz")
    assert (status, '"running"' in body) == (200, True)


# ---- seen from a shell


def test_where_processors_are_short_the_jvm_is_served_last(site: Site) -> None:
    """Also where the kernel shares them out by session: niceness counts within one only."""
    [java] = [process.pid for process in site.bridge.processes() if process.name() == "java"]
    own = site.bridge.pid
    assert os.getpriority(os.PRIO_PROCESS, java) == max(NICE, os.getpriority(os.PRIO_PROCESS, own))
    assert os.getsid(java) != os.getsid(own)
    with suppress(FileNotFoundError):
        assert Path(f"/proc/{java}/autogroup").read_text().split()[1:] == ["nice", str(NICE)]


def test_the_charts_test_pod_sends_a_message_and_sees_it_arrive(site: Site, collector: Collector) -> None:
    """What `helm test` runs, against a real broker: status 0, and one line that says where and how late."""
    pod = yaml.safe_load((ROOT / "tests/packaging/helm/snapshots/pod-test.yaml").read_text())
    target = site.topics.create("test")
    values = {"--config": str(site.bridge.config_file), "--to": target, "--delay-topic": site.delay, "--after": "1s"}
    arguments = [
        f"{name}={values.get(name, value)}" if equals else name
        for name, equals, value in (word.partition("=") for word in pod["spec"]["containers"][0]["args"])
    ]
    run = send_from_a_shell([*arguments, "--header", f"traceparent={TRACE}"])
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(rf"{site.delay}/\d+/\d+ arrived at {target}/0/0, \d+ ms late\n", run.stdout), run.stdout
    (record,) = site.receive(target, 1)
    assert record.value == b"helm test"
    assert record.header("traceparent") == TRACE.encode(), "a trace goes on across the delay"
    wait_until(lambda: collector.spans, DELIVERED_S_MAX, "the span of this one delivery")
    (span,) = collector.spans
    assert (span.name, span.links[0].trace_id.hex()) == (f"send {target}", TRACE.split("-")[1])


def test_who_waits_for_a_dead_letter_is_told_so(site: Site) -> None:
    """`send --wait` ends at once, with the reason, when the message cannot be delivered."""
    denied = site.topics.create(DENIED)
    run = send_from_a_shell(
        [
            "send",
            f"--config={site.bridge.config_file}",
            "--to",
            denied,
            "--delay-topic",
            site.delay,
            "--after=1s",
            "--wait=90s",
            "x",
        ]
    )
    assert run.returncode == 3, run.stdout
    assert "is a dead letter" in run.stderr and "forbidden-target" in run.stderr


def send_from_a_shell(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """`delay-bridge ...`, as a process of its own."""
    command = [sys.executable, "-m", "bridge", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(DELIVERED_S_MAX), check=False
    )
