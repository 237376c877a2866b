"""`make browser`: fetch it, and say where it is."""

from __future__ import annotations

from dev.browser import browser

print(browser().program)
