"""How the page is looked at: light, dark, on a phone; and by axe, for those who cannot see it."""

from __future__ import annotations

from typing import Any, Final

from playwright.sync_api import Page

from dev.browser import browser
from tests.browser.rig import PHONE

LOOKS: Final[dict[str, dict[str, Any]]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "dark", "viewport": PHONE, "has_touch": True, "is_mobile": True},
}
AXE: Final = """within => axe.run(within, {
  runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'], resultTypes: ['violations'] })"""


def serious(page: Page, within: str = "html") -> list[Any]:
    """What axe finds that keeps some from using the page, or a part of it."""
    if page.evaluate("window.axe === undefined"):
        page.evaluate(browser().axe.read_text(encoding="utf-8"))
    found = page.evaluate(AXE, within)["violations"]
    bad = [each for each in found if each["impact"] in ("serious", "critical")]
    return [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in bad]
