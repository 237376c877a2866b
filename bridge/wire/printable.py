"""Text from records, brokers and people, made fit for a terminal. Pure.

A topic name or a header can hold escape sequences that recolour, overwrite or hide what is printed, line breaks that
forge a line of their own, and marks that reverse the direction of what follows.
"""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    """`text` with everything that is not a plain printable character as its escape (`\\x1b`, `\\u202e`), but `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
