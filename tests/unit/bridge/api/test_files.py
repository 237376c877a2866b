"""bridge.api.files: the page comes with the package, from one origin, under a policy that leaves nothing else."""

from __future__ import annotations

import json
import re
from posixpath import dirname, join, normpath

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from bridge.api.application import application
from bridge.api.files import MEDIA_TYPES, VIEWS, contents
from bridge.api.filters import Filters, LetterFilters
from bridge.errors import ConfigurationError
from bridge.http.protection import Protection
from bridge.settings.model import Settings
from tests.unit.bridge.api.fakes import Bridge
from timerstore.rows.pending_state import PendingState

FILES = {name: each.read_text() for name, each in contents()}


def client(protection: Protection | None = None, url: str = "http://localhost") -> TestClient:
    return TestClient(application(Bridge(), protection or Protection(), show_payloads=False), base_url=url)


ADDRESSES = [
    *("/", "/messages?state=overdue", "/messages/delay/0/42", "/schedules", "/dead-letters"),
    *("/dead-letters/delay.dlt/0/42", "/targets", "/instance"),
]


def test_an_address_for_each_view() -> None:
    """The tests below leave none out."""
    views = [re.compile(re.sub(r"{\w+}", "[^/]+", view)) for view in VIEWS]
    assert all(any(view.fullmatch(each.partition("?")[0]) for each in ADDRESSES) for view in views)


@pytest.mark.fault("a page address that is loaded again while there are peers")
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ADDRESSES)
def test_each_view_is_the_document_with_peers(path: str, method: str) -> None:
    """With peers, too, an address of the page gives HTML, also if it resembles an address of the API."""
    app = application(
        Bridge(), Protection(), show_payloads=False, peers=["http://127.0.0.1:9", "http://127.0.0.1:10"], instance="i"
    )
    answer = TestClient(app, base_url="http://localhost").request(method, path)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, MEDIA_TYPES["html"])


@pytest.mark.parametrize("path", ADDRESSES)
def test_each_view_is_the_document(path: str) -> None:
    """So that an address can be kept, and sent to others."""
    answer = client().get(path)
    assert (answer.status_code, answer.text) == (200, FILES["index.html"])
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'") and "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_served_as_what_it_is(name: str) -> None:
    """Nothing else of the package is."""
    answer = client().get(f"/page/{name}")
    assert (answer.status_code, answer.text) == (200, FILES[name])
    assert answer.headers["Content-Type"] == MEDIA_TYPES[name.rpartition(".")[2]]
    assert client().get(f"/page/..%2f{name}").status_code == client().get("/page/").status_code == 404


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_inline_or_from_elsewhere(name: str) -> None:
    """Every module and style is one of these files, and no text can become markup."""
    text = FILES[name]
    modules = {normpath(join(dirname(name), each)) for each in re.findall(r'(?:from|import) "(\.[^"]+)"', text)}
    assert modules | {*re.findall(r'(?:src|href)="/page/([^"]+)"', text)} <= FILES.keys()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert name != "index.html" or not re.search(r"<script(?! type=\"module\" src=)| on\w+=| style=|<style", text)


@pytest.mark.parametrize(("view", "model"), [("messages", Filters), ("letters", LetterFilters)])
def test_a_view_has_the_filters_of_the_api(view: str, model: type[BaseModel]) -> None:
    """All of them, in a field or hidden: the next page of a list keeps what its address says; the states are all."""
    text = FILES[f"views/{view}.js"]
    assert {*re.findall(r'(?:text|time|choices|hidden)\(asked, "(\w+)"', text)} == model.model_fields.keys()
    states = re.search(r"const STATES = \[(.*)\];", text)
    assert states is None or {*json.loads(f"[{states[1]}]")} == {each.value for each in PendingState}


def test_a_password_guards_the_page() -> None:
    """And lets it be asked for under any name: a stranger's page does not have it."""
    guarded = client(Protection(user="u", password="p"), "http://bridge.example.com")
    for path in ("/", "/page/app.js"):
        assert guarded.get(path).status_code == 401
        assert guarded.get(path, auth=("u", "p")).status_code == 200


def test_a_strangers_name_is_not_answered_without_a_password() -> None:
    """DNS rebinding: neither page nor API, and it says what to do."""
    for path in ("/", "/page/app.js", "/api/v1/summary"):
        answer = client(url="http://rebound.example.com:8081").get(path)
        assert answer.status_code == 421 and "Set http.user" in answer.json()["detail"]


@pytest.mark.parametrize("peers", [[], ["http://127.0.0.1:9"]])
def test_everything_has_an_address_below_the_base_path(peers: list[str]) -> None:
    """Whether a proxy takes it off or not; the document and the OpenAPI document have it; a longer name is another."""
    app = application(Bridge(), Protection(), show_payloads=False, base_path="/tools/delay", peers=peers, instance="i")
    api = TestClient(app, base_url="http://localhost")
    for path in (*ADDRESSES, "/page/app.js", "/api/v1/openapi.json", "/api/v1/dead-letters"):
        inside, outside = api.get(path), api.get(f"/tools/delay{path}")
        assert inside.status_code == outside.status_code == 200 and inside.text == outside.text
    document = api.get("/tools/delay").text
    found = re.findall(r'(?:src|href)="([^"#]+)"', document)
    assert found and all(each.startswith("/tools/delay/") for each in found)
    assert api.get("/api/v1/openapi.json").json()["servers"] == [{"url": "/tools/delay"}]
    assert api.get("/tools/delayed").status_code == api.get("/tools/").status_code == 404


@pytest.mark.parametrize("path", ["delay", "/delay/", "//delay", "/de lay", '/"><script>', "/%2f", "/a?b", "/a#b"])
def test_a_base_path_that_is_none_is_refused(path: str) -> None:
    """It goes into the document as it is."""
    with pytest.raises(ConfigurationError, match=r"http\.base_path"):
        Settings.of({"http": {"base_path": path}})


def test_the_page_is_read_only() -> None:
    """Nothing is posted to it."""
    assert client().post("/").status_code == 403
    assert client().head("/").status_code == 200
