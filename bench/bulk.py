"""Bulk actions over the API: time and memory of a cancel by filter."""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any, Final

from bench.bridge import Bridge, run_program
from bench.load import TARGETS
from bench.report import Report

CHOSEN: Final = 100_000
FAR_MS: Final = ("3600000", "7200000")
INGEST_S: Final = 300
ANSWER_S: Final = 120
TOKEN: Final = "of-this-benchmark-only"


def bulk_cancel(bridge: Bridge, arguments: argparse.Namespace, report: Report) -> None:
    """Of --messages that wait for an hour or two, one request cancels the 100,000 of one target."""
    token = bridge.directory / "token"
    token.write_text(TOKEN)
    bridge.configure({"http": {"api": "write", "token_file": str(token)}})
    bridge.start()
    chosen, *others = TARGETS
    count = max(arguments.messages, CHOSEN)
    for number, targets in ((CHOSEN, [chosen]), (count - CHOSEN, others)):
        run_program(bridge, "load", "--messages", str(number), "--delay", *FAR_MS, "--targets", *targets).wait()
    bridge.wait(lambda: _ask(bridge, "summary")["pending"] >= count, INGEST_S, "ingest")
    before = bridge.rss_bytes()
    bridge.peak_bytes = before
    began_s = bridge.clock.monotonic_s()
    last = _ask(bridge, "messages/cancel", {"target": chosen})
    taken_s = bridge.clock.monotonic_s() - began_s
    scenario = f"bulk cancel of {CHOSEN:,} among {count:,}"
    report.add(scenario, "time", f"{taken_s:.1f} s", "<= 10 s")
    report.add(scenario, "outcomes", ", ".join(f"{name} {number:,}" for name, number in last["outcomes"].items()))
    report.add(scenario, "RSS before / peak", f"{before >> 20} / {bridge.peak_bytes >> 20} MiB")
    report.add(scenario, "pending after", f"{_ask(bridge, 'summary')['pending']:,}", f"{count - CHOSEN:,}")


def _ask(bridge: Bridge, path: str, body: dict[str, Any] | None = None) -> Any:
    """The last line of the answer to a GET, or with a body to a POST."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}", "X-Delay-Bridge-Action": "1"}
    url = f"{bridge.api_url()}/api/v1/{path}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return [json.loads(line) for line in answer.read().splitlines()][-1]
