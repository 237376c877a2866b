"""Errors of the timer store, by where the remedy lies.

TimerStoreError
├── WrongIdentity      environment: the directory belongs to another cluster or topic
├── DirectoryInUse     environment: another process holds the directory
├── Corrupt            data: a file is damaged; it is set aside and the index is rebuilt
├── DiskFailure        environment: a read, write or fsync failed
│   └── DiskFull       environment: no room; nothing is lost, and a later write is tried
├── Closed             the store was closed while a caller waited
├── Inconsistent       a bug, or no memory: a change failed half-way; the store must be opened anew
└── Misuse             a bug in the caller: a wrong argument, or a call out of order
"""

from __future__ import annotations


class TimerStoreError(Exception):
    """An error of the timer store; `hint` names the remedy, `code` the error."""

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code


class WrongIdentity(TimerStoreError):
    """The directory belongs to another cluster, or to a topic that was created anew."""


class DirectoryInUse(TimerStoreError):
    """Another process holds the directory's lock."""


class Corrupt(TimerStoreError):
    """A file failed its checksum, or cannot be parsed; `path` names the file."""

    def __init__(self, message: str, *, path: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class DiskFailure(TimerStoreError):
    """A read, write, fsync or rename failed. A failed fsync is never retried: the file's content is unknown."""


class DiskFull(DiskFailure):
    """The disk is full. Rows stay in memory, ingest waits, and delivery goes on."""


class Closed(TimerStoreError):
    """The store was closed while a caller waited for room."""


class Inconsistent(TimerStoreError):
    """A change failed half-way, and rows may be missing in memory, so that nothing is delivered or written any more.
    The files are intact: a store that is opened anew has all rows, as after a crash."""


class Misuse(TimerStoreError):
    """A bug in the caller: contradictory arguments, or a call out of order."""
