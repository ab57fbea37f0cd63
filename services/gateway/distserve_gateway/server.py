"""uvicorn as the gateway runs it: no signals of its own, TCP_NODELAY, quiet, a bound port that can be asked for."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from distserve.errors import ConfigError

BACKLOG = 2048  # connections that wait to be accepted
START_S = 10.0


class NoDelayProtocol(HttpToolsProtocol):
    """Each token leaves at once. Event loops set TCP_NODELAY themselves today; a token must not depend on that."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)


class HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the service's life belongs to lifecycle.py


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address can't be had."""
    listener = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)  # only now is the port this one's: with SO_REUSEADDR two may bind it
        listener.set_inheritable(False)
    except OSError as e:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"gateway.port is {port} on {host}: {e.strerror or e}; choose a free port, or 0 for any",
            key="gateway.port",
            value=port,
        ) from e
    return listener


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket, *, end_s: float = 2.0) -> AsyncIterator[None]:
    """Serve `app` on the socket while inside; connections still busy at the end have end_s to finish.

    Raises ConfigError if the server does not come up.
    """
    config = uvicorn.Config(
        app,
        http=NoDelayProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(end_s)),
    )
    server = HttpServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        await _started(server, task, listener)
        yield
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=end_s + 3.0)
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _started(server: uvicorn.Server, task: asyncio.Task[None], listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    try:
        async with asyncio.timeout(START_S):
            while not server.started:
                if task.done():
                    reason = None if task.cancelled() else task.exception()
                    raise ConfigError(
                        f"gateway.port is {port}: the HTTP server ended at its start: {reason or 'no reason given'}",
                        key="gateway.port",
                        value=port,
                    ) from reason
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise ConfigError(
            f"gateway.port is {port}: the HTTP server did not start within {START_S:g} s",
            key="gateway.port",
            value=port,
        ) from None
