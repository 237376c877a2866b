"""The broker goes away and comes back, and another one stands in its place. On a broker of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Producer

from bridge.delivery.producer.transaction_markers import are_offsets_pending
from bridge.errors import EnvironmentFailure, StateError
from bridge.settings.model import Settings
from dev.broker import EmbeddedBroker
from dev.harness.kafka import Topics
from dev.harness.ledger import Balance
from dev.harness.load import Load
from dev.harness.waiting import wait_until
from tests.broker.losing import LosingCluster, is_running, losing_cluster
from tests.broker.test_transaction_markers import ROWS, lose_an_end
from tests.paths import ROOT
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker, own_broker

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

DELIVERED_S_MAX: Final = 120
OUTAGE_S_MAX: Final = 90
REFUSED_S_MAX: Final = 120
DEADLINE_S: Final = 60


@pytest.fixture(scope="module")
def fragile() -> Iterator[EmbeddedBroker]:
    """A broker that may be stopped: no other test uses it."""
    with own_broker() as broker:
        yield broker


@pytest.fixture(scope="module")
def site(fragile: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningBridge, Load]]:
    """A bridge for each way in which the broker goes, and its load; both are unchanged."""
    topics = Topics(fragile.bootstrap)
    delay = topics.delay(partitions=2)
    load = Load(fragile.bootstrap, delay, [topics.create("orders")], seed=5, delay_ms_max=10_000)
    with RunningBridge(tmp_path_factory.mktemp("outage"), fragile.bootstrap, delay) as bridge:
        bridge.start()
        yield bridge, load
        assert bridge.stop() == 0


@pytest.mark.fault("a broker that stops or dies, and comes back")
@pytest.mark.parametrize("way", ["stop", "kill"])
def test_a_broker_that_restarts_costs_nothing(
    fragile: EmbeddedBroker, site: tuple[RunningBridge, Load], way: str
) -> None:
    """The bridge sits out a broker's restart or crash, or ends with one clear line; nothing is lost or doubled."""
    bridge, load = site
    load.send(500)
    getattr(fragile, way)()
    fragile.start()
    load.send(500)
    records = load.wait_delivered(fragile.bootstrap, OUTAGE_S_MAX)
    if not bridge.running:
        assert bridge.wait_end(0) == EnvironmentFailure.exit_code
        print(f"it ended: {bridge.last_words()}")
        bridge.start()
        records = load.wait_delivered(fragile.bootstrap, DELIVERED_S_MAX)
    balance = load.balance(records)
    assert balance == Balance(), f"{balance}; log:\n{bridge.tail()}"


@pytest.fixture(scope="module")
def losing() -> Iterator[LosingCluster]:
    """Brokers that lose the end of a transaction, each time."""
    with losing_cluster() as cluster:
        yield cluster


def bridge_after_a_lost_end(cluster: LosingCluster, directory: Path) -> tuple[RunningBridge, Settings, Load]:
    """A node went away just before a commit, and the bridge right after it. Offsets stay pending then: a start would
    wait for them without end. Also the settings of the one that is gone, and messages for the next one."""
    delay, target = cluster.create(ROWS, [("delay-for", b"86400000")])
    settings = lose_an_end(cluster, delay, target)
    load = Load(cluster.bootstrap, delay, [cluster.topics.create()], seed=7, delay_ms_max=5_000)
    config = {"delivery": {"session_timeout": "6s"}}
    bridge = RunningBridge(directory, cluster.bootstrap, delay, instance="one", config=config, spark=False)
    return bridge, settings, load


@pytest.mark.fault("a lost transaction marker")
def test_the_end_of_a_transaction_that_the_broker_has_lost_is_written_again(
    losing: LosingCluster, tmp_path: Path
) -> None:
    """The bridge asks the coordinator for the outcome and ends the transaction accordingly, without an operator."""
    bridge, _, load = bridge_after_a_lost_end(losing, tmp_path)
    with bridge:
        bridge.start()
        [pending] = [event for event in bridge.events("offsets-pending") if event["to_be"] == "committed"]
        assert pending["state"] == "CompleteCommit"
        assert bridge.events("transaction-ended-again")
        load.send(100)
        assert load.balance(load.wait_delivered(losing.bootstrap, DELIVERED_S_MAX)) == Balance()
        assert bridge.stop() == 0


@pytest.mark.fault("a transaction that the brokers have forgotten")
def test_a_transaction_that_the_brokers_have_forgotten_is_an_operators_choice(
    losing: LosingCluster, tmp_path: Path
) -> None:
    """An operator chooses the outcome, since a later initialisation made the coordinator forget it. The start guesses
    nothing: status 4, and the command that chooses; after that the next start goes on. With nothing to resolve the
    command changes nothing."""
    bridge, settings, load = bridge_after_a_lost_end(losing, tmp_path)
    own = {"bootstrap.servers": losing.bootstrap, "transactional.id": settings.transactional_id}
    Producer(own).init_transactions(REFUSED_S_MAX)

    def resolve() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bridge", "resolve", "--as", "committed", "--config", str(bridge.config_file)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    with bridge:
        bridge.launch()
        assert bridge.wait_end(REFUSED_S_MAX) == StateError.exit_code, bridge.tail()
        assert "delay-bridge resolve" in bridge.last_words()
        assert not bridge.events("transaction-ended-again")
        assert are_offsets_pending(settings)
        wait_until(lambda: not is_running(settings), DEADLINE_S, "its membership has ended")
        done = resolve()
        assert done.returncode == 0, done
        assert f"{settings.transactional_id}: the last transaction is committed" in done.stdout
        again = resolve()
        assert again.returncode == StateError.exit_code, again
        assert "nothing to resolve" in again.stderr
        bridge.start()
        load.send(100)
        assert load.balance(load.wait_delivered(losing.bootstrap, DELIVERED_S_MAX)) == Balance()
        assert bridge.stop() == 0


@pytest.mark.fault("a directory of another cluster")
def test_a_directory_of_another_cluster_is_refused(broker: Broker, fragile: EmbeddedBroker, tmp_path: Path) -> None:
    """A directory that indexes another cluster is neither used nor changed: status 4, with the remedy."""
    delay = Topics(fragile.bootstrap).delay()
    with RunningBridge(tmp_path, fragile.bootstrap, delay, spark=False) as bridge:
        bridge.start()
        assert bridge.stop() == 0
        kept = {path.name: path.read_bytes() for path in bridge.data.rglob("*") if path.is_file()}
        assert any("checkpoint" in name for name in kept)
        bridge.configure({"kafka": {"common": {"bootstrap.servers": broker.bootstrap}}})
        bridge.launch()
        assert bridge.wait_end(REFUSED_S_MAX) == StateError.exit_code, bridge.tail()
        words = bridge.last_words()
        assert fragile.cluster_id in words
        assert "store.directory" in words
        assert {path.name: path.read_bytes() for path in bridge.data.rglob("*") if path.is_file()} == kept
