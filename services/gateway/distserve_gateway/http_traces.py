"""Around the routes that answer with tokens: each request over HTTP is a trace, or a part of its caller's."""

from collections.abc import Iterable, Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from distserve.telemetry import entered
from distserve_gateway.calls import Kind
from distserve_gateway.request_trace import NO_TRACE, RequestTrace
from distserve_gateway.traces import Traces

_PARENT, _STATE = "traceparent", "tracestate"


class HttpTraces:
    """A POST to a path of `kinds` gets a RequestTrace, as `trace` of its state; all else passes. It needs RequestIds
    around it, which notes the answer's status."""

    def __init__(self, app: ASGIApp, traces: Traces, kinds: Mapping[str, Kind]) -> None:
        self._app = app
        self._traces = traces
        self._kinds = kinds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = self._kinds.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if kind is None:
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        attributes = {
            "http.request.method": "POST",
            "http.route": scope["path"],
            "http.request.header.x-request-id": [state["request_id"]],
        }
        trace = state["trace"] = self._traces.begin(kind, trace_headers(scope["headers"]), attributes)
        try:
            with entered(trace.root):
                await self._app(scope, receive, send)
        finally:
            trace.finish(state.get("status"))


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Those that name a caller's span. Two traceparents name none: https://www.w3.org/TR/trace-context/ 3.2.1."""
    found: dict[str, str] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        if name == _PARENT and name in found:
            return {}
        if name == _STATE and name in found:
            found[name] += "," + value.decode("latin-1")
        elif name in (_PARENT, _STATE):
            found[name] = value.decode("latin-1")
    return found


def trace_of(request: Request) -> RequestTrace:
    trace: RequestTrace = getattr(request.state, "trace", NO_TRACE)
    return trace
