"""bridge.dead_letters.rejection: what would be rejected again is known before it goes back."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.dead_letters.rejection import GoingBack, Rejection
from bridge.settings.model import Settings
from bridge.wire import headers as h
from bridge.wire.letters import Letter, LetterChoice
from bridge.wire.reasons import RejectReason

NOW_MS = 1_800_000_000_000
_R = RejectReason
GOOD: h.Headers = [("delay-for", b"5s"), ("delay-topic", b"t"), ("own", b"1")]


def why(headers: h.Headers, *, tree: dict[str, Any] | None = None, **choice: Any) -> str | None:
    """Why a record with these headers would be rejected when it goes back."""
    letter = Letter(headers=headers, reason="?", topic="delay", partition=3, target="t")
    record = GoingBack(letter, LetterChoice(**choice).headers(letter), None, b"v")
    (found,) = Rejection(Settings.of(tree or {})).reasons([record], NOW_MS)
    return found


def without(name: str, *more: tuple[str, bytes | None]) -> h.Headers:
    return [*(each for each in GOOD if each[0] != name), *more]


BROKEN: list[tuple[h.Headers, RejectReason]] = [
    (without("delay-for"), _R.NO_TIME),
    (without("", ("delay-until", b"5")), _R.TWO_TIMES),
    (without("", ("delay-topic", b"u")), _R.DUPLICATE_HEADER),
    (without("delay-for", ("delay-for", b"soon")), _R.BAD_FOR),
    (without("delay-for", ("delay-until", b"never")), _R.BAD_UNTIL),
    (without("delay-for", ("delay-level", b"0")), _R.BAD_LEVEL),
    (without("delay-topic"), _R.NO_TARGET),
    (without("delay-topic", ("delay-topic", b"a b")), _R.BAD_TARGET),
    (without("", ("delay-partition", b"-1")), _R.BAD_PARTITION),
    (without("", ("delay-id", b"")), _R.BAD_ID),
    (without("", ("delay-replace", b"true")), _R.BAD_REPLACE),
    (without("", ("delay-copy-origin", b"?")), _R.BAD_COPY),
    (without("delay-for", ("delay-every", b"never")), _R.BAD_SCHEDULE),
    (without("delay-for", ("delay-every", b"1ms")), _R.BAD_SCHEDULE),
    (without("delay-for", ("delay-cron", b"0 0 31 2 *")), _R.BAD_SCHEDULE),
    (without("delay-for", ("delay-every", b"1h"), ("delay-end", b"5")), _R.BAD_SCHEDULE),
    (without("delay-for", ("delay-every", b"\xff")), _R.BAD_SCHEDULE),
    (without("delay-for", ("delay-cron", b"0 0 */31 * MON#5")), _R.BAD_SCHEDULE),
    (without("", ("delay-times", b"4")), _R.BAD_SCHEDULE),
    ([("delay-cancel", b"")], _R.BAD_ID),
    ([("delay-cancel-origin", b"?")], _R.BAD_ORIGIN),
    ([("delay-cancel", b"x"), ("delay-reply-to", b"a b")], _R.BAD_REPLY),
    (without("", *((f"h{n}", b"") for n in range(1_000))), _R.TOO_MANY_HEADERS),
]


@pytest.mark.fault("a dead letter that goes back as broken as it came")
@pytest.mark.parametrize(("headers", "reason"), BROKEN)
def test_a_record_that_is_broken_would_be_rejected_again(headers: h.Headers, reason: RejectReason) -> None:
    """A letter that the decoder would reject again stays, also one whose schedule has no due time, and does not count
    as redriven."""
    assert why(headers) == reason
    assert {reason for _, reason in BROKEN} >= {_R.BAD_ORIGIN, _R.BAD_SCHEDULE}


@pytest.mark.parametrize(
    ("set_headers", "reason"),
    [
        ([("delay-for", b"1m")], None),
        ([("delay-for", b"soon")], _R.BAD_FOR),
        ([("delay-until", b"5")], _R.TWO_TIMES),
        ([("own", b"2")], _R.BAD_FOR),
        ([("delay-for", b"1m"), ("delay-topic", b"a b")], _R.BAD_TARGET),
        ([("delay-for", b"1m"), ("delay-for", b"2m")], _R.DUPLICATE_HEADER),
    ],
)
def test_headers_that_are_set_must_put_the_record_right(
    set_headers: list[tuple[str, bytes]], reason: RejectReason | None
) -> None:
    """To set just any header is not enough."""
    assert why([("delay-for", b"?"), ("delay-topic", b"t")], set_headers=set_headers) == reason


def test_due_now_puts_times_right_and_nothing_else() -> None:
    """Copies become originals by it."""
    for headers, reason in BROKEN[:6]:
        assert (why(headers, due_now=True) is None) == (reason != _R.DUPLICATE_HEADER)
    assert why(without("", ("delay-copy-origin", b"?")), due_now=True) is None
    assert why(without("delay-topic"), due_now=True) == _R.NO_TARGET


def test_what_the_configuration_has_changed_counts() -> None:
    """A default target, a longer maximum, another dialect; copies stay acceptable whatever the maximum is."""
    tree: dict[str, Any] = {"delay_topics": {"delay": {"target": "t"}}, "delay": {"max": "1h"}}
    assert why(without("delay-topic"), tree=tree) is None
    assert why(without("delay-for", ("delay-for", b"2h")), tree=tree) == _R.BEYOND_MAX
    due = str(NOW_MS + 7_200_000).encode()
    copy: h.Headers = [
        ("delay-copy-origin", b"5"),
        ("delay-copy-due", due),
        ("delay-copy-rolls", b"1"),
        ("delay-copy-attempt", b"1"),
    ]
    assert why([*copy, ("delay-topic", b"t")], tree=tree) is None
    tree = {"delay_topics": {"delay": {"dialect": "etf1"}}}
    target: h.Headers = [("scheduler-target-topic", b"t"), ("scheduler-target-key", b"k")]
    epoch: h.Headers = [("scheduler-epoch", b"1800000100"), *target]
    assert why(epoch, tree=tree) is None and why(epoch) == _R.NO_TIME
