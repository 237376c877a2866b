"""A real Chromium for this folder; tests that ask for it are skipped where none can be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest
from playwright.sync_api import Browser, Error, expect, sync_playwright

from bridge.errors import EnvironmentFailure
from dev.browser import browser
from dev.harness.pace import scaled

EXPECTED_MS: Final = 5_000
"""The default deadline of an expectation."""
ARGUMENTS = ("--no-sandbox", "--no-zygote", "--font-render-hinting=none", "--disable-webgl")


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """Without a window. Its client has an event loop in this thread, where tests of other folders run their own."""
    try:
        found = browser()
    except EnvironmentFailure as error:
        pytest.skip(f"no Chromium: {error}")
    expect.set_options(timeout=scaled(EXPECTED_MS))
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(
                executable_path=found.program,
                args=ARGUMENTS,
                env={**os.environ, **found.environment},
            )
        except Error as error:
            pytest.skip(f"this machine cannot run the Chromium there is: {error.message[:500]}")
        with started:
            yield started
