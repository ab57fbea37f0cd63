"""The short way for answers: it takes its routes past the application, and leaves everything else to it."""

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from distserve.errors import Overloaded
from distserve_gateway.app import respond_to_error
from distserve_gateway.calls import Kind
from distserve_gateway.errors_http import error_response
from distserve_gateway.lane import Lane
from distserve_gateway.middleware import RequestIds
from tests.unit.gateway.scripted import says, serving


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("behind")(scope, receive, send)


async def answer(request: Request, kind: Kind) -> Response:
    asked = (await request.body()).decode()
    if asked == "busy":
        raise Overloaded("no room", retry_after_s=2.0)
    if asked == "kind":
        raise HTTPException(415, "not this")
    if asked == "fault":
        raise KeyError("ours")
    return PlainTextResponse(f"{kind}: {asked}")


def client() -> httpx.AsyncClient:
    app = RequestIds(Lane(behind, {"/v1/completions": "completion"}, answer, respond_to_error))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("POST", "/v1/completions/"), ("POST", "/x")])
async def test_all_else_goes_to_the_application(method: str, path: str) -> None:
    async with client() as c:
        assert (await c.request(method, path)).text == "behind"


async def test_a_post_to_its_route_does_not() -> None:
    async with client() as c:
        assert (await c.post("/v1/completions", content="hello")).text == "completion: hello"


@pytest.mark.parametrize(("asked", "status"), [("busy", 503), ("kind", 415), ("fault", 500)])
async def test_what_an_answer_raises_becomes_a_response_with_the_requests_id(asked: str, status: int) -> None:
    async with client() as c:
        response = await c.post("/v1/completions", content=asked, headers={"x-request-id": "mine"})
    assert response.status_code == status
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["error"]["message"]
    assert "ours" not in response.text  # a fault's details are for the log
    assert response.headers.get("retry-after") == ("2" if asked == "busy" else None)


async def test_the_gateways_answers_take_it() -> None:
    """Whatever stands behind is not asked: an application that answers nothing serves completions all the same."""
    async with serving(says("a b c")) as cluster:
        lane = cluster.app._app._app  # type: ignore[attr-defined]
        assert isinstance(lane, Lane)
        lane._app = error_response(Overloaded("behind", retry_after_s=1.0))
        async with cluster.client() as c:
            for path, body in (
                ("/v1/completions", {"prompt": "a"}),
                ("/generate", {"prompt": "a"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ):
                assert (await c.post(path, json=body)).status_code == 200
            assert (await c.get("/v1/models")).status_code == 503
