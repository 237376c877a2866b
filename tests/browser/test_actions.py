"""Actions in a real Chromium: each describes itself and counts its messages, runs, and shows the outcome."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from bridge.api.source import Order
from bridge.delivery.targets.target import TargetReport
from bridge.errors import EnvironmentFailure
from tests.browser.looks import LOOKS, serious
from tests.browser.rig import SEEN, bridge, hostile_letter, looking
from tests.unit.bridge.api.fakes import NOW_MS, Bridge, Dispatcher, Letters, message
from timerstore.operations.find import PendingState

ONE: Final = "/messages/delay/0/9"
LETTER: Final = "/dead-letters/delay.dlt/0/69"
ORIGIN: Final = ("delay", 0, 9)
DIALOGS: Final = {
    ONE: ("Cancel", "Move", "Deliver now"),
    "/messages?target=orders": ("Cancel …", "Move …"),
    "/dead-letters?reason=unknown-target": ("Redrive …",),
    LETTER: ("Redrive",),
    "/schedules": ("Cancel",),
    "/targets": ("Pause",),
}


def dialog(page: Page) -> Locator:
    return page.get_by_role("dialog")


def ask_for(page: Page, action: str) -> Locator:
    """Open the dialog of an action; its button."""
    page.get_by_role("group", name="Actions").first.get_by_role("button", name=action, exact=True).click()
    expect(dialog(page)).to_be_visible()
    return dialog(page).locator("button.strong")


def counted(page: Page) -> str:
    """The number of matches that the dialog shows after its count."""
    status = dialog(page).get_by_role("status")
    expect(status).to_contain_text(re.compile(r"\d.* match(es)?\."))
    return status.inner_text().split()[0]


def dispatcher(there: Bridge) -> Dispatcher:
    assert there.dispatcher is not None
    return there.dispatcher


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("path", DIALOGS)
def test_each_dialog_is_sound(chromium: Browser, path: str, look: str) -> None:
    """No error in the console, nothing that axe calls serious, nothing wider than the screen; Escape closes it, and
    the focus is where it was."""
    with looking(chromium, bridge(), path, is_writable=True, **LOOKS[look]) as (page, complaints):
        assert not serious(page)
        for action in DIALOGS[path]:
            button = ask_for(page, action)
            expect(dialog(page)).not_to_contain_text("Counting")
            assert not serious(page, "dialog")  # the rest does not change, and is out of reach
            assert page.evaluate("document.querySelector('dialog').scrollWidth <= innerWidth")
            expect(button).to_be_visible()
            page.keyboard.press("Escape")
            expect(dialog(page)).not_to_be_visible()
            assert page.evaluate("document.activeElement.dataset.verb")
        assert not complaints, complaints


def test_a_message_is_cancelled(chromium: Browser) -> None:
    """By one command, once it is confirmed; then the page shows it as cancelled, and offers no more."""
    there = bridge()
    with looking(chromium, there, ONE, is_writable=True) as (page, complaints):
        button = ask_for(page, "Cancel")
        expect(dialog(page)).to_contain_text("Cancel: message delay/0/9")
        assert not dispatcher(there).sent
        button.click()
        expect(dialog(page).get_by_role("status")).to_have_text("It is cancelled, and will not be delivered.")
        assert dispatcher(there).sent == [Order(ORIGIN[:2], ORIGIN[2:], None)]
        page.keyboard.press("Enter")
        expect(dialog(page)).not_to_be_visible()
        expect(page.locator(".why")).to_contain_text("cancelled")
        expect(page.get_by_role("group", name="Actions")).to_have_count(0)
        assert not complaints, complaints


def test_a_message_that_comes_again_is_cancelled(chromium: Browser) -> None:
    """Where it is listed, with all its ticks."""
    there = bridge()
    with looking(chromium, there, "/schedules", is_writable=True) as (page, complaints):
        ask_for(page, "Cancel").click()
        expect(dialog(page).get_by_role("status")).to_have_text("It is cancelled, and will not be delivered.")
        (order,) = dispatcher(there).sent
        assert (order.origins, order.due_ms) == ((4,), None)
        dialog(page).get_by_role("button", name="Close").click()
        expect(page.locator("tbody tr")).to_have_count(3)
        assert not complaints, complaints


def test_a_message_is_moved(chromium: Browser) -> None:
    """To a time of the reader's zone."""
    there = bridge()
    with looking(chromium, there, ONE, is_writable=True) as (page, complaints):
        button = ask_for(page, "Move")
        page.get_by_label("New due time").fill("2027-02-01T09:30:00")  # Berlin's: 08:30 UTC
        button.click()
        expect(dialog(page).get_by_role("status")).to_have_text("It is moved.")
        assert dispatcher(there).sent == [Order(ORIGIN[:2], ORIGIN[2:], 1_801_470_600_000)]
        dialog(page).get_by_role("button", name="Close").click()
        expect(page.locator("dl")).to_contain_text("2027-02-01 09:30:00")
        assert not complaints, complaints


def test_a_message_is_delivered_now(chromium: Browser) -> None:
    """It is due now."""
    there = bridge()
    with looking(chromium, there, ONE, is_writable=True) as (page, complaints):
        ask_for(page, "Deliver now").click()
        expect(dialog(page).get_by_role("status")).to_have_text("It is due now, and delivered.")
        assert dispatcher(there).sent == [Order(ORIGIN[:2], ORIGIN[2:], NOW_MS)]
        assert not complaints, complaints


def test_what_came_too_late_says_so(chromium: Browser) -> None:
    """A message that is delivered while its dialog is open."""
    there = bridge()
    with looking(chromium, there, ONE, is_writable=True) as (page, _):
        button = ask_for(page, "Cancel")
        assert there.store is not None
        there.store.rows = [row for row in there.store.rows if row.origin != 9]
        button.click()
        expect(dialog(page).get_by_role("status")).to_have_text("It is not pending: nothing has changed.")
        dialog(page).get_by_role("button", name="Close").click()
        expect(page.get_by_role("alert")).to_contain_text("is not pending here")


def test_what_fails_says_why(chromium: Browser) -> None:
    """And what to do."""
    there = bridge()
    dispatcher(there).error = EnvironmentFailure(
        "the command could not be written", hint="Look at the brokers", code="DB-3001"
    )
    with looking(chromium, there, ONE, is_writable=True) as (page, _):
        ask_for(page, "Cancel").click()
        expect(dialog(page).get_by_role("alert")).to_contain_text("Look at the brokers")


def test_all_that_fit_are_cancelled(chromium: Browser) -> None:
    """Counted first; the number has to be typed; the list shows the rest."""
    there = bridge()
    assert there.store is not None
    with looking(chromium, there, "/messages?target=orders&state=waiting", is_writable=True) as (page, complaints):
        number = sum(row.target == "orders" and row.state is PendingState.WAITING for row in there.store.rows)
        button = ask_for(page, "Cancel …")
        expect(dialog(page).get_by_role("status")).to_have_text(f"{number} messages match.")
        expect(dialog(page).get_by_role("list", name="Filters")).to_have_text("target ordersstate waiting")
        expect(button).to_be_disabled()
        typed = dialog(page).get_by_label("to confirm")
        expect(typed).to_be_focused()
        typed.fill(str(number - 1))
        expect(button).to_be_disabled()
        typed.press("Enter")
        assert not dispatcher(there).sent
        typed.fill(str(number))
        typed.press("Enter")
        expect(dialog(page).get_by_role("status")).to_contain_text(
            f"{number} of {number} messages: {number} cancelled."
        )
        assert sum(len(order.origins) for order in dispatcher(there).sent) == number
        dialog(page).get_by_role("button", name="Close").click()
        expect(page.locator("main")).to_contain_text("No message matches.")
        assert not complaints, complaints


def test_what_was_cancelled_is_behind_its_number(chromium: Browser) -> None:
    """Until it is passed over."""
    there = bridge()
    with looking(chromium, there, "/messages?key=customer-37", is_writable=True) as (page, complaints):
        ask_for(page, "Cancel …")
        number = counted(page)
        typed = dialog(page).get_by_label("to confirm")
        typed.fill(number)
        typed.press("Enter")
        dialog(page).get_by_role("status").get_by_role("link", name=number, exact=True).click()
        expect(page.locator("tbody tr")).to_have_count(int(number))
        expect(page.locator("tbody")).to_contain_text("cancelled")
        assert not complaints, complaints


def test_without_a_filter_all_are_meant(chromium: Browser) -> None:
    """And the dialog says so."""
    there = bridge()
    with looking(chromium, there, "/messages", is_writable=True) as (page, complaints):
        button = ask_for(page, "Move …")
        expect(dialog(page)).to_contain_text("all messages")
        page.get_by_label("New due time").fill("2027-02-01T09:30:00")
        label = dialog(page).get_by_label("to confirm")
        expect(label).to_be_visible()
        label.fill(counted(page))
        button.click()
        expect(dialog(page).get_by_role("status")).to_contain_text("195 moved.")
        assert {order.due_ms for order in dispatcher(there).sent} == {1_801_470_600_000}
        dialog(page).get_by_role("status").get_by_role("link", name="195").click()
        expect(dialog(page)).not_to_be_visible()
        expect(page.locator("caption")).to_contain_text("195 matching messages")
        assert not complaints, complaints


def test_what_takes_long_can_be_stopped(chromium: Browser) -> None:
    """Finished parts stay finished, and the page says so."""
    there = bridge()
    dispatcher(there).silent = set(range(200))
    with looking(chromium, there, "/messages?target=payments", is_writable=True) as (page, _):
        button = ask_for(page, "Cancel …")
        typed = dialog(page).get_by_label("to confirm")
        expect(typed).to_be_visible()
        typed.fill(counted(page))
        button.click()
        expect(dialog(page).get_by_role("progressbar")).to_be_visible()
        dialog(page).get_by_role("button", name="Stop").click()
        expect(dialog(page).get_by_role("alert")).to_have_text("Stopped. Finished parts stay finished.")
        dialog(page).get_by_role("button", name="Close").click()
        expect(dialog(page)).not_to_be_visible()


@pytest.mark.fault("an action that is offered and then refused")
def test_what_would_be_refused_is_not_offered(chromium: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page offers no pause for the bridge's own topics, and no action for cancelled messages."""
    there = bridge()
    own = TargetReport(name="delay", partitions=1)
    monkeypatch.setattr(there, "targets", lambda: [own, TargetReport(name="orders", partitions=3)])
    with looking(chromium, there, "/targets", is_writable=True) as (page, complaints):
        expect(page.locator("tr[data-key=orders] button")).to_have_count(1)
        expect(page.locator("tr[data-key=delay] button")).to_have_count(0)
        page.goto("/messages?state=cancelled")
        expect(page.locator("caption")).to_be_visible()
        expect(page.locator("button[data-verb]")).to_have_count(0)
        assert not complaints, complaints


def test_a_target_is_paused_and_resumed(chromium: Browser) -> None:
    """It says so among the targets."""
    there = bridge()
    with looking(chromium, there, "/targets", is_writable=True) as (page, complaints):
        row = page.locator("tbody tr", has_text="well")
        row.get_by_role("button", name="Pause").click()
        expect(dialog(page)).to_contain_text("Pause: target well")
        dialog(page).locator("button.strong").click()
        expect(dialog(page).get_by_role("status")).to_have_text("It is paused now.")
        assert there.paused.names() == {"well"}
        dialog(page).get_by_role("button", name="Close").click()
        expect(row.locator(".badge")).to_have_text("paused")
        row.get_by_role("button", name="Resume").click()
        dialog(page).locator("button.strong").click()
        expect(dialog(page).get_by_role("status")).to_have_text("It is not paused now.")
        assert not there.paused.names()
        assert not complaints, complaints


def test_dead_letters_are_found_and_put_back(chromium: Browser) -> None:
    """The newest first, by reason; one goes back, and says so."""
    there = bridge()
    with looking(chromium, there, "/dead-letters", is_writable=True) as (page, complaints):
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(50)
        page.get_by_role("link", name="Next page").click()
        expect(rows).to_have_count(20)
        page.get_by_label("Reason").fill("bad-until")
        page.get_by_label("Reason").press("Enter")
        expect(rows).to_have_count(14)
        page.get_by_role("link", name="Dead letters").click()
        expect(rows).to_have_count(50)
        rows.first.locator("a").first.click()
        expect(page.locator("h1")).to_have_text("Dead letter delay.dlt/0/69")
        for text in ("orders does not exist", "delay/0/69", "16 failed attempts", "own"):
            expect(page.locator("main")).to_contain_text(text)
        ask_for(page, "Redrive").click()
        expect(dialog(page).get_by_role("status")).to_have_text("It has gone back into its delay topic.")
        dialog(page).get_by_role("button", name="Close").click()
        expect(page.locator(".why")).to_contain_text("It has gone back")
        expect(page.get_by_role("group", name="Actions")).to_have_count(0)
        assert not complaints, complaints


def test_dead_letters_that_would_be_rejected_again_stay(chromium: Browser) -> None:
    """They are counted; due at once they go back too."""
    with looking(chromium, bridge(), "/dead-letters?reason=bad-until", is_writable=True) as (page, complaints):
        button = ask_for(page, "Redrive …")
        expect(dialog(page).get_by_role("status")).to_have_text(
            "0 dead letters match. 14 more would be rejected again."
        )
        expect(button).to_be_disabled()
        page.get_by_label("Due at once").check()
        expect(dialog(page).get_by_role("status")).to_have_text("14 dead letters match.")
        dialog(page).get_by_label("to confirm").fill("14")
        button.click()
        expect(dialog(page).get_by_role("status")).to_have_text("14 gone back.")
        dialog(page).get_by_role("link", name="14").click()
        expect(page.locator("tbody .badge.redriven")).to_have_count(14)
        assert not complaints, complaints


@pytest.mark.parametrize("path", [ONE, "/messages", "/schedules", "/dead-letters", LETTER, "/targets"])
def test_who_may_only_read_is_told_so(chromium: Browser, path: str) -> None:
    """No action is offered, and the page says which setting would."""
    with looking(chromium, bridge(), path) as (page, complaints):
        expect(page.locator("main")).to_contain_text("Set http.api to write")
        assert page.locator("button[data-verb]").count() == 0
        assert not complaints, complaints


@pytest.mark.parametrize("path", ["/dead-letters", "/dead-letters/delay.dlt/0/0"])
def test_what_a_dead_letter_says_stays_text(chromium: Browser, path: str) -> None:
    """Its reason, target, origin and headers."""
    there = Bridge(bridge().store, letters=Letters([hostile_letter()]))
    with looking(chromium, there, path, is_writable=True) as (page, complaints):
        expect(page.locator("bdi", has_text=SEEN).first).to_be_visible()
        assert page.locator("main img, main script, main iframe").count() == 0
        hrefs = page.locator("main a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
        assert hrefs and all(href.startswith("/") for href in hrefs)
        assert not complaints, complaints


def test_a_filter_stays_text_in_the_dialog(chromium: Browser) -> None:
    """As everywhere."""
    name = '"><img src=x onerror=alert(1)>\u202e'
    path = f"/messages?{urlencode({'target': name})}"
    with looking(chromium, bridge(message(0, target=name)), path, is_writable=True) as (page, complaints):
        ask_for(page, "Cancel …")
        expect(dialog(page).get_by_role("list", name="Filters")).to_have_text(f"target {name[:-1]}\\u202e")
        assert page.locator("dialog img").count() == 0
        assert not complaints, complaints


def test_instances_that_do_not_answer_are_named(chromium: Browser) -> None:
    """All numbers leave their messages out."""

    def lacking(route: Route) -> None:
        answer: dict[str, Any] = route.fetch().json()
        route.fulfill(json=answer | {"incomplete": ["http://bridge-2:8081"]})

    with looking(chromium, bridge()) as (page, _):
        page.route("**/api/v1/summary", lacking)
        page.reload()
        expect(page.locator("#notice")).to_contain_text("http://bridge-2:8081 does not answer")
