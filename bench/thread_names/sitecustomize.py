"""Gives the names of Python's threads to the operating system, so that `/proc` has them. Python runs this module at its
start, if its directory is in PYTHONPATH (bench/processor.py)."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Final

PR_SET_NAME: Final = 15
NAME_BYTES_MAX: Final = 15

_bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]  # private: no public hook runs in a thread
_prctl: Final = ctypes.CDLL(None).prctl


def _named(thread: Any) -> None:
    _prctl(PR_SET_NAME, thread.name.encode()[:NAME_BYTES_MAX])
    _bootstrap(thread)


threading.Thread._bootstrap_inner = _named  # type: ignore[attr-defined]
