"""bridge.budgets: what delivery has time for follows from one setting; settings that do not go together are told."""

from __future__ import annotations

import pytest

from bridge.errors import ConfigurationError
from bridge.settings.model import Settings
from bridge.settings.time_budgets import CONDITIONS, LOOK_UP_REQUESTS, TRANSACTION_TIMEOUT_MS_MIN, TimeBudgets

BASE = {"bootstrap.servers": "localhost:1"}


@pytest.mark.parametrize("transaction_ms", [TRANSACTION_TIMEOUT_MS_MIN, 10_000, 60_000, 900_000])
def test_every_relation_holds_whatever_the_transaction_time_out(transaction_ms: int) -> None:
    """The budgets derive from it."""
    producer = {"transaction.timeout.ms": str(transaction_ms)}
    budgets = TimeBudgets.of(producer, commit_interval_ms=20, poll_interval_ms=3 * transaction_ms)
    assert all(relation.holds(budgets) for relation in CONDITIONS)
    assert budgets.fill_s < budgets.transaction_s / 2 and not budgets.is_timed_out(budgets.send_s)
    assert budgets.fill_s < budgets.send_s < budgets.acknowledge_s < budgets.transaction_s
    assert budgets.full_s < budgets.send_s, "a full queue is noticed before sending must be over"
    assert budgets.send_s + budgets.stalled_s <= budgets.transaction_s, "and a stall before the transaction is"
    assert LOOK_UP_REQUESTS * budgets.look_up_s < budgets.transaction_s / 2
    assert budgets.call_s < budgets.unanswered_s < budgets.step_s
    assert budgets.step_s > budgets.transaction_s and budgets.pending_s > budgets.transaction_s


@pytest.mark.parametrize(
    ("relation", "tree"),
    [
        ("transaction-is-long-enough", {"kafka": {"producer": {"transaction.timeout.ms": "2000"}}}),
        ("message-within-transaction", {"kafka": {"producer": {"message.timeout.ms": "10000"}}}),
        ("message-within-transaction", {"kafka": {"producer": {"delivery.timeout.ms": "30000"}}}),
        ("message-within-transaction", {"kafka": {"producer": {"message.timeout.ms": "0"}}}),
        ("linger-within-fill", {"kafka": {"producer": {"linger.ms": "2000"}}}),
        ("commit-interval-within-fill", {"delivery": {"commit_interval": "4s"}}),
        ("transaction-within-poll-interval", {"kafka": {"consumer": {"max.poll.interval.ms": "20000"}}}),
    ],
)
def test_settings_that_break_a_relation_stop_the_start_with_its_name(
    relation: str, tree: dict[str, dict[str, object]]
) -> None:
    """And name the keys that do not go together."""
    kafka = {"common": BASE, **tree.get("kafka", {})}
    with pytest.raises(ConfigurationError, match=relation):
        Settings.of({**tree, "kafka": kafka})


def test_a_transaction_time_out_may_be_short() -> None:
    """A third of it is for filling: at three seconds, one."""
    settings = Settings.of({"kafka": {"common": BASE, "producer": {"transaction.timeout.ms": "3000"}}})
    assert settings.budgets.fill_s == 1.0
    assert settings.budgets.message_s == 2.0


def test_without_transactions_their_time_out_means_nothing() -> None:
    """At least once there is none that the brokers could end."""
    tree = {
        "kafka": {"common": BASE, "producer": {"message.timeout.ms": "60000"}},
        "delivery": {"mode": "at-least-once"},
    }
    assert Settings.of(tree).budgets.transaction_s == 10.0
