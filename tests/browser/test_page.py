"""The page in a real Chromium: an operator's views and actions, and the limits of a hostile producer."""

from __future__ import annotations

import json
import os
import re
from typing import Final

import pytest
from playwright.sync_api import Browser, Error, Page, expect

from tests.browser.looks import LOOKS, serious
from tests.browser.rig import DESKTOP, PHONE, SEEN, bridge, hostile, looking, orders, refresh, starting
from tests.paths import ROOT
from tests.unit.bridge.api.fakes import NOW_MS, Bridge, Store, message
from timerstore.operations.find import PENDING, PendingState

VIEWS: Final = (
    *("/", "/?by=month", "/messages", "/messages/delay/0/7", "/schedules"),
    *("/dead-letters", "/dead-letters/delay.dlt/0/69", "/targets", "/instance"),
)
PICTURES: Final = {
    "page-overview": ("/", "light", None),
    "page-messages": ("/messages", "dark", None),
    "page-cancel": ("/messages?target=payments&state=retrying", "light", "Cancel …"),
    "page-phone": ("/", "phone", None),
}

rows = "tbody tr"


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("path", VIEWS)
def test_each_view_is_sound(chromium: Browser, path: str, look: str) -> None:
    """No error in the console, nothing that axe calls serious, nothing wider than the screen."""
    with looking(chromium, bridge(), path, **LOOKS[look]) as (page, complaints):
        expect(page.locator("main h1")).to_be_visible()
        assert not serious(page)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= page.evaluate("window.innerWidth")
        assert not complaints, complaints


def test_filters_are_the_address(chromium: Browser) -> None:
    """The filters are in the address; it shows the same again, and back leads to the previous view."""
    wanted = [row for row in orders() if row.target == "orders" and row.state is PendingState.WAITING]
    with looking(chromium, bridge(), "/messages") as (page, complaints):
        expect(page.locator("caption")).to_contain_text(
            f"{sum(r.state in PENDING for r in orders())} matching messages"
        )
        page.get_by_label("Target").fill("orders")
        page.get_by_label("waiting").check()
        page.get_by_role("button", name="Filter").click()
        expect(page).to_have_url(re.compile(r"/messages\?target=orders&state=waiting$"))
        expect(page.locator("caption")).to_contain_text(f"{len(wanted)} matching messages")
        page.reload()
        expect(page.get_by_label("Target")).to_have_value("orders")
        expect(page.get_by_label("waiting")).to_be_checked()
        expect(page.locator(rows)).to_have_count(len(wanted))
        page.get_by_label("Due before").fill("2027-01-15T09:10:00")  # Berlin's, an hour ahead of UTC
        page.get_by_label("Due before").press("Enter")
        expect(page).to_have_url(re.compile("due_until=2027-01-15T08%3A10%3A00Z"))
        expect(page.get_by_label("Due before")).to_have_value(re.compile("2027-01-15T09:10"))
        page.go_back()
        page.go_back()
        expect(page.get_by_label("Target")).to_have_value("")
        assert not complaints, complaints


def test_what_comes_again_says_when(chromium: Browser) -> None:
    """Its next ticks in the reader's zone, the clock change included where there is one; it leads to its message."""
    with looking(chromium, bridge(), "/schedules") as (page, complaints):
        expect(page.locator(rows)).to_have_count(4)
        daily = page.locator(rows, has_text="Europe/Berlin").first
        expect(daily).to_contain_text("0 9 * * *")
        times = daily.locator("time").all_inner_texts()
        assert len(times) == 5 and all(each.endswith(" 09:00:00") for each in times[1:])
        ending = page.locator(rows, has_text="times 3").first
        expect(ending.locator("time")).to_have_count(2)
        ending.get_by_role("link").first.click()
        expect(page.locator("h1")).to_contain_text("Message delay/0/")
        assert not complaints, complaints


def test_a_filter_that_is_wrong_says_so(chromium: Browser) -> None:
    """And can be corrected in its place; those without a field can be taken off."""
    with looking(chromium, bridge(), "/messages?origin=nonsense&at_until=0") as (page, _):
        expect(page.get_by_role("alert")).to_contain_text("topic/partition/offset")
        page.get_by_label("Origin").fill("delay/0/5")
        page.get_by_label("Origin").press("Enter")
        expect(page.locator("main")).to_contain_text("No message matches.")
        page.get_by_role("link", name="Remove this filter: comes up before").click()
        expect(page.locator(rows)).to_have_count(1)


def test_pages_have_each_message_once(chromium: Browser) -> None:
    """From the first page to the last, and at once to the first again."""
    with looking(chromium, bridge(), "/messages") as (page, complaints):
        origins, following = page.locator(f"{rows} td:last-child"), page.get_by_role("link", name="Next page")
        seen = origins.all_inner_texts()
        while following.count():
            first = origins.first.inner_text()
            following.click()
            expect(origins.first).not_to_have_text(first)
            seen += origins.all_inner_texts()
        expected = sorted((r for r in orders() if r.state in PENDING), key=lambda r: (r.at_ms, r.offset))
        assert seen == [f"delay/0/{row.origin}" for row in expected]
        page.get_by_role("link", name="First page").click()
        expect(origins.first).to_have_text(seen[0])
        assert not complaints, complaints


def test_each_number_leads_to_what_it_counts(chromium: Browser) -> None:
    """Overdue, a target, a bar: the number of matching messages."""
    every = bridge()
    assert every.store is not None
    with looking(chromium, every) as (page, complaints):
        for link in ("ul.shares a", "svg.timeline a", "section p a"):
            page.locator(link).first.click()
            expect(page.locator("caption")).to_be_visible()
            text = page.locator("caption").inner_text()
            assert int(re.findall(r"[\d,]+", text)[0]) >= 1
            page.go_back()
            name = page.locator(link).first.get_attribute("aria-label") or page.locator(link).first.inner_text()
            assert re.findall(r"[\d,]+", name)[-1] == re.findall(r"[\d,]+", text)[0]
        expect(page.locator("a.tile")).to_have_count(10)
        page.get_by_role("link", name="Lateness p99").click()
        expect(page.locator("#lateness + p + dl")).to_contain_text("1,234 in 5 min")
        page.go_back()
        page.get_by_role("link", name="Overdue").click()
        expect(page.locator(rows)).to_have_count(2)
        assert not complaints, complaints


@pytest.mark.fault("a number of the page that its list does not confirm")
def test_numbers_of_the_overview_are_those_of_their_lists(chromium: Browser) -> None:
    """Messages that their targets did not take are counted, also while none is overdue; failing and paused targets are
    those of the list."""
    calm = bridge(
        *[row for row in orders() if row.state is not PendingState.OVERDUE],
        oldest_overdue_s=0.0,
        paused_s={"well": 60.0},
    )
    calm.paused.put("well", paused=True)
    with looking(chromium, calm) as (page, complaints):
        tile = page.locator("a.tile", has_text="Overdue")
        expect(tile).to_contain_text("apart from retried messages")
        tile = page.locator("a.tile", has_text="Retrying")
        retrying = int(tile.locator("strong").inner_text())
        assert retrying == 5
        tile.click()
        expect(page.locator("caption")).to_contain_text(f"{retrying} matching messages")
        expect(page.locator(rows)).to_have_count(retrying)
        page.go_back()
        tile = page.locator("a.tile", has_text="Targets failing")
        failing = int(tile.locator("strong").inner_text())
        expect(page.locator("a.tile", has_text="Targets paused").locator("strong")).to_have_text("1")
        tile.click()
        expect(page.locator(".badge.failing")).to_have_count(failing)
        expect(page.locator(".badge.paused")).to_have_count(1)
        assert not complaints, complaints


@pytest.mark.fault("words that break in buttons and headings")
@pytest.mark.parametrize("path", [path for path in VIEWS if path != "/?by=month"])
def test_nothing_short_breaks_in_two(chromium: Browser, path: str) -> None:
    """Buttons, badges, headings of columns and short names stay on one line on a screen of 1280 pixels."""
    size = {"width": 1280, "height": 900}
    with looking(chromium, bridge(), path, is_writable=True, viewport=size) as (page, complaints):
        short = page.locator("button, th, .badge, td .whole, nav a, .tile strong, td time")
        lines = short.evaluate_all(
            "found => found.filter(each => each.getClientRects().length)"
            ".map(each => { const range = document.createRange(); range.selectNodeContents(each);"
            " return [each.textContent, new Set([...range.getClientRects()].map(r => Math.round(r.top / 8))).size]; })"
        )
        assert lines and not [text for text, count in lines if count > 2 or (count > 1 and " " not in text)]
        assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"]
        assert not complaints, complaints


@pytest.mark.fault("a form of filters that fills the screen of a phone")
@pytest.mark.parametrize("path", ["/messages", "/schedules", "/dead-letters"])
def test_the_first_screen_of_a_phone_has_what_was_looked_for(chromium: Browser, path: str) -> None:
    """The form of filters is closed on a phone, and can be opened."""
    with looking(chromium, bridge(), path, **LOOKS["phone"]) as (page, _):
        first = page.locator(rows).first.bounding_box()
        assert first is not None and first["y"] < PHONE["height"]
        expect(page.get_by_label("Target")).to_be_hidden()
        page.get_by_text("Filters", exact=True).click()
        page.get_by_label("Target").fill("orders")
        page.get_by_role("button", name="Filter").click()
        expect(page).to_have_url(re.compile("target=orders"))


@pytest.mark.fault("a reverse proxy with a path")
def test_the_page_is_at_home_below_a_path(chromium: Browser) -> None:
    """Links, forms, questions and the browser's history stay below http.base_path."""
    with looking(chromium, bridge(), "/tools/delay/", base_path="/tools/delay") as (page, complaints):
        for name, path in (("Messages", "/messages"), ("Targets", "/targets"), ("Overview", "/")):
            page.get_by_role("navigation", name="Views").get_by_role("link", name=name, exact=True).click()
            expect(page).to_have_url(re.compile(f"/tools/delay{path}$"))
            expect(page.locator("header nav a[aria-current]")).to_have_text(name)
        page.locator("ul.shares a").first.click()
        expect(page).to_have_url(re.compile(r"/tools/delay/messages\?target="))
        page.get_by_label("Id").fill("order-10008")
        page.get_by_role("button", name="Filter").click()
        expect(page).to_have_url(re.compile(r"/tools/delay/messages\?id=order-10008"))
        page.reload()
        page.locator(f"{rows} a").first.click()
        expect(page.locator("h1")).to_contain_text("Message delay/0/")
        assert "/tools/delay/messages/delay/0/" in page.url
        page.go_back()
        expect(page.locator("caption")).to_be_visible()
        assert all(
            href.startswith(("/tools/delay/", "#"))
            for href in page.locator("a[href]").evaluate_all("found => found.map(each => each.getAttribute('href'))")
        )
        assert not complaints, complaints


def test_a_record_can_be_copied_and_downloaded(chromium: Browser) -> None:
    """Its place and its value; and all letters that fit, as the API has them."""
    permissions = ["clipboard-read", "clipboard-write"]
    with looking(chromium, bridge(), "/dead-letters/delay.dlt/0/69", permissions=permissions) as (page, complaints):
        page.get_by_role("button", name="Copy the place").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == "delay.dlt/0/69"
        with page.expect_download() as found:
            page.get_by_role("link", name="Download as JSON").click()
        assert json.loads(found.value.path().read_text())["origin"] == "delay/0/69"
        page.goto("/dead-letters")
        chips = page.get_by_role("list", name="Causes on this page")
        expect(chips).to_contain_text(re.compile("unknown-target.*40.*bad-until.*10"))
        with page.expect_download() as found:
            page.get_by_role("link", name="Download as JSON").click()
        assert len(json.loads(found.value.path().read_text())["letters"]) == 70
        page.get_by_role("button", name="Count all").click()
        expect(page.get_by_text("69 dead letters of these; 1 of all have gone back.")).to_be_visible()
        expect(page.get_by_role("list", name="All by cause and target")).to_contain_text("bad-until for no target: 14")
        chips.get_by_role("link", name="bad-until").click()
        expect(page).to_have_url(re.compile("reason=bad-until"))
        assert not complaints, complaints


def test_one_message_says_where_it_is_and_why(chromium: Browser) -> None:
    """From the list to a message that is retried; when it is delivered, the page says so."""
    there = bridge()
    with looking(chromium, there, "/messages?state=retrying", has_clock=False) as (page, _):
        page.locator(f"{rows} a").first.click()
        expect(page.locator("h1")).to_have_text("Message delay/0/7")
        main = page.locator("main")
        for text in ("next attempt is", "payments", "target-unavailable", "3 failed attempts", "application/json"):
            expect(main).to_contain_text(text)
        expect(page.locator("pre")).to_have_text('{"order": 7, "text": "call back"}')
        assert there.store is not None
        there.store.rows = [row for row in there.store.rows if row.offset != 7]
        refresh(page)
        expect(page.get_by_role("alert")).to_contain_text("is not pending here")


@pytest.mark.parametrize("path", ["/", "/messages", "/messages/delay/0/0", "/targets"])
def test_what_a_producer_writes_stays_text(chromium: Browser, path: str) -> None:
    """In a target, key, id, header, value and reason; what cannot be seen is written out."""
    with looking(chromium, bridge(hostile()), path) as (page, complaints):
        expect(page.locator("bdi", has_text=SEEN).first).to_be_visible()
        assert page.locator("main img, main script, main iframe").count() == 0
        hrefs = page.locator("main a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
        assert hrefs and all(href.startswith("/") for href in hrefs)
        assert not set(page.locator("main").inner_text()) & {"\u202e", "\x00"}
        assert not complaints, complaints


def test_markup_is_refused_by_the_browser_itself(chromium: Browser) -> None:
    """If a mistake made text into markup or script, the policy would stop it."""
    with looking(chromium, bridge()) as (page, _):
        with pytest.raises(Error, match="TrustedHTML"):
            page.evaluate("() => { document.body.innerHTML = '<b>x</b>' }")
        with pytest.raises(Error, match=r"TrustedScript|Content Security Policy"):
            page.add_script_tag(content="window.own = 1")
        assert page.evaluate("window.own") is None


def test_a_keyboard_is_enough(chromium: Browser) -> None:
    """Skip, walk through the bars with the arrows, open their messages; the focus outlasts an update."""
    there = bridge()
    with looking(chromium, there, has_clock=False) as (page, complaints):
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        page.keyboard.press("Enter")
        page.locator(".choice a").last.focus()
        page.keyboard.press("Tab")
        bars = page.locator("svg.timeline a")
        expect(bars.nth(0)).to_be_focused()
        page.keyboard.press("ArrowRight")
        expect(bars.nth(1)).to_be_focused()
        assert there.store is not None
        there.gauges = bridge(*there.store.rows[:9]).gauges
        refresh(page)
        expect(page.locator(".tile").first).to_contain_text("9")
        expect(bars.nth(1)).to_be_focused()
        label = bars.nth(1).get_attribute("aria-label") or ""
        page.keyboard.press("Enter")
        expect(page.locator("caption")).to_contain_text(label.split(": ")[1].split()[0])
        expect(page.locator("main")).to_be_focused()
        assert not complaints, complaints


def test_it_asks_only_while_it_is_looked_at(chromium: Browser) -> None:
    """Every few seconds; not in a hidden tab, and not while it is paused."""
    asked: list[str] = []
    with looking(chromium, bridge()) as (page, _):
        page.clock.install()
        page.reload()
        expect(page.locator(".tile").first).to_be_visible()
        page.on("request", lambda request: asked.append(request.url))
        with page.expect_response("**/timeline*"):
            page.clock.run_for(6_000)
        page.evaluate("Object.defineProperty(document, 'hidden', { get: () => true, configurable: true })")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        asked.clear()
        page.clock.run_for(60_000)
        assert not asked
        page.evaluate("Object.defineProperty(document, 'hidden', { get: () => false, configurable: true })")
        with page.expect_response("**/timeline*"):
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.get_by_role("button", name="Pause").click()
        asked.clear()
        page.clock.run_for(60_000)
        assert not asked
        with page.expect_response("**/timeline*"):
            page.get_by_role("button", name="Pause").click()


def test_a_bridge_that_cannot_tell_says_why(chromium: Browser) -> None:
    """While it starts; the old view is marked as stale, and recovers by itself."""
    there = Bridge(None, starting())
    with looking(chromium, there, has_clock=False) as (page, _):
        expect(page.locator("#notice")).to_contain_text("records up to the committed offsets")
        whole = bridge()
        there.store, there.where, there.gauges = whole.store, whole.where, whole.gauges
        refresh(page)
        expect(page.locator(".tile").first).to_be_visible()
        expect(page.locator("#notice")).to_be_empty()
        there.store = None
        refresh(page)
        expect(page.locator("main.stale .tile").first).to_be_visible()


def test_many_messages_stay_readable(chromium: Browser) -> None:
    """Long names break where they must, on a phone too."""
    long = message(0, target="t" * 249, key=b"k" * 2_000, id="i" * 2_000, due_ms=NOW_MS)
    for path in VIEWS[:4]:
        there = Bridge(Store(long), gauges=bridge(long).gauges)
        with looking(chromium, there, path, **LOOKS["phone"]) as (page, _):
            assert page.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_documentation(chromium: Browser, name: str) -> None:
    """There, and not empty; SNAPSHOTS=write makes them anew."""
    path, look, action = PICTURES[name]
    file = ROOT / "docs" / f"{name}.png"
    with looking(chromium, bridge(), path, is_writable=True, **LOOKS[look]) as (page, _):
        if action is not None:
            page.get_by_role("button", name=action).click()
            expect(page.get_by_role("dialog")).to_contain_text("confirm")
        if os.environ.get("SNAPSHOTS") == "write":
            picture(page, str(file))
    assert 5_000 < file.stat().st_size < 200_000


def picture(page: Page, path: str) -> None:
    """The visible part."""
    size = page.viewport_size or DESKTOP
    page.screenshot(path=path, clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"]})
