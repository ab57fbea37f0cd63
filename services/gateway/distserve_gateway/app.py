"""The HTTP door. Every route and every layer around them is in `build_app`."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import distserve
from distserve.errors import DistServeError, InvalidRequest
from distserve.telemetry import is_tracing
from distserve_gateway import metrics, openapi, status_page
from distserve_gateway.calls import Kind
from distserve_gateway.client import Client
from distserve_gateway.decoding import decode_body
from distserve_gateway.envelope import envelope
from distserve_gateway.errors_http import error_response, plain_error
from distserve_gateway.guard import Guard
from distserve_gateway.http_traces import HttpTraces, trace_of
from distserve_gateway.lane import Lane
from distserve_gateway.middleware import RequestIds, read_json_body
from distserve_gateway.params import check_token_ids
from distserve_gateway.responses import StreamResponse, WholeResponse
from distserve_gateway.schema import ChatBody, CompletionBody, DetokenizeBody, GenerateBody, TokenizeBody

if TYPE_CHECKING:
    from distserve_gateway.gateway import Gateway

log = logging.getLogger(__name__)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def build_app(gateway: "Gateway") -> ASGIApp:
    """The ASGI application of a gateway that has been entered."""
    options = gateway.options
    pipeline = gateway.pipeline
    app = FastAPI(title="DistServe", version=distserve.__version__, docs_url="/docs", redoc_url=None)
    app.add_exception_handler(DistServeError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_fault)

    async def answer(request: Request, kind: Kind) -> Response:
        body = await read_json_body(request, options.max_body_bytes)
        beside = replace(envelope(request.headers.get), request_id=request.state.request_id, trace=trace_of(request))
        client = Client(request.receive)
        try:
            renderer = await client.while_here(pipeline.begin(kind, body, beside, request.state.api_key))
        except BaseException:
            client.close()
            raise
        response = StreamResponse if renderer.call.stream else WholeResponse
        return response(renderer, options.answer_limit_s, client)

    @app.post("/v1/completions", openapi_extra=openapi.body(CompletionBody), tags=["OpenAI"])
    async def completions(request: Request) -> Response:
        """One or more completions of one or more prompts."""
        return await answer(request, "completion")

    @app.post("/v1/chat/completions", openapi_extra=openapi.body(ChatBody), tags=["OpenAI"])
    async def chat_completions(request: Request) -> Response:
        """The assistant's next message."""
        return await answer(request, "chat")

    @app.post("/generate", openapi_extra=openapi.body(GenerateBody), tags=["DistServe"])
    async def generate(request: Request) -> Response:
        """One completion, its text at the top of the answer."""
        return await answer(request, "generate")

    @app.get("/v1/requests", tags=["DistServe"])
    async def requests(request: Request) -> Response:
        """Requests of yours that run on this gateway, the oldest first."""
        runs = gateway.running.of(request.state.api_key.name)
        return _json({"object": "list", "data": [run.description() for run in runs]})

    @app.delete("/v1/requests/{request_id:path}", tags=["DistServe"])
    async def stop(request: Request, request_id: str) -> Response:
        """End a request of yours that runs, on any gateway: by its answer's id, or by the X-Request-Id it came with."""
        stopped = await gateway.stopping.stop(request.state.api_key.name, request_id)
        return Response(stopped, media_type="application/json")

    def card() -> dict[str, Any]:
        return {
            "id": options.model,
            "object": "model",
            "created": gateway.created,
            "owned_by": "distserve",
            "max_model_len": pipeline.intake.context_length(),
        }

    @app.get("/v1/models", tags=["OpenAI"])
    async def models(request: Request) -> Response:
        """The models that are served, of those that the API key may use."""
        return _json({"object": "list", "data": [card()] if request.state.api_key.may_use(options.model) else []})

    @app.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def model(model: str, request: Request) -> Response:
        """One model."""
        pipeline.intake.check_model(model, request.state.api_key)
        return _json(card())

    @app.post("/tokenize", openapi_extra=openapi.body(TokenizeBody), tags=["DistServe"])
    async def tokenize(request: Request) -> Response:
        """The ids of a text, or of the prompt that messages make."""
        body = decode_body(TokenizeBody, await read_json_body(request, options.max_body_bytes))
        ids = await pipeline.intake.tokenize(body, request.state.api_key)
        tokens = [pipeline.tokenizer.token(i) for i in ids] if body.return_token_strs else None
        return _json(
            {
                "count": len(ids),
                "max_model_len": pipeline.intake.context_length(),
                "tokens": ids,
                "token_strs": tokens,
            }
        )

    @app.post("/detokenize", openapi_extra=openapi.body(DetokenizeBody), tags=["DistServe"])
    async def detokenize(request: Request) -> Response:
        """The text of ids, special tokens included."""
        body = decode_body(DetokenizeBody, await read_json_body(request, options.max_body_bytes))
        pipeline.intake.check_model(body.model, request.state.api_key)
        check_token_ids("tokens", body.tokens, pipeline.tokenizer.vocab_size)
        return _json({"prompt": pipeline.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def health() -> Response:
        """Whether requests can be served now, the workers of each role, and what is wrong."""
        ready, report = gateway.health()
        return _json(report, 200 if ready else 503)

    app.get("/health", tags=["operations"])(health)
    app.get("/health/ready", tags=["operations"])(health)

    @app.get("/health/live", tags=["operations"])
    async def live() -> Response:
        """200 while the process answers; it says the same as /health."""
        return _json(gateway.health()[1])

    @app.get("/metrics", tags=["operations"])
    async def exposition() -> Response:
        """Prometheus's text format."""
        return Response(gateway.metrics.exposition(), headers={"content-type": metrics.CONTENT_TYPE})

    status_page.add_to(app, gateway.cluster_view)

    @app.get("/version", tags=["operations"])
    async def version() -> Response:
        """The version of DistServe."""
        return _json({"version": distserve.__version__})

    async def refuse(request: Request, error: DistServeError) -> Response:
        if request.method == "POST" and request.url.path in ANSWERS:
            gateway.metrics.started()
            gateway.metrics.refused(ANSWERS[request.url.path], error)
        return await respond_to_error(request, error)

    openapi.complete(app, needs_key=bool(gateway.keys))
    lane = Lane(app, ANSWERS, answer, respond_to_error)
    guard = Guard(lane, gateway.keys, refuse)
    within = HttpTraces(guard, gateway.traces, ANSWERS) if is_tracing() else guard
    return RequestIds(within)  # outermost: an answer to a fault of our own carries its id too


ANSWERS: dict[str, Kind] = {
    "/v1/completions": "completion",
    "/v1/chat/completions": "chat",
    "/generate": "generate",
}


async def respond_to_error(request: Request, error: Exception) -> Response:
    """What any route answers when it has failed."""
    if not isinstance(error, HTTPException):
        trace_of(request).failed(error)
    if isinstance(error, DistServeError):
        return await _on_error(request, error)
    if isinstance(error, HTTPException):
        return await _on_http_exception(request, error)
    return await _on_fault(request, error)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DistServeError)
    if not isinstance(error, InvalidRequest):
        log.info("%s %s: %s", request.state.request_id, error.code, error)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "route_not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}
    message = error.detail
    if error.status_code in (404, 405):
        message = f"{request.method} {request.url.path}: {error.detail}; see /docs for what there is"
    response = plain_error(message, status=error.status_code, code=codes.get(error.status_code, "http_error"))
    response.headers.update(error.headers or {})
    return response


async def _on_fault(request: Request, error: Exception) -> Response:
    log.error("%s: %s %s failed", request.state.request_id, request.method, request.url.path, exc_info=error)
    return error_response(DistServeError("internal error"))
