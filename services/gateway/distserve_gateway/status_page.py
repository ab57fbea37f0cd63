"""The status page, and the figures that it shows: GET /, /status, /metrics/cluster.

The page is the files of page/, as they are: nothing is built and nothing comes from elsewhere.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from distserve_gateway import metrics

if TYPE_CHECKING:
    from distserve_gateway.cluster_view import ClusterView

_SCRIPT = "text/javascript; charset=utf-8"

FOLDER = Path(__file__).parent / "page"

FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/status.css": ("status.css", "text/css; charset=utf-8"),
    "/page/dom.js": ("dom.js", _SCRIPT),
    "/page/status.js": ("status.js", _SCRIPT),
    "/page/try.js": ("try.js", _SCRIPT),
}
"""By path: a file of FOLDER and its content type."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_to(app: FastAPI, view: "ClusterView") -> None:
    """Its routes. The files are read now, once."""
    bodies = {path: (FOLDER / name).read_bytes() for path, (name, _) in FILES.items()}

    async def page(request: Request) -> Response:
        """The status page."""
        path = request.url.path
        return Response(bodies[path], headers={**HEADERS, "content-type": FILES[path][1]})

    for path in FILES:
        app.get(path, include_in_schema=path == "/", tags=["operations"])(page)

    @app.get("/status", tags=["operations"])
    async def status() -> Response:
        """The whole cluster's figures, as JSON: the same ones for everybody who asks within a second."""
        return Response(await view.status(), media_type="application/json", headers={"cache-control": "no-store"})

    @app.get("/metrics/cluster", tags=["operations"])
    async def cluster_exposition() -> Response:
        """Every service's samples in Prometheus's text format, with the labels `service` and `service_role`."""
        return Response(await view.exposition(), headers={"content-type": metrics.CONTENT_TYPE})
