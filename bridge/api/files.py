"""The files of the page: read once from the package and served unchanged.

A view has the path of its API request without `/api/v1`; every view is the same document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

VIEWS: Final = (
    *("/", "/messages", "/messages/{topic}/{partition}/{offset}", "/schedules"),
    *("/dead-letters", "/dead-letters/{topic}/{partition}/{offset}", "/targets", "/instance"),
)
DOCUMENT: Final = "index.html"
MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Nothing from other origins, nothing inline, and no text turned into markup."""


def contents() -> Iterator[tuple[str, Traversable]]:
    """The files by their names in URLs and imports."""
    page = files("bridge").joinpath("api/page")
    for folder, prefix in ((page, ""), (page.joinpath("views"), "views/")):
        yield from ((prefix + file.name, file) for file in folder.iterdir() if file.is_file())


def page_routes(base_path: str = "") -> Sequence[Route]:
    """The routes of the page, for GET and HEAD. `base_path` is the path of the page in browsers."""
    bodies = {name: file.read_bytes() for name, file in contents()}
    for attribute in (b'href="', b'src="'):
        bodies[DOCUMENT] = bodies[DOCUMENT].replace(attribute + b"/", attribute + base_path.encode() + b"/")

    def route(path: str, name: str) -> Route:
        async def endpoint(_request: Request) -> Response:
            media_type = MEDIA_TYPES[name.rpartition(".")[2]]
            return Response(bodies[name], media_type=media_type, headers={"Content-Security-Policy": POLICY})

        return Route(path, endpoint, methods=["GET"], include_in_schema=False)

    return [*(route(path, DOCUMENT) for path in VIEWS), *(route(f"/page/{name}", name) for name in bodies)]
