"""docs/messages.md is whole: all that the source can end or complain with is in it, and nothing else (messages.py)."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from release.messages import (
    CODE,
    DOCUMENT,
    check_texts,
    coded,
    errors,
    events,
    generated,
    has_words,
    normal,
    possible_texts,
    states,
    values,
)
from tests.paths import ROOT


def documented(*headings: str) -> dict[str, int]:
    """The document's code spans, with their lines; with `headings` only in a table's columns of such names."""
    found: dict[str, int] = {}
    columns: list[int] = []
    for number, line in enumerate((ROOT / DOCUMENT).read_text(encoding="utf-8").splitlines(), start=1):
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        named = [i for i, cell in enumerate(cells) if cell in headings]
        if not cells or named:
            columns = named
        elif headings:
            line = " ".join(cells[column] for column in columns)
        if not headings or (cells and columns):
            found |= {normal(span): number for span in re.findall(r"`([^`]+)`", line)}
    return found


@pytest.mark.parametrize(
    "collect",
    [values, lambda: events("warning", "error", "exception", "critical"), check_texts, states],
    ids=["values", "events", "findings", "states"],
)
def test_every_message_is_explained(collect: Callable[[], Iterator[tuple[str, str]]]) -> None:
    """A search of the document for a message finds it."""
    said = {normal(text): place for text, place in collect() if has_words(text)}
    assert len(said) > 20, "the collector no longer finds them"
    absent = {text: place for text, place in said.items() if text not in documented()}
    assert not absent, f"not in {DOCUMENT}: {absent}"


def test_no_message_is_explained_that_nobody_says() -> None:
    """The document has no reworded or removed messages."""
    collectors = (errors, values, lambda: events("info", "warning", "error", "exception"), check_texts, states)
    said = {normal(text) for collect in collectors for text, _ in collect()}
    listed = documented("message", "event", "detail", "reasons", "phase")
    assert len(listed) > 150
    stale = {text: line for text, line in listed.items() if text not in said and text[:3] != "DB-"}
    assert not stale, f"of {DOCUMENT}, nowhere in the source: {stale}"


def test_a_message_that_begins_with_cannot_goes_on_with_a_verb() -> None:
    """No message lacks its verb, such as `cannot the offsets`: some get their first word from a shared function."""
    said = {text: place for text, place in errors() if re.match(r"cannot (?:a|an|the)\b", text)}
    assert not said, f"without a verb: {said}"


@pytest.mark.parametrize("code", ["f'{a!r} is no {b}{c}'", "'… is no ' + x", "f'{a} is ' + ('no ' if b else 'a ') + d"])
def test_the_collector_reads_all_ways_of_writing(code: str) -> None:
    """The collector sees every text that the document must have."""
    assert "… is no …" in [normal(text) for text in possible_texts(ast.parse(code, mode="eval").body)]


def test_every_error_has_a_code_and_every_code_one_row() -> None:
    """An operator searches for the code; it stays when the words change."""
    said = list(coded())
    assert len(said) > 100, "the collector no longer finds them"
    assert not [(message, place) for code, message, place in said if not code], "raised without a code"
    assert not {code for code, _, _ in said if not re.fullmatch(r"DB-[1-7][0-9]{3}", code)}
    lines = (ROOT / DOCUMENT).read_text(encoding="utf-8").splitlines()
    rows = Counter(found[1] for found in map(CODE.match, lines) if found)
    assert rows == Counter({code for code, _, _ in said})


def test_the_messages_of_the_document_are_those_of_the_source() -> None:
    """Whoever searches for the words finds them as well: `make messages` writes them."""
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    assert text == generated(text), "run make messages"
