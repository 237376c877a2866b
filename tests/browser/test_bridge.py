"""The page of a real bridge on a real broker: consumers see the effect of each action."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from bridge.client import DelayClient
from dev.harness.kafka import Outgoing, TopicReader, Topics, produce
from dev.harness.pace import scaled
from tests.browser.rig import DESKTOP, USER
from tests.system.bridge import RunningBridge
from tests.system.broker import Broker

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SEEN_MS: Final = scaled(60_000)
"""For a later refresh of the page."""
PAUSED_S: Final = 90
"""Messages that a pause has put off come half a minute later."""


@contextmanager
def operated(chromium: Browser, broker: Broker, delay: str, directory: Path) -> Iterator[Page]:
    """The page of a bridge that may be told what to do."""
    password = directory / "password"
    password.write_text(USER["password"])
    password.chmod(0o600)
    http = {"api": "write", "user": USER["username"], "password_file": str(password), "show_payloads": True}
    with RunningBridge(directory, broker.bootstrap, delay, config={"http": http}, spark=False) as bridge:
        bridge.start()
        with chromium.new_context(base_url=bridge.api_url(), viewport=DESKTOP, http_credentials=USER) as context:  # type: ignore[arg-type] # a TypedDict
            context.set_default_timeout(SEEN_MS)
            yield context.new_page()
        assert bridge.stop() == 0


def confirmed(page: Page) -> Locator:
    """The dialog's answer, when its action has been confirmed."""
    page.locator("dialog button.strong").click()
    return page.get_by_role("dialog").get_by_role("status")


def test_a_dead_letter_is_put_right_and_arrives(
    chromium: Browser, broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """A record with a time that is none: found among the dead letters, sent back as due at once, delivered once."""
    delay, orders = topics.delay(), topics.create("orders")
    headers = [("delay-until", b"tomorrow"), ("delay-topic", orders.encode())]
    with operated(chromium, broker, delay, tmp_path) as page:
        produce(broker.bootstrap, [Outgoing(topic=delay, key=b"k", value=b"call back", headers=headers)])
        page.goto("/dead-letters")
        row = page.locator("tbody tr", has_text="bad-until")
        expect(row).to_have_count(1, timeout=SEEN_MS)
        row.get_by_role("link").first.click()
        expect(page.locator("pre")).to_have_text("call back")
        page.get_by_role("button", name="Redrive").click()
        page.get_by_label("Due at once").check()
        expect(confirmed(page)).to_have_text("It has gone back into its delay topic.", timeout=SEEN_MS)
        with TopicReader(broker.bootstrap, [orders]) as reader:
            (record,) = reader.wait_for(1, SEEN_MS // 1_000)
        assert (record.key, record.value) == (b"k", b"call back")
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
        expect(page.locator(".badge.redriven")).to_be_visible(timeout=SEEN_MS)


def test_a_paused_target_gets_nothing_until_it_is_resumed(
    chromium: Browser, broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """Its messages wait, and the page says why; others are delivered meanwhile."""
    delay, orders, others = topics.delay(), topics.create("orders"), topics.create("others")
    client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 0}, delay)
    with operated(chromium, broker, delay, tmp_path) as page, TopicReader(broker.bootstrap, [orders, others]) as reader:
        client.send(orders, "first", "k", after=timedelta(0))
        client.flush()
        reader.wait_for(1, SEEN_MS // 1_000)
        page.goto("/targets")
        row = page.locator("tbody tr", has_text=orders)
        row.get_by_role("button", name="Pause").click()
        expect(confirmed(page)).to_have_text("It is paused now.")
        page.get_by_role("dialog").get_by_role("button", name="Close").click()
        client.send(orders, "second", "k", after=timedelta(0))
        client.send(others, "third", "k", after=timedelta(0))
        client.flush()
        assert [record.value for record in reader.wait_for(2, SEEN_MS // 1_000)] == [b"first", b"third"]
        row.get_by_role("link", name="paused").click()
        expect(page.locator("tbody tr")).to_have_count(1, timeout=SEEN_MS)
        page.locator("tbody a").first.click()
        expect(page.locator(".why")).to_contain_text("is put off")
        page.goto("/targets")
        row.get_by_role("button", name="Resume").click()
        expect(confirmed(page)).to_have_text("It is not paused now.")
        values = [record.value for record in reader.wait_for(3, PAUSED_S)]
        assert values == [b"first", b"third", b"second"]


def test_what_is_cancelled_moved_and_delivered_there_is_what_consumers_see(
    chromium: Browser, broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """One is cancelled, one delivered now, and all others cancelled at once: one message comes."""
    delay, orders = topics.delay(), topics.create("orders")
    client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 0}, delay)
    with operated(chromium, broker, delay, tmp_path) as page, TopicReader(broker.bootstrap, [orders]) as reader:
        for n in range(5):
            client.send(orders, f"value-{n}", "k", after=timedelta(hours=1), id=f"id-{n}")
        client.flush()
        dialog = page.get_by_role("dialog")

        def acted(path: str, action: str, said: str) -> None:
            page.goto(path)
            page.get_by_role("group", name="Actions").first.get_by_role("button", name=action, exact=True).click()
            expect(confirmed(page)).to_have_text(said, timeout=SEEN_MS)
            dialog.get_by_role("button", name="Close").click()

        page.goto("/messages")
        expect(page.locator("tbody tr")).to_have_count(5, timeout=SEEN_MS)
        acted(f"/messages/{delay}/0/0", "Cancel", "It is cancelled, and will not be delivered.")
        acted(f"/messages/{delay}/0/1", "Deliver now", "It is due now, and delivered.")
        (record,) = reader.wait_for(1, SEEN_MS // 1_000)
        assert record.value == b"value-1"
        page.goto("/messages?key=k")
        expect(page.locator("tbody tr")).to_have_count(3, timeout=SEEN_MS)
        page.get_by_role("group", name="Actions").first.get_by_role("button", name="Cancel …", exact=True).click()
        typed = dialog.get_by_label("to confirm")
        typed.fill("3")
        typed.press("Enter")
        expect(dialog.get_by_role("status")).to_contain_text("3 of 3 messages: 3 cancelled.", timeout=SEEN_MS)
        dialog.get_by_role("status").get_by_role("link", name="3", exact=True).click()
        for n in range(2, 5):  # and the first one, until the index drops it
            row = page.locator("tbody tr").filter(has_text=f"id-{n}")
            expect(row).to_contain_text("cancelled", timeout=SEEN_MS)
        assert len(reader.to_end()) == 1


def test_a_schedule_is_run_paused_and_resumed(
    chromium: Browser, broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    """Run now is an extra tick; a paused schedule has no next tick until it is resumed."""
    delay, orders = topics.delay(), topics.create("orders")
    client = DelayClient({"bootstrap.servers": broker.bootstrap, "linger.ms": 0}, delay)
    with operated(chromium, broker, delay, tmp_path) as page, TopicReader(broker.bootstrap, [orders]) as reader:
        client.schedule(orders, "again", "k", every=timedelta(hours=1), id="hourly")
        client.flush()
        row = page.locator("tbody tr")

        def acted(action: str, said: str) -> None:
            page.goto("/schedules")
            expect(row).to_have_count(1, timeout=SEEN_MS)
            row.get_by_role("button", name=action, exact=True).click(timeout=SEEN_MS)
            expect(confirmed(page)).to_have_text(said, timeout=SEEN_MS)
            page.get_by_role("dialog").get_by_role("button", name="Close").click()

        acted("Run now", "It is due now, and delivered.")
        (record,) = reader.wait_for(1, SEEN_MS // 1_000)
        assert (record.value, record.header("delay-tick")) == (b"again", b"1")
        acted("Pause", "It is paused.")
        expect(row).to_contain_text("paused, number 2 is next", timeout=SEEN_MS)
        acted("Resume", "It goes on.")
        expect(row).to_contain_text("in 59 min", timeout=SEEN_MS)
        acted("Cancel", "It is cancelled, and will not be delivered.")
        expect(page.locator("main")).to_contain_text("No recurring message matches.", timeout=SEEN_MS)
