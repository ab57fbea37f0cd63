"""`/metrics` and `/health` of a worker: HTTP on threads of its own, so that a scrape holds up no token."""

import asyncio
import concurrent.futures
import errno
import logging
import socket
import socketserver
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from distserve.config import Config
from distserve.errors import ConfigError
from distserve.worker import metrics
from distserve.worker.reachable import reachable_host
from distserve.worker.report import Report, health

log = logging.getLogger(__name__)

ANSWER_S = 2.0  # for the event loop to take a picture; a worker that is slower is not well
CLIENT_S = 5.0  # of silence of a client in mid-request
JSON = "application/json"

TakeReport = Callable[[], Report]


@asynccontextmanager
async def side_door(host: str, port: int, key: str, take: TakeReport) -> AsyncIterator[str]:
    """Serves while inside; gives the base URL. `take` is called on this event loop, once for each request.

    key: the setting that `port` came from. Raises ConfigError naming it, or telemetry.metrics_host, if that is what
    can't be had.
    """
    server = _listen(host, port, key, asyncio.get_running_loop(), take)
    thread = threading.Thread(target=server.serve_forever, name="side-door", daemon=True)
    thread.start()
    try:
        address, actual = server.socket.getsockname()[:2]
        url = f"http://[{address}]:{actual}" if ":" in address else f"http://{address}:{actual}"
        log.info("metrics and health on %s", url)
        yield url
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


def reachable(url: str, config: Config) -> str:
    """The URL as other hosts know it: one that listens on every address is reached at ours."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    if host not in ("0.0.0.0", "[::]"):
        return url
    ours = reachable_host(config)
    return f"http://[{ours}]:{port}" if ":" in ours else f"http://{ours}:{port}"


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 16

    def __init__(
        self, family: socket.AddressFamily, address: Any, loop: asyncio.AbstractEventLoop, take: TakeReport
    ) -> None:
        self.address_family = family
        self._loop = loop
        self._take = take
        super().__init__(address, _Request)

    def report(self) -> Report:
        """Raises TimeoutError if the event loop is held up."""

        async def on_the_loop() -> Report:
            return self._take()

        future = asyncio.run_coroutine_threadsafe(on_the_loop(), self._loop)
        try:
            return future.result(ANSWER_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError(f"the worker's event loop did not answer within {ANSWER_S:g} s") from None


def _listen(host: str, port: int, key: str, loop: asyncio.AbstractEventLoop, take: TakeReport) -> _Server:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _Server(family, address, loop, take)
    except OSError as e:
        if e.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(
                f"{key} is {port} on {host}: {e.strerror or e}; choose a free port, or 0 for any",
                key=key,
                value=port,
                expected="a free port, or 0",
            ) from e
        raise ConfigError(
            f"telemetry.metrics_host is {host!r}: {e.strerror or e}; choose an address of this host, or 0.0.0.0",
            key="telemetry.metrics_host",
            value=host,
            expected="an address of this host, or 0.0.0.0",
        ) from e


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path not in ("/metrics", "/health", "/health/ready", "/health/live"):
            self._send(404, {"error": f"{path} is not here: /metrics, /health, /health/ready and /health/live are"})
            return
        try:
            report = self.server.report()
        except TimeoutError as e:
            self._send(503, {"status": "degraded", "ready": False, "reasons": [str(e)]})
            return
        if path == "/metrics":
            self._send(200, metrics.exposition(report), metrics.CONTENT_TYPE)
        else:
            self._send(200 if report.ready or path == "/health/live" else 503, health(report))

    def _send(self, status: int, body: Any, content_type: str = JSON) -> None:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("side door: " + format, *args)
