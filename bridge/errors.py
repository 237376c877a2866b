"""The errors of the bridge, by the party that must act.

    BridgeError                 base: a message, a hint with the remedy, and fields
    ├── ConfigurationError      exit 2   the configuration file, the environment or the command line is wrong
    ├── EnvironmentFailure      exit 3   the broker, the disk, Java or the network fails
    ├── StateError              exit 4   committed offsets, the directory and the topics do not match
    ├── FencedError             exit 5   another instance took over; this one has nothing left to do
    └── InternalError           exit 70  a bug of the bridge

Printed, an error is one line: `DB-3012 message (field=value ...). Hint.` Fields must never contain payloads or secrets.

A code is stable: it keeps its meaning and its row in docs/messages.md when the words change. Its first digit is the
exit status (7 for 70), or 1 for an error of the commands and the Python client alone.
"""

from __future__ import annotations

from typing import ClassVar


class BridgeError(Exception):
    """An error that an operator can act on.

    `message` states the problem, `hint` the remedy, and `code` is the row of docs/messages.md that explains both.
    `fields` are separate values of a log line.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str, code: str = "", **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        self.fields = fields

    def __str__(self) -> str:
        fields = " ".join(f"{name}={_one_line(str(value))}" for name, value in self.fields.items())
        head = f"{self.code} {_one_line(self.message)}".strip().rstrip(".") + (f" ({fields})" if fields else "")
        return f"{head}{'' if head.endswith('?') else '.'} {_sentence(self.hint)}"


class ConfigurationError(BridgeError):
    """The configuration file, the environment or the command line is wrong."""

    exit_code = 2


class EnvironmentFailure(BridgeError):
    """A dependency is absent or does not answer: broker, disk, Java, connector."""

    exit_code = 3


class StateError(BridgeError):
    """Kafka's state and the bridge's do not match: going on would lose or repeat messages."""

    exit_code = 4


class FencedError(BridgeError):
    """Another instance of the same name took over; this one must stop, and must not restart by itself."""

    exit_code = 5


class InternalError(BridgeError):
    """An internal assumption was violated; please report it."""

    exit_code = 70


def _sentence(hint: str) -> str:
    """A hint as a sentence. It begins with a verb, or with a name that keeps its case."""
    text = _one_line(hint)
    first = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first.isalpha() else text


def _one_line(text: str) -> str:
    return " ".join(text.split())
