"""What can go wrong, by who must act.

    BridgeError                 base: a message, a hint that says what to do, and fields
    ├── ConfigurationError      exit 2   the configuration file, the environment or the command line is wrong
    ├── EnvironmentFailure      exit 3   the broker, the disk, Java or the network is not as it must be
    ├── StateError              exit 4   committed offsets, the directory or the topics do not belong together
    ├── FencedError             exit 5   another instance took over; this one has nothing left to do
    └── InternalError           exit 70  a bug of the bridge

Printed, an error is one line: `DB-3012 message (field=value ...). Hint.` Fields must never carry payloads or secrets.

A code is stable: it keeps its meaning and its row in docs/messages.md when the words change. Its first digit is the
exit status (7 for 70), or 1 for what only commands and the Python client say.
"""

from __future__ import annotations

from typing import ClassVar


class BridgeError(Exception):
    """An error that an operator can act on.

    `message` says what is wrong, `hint` what to do about it, `code` where docs/messages.md explains both; `fields` are
    values that a log line keeps apart.
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
    """Something that the bridge needs is absent or does not answer: broker, disk, Java, connector."""

    exit_code = 3


class StateError(BridgeError):
    """Kafka's state and the bridge's do not belong together: going on would lose or repeat messages."""

    exit_code = 4


class FencedError(BridgeError):
    """Another instance of the same name took over; this one must stop and must not come back by itself."""

    exit_code = 5


class InternalError(BridgeError):
    """A promise of this code to itself was broken; a report is welcome."""

    exit_code = 70


def _sentence(hint: str) -> str:
    """Hints begin with a verb, or with a name that keeps its case."""
    text = _one_line(hint)
    first = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first.isalpha() else text


def _one_line(text: str) -> str:
    return " ".join(text.split())
