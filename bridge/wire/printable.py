"""Untrusted text from records, brokers and people, escaped for a terminal. Pure.

A topic name or a header can contain escape sequences that recolour, overwrite or hide output, line breaks that forge a
line, and marks that reverse the direction of the following text.
"""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    """`text` with an escape (`\\x1b`, `\\u202e`) for each unprintable character, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
