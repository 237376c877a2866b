"""The API against its own OpenAPI document: whatever is asked, what it answers is in the document, and no 500."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bridge.api.application import application
from bridge.telemetry.http import Protection
from tests.unit.bridge.api.fakes import Bridge, Letters, Store, letter, message

ROWS = [message(n, id=f"id-{n}", key=bytes([n, 0xFF]), headers=(("h", None), ("h", b"\xff"))) for n in range(20)]
BRIDGE = Bridge(Store(*ROWS), letters=Letters([letter(n) for n in range(20)]))
APP = application(BRIDGE, Protection(), show_payloads=True, is_writable=True)
SCHEMA = schemathesis.openapi.from_asgi("/api/v1/openapi.json", APP)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@SCHEMA.parametrize()
@settings(suppress_health_check=list(HealthCheck), deadline=None)
def test_any_request_has_an_answer_of_the_document(case: Any) -> None:
    """Requests that fit the document and requests that do not; actions too."""
    case.call_and_validate(checks=CHECKS, headers={"X-Delay-Bridge-Action": "1"})
