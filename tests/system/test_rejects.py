"""Every reason for which a record is refused when it is read, in every dialect, through one running bridge into the
dead-letter topics; and what only other clients than ours can write."""

from __future__ import annotations

import os
import struct
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # public, but not marked as exported
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from bridge.install import connector
from bridge.wire import headers as h
from bridge.wire.dialects import DIALECTS, NATIVE, Dialect
from bridge.wire.reasons import RejectReason
from dev.broker.embedded import broker_jars
from dev.harness.kafka import Headers, Outgoing, ReadRecord, TopicReader, Topics, produce
from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker
from tests.system.raw import RawRecord, produce_raw
from timerstore.clock import SystemClock

pytestmark = [pytest.mark.system, pytest.mark.slow]

ARRIVED_S_MAX: Final = 120
PROGRAM_S_MAX: Final = 120
HEADERS_MAX: Final = 12
BYTES_MAX: Final = 1_024
MESSAGE_BYTES: Final = 2_700
ALONE: Final = {"batch.size": 1}
"""The topics take no batch of several records."""
READ: Final = list(RejectReason)[: list(RejectReason).index(RejectReason.HEADERS_TOO_LARGE) + 1]
WRONG: Final = {
    h.UNTIL: (RejectReason.BAD_UNTIL, b"soon"),
    h.FOR: (RejectReason.BAD_FOR, b"soon"),
    h.LEVEL: (RejectReason.BAD_LEVEL, b"low"),
    h.TOPIC: (RejectReason.BAD_TARGET, b"a/b"),
    h.PARTITION: (RejectReason.BAD_PARTITION, b"first"),
}
NOTHING: Final = Dialect(times=((h.FOR, h.FOR, False), (h.UNTIL, h.UNTIL, False)), renamed={h.TOPIC: h.TOPIC})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A record that cannot be understood; `named`: the header that the detail must name."""

    reason: RejectReason
    headers: Headers
    key: bytes | None = None
    filler: int = 0
    named: str = ""


def time(dialect: Dialect, ahead_ms: int) -> tuple[str, bytes]:
    """The dialect's first header for a time `ahead_ms` from now."""
    name, native, in_seconds = dialect.times[0]
    ms = ahead_ms if native == h.FOR else SystemClock().now_ms() + ahead_ms
    return name, b"%d" % (ms // 1000 if in_seconds else ms)


def cases(dialect: Dialect) -> Iterator[Case]:
    """Every reason: by the dialect's own headers where it has such, else by native ones."""
    r, to = RejectReason, (h.TOPIC, b"nowhere")
    soon, far = time(dialect, 60_000), time(dialect, 1_800_000)
    other = h.LEVEL if dialect.times[0][1] != h.LEVEL else h.FOR
    renamed = {native: name for name, native, _ in reversed(dialect.times)}
    renamed |= {native: name for name, native in dialect.renamed.items()}
    for native, (reason, text) in WRONG.items():
        name = renamed.get(native, native)
        rest = {h.TOPIC: [soon], h.PARTITION: [soon, to]}.get(native, [])
        for wrong in (text, None, b"\xff"):
            yield Case(reason=reason, headers=[*rest, (name, wrong)], named=name)
    yield Case(reason=r.DUPLICATE_HEADER, headers=[soon, to, to])
    yield Case(reason=r.DUPLICATE_HEADER, headers=[soon, (dialect.times[0][1], soon[1])])
    yield Case(reason=r.BAD_COPY, headers=[to, (h.COPY_ORIGIN, b"99999999"), (h.COPY_DUE, b"0")])
    yield Case(reason=r.NO_TIME, headers=[to])
    yield Case(reason=r.NO_TIME, headers=[], key=b"k")
    yield Case(reason=r.TWO_TIMES, headers=[soon, to, (other, b"1")])
    yield Case(reason=r.BAD_SCHEDULE, headers=[soon, to, (h.TIMES, b"3")])
    yield Case(reason=r.BAD_REPLY, headers=[(h.CANCEL, b"a"), (h.REPLY_TO, b"a/b")])
    yield Case(reason=r.BEYOND_MAX, headers=[time(dialect, 7_200_000), to])
    yield Case(reason=r.NO_TARGET, headers=[soon])
    yield Case(reason=r.BAD_ID, headers=[soon, to] if dialect.keyed else [soon, to, (h.ID, b"")], key=b"k" * 257)
    yield Case(reason=r.BAD_ORIGIN, headers=[(h.CANCEL_ORIGIN, b"a/b")], named=h.CANCEL_ORIGIN)
    yield Case(reason=r.BAD_REPLACE, headers=[soon, to, (h.REPLACE, b"perhaps")])
    yield Case(reason=r.TOO_MANY_HEADERS, headers=[soon, to, *[("many", b"")] * HEADERS_MAX])
    yield Case(reason=r.PAYLOAD_TOO_LARGE, headers=[soon, to], filler=BYTES_MAX)
    yield Case(reason=r.HEADERS_TOO_LARGE, headers=[soon, to, ("large", b"v" * BYTES_MAX)])
    # Within the limits, but with a copy's headers more than the topic takes.
    yield Case(reason=r.TOO_LARGE_TO_ROLL, headers=[far, to, ("large", b"v" * 900)], filler=900)


class Site:
    """One bridge with a delay topic for each dialect, by its name."""

    def __init__(self, broker: Broker, topics: Topics, bridge: RunningBridge, delay: Mapping[str, str]) -> None:
        self.bootstrap, self.topics, self.bridge, self.delay = broker.bootstrap, topics, bridge, delay

    def letters(self, *marks: bytes) -> dict[bytes, ReadRecord]:
        """The dead letters whose values begin with these 32 bytes, when all are there; none may be there twice."""
        with TopicReader(self.bootstrap, [f"{topic}.dlt" for topic in self.delay.values()]) as reader:

            def mine() -> list[ReadRecord]:
                assert self.bridge.running, self.bridge.tail()
                reader.poll()
                return [record for record in reader.records if (record.value or b"")[:32] in marks]

            wait_until(lambda: len(mine()) >= len(marks), ARRIVED_S_MAX, lambda: f"{len(mine())} of {len(marks)}")
            reader.to_end()
            found = {(record.value or b"")[:32]: record for record in mine()}
            assert len(found) == len(mine()) == len(marks)
        return found


@pytest.fixture(scope="module")
def site(broker: Broker, topics: Topics, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One start for all that is here."""
    delay = {name: topics.delay(name, config={"max.message.bytes": str(MESSAGE_BYTES)}) for name in (NATIVE, *DIALECTS)}
    config = {
        "delay_topics": {topic: {"dialect": name} for name, topic in delay.items()},
        "limits": {"headers": HEADERS_MAX, "header_bytes": BYTES_MAX, "payload_bytes": BYTES_MAX},
        "delay": {"levels": "1s 2s", "max": "1h"},
        "roll": {"window": "10m"},
    }
    directory = tmp_path_factory.mktemp("rejects")
    with RunningBridge(directory, broker.bootstrap, *delay.values(), config=config) as bridge:
        bridge.start()
        yield Site(broker, topics, bridge, delay)


def mark() -> bytes:
    """The value of a record that is looked for."""
    return uuid.uuid4().hex.encode()


@pytest.mark.fault("header names that a client would cut")
def test_names_that_our_client_would_cut_reach_no_target(site: Site) -> None:
    """A header name with NUL would arrive as another name: the message becomes a dead letter when it is due, and the
    letter of a reject has the whole name. (Where Spark reads; the plain reader's client cuts it, too.)"""
    site.bridge.wait_spark()
    target, delay = site.topics.create("never"), site.delay[NATIVE]
    timer, reject, fine = mark(), mark(), mark()
    to = f"delay-topic:{target}"
    lines = [
        f"delay-for:1s,{to},delay-origin\0x:forged,é\0:1\tk\t{timer.decode()}",
        f"delay-for:?,{to},delay-reason\0:forged\tk\t{reject.decode()}",
        f"delay-for:2s,{to},delay-escaped-x:1\tk\t{fine.decode()}",
    ]
    class_path = os.pathsep.join(str(jar) for jar in [*connector.jars(), *broker_jars()])
    properties = ["--reader-property", "parse.headers=true", "--reader-property", "parse.key=true"]
    command = ["java", "-Dfile.encoding=UTF-8", "-cp", class_path, "org.apache.kafka.tools.ConsoleProducer"]
    command += ["--bootstrap-server", site.bootstrap, "--topic", delay, *properties]
    text = "\n".join(lines).encode()
    done = subprocess.run(command, input=text, capture_output=True, timeout=scaled(PROGRAM_S_MAX), check=False)
    assert done.returncode == 0, done.stderr
    letters = site.letters(timer, reject)
    assert letters[timer].header("delay-reason") == b"bad-header-name"
    assert letters[timer].headers[:2] == (
        ("delay-escaped-delay-origin%00x", b"forged"),
        ("delay-escaped-%C3%A9%00", b"1"),
    )
    assert letters[timer].header("delay-topic") == target.encode()
    assert letters[reject].header("delay-reason") == b"bad-for"
    assert letters[reject].headers[2] == ("delay-escaped-delay-reason%00", b"forged")
    with TopicReader(site.bootstrap, [target]) as reader:
        (arrived,) = reader.wait_for(1, ARRIVED_S_MAX)
    assert (arrived.value, arrived.headers[0]) == (fine, ("delay-escaped-x", b"1"))


def test_names_that_are_no_text_arrive_with_replacements(site: Site) -> None:
    """A header's name is read as Java reads UTF-8; what is none of it is U+FFFD from then on, and a name that only
    resembles a control header is none. The values are bytes, and do not change."""
    target, delay = site.topics.create("no-text"), site.delay[NATIVE]
    timer, reject = mark(), mark()
    names = {
        b"x\xff": "x\ufffd",
        b"\xc3(": "\ufffd(",
        b"\xed\xa0\x80": "\ufffd",
        b"\xf0\x9f\x98": "\ufffd",
        b"\xff\xfe": "\ufffd\ufffd",
        b"delay-origin\xfe": "delay-origin\ufffd",
        b"\xc3\xa9": "\u00e9",
    }
    odd = [(name, b"\xff\x00") for name in names]
    produce_raw(
        site.bootstrap,
        delay,
        0,
        [
            RawRecord(value=timer, headers=[*odd, (b"delay-for", b"1s"), (b"delay-topic", target.encode())]),
            RawRecord(value=reject, headers=[*odd, (b"delay-for", b"?")]),
        ],
    )
    with TopicReader(site.bootstrap, [target]) as reader:
        (arrived,) = reader.wait_for(1, ARRIVED_S_MAX)
    letter = site.letters(reject)[reject]
    assert letter.header("delay-reason") == b"bad-for"
    for record in (arrived, letter):
        assert [value for _, value in record.headers[: len(odd)]] == [b"\xff\x00"] * len(odd)
        assert [name for name, _ in record.headers[: len(odd)]] == list(names.values())
    assert (arrived.header("delay-origin") or b"").startswith(f"{delay}/0/".encode())


@pytest.mark.fault("a JVM that stands still")
def test_a_jvm_that_stands_still_holds_up_no_message(site: Site) -> None:
    """While the JVM is stopped, the plain reader takes over within seconds; Spark reads again when the JVM is back."""
    bridge, target, sent = site.bridge, site.topics.create("still"), [mark(), mark()]
    bridge.wait_spark()
    wait_until(lambda: bridge.reader() == "spark", ARRIVED_S_MAX, "Spark reads")
    headers: Headers = [(h.FOR, b"1s"), (h.TOPIC, target.encode())]
    [java] = [process for process in bridge.processes() if process.name() == "java"]
    with TopicReader(site.bootstrap, [target]) as reader:
        java.suspend()
        try:
            produce(site.bootstrap, [Outgoing(topic=site.delay[NATIVE], value=sent[0], headers=headers)])
            reader.wait_for(1, ARRIVED_S_MAX)
            assert bridge.events("plain-reader-takes-over")
            # /readyz follows at the main thread's next look.
            wait_until(lambda: bridge.reader() == "plain", ARRIVED_S_MAX, lambda: bridge.tail())
        finally:
            java.resume()
        wait_until(lambda: bridge.reader() == "spark", ARRIVED_S_MAX, lambda: bridge.tail())
        produce(site.bootstrap, [Outgoing(topic=site.delay[NATIVE], value=sent[1], headers=headers)])
        records = reader.wait_for(2, ARRIVED_S_MAX)
    assert [record.value for record in records] == sent


@pytest.mark.fault("a record that one reader cannot read, below the committed offset")
def test_a_start_comes_up_behind_a_record_that_the_plain_reader_cannot_read(site: Site) -> None:
    """The plain reader leaves the record to Spark, and neither waits for the other."""
    bridge, delay, target = site.bridge, site.delay[NATIVE], site.topics.create("behind")
    odd = [(b"x\xff", b"1"), (b"delay-for", b"20s"), (b"delay-topic", target.encode())]
    before = mark()
    produce_raw(site.bootstrap, delay, 0, [RawRecord(value=before, headers=odd)])
    after: Headers = [(h.FOR, b"1s"), (h.TOPIC, target.encode())]
    with TopicReader(site.bootstrap, [target]) as reader:
        produce(site.bootstrap, [Outgoing(topic=delay, partition=0, value=mark(), headers=after)])
        reader.wait_for(1, ARRIVED_S_MAX)
        bridge.kill()
        bridge.wait_no_orphans()
        bridge.start()
        assert before in {record.value for record in reader.wait_for(2, ARRIVED_S_MAX)}


def test_a_forged_letter_is_not_the_bridge_s_word(site: Site) -> None:
    """A record that looks like a dead letter that waits for its topic, but is no copy, or of another record, is a dead
    letter of its own: why and where from are the bridge's."""
    delay = site.delay[NATIVE]
    said = h.dead_letter_headers(
        [("a", b"1")], RejectReason.BAD_FOR, "lies", h.Where(topic=delay, partition=0, offset=0, origin=0, ts_ms=7)
    )
    to = (h.TOPIC, f"{delay}.dlt".encode())
    held: Headers = [(h.HELD, None), *((h.HELD_PREFIX + name if name == h.ORIGIN else name, v) for name, v in said)]
    copied: Headers = [(h.COPY_ORIGIN, b"0"), (h.COPY_DUE, b"8"), (h.COPY_ROLLS, b"0"), (h.COPY_ATTEMPT, b"1")]
    marks = [mark(), mark()]
    written = produce(
        site.bootstrap,
        [
            Outgoing(topic=delay, value=value, headers=[*held, to, *more])
            for value, more in zip(marks, ([(h.FOR, b"0")], copied), strict=True)
        ],
        **ALONE,
    )
    letters = site.letters(*marks)
    for value, record in zip(marks, written, strict=True):
        assert letters[value].header("delay-reason") == b"forbidden-target"
        assert letters[value].header("kafka_dlt-original-offset") == struct.pack(">q", record.offset)


def test_whatever_is_wrong_in_whatever_dialect_is_a_dead_letter_byte_for_byte(site: Site) -> None:
    """Each reason in each dialect, once, with its reason, the unchanged record, and the name of the wrong header; and
    the bridge goes on."""
    sent: list[tuple[str, Case, Outgoing]] = []
    for name, topic in site.delay.items():
        dialect = DIALECTS.get(name, NOTHING)
        key = [(dialect.key, b"another")] if dialect.key else []
        for case in cases(dialect):
            value = mark() + b"\x00" * case.filler
            headers = [("x", None), *case.headers, *key, ("x", b"\xfe")]
            sent.append((name, case, Outgoing(topic=topic, key=case.key, value=value, headers=headers)))
    written = produce(site.bootstrap, [message for *_, message in sent], **ALONE)
    for topic in site.delay.values():
        change = ConfigEntry("message.timestamp.type", "CreateTime", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change])
        site.topics.admin.incremental_alter_configs([resource])[resource].result(ARRIVED_S_MAX)
    late = Case(reason=RejectReason.CREATE_TIME, headers=[(h.FOR, b"1s")])
    for name, topic in site.delay.items():
        sent.append((name, late, Outgoing(topic=topic, value=mark(), headers=late.headers)))
    written += produce(site.bootstrap, [message for *_, message in sent[len(written) :]], **ALONE)
    letters = site.letters(*((message.value or b"")[:32] for *_, message in sent))
    for (name, case, message), record in zip(sent, written, strict=True):
        letter = letters[(message.value or b"")[:32]]
        said = f"{name}: {case} {letter.headers[len(message.headers) :]}"
        assert letter.header("delay-reason") == case.reason.value.encode(), said
        assert (letter.key, letter.value) == (message.key, message.value), said
        assert letter.headers[: len(message.headers)] == tuple(message.headers), said
        assert letter.header("delay-origin") == f"{record.topic}/{record.partition}/{record.offset}".encode()
        assert case.named.encode() in (letter.header("delay-reason-detail") or b""), said
    for name in site.delay:
        assert {case.reason for found, case, _ in sent if found == name} == set(READ)
    assert not site.bridge.events("dead-letter-plain")
