"""The API against its own OpenAPI document: whatever is asked, what it answers is in the document, and no 500."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bridge.api.application import application
from bridge.http.protection import Protection
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


@pytest.mark.fault("a client that is generated from the OpenAPI document")
@pytest.mark.parametrize(
    ("protection", "security"),
    [
        (Protection(), [{"password": []}, {"token": []}, {}]),
        (Protection(user="u", password="p"), [{"password": []}]),
        (Protection(token="0123456789abcdef"), [{"token": []}]),
        (Protection(user="u", password="p", token="0123456789abcdef"), [{"password": []}, {"token": []}]),
    ],
)
def test_the_document_says_how_to_log_in_and_to_act(protection: Protection, security: list[Any]) -> None:
    """The OpenAPI document has the schemes in force, and the header that every action needs."""
    app = application(BRIDGE, protection, show_payloads=True, is_writable=True)
    basic, bearer = f"Basic {base64.b64encode(b'u:p').decode()}", "Bearer 0123456789abcdef"
    api = TestClient(app, base_url="http://localhost")
    answer = api.get("/api/v1/openapi.json", headers={"Authorization": bearer if protection.token else basic})
    assert answer.status_code == 200, answer.text
    document = answer.json()
    assert document["security"] == security
    schemes = document["components"]["securitySchemes"]
    assert {(each["type"], each["scheme"]) for each in schemes.values()} == {("http", "basic"), ("http", "bearer")}
    actions = [operations["post"] for operations in document["paths"].values() if "post" in operations]
    assert len(actions) > 8
    for each in actions:
        (header,) = [found for found in each["parameters"] if found["in"] == "header"]
        assert (header["name"], header["required"], header["schema"]["enum"]) == ("X-Delay-Bridge-Action", True, ["1"])


PEERS: list[list[str]] = [[], ["http://127.0.0.1:9"]]


@pytest.mark.parametrize("peers", PEERS)
def test_a_method_that_is_not_allowed_is_told_with_those_that_are(peers: list[str]) -> None:
    """Of each path of the document, with peers too."""
    app = application(BRIDGE, Protection(), show_payloads=True, is_writable=True, peers=peers, instance="i")
    api = TestClient(app, base_url="http://localhost", headers={"X-Delay-Bridge-Action": "1"})
    document = api.get("/api/v1/openapi.json").json()
    for path, operations in document["paths"].items():
        place = path.replace("{partition}", "0").replace("{offset}", "0").replace("{topic}", "t").replace("{name}", "n")
        (allowed,) = operations
        for method in {"get", "post", "put", "delete", "head", "options", "patch"} - {allowed}:
            answer = api.request(method, place)
            assert (answer.status_code, answer.headers["Allow"]) == (405, allowed.upper()), (method, path)
            assert method == "head" or f"use {allowed.upper()}." in answer.json()["detail"]


@pytest.mark.parametrize("peers", PEERS)
@pytest.mark.parametrize("body", [b"{", b"\xff", b"{'a': 1}", b"[" * 30_000, b'{"dry_run": tru}'])
def test_a_body_that_is_not_json_is_told_so(peers: list[str], body: bytes) -> None:
    """Whatever is wrong with it."""
    app = application(BRIDGE, Protection(), show_payloads=True, is_writable=True, peers=peers, instance="i")
    headers = {"X-Delay-Bridge-Action": "1", "Content-Type": "application/json"}
    api = TestClient(app, base_url="http://localhost", headers=headers)
    for path in ("messages/delay/0/0/move", "messages/cancel", "dead-letters/redrive", "targets/orders/pause"):
        answer = api.post(f"/api/v1/{path}", content=body)
        assert answer.status_code == 400 and answer.json()["detail"].startswith("The body is not JSON")
    answer = api.post("/api/v1/messages/cancel", content=b"[]")
    assert answer.status_code == 422 and answer.json()["detail"].startswith("body: ")
