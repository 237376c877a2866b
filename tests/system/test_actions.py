"""The API acts on pending messages of a running bridge, one or many, and its answers are true; also through a kill."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from bridge.client import DelayClient
from dev.broker.embedded import free_ports
from dev.harness.kafka import TopicReader, Topics, read_committed
from dev.harness.pace import scaled
from dev.harness.waiting import wait_until
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

DEADLINE_S: Final = 60
FAR: Final = timedelta(hours=1)
MANY: Final = 3_000
PAUSED: Final = 300
SECRET: Final = "open sesame"
CONFIG: Final = {"store": {"flush_interval": "500ms"}, "ready_rows": {"horizon": "1s"}}


class Operator:
    """Somebody who may act, over HTTP and on the command line."""

    def __init__(self, bridge: RunningBridge) -> None:
        self.bridge = bridge
        basic = base64.b64encode(f"me:{SECRET}".encode()).decode()
        self._headers = {"Authorization": f"Basic {basic}", "X-Delay-Bridge-Action": "1"}

    def ask(self, path: str, body: dict[str, Any] | None = None) -> list[Any]:
        """The answer to a GET, or a POST where there is a body; a line each."""
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data is not None else {})
        request = urllib.request.Request(f"{self.bridge.api_url()}/api/v1/{path}", data=data, headers=headers)
        try:
            answer = urllib.request.urlopen(request, timeout=scaled(DEADLINE_S))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from None
        with answer:
            return [json.loads(line) for line in answer.read().decode().splitlines()]

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`delay-bridge`, beside that bridge."""
        full = [sys.executable, "-m", "bridge", *words, "--url", self.bridge.api_url()]
        full += ["--config", str(self.bridge.config_file)]
        return subprocess.run(full, capture_output=True, text=True, timeout=scaled(DEADLINE_S), check=False)


def test_actions_do_what_they_answer(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Cancelled messages never come, moved ones when they are due then, delivered ones at once; twice is not pending;
    commits before a kill hold after it."""
    delay, orders = topics.delay(partitions=2), topics.create("orders")
    (tmp_path / "password").write_text(SECRET)
    http = {"api": "write", "user": "me", "password_file": str(tmp_path / "password")}
    client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 1}, delay)
    with RunningBridge(tmp_path, broker.bootstrap, delay, config={**CONFIG, "http": http}, spark=False) as bridge:
        bridge.start()
        operator = Operator(bridge)
        for n in range(6):
            client.send(orders, f"value-{n}", f"key-{n}", after=FAR, id=f"id-{n}")
        for n in range(MANY):
            client.send(orders, f"many-{n}", "many", after=FAR)
        client.flush()
        wait_until(lambda: operator.ask("summary")[0]["pending"] == MANY + 6, DEADLINE_S, lambda: bridge.tail())

        def origin(n: int) -> str:
            (found,) = operator.ask(f"messages?id=id-{n}")[0]["messages"]
            return str(found["origin"])

        names = [origin(n) for n in range(6)]
        (done,) = operator.ask(f"messages/{names[0]}/cancel", {})
        assert (done["outcome"], done["count"], done["origin"]) == ("cancelled", 1, names[0])
        assert operator.ask(f"messages/{names[0]}/cancel", {})[0]["outcome"] == "not-pending"
        assert operator.ask(f"messages/{names[1]}/deliver", {})[0]["outcome"] == "moved"
        assert operator.ask(f"messages/{names[2]}/move", {"after": "2s"})[0]["outcome"] == "moved"
        assert operator.ask(f"messages/{names[3]}/move", {"after": "3h"})[0]["outcome"] == "moved"
        told = operator.command("pending", "cancel", names[4], "--yes")
        assert told.returncode == 0, told.stderr
        with TopicReader(broker.bootstrap, [orders]) as reader:
            came = reader.wait_for(2, DEADLINE_S)
        assert sorted(record.value or b"" for record in came) == [b"value-1", b"value-2"]
        assert operator.ask(f"messages/{names[1]}/cancel", {})[0]["outcome"] in ("delivered", "not-pending")

        assert operator.ask("messages/cancel", {"key": "many", "dry_run": True})[0]["count"] == MANY
        lines = operator.ask("messages/cancel", {"key": "many"})
        assert lines[-1]["complete"], lines[-1]
        assert lines[-1]["outcomes"]["cancelled"] == lines[-1]["done"] == MANY
        bridge.kill()
        bridge.start()
        wait_until(lambda: operator.ask("summary")[0]["pending"] == 2, DEADLINE_S, lambda: bridge.tail())
        assert operator.ask(f"messages/{names[5]}/deliver", {})[0]["outcome"] == "moved"
        (moved,) = operator.ask("messages?id=id-3")[0]["messages"]
        assert moved["origin"] == names[3]
        wait_until(lambda: len(read_committed(broker.bootstrap, orders)) == 3, DEADLINE_S, lambda: bridge.tail())
    values = Counter(record.value for record in read_committed(broker.bootstrap, orders))
    assert values == {b"value-1": 1, b"value-2": 1, b"value-5": 1}


@pytest.mark.fault("a target that is paused for long")
def test_a_pause_costs_one_copy_for_each_message_and_loses_none(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """A pause of any length copies each due message of its target once; it outlives a kill and the loss of the volume,
    and each message is delivered once after it. Others do not wait."""
    delay, orders, bills = topics.delay(partitions=2), topics.create("orders"), topics.create("bills")
    client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 1}, delay)
    (tmp_path / "password").write_text(SECRET)
    http = {"api": "write", "user": "me", "password_file": str(tmp_path / "password")}
    config = {**CONFIG, "http": http, "delivery": {"resume_rate": "1000/s"}}
    with RunningBridge(tmp_path, broker.bootstrap, delay, config=config, spark=False) as bridge:
        bridge.start()
        operator = Operator(bridge)
        operator.ask(f"targets/{orders}/pause", {"reason": "repairs"})
        for n in range(PAUSED):
            client.send(orders, f"value-{n}", f"key-{n}", after=timedelta(0))
        client.flush()
        wait_until(lambda: _waiting(operator, orders) == PAUSED, DEADLINE_S, bridge.tail)
        written = len(read_committed(broker.bootstrap, delay))
        assert written == 2 * PAUSED
        bridge.kill()
        shutil.rmtree(bridge.data)
        bridge.start()
        (shown,) = (each for each in operator.ask("targets")[0]["targets"] if each["name"] == orders)
        assert shown["paused"] and shown["pause"]["reason"] == "repairs"
        client.send(bills, "bill", "key", after=timedelta(0))
        client.flush()
        wait_until(lambda: len(read_committed(broker.bootstrap, bills)) == 1, DEADLINE_S, bridge.tail)
        assert len(read_committed(broker.bootstrap, delay)) == written + 1 and not read_committed(
            broker.bootstrap, orders
        )
        operator.ask(f"targets/{orders}/resume", {})
        bridge.kill()
        bridge.start()
        wait_until(lambda: len(read_committed(broker.bootstrap, orders)) >= PAUSED, DEADLINE_S, bridge.tail)
        wait_until(lambda: operator.ask("summary")[0]["pending"] == 0, DEADLINE_S, bridge.tail)
    came = Counter(record.value for record in read_committed(broker.bootstrap, orders))
    assert came == {f"value-{n}".encode(): 1 for n in range(PAUSED)}


def _waiting(operator: Operator, target: str) -> int:
    """Messages for a paused target that were put off."""
    now_ms = operator.ask("summary")[0]["now"]
    return int(operator.ask(f"count?target={target}&state=paused&at_from={now_ms + 1_000}")[0]["count"])


def test_any_instance_acts_for_all(broker: Broker, topics: Topics, tmp_path: Path) -> None:
    """Two share the partitions; either counts, moves, exports and delivers what both have."""
    delay, orders = topics.delay(partitions=4), topics.create("orders")
    (tmp_path / "password").write_text(SECRET)
    ports = free_ports(2)
    peers = [f"http://127.0.0.1:{port}" for port in ports]
    http = {"api": "write", "user": "me", "password_file": str(tmp_path / "password"), "peers": peers}
    client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 1}, delay)
    one, other = (
        RunningBridge(
            tmp_path / name, broker.bootstrap, delay, id=f"bridge-{delay}", instance=name,
            config={**CONFIG, "http": {**http, "api_port": port}}, spark=False,
        )
        for name, port in zip("ab", ports, strict=True)
    )  # fmt: skip
    with one, other:
        one.start()
        other.start()
        operators = [Operator(each) for each in (one, other)]
        for n in range(MANY):
            client.send(orders, f"value-{n}", f"key-{n}", after=FAR)
        client.flush()
        everything = {"count": MANY, "exact": True}
        wait_until(lambda: [each.ask("count")[0] for each in operators] == [everything] * 2, DEADLINE_S, other.tail)
        last = operators[1].ask("messages/move", {"all": True, "after": "2h"})[-1]
        assert last["complete"] and last["outcomes"] == {"moved": MANY}, last
        told = operators[0].command("pending", "export", "--to", str(tmp_path / "all.parquet"))
        assert told.returncode == 0 and told.stdout.startswith(f"{MANY} messages"), told.stdout + told.stderr
        (counted,) = operators[0].ask("messages/deliver", {"all": True, "dry_run": True})
        assert counted == everything
        last = operators[0].ask("messages/deliver", {"all": True})[-1]
        assert last["complete"] and last["outcomes"] == {"moved": MANY}, last
        # Copies that are written and not read yet are not counted, so a count of none does not say that all are there.
        wait_until(lambda: len(read_committed(broker.bootstrap, orders)) >= MANY, DEADLINE_S, one.tail)
        wait_until(lambda: operators[1].ask("count")[0]["count"] == 0, DEADLINE_S, one.tail)
    values = Counter(record.value for record in read_committed(broker.bootstrap, orders))
    assert len(values) == MANY and set(values.values()) == {1}
