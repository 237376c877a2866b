"""Ends of threads that work on the store, reported to the application: the disk, or a bug."""

from __future__ import annotations

from collections.abc import Callable

from bridge.errors import BridgeError, EnvironmentFailure, InternalError
from timerstore.errors import Closed, DiskFailure


def guarded(
    what: str,
    run: Callable[[], None],
    *,
    on_fatal: Callable[[BridgeError], None],
) -> None:
    """Run `what`. An exception goes to `on_fatal`. Raises Closed."""
    try:
        run()
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
