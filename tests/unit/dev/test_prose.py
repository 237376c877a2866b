"""The counter of clauses (dev/prose.py): its sources in each kind of file, and the comparison with ceilings."""

from __future__ import annotations

import pytest

from dev.prose import judge, offences, texts


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.py", '"""It writes wh_at is due."""'),
        ("a.py", "# It writes\n# wh_at is due.\nx = 1"),
        ("a.py", 'raise ValueError("It writes " "wh_at is due.")'),
        ("a.py", 'hint = f"{name} writes wh_at is due."'),
        ("a.md", "It writes\nwh_at is due."),
        ("a.yaml", "# It writes\n# wh_at is due.\nkey: 1"),
        ("a.yaml", "description: It writes wh_at is due."),
        ("a.js", "// It writes\n// wh_at is due.\nlet a;"),
        ("a.js", "el('p', 'It writes wh_at is due.');"),
        ("a.java", "/**\n * It writes\n * wh_at is due.\n */\nclass A {}"),
        ("a.java", 'throw new Error("It writes wh_at is due.");'),
    ],
)
def test_a_clause_is_counted_once(name: str, source: str) -> None:
    """In docstrings, in comments of several lines, in literals and in Markdown."""
    assert sum(len(offences(text)) for text in texts(name, source.replace("_", ""))) == 1


@pytest.mark.parametrize(
    "text", ["It writes due messages.", "`wh_at is due`", "```text\nwh_at is due\n```", "[how](what/is.md) it does so"]
)
def test_nouns_and_code_are_no_clauses(text: str) -> None:
    """Code in quotes, blocks of code and the addresses of links are not prose."""
    assert not [sentence for part in texts("a.md", text.replace("_", "")) for sentence in offences(part)]


def test_a_count_above_its_ceiling_fails_and_one_below_lowers_it() -> None:
    """A tree without a ceiling may have no clause."""
    above, below = judge({"bridge": 3, "docs": 1, "new": 1}, {"bridge": 2, "docs": 2})
    assert above == ["bridge: 3 clauses, 2 allowed", "new: 1 clauses, 0 allowed"]
    assert below == ["docs = 1"]
