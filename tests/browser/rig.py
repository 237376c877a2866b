"""The page of a fictitious bridge, in a browser that notes all errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page

from bridge.api.listener import Listener
from bridge.http.protection import Protection
from bridge.stores.search import PendingRow
from bridge.telemetry.health import Phase
from bridge.telemetry.metrics import StoreSnapshot
from tests.unit.bridge.api.fakes import NOW_MS, Bridge, Letters, Store, letter, message
from timerstore.operations.find import PendingState

DESKTOP: Final = {"width": 1200, "height": 900}
PHONE: Final = {"width": 360, "height": 740}
USER: Final[dict[str, str]] = {"username": "operator", "password": "night"}
MINUTE_MS: Final = 60_000
INTERVAL_MS: Final = 5_000
"""Of the page's refreshes."""
NINE: Final = '{"cron":"0 9 * * *","time-zone":"Europe/Berlin"}'
HOSTILE: Final = '"><img src=x onerror=alert(1)><script>alert(2)</script>\u202egpj.exe\x00'
SEEN: Final = HOSTILE.replace("\u202e", "\\u202e").replace("\x00", "\\u0000")


def orders() -> list[PendingRow]:
    """What an operator may find in the night: 200 messages in all states."""
    rows = []
    for n in range(200):
        due_ms = NOW_MS + (n * n % 3_541) * 1_000 + n * n * 90
        values: dict[str, Any] = {"at_ms": due_ms, "due_ms": due_ms, "ts_ms": NOW_MS - 1_000 * n, "origin": n}
        values |= {"target": ("orders", "payments", "reminders", "")[n % 4], "key": b"customer-%d" % (n * 37 % 100)}
        values |= {"id": f"order-{10_000 + n}" if n % 3 else None, "partition": 0}
        if n % 40 == 7:
            values |= {
                "state": PendingState.RETRYING,
                "attempt": 3,
                "reason": "target-unavailable",
                "target": "payments",
            }
        elif n % 40 == 11:
            values |= {"state": PendingState.ROLLED, "due_ms": due_ms + 40 * 86_400_000, "rolls": 2}
        elif n % 40 == 13:
            values |= {"state": PendingState.CANCELLED}
        elif n % 100 == 17:
            values |= {"state": PendingState.OVERDUE, "at_ms": NOW_MS - 42_000, "due_ms": NOW_MS - 42_000}
        if n % 50 == 4:
            values |= {"schedule": ('{"every":"6h","times":"3"}', NINE)[n // 50 % 2], "tick": 2}
        values |= {"headers": (("content-type", b"application/json"), ("trace", b"\xff\x00\x01"), ("empty", None))}
        rows.append(message(n, value=b'{"order": %d, "text": "call back"}' % n, **values))
    return rows


def hostile() -> PendingRow:
    """A message whose producer wants to be more than text."""
    text = HOSTILE.encode()
    headers = ((HOSTILE, text), ("href", b"javascript:alert(3)"))
    return message(0, target=HOSTILE, id=HOSTILE, key=text, value=text, headers=headers, reason=HOSTILE, attempt=1)


def hostile_letter() -> Any:
    """The same, dead."""
    text = HOSTILE.encode()
    inner = letter(0).letter
    inner = replace(inner, headers=[(HOSTILE, text)], reason=HOSTILE, detail=HOSTILE, target=HOSTILE, origin=HOSTILE)
    return letter(0, letter=replace(inner, topic=HOSTILE), key=text, value=text)


def bridge(*rows: PendingRow, **gauges: Any) -> Bridge:
    """Counts are those of its rows, except for given ones."""
    found = rows or tuple(orders())
    pending = [row for row in found if row.state is not PendingState.CANCELLED]
    targets = [row.target for row in pending]
    values: Mapping[str, Any] = {
        "pending_total": len(pending),
        "pending_by_topic": {name: targets.count(name) for name in sorted({*targets})},
        "oldest_overdue_s": 42.0,
        "consumer_lag": {("delay", 0): 7, ("delay", 1): 0},
        "retention_headroom_s": {"delay": 561_600.0},
        "disk_bytes": 100 << 30,
        "disk_free_bytes": 71 << 30,
        "segments": 12,
        "segment_bytes": 81 << 20,
        "failing": {("payments", "target-unavailable"): 1},
    }
    return Bridge(Store(*found), gauges=StoreSnapshot(**{**values, **gauges}), letters=Letters(dead()))


def dead() -> list[Any]:
    """Seventy dead letters: some have gone back, some would be rejected again, some have lost their value."""
    found = [letter(n) for n in range(70)]
    for n in range(0, 70, 5):
        inner = replace(found[n].letter, reason="bad-until", detail="neither epoch ms nor RFC 3339", target="")
        found[n] = replace(found[n], letter=inner)
    found[68] = replace(found[68], redriven=True)
    found[67] = replace(found[67], redriven=None)
    found[66] = replace(found[66], letter=replace(found[66].letter, is_cut=True))
    return found


def starting() -> Phase:
    """A bridge that cannot tell yet."""
    return Phase(name="catching-up", reasons=("records up to the committed offsets",), progress=0.25)


@contextmanager
def looking(
    chromium: Browser,
    at: Bridge,
    path: str = "/",
    *,
    is_writable: bool = False,
    base_path: str = "",
    has_clock: bool = True,
    **options: Any,
) -> Iterator[tuple[Page, list[str]]]:
    """The page at a path, once it shows a view, and the browser's complaints. `options` as for a context. Without
    `has_clock` time stands still for the page, which refreshes its view at `refresh` only."""
    complaints: list[str] = []

    def note(said: ConsoleMessage) -> None:
        if said.type in ("error", "warning"):
            complaints.append(said.text)

    def dismiss(dialog: Dialog) -> None:
        complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    protection = Protection(user=USER["username"], password=USER["password"]) if is_writable else Protection()
    listener = Listener(
        "127.0.0.1", 0, source=at, protection=protection, show_payloads=True, is_writable=is_writable,
        base_path=base_path,
    )  # fmt: skip
    settings: dict[str, Any] = {"viewport": DESKTOP, "timezone_id": "Europe/Berlin", "locale": "en-GB", **options}
    settings |= {"http_credentials": USER} if is_writable else {}
    with listener, chromium.new_context(base_url=f"http://localhost:{listener.port}", **settings) as context:
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(error.message))
        page.on("dialog", dismiss)
        if not has_clock:
            page.clock.install()
            page.clock.pause_at(NOW_MS / 1000)
        page.goto(path)
        page.locator("main h1, #notice p").first.wait_for()
        yield page, complaints


def refresh(page: Page) -> None:
    """Let the page's interval pass: it is longer after a slow answer, so a real one depends on the machine."""
    page.clock.run_for(INTERVAL_MS)
