"""Every order in which requests of the transaction protocol can arrive, within a budget of failures.

The promise about late requests is here, and each part of the rule that it needs. Tests of bridge/delivery/producer show
that the bridge keeps the rule.
"""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.model.protocol import brokers as kafka
from tests.model.protocol.bridge import (
    OFFSETS_FIRST,
    OFFSETS_TWICE,
    RECORDS_FIRST,
    UNASKED,
    Budget,
    Rules,
)
from tests.model.protocol.brokers import ABORT, ADD_OFFSETS, ADD_PARTITION, COMMIT, INIT, OFFSETS, Coordinator, Request
from tests.model.protocol.search import BACK, DOUBLED, STUCK, search
from tests.profiles import IS_NIGHTLY, timeout_s

BOTH: Final = (RECORDS_FIRST, OFFSETS_FIRST)
SEARCHES: Final = [
    *((requests, Budget(delayed=1, doubled=1, crashes=1)) for requests in BOTH),
    (RECORDS_FIRST, Budget(delayed=1, given_up=1)),
    (OFFSETS_FIRST, Budget(delayed=1, aborted=1)),
    (RECORDS_FIRST, Budget(delayed=1, timed_out=1)),
    (OFFSETS_FIRST, Budget(delayed=1, lost=1)),
    (OFFSETS_FIRST, Budget(zombies=1)),
    (OFFSETS_TWICE, Budget(delayed=1, crashes=1)),
]
AT_NIGHT: Final = [
    Budget(delayed=1, doubled=1, given_up=1),
    Budget(delayed=1, doubled=1, aborted=1),
    Budget(delayed=1, doubled=1, timed_out=1),
    Budget(delayed=1, doubled=1, lost=1),
    Budget(delayed=1, zombies=1),
    Budget(delayed=2, doubled=1, crashes=1),
    Budget(delayed=1, doubled=1, aborted=1, crashes=1),
    Budget(delayed=1, given_up=1, crashes=1),
    Budget(delayed=1, timed_out=1, crashes=1),
    Budget(delayed=1, crashes=2),
]
if IS_NIGHTLY:
    SEARCHES.extend((requests, budget) for budget in AT_NIGHT for requests in (*BOTH, OFFSETS_TWICE))


def _named(value: tuple[str, ...] | Budget) -> str:
    if isinstance(value, Budget):
        return " ".join(name for name, count in value._asdict().items() for _ in range(count))
    return "offsets twice" if value == OFFSETS_TWICE else f"{value[0]} first"


@pytest.mark.fault("a late or repeated request of a transaction, in every order")
@pytest.mark.timeout(timeout_s(180))
@pytest.mark.parametrize(("requests", "budget"), SEARCHES, ids=_named)
def test_whatever_arrives_late_each_message_is_seen_once(requests: tuple[str, ...], budget: Budget) -> None:
    """With any late or repeated request of any transaction, and any other failure, each message is seen once, (O, P)
    never goes back, and delivery ends."""
    found = search(Rules(requests=requests), budget)
    assert not found.traces, _printed(found.traces)


def test_without_the_rule_a_late_end_tears_the_next_transaction() -> None:
    """Without new epochs, the late end of one transaction ends the next one of its id half-way, and its message is seen
    twice."""
    rules = Rules(renews=False, delays=frozenset({COMMIT}))
    found = search(rules, Budget(delayed=1), passes=frozenset({BACK, UNASKED}))
    assert _has(
        found.traces[DOUBLED],
        r"(.): EndTxn\(commit\) is delayed",
        r"\1: EndTxn\(commit\): OK",
        r"\1: Produce\((.)\): OK",
        r"\1: EndTxn\(commit\) of before arrives: OK",
        r"\1: .*: INVALID_TXN_STATE",
        r".: Produce\(\2\): OK",
        r".: EndTxn\(commit\): OK",
    ), _printed(found.traces)


def test_without_the_rule_late_offsets_take_the_position_back() -> None:
    """Without new epochs, late offsets of one transaction are committed by the next one of its id, without an error."""
    rules = Rules(renews=False, delays=frozenset({OFFSETS}))
    found = search(rules, Budget(delayed=1))
    trace = found.traces[BACK]
    assert _has(
        trace,
        r"(.): TxnOffsetCommit\(1\) is delayed",
        r"\1: EndTxn\(commit\): OK",
        r"\1: TxnOffsetCommit\(2\): OK",
        r"\1: TxnOffsetCommit\(1\) of before arrives: OK",
        r"\1: marker after TxnOffsetCommit",
    ), _printed(found.traces)
    assert "INVALID" not in " ".join(trace)


@pytest.mark.parametrize(
    ("rules", "budget", "finding"),
    [
        (Rules(renews=False), Budget(delayed=1), BACK),
        (Rules(waits=False), Budget(delayed=1), BACK),
        (Rules(waits=False, delays=frozenset({OFFSETS})), Budget(delayed=1, crashes=1), DOUBLED),
        (Rules(is_one_set=False, requests=OFFSETS_TWICE), Budget(delayed=1), BACK),
        (Rules(verifies=False), Budget(delayed=1), STUCK),
        (Rules(verifies=False), Budget(delayed=1, aborted=1), DOUBLED),
    ],
    ids=["new epochs", "waits for them", "waits for them, crash", "one set of offsets", "KIP-890", "KIP-890, abort"],
)
def test_each_part_of_the_rule_is_needed(rules: Rules, budget: Budget, finding: str) -> None:
    """A late request does harm without new epochs, without the wait for one after a commit with offsets in doubt, with
    a second set of offsets in doubt, or under brokers that do not verify (KIP-890)."""
    assert finding in search(rules, budget, until=finding).traces


def test_the_coordinator_keeps_to_its_table() -> None:
    """The coordinator of the model does what the table of its module says."""
    rows = re.findall(
        r"^    (Empty|Ongoing|Prepare\w+|Complete\w+) +(\w+) +(\w+) +(\w+) +(\w+)$", kafka.__doc__ or "", re.MULTILINE
    )
    assert len(rows) == 6
    kinds = ((ADD_PARTITION, ADD_OFFSETS), (COMMIT,), (ABORT,), (INIT,))
    for state, *told in rows:
        for words, group in zip(told, kinds, strict=True):
            for kind in group:
                after, answer = kafka.coordinated(Coordinator(state, 7), Request(kind, 0, 7))
                is_left = after == Coordinator(state, 7)
                got = after.state if answer == kafka.OK or not is_left else answer
                assert {"BUSY": kafka.BUSY, "INVALID": kafka.INVALID}.get(words, words) == got, (state, kind)
                assert after.epoch == 7 + (kind == INIT and not is_left)


def _has(trace: list[str], *lines: str) -> bool:
    """Whether the trace has these lines, in this order, with others between them."""
    return re.search("^" + "$.*?^".join(lines) + "$", "\n".join(trace), re.MULTILINE | re.DOTALL) is not None


def _printed(traces: dict[str, list[str]]) -> str:
    return "\n".join(f"{finding}:\n    " + "\n    ".join(trace) for finding, trace in traces.items())
