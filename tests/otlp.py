"""A receiver of traces over OTLP/HTTP on a real socket, and what it received as trees.

    with Receiver() as receiver:
        ...  # telemetry.otlp_endpoint = receiver.url
        trace = receiver.wait_for(lambda r: r.roots("chat tiny"))

As a program, `python -m tests.otlp --port 4318 --file spans.jsonl` appends a line of JSON for each span and runs until
SIGTERM.
"""

import argparse
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

T = TypeVar("T")

PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class Received:
    """A span as it came. Ids in hex, parent_id empty for a root; times are Unix seconds; `resource`: who sent it."""

    name: str
    kind: str  # internal, server, client, producer, consumer
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, Any]
    links: list[str]  # the ids of spans
    failed: bool
    message: str
    resource: dict[str, Any] = field(repr=False)

    @property
    def service(self) -> str:
        """`gateway` of distserve-gateway."""
        return str(self.resource["service.name"]).removeprefix("distserve-")


@dataclass(slots=True)
class Node:
    span: Received
    children: "list[Node]" = field(default_factory=list)

    def __iter__(self) -> "Iterator[Node]":
        """It and all below it, each before its children."""
        yield self
        for child in self.children:
            yield from child

    def all(self, name: str) -> "list[Node]":
        return [node for node in self if node.span.name == name]

    def one(self, name: str) -> "Node":
        found = self.all(name)
        assert len(found) == 1, f"{len(found)} spans {name!r} in\n{self.picture()}"
        return found[0]

    def names(self) -> Any:
        """The tree of names: (name, [children]), and of a leaf its name alone."""
        return (self.span.name, [child.names() for child in self.children]) if self.children else self.span.name

    def picture(self, depth: int = 0) -> str:
        span, indent = self.span, "  " * depth
        mark = " FAILED" if span.failed else ""
        line = f"{indent}{span.name}  [{span.service}] {1000 * (span.end - span.start):.1f} ms{mark}"
        return "\n".join([line, *(child.picture(depth + 1) for child in self.children)])


class Receiver:
    """`status`: what it answers; anything but 200 takes nothing. on_span: told of each, on another thread."""

    def __init__(
        self, port: int = 0, on_span: Callable[[Received], None] = lambda span: None, *, host: str = "127.0.0.1"
    ) -> None:
        self.status = 200
        self.num_posts = 0
        self._on_span = on_span
        self._spans: list[Received] = []
        self._arrived = threading.Condition()
        self._server = ThreadingHTTPServer((host, port), _posts(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def take(self, body: bytes) -> None:
        found = spans_of(ExportTraceServiceRequest.FromString(body))
        for span in found:
            self._on_span(span)
        with self._arrived:
            self._spans += found
            self._arrived.notify_all()

    # ------------------------------------------------------------ what has come

    def spans(self, trace_id: str = "") -> list[Received]:
        """Of one trace, or all."""
        with self._arrived:
            return [span for span in self._spans if trace_id in ("", span.trace_id)]

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans() if span.name == name]

    def trees(self, trace_id: str) -> list[Node]:
        """Each span whose parent has not come (yet), with all below it: one, if the trace is whole."""
        nodes = {span.span_id: Node(span) for span in sorted(self.spans(trace_id), key=lambda s: s.start)}
        roots: list[Node] = []
        for node in nodes.values():
            parent = nodes.get(node.span.parent_id)
            (roots if parent is None else parent.children).append(node)
        return roots

    def tree(self, trace_id: str) -> Node:
        """The whole trace. Fails the test if it has orphans."""
        roots = self.trees(trace_id)
        assert len(roots) == 1, "orphans:\n" + "\n".join(root.picture() for root in roots)
        return roots[0]

    def wait_for(self, condition: "Callable[[Receiver], T]", timeout_s: float = 15.0) -> T:
        """What the condition says once it says something true. Fails the test if it doesn't within timeout_s."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._arrived:
                if found := condition(self):
                    return found
                left_s = deadline - time.monotonic()
                names = sorted({span.name for span in self._spans})
                assert left_s > 0, f"not within {timeout_s:g} s; {len(self._spans)} spans have come: {names}"
                self._arrived.wait(left_s)


def _posts(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Posts(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.num_posts += 1
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            status = receiver.status if self.path == PATH else 404
            if status == 200:
                receiver.take(body)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    return Posts


def spans_of(request: ExportTraceServiceRequest) -> list[Received]:
    return [
        _received(span, _attributes(of_resource.resource.attributes))
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def _received(span: ProtoSpan, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        kind=ProtoSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        links=[link.span_id.hex() for link in span.links],
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        message=span.status.message,
        resource=resource,
    )


def _attributes(found: "list[KeyValue] | Any") -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in found}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(v) for v in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=4318)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--file", type=Path, required=True)
    a = parser.parse_args()
    lock = threading.Lock()

    def write(span: Received) -> None:
        with lock:
            out.write(json.dumps(asdict(span)) + "\n")
            out.flush()

    with a.file.open("a") as out, Receiver(a.port, write, host=a.host) as receiver:
        print(f"listening on {receiver.url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
