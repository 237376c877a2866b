"""Errors of the timer store, by where the remedy lies.

TimerStoreError
├── WrongIdentity      environment: the directory belongs to another cluster or topic
├── DirectoryInUse     environment: another process holds the directory
├── Corrupt            data: a file is damaged; it is set aside and the index is rebuilt
├── DiskFailure        environment: write or fsync failed
│   └── DiskFull       environment: no room; nothing is lost, the write is tried again later
├── Closed             the store was closed while a caller waited
├── Inconsistent       our bug, or no memory: a change failed half-way; the store must be opened anew
└── Misuse             our bug: an argument or a call out of order
"""

from __future__ import annotations


class TimerStoreError(Exception):
    """Something the timer store cannot go on with; `hint` says what to do about it, `code` names it."""

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code


class WrongIdentity(TimerStoreError):
    """The directory was written for another cluster, or for a topic that has been made anew since."""


class DirectoryInUse(TimerStoreError):
    """Another process holds the directory's lock."""


class Corrupt(TimerStoreError):
    """A file failed its checksum or cannot be parsed; `path` names it."""

    def __init__(self, message: str, *, path: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class DiskFailure(TimerStoreError):
    """A write, fsync or rename failed. After a failed fsync nothing is known of the file: never retried."""


class DiskFull(DiskFailure):
    """There is no room for a segment. Its rows stay in memory and ingest waits; delivery goes on."""


class Closed(TimerStoreError):
    """The store was closed while a caller waited for room."""


class Inconsistent(TimerStoreError):
    """A change failed half-way, and rows may be missing in memory: nothing more is delivered or written from there.
    The files are as good as ever: opened anew, the store has everything, as after a crash."""


class Misuse(TimerStoreError):
    """A bug in the caller: arguments that contradict each other, or a call out of order."""
