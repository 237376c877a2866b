"""Ends of threads that work on the store, reported to the application: damage, the disk, or a bug."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from bridge.errors import BridgeError, EnvironmentFailure, InternalError
from timerstore.clock import Clock
from timerstore.errors import Closed, Corrupt, DiskFailure
from timerstore.operations import recovery

log = structlog.get_logger("bridge.ingest.watch.guarded")


def guarded(
    what: str,
    run: Callable[[], None],
    *,
    clock: Clock,
    on_corrupt: Callable[[], None],
    on_fatal: Callable[[BridgeError], None],
) -> None:
    """Run `what`. A damaged file is set aside, and `on_corrupt` asks for a rebuild; any other exception, also while the
    file is set aside, goes to `on_fatal`. Raises Closed."""
    try:
        try:
            run()
        except Corrupt as corrupt:
            log.error("segment-corrupt", report=recovery.set_aside(corrupt, clock.now_ms()))
            on_corrupt()
    except Closed:
        raise
    except DiskFailure as failure:
        on_fatal(EnvironmentFailure(failure.message, hint=failure.hint, code=failure.code))
    except BridgeError as error:
        on_fatal(error)
    except Exception as error:  # noqa: BLE001 - the application must know that the thread has ended
        hint = "Please report this with the log."
        bug = InternalError(f"{what} failed", hint=hint, reason=repr(error), code="DB-7001")
        bug.__cause__ = error
        on_fatal(bug)
