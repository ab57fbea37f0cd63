"""The bus on NATS. The only file that knows the client library: its exceptions are translated here.

The client reconnects by itself, for ever, and keeps subscriptions, waiting requests and up to PENDING_BYTES of
unsent messages over a cut. Some errors of the server make it give up for good; then a fresh client takes over.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client

from distserve.bus import subjects
from distserve.bus.base import Bus, BusStats, Callback, Delivery, Headers, Pending, Registry, Responder, Subscription
from distserve.bus.callbacks import Callbacks
from distserve.bus.complaints import Complaints, words
from distserve.bus.exchange import answer, check_payload, nobody_answers, stream_answers, timed_out
from distserve.bus.jetstream import JetStreamBucket
from distserve.bus.online import Online
from distserve.bus.pending import pending_of
from distserve.bus.registry import BucketRegistry
from distserve.bus.round_trip import RoundTrips
from distserve.errors import BusError

PENDING_BYTES = 2 * 1024 * 1024
"""Unsent bytes that the client holds. While cut off, publish() beyond it raises BusError."""

_BACKOFF_S = (0.05, 1.0)  # first and longest wait between attempts; well within a TTL, so that a cut costs no entry
_ATTEMPT_S = 2  # for one attempt to connect
_PING_S = 2  # an idle connection that is dead is noticed after three of these
_CALL_S = 10.0  # for (un)subscribing
_CLOSE_S = 2.0
_GIVE_UP_S = 30.0  # a client that has not reconnected by then is replaced, in case its attempts have ended unnoticed
_NO_HEADERS: Headers = {}
_FOREIGN = (nats.errors.Error, OSError, TimeoutError)

_log = logging.getLogger(__name__)


def _shown(url: str) -> str:
    """A URL, or several with commas between, without user and password."""
    parts = [urlsplit(part if "//" in part else f"nats://{part}") for part in url.split(",")]
    return ",".join(f"{part.scheme}://{part.netloc.rpartition('@')[2]}" for part in parts)


class NatsSubscription(Subscription):
    """Made by NatsBus.subscribe."""

    def __init__(self, bus: "NatsBus", subject: str, queue: str, callbacks: Callbacks) -> None:
        self._bus = bus
        self._subject = subject
        self._queue = queue
        self.callbacks = callbacks
        self.subscribed: Any = None  # the client's
        self._client: Client | None = None
        self._closing = False

    async def attach(self, client: Client) -> None:
        """Subscribe on a client; returns when the server knows."""
        self._client = client
        self.subscribed = await client.subscribe(
            self._subject,
            queue=self._queue,
            cb=self._on_message,
            pending_msgs_limit=self._bus.pending_messages,
            pending_bytes_limit=self._bus.pending_bytes,
        )
        await self._bus.round_trips(client.flush, _CALL_S)
        if self._closing:  # meanwhile
            await self.close()

    async def _on_message(self, message: Any) -> None:
        headers = message.headers or _NO_HEADERS
        await self.callbacks.deliver(Delivery(message.subject, message.data, message.reply or None, headers))

    async def close(self) -> None:
        self._closing = True
        subscribed, self.subscribed = self.subscribed, None
        self._bus.subscriptions.discard(self)
        if self.callbacks.inline:
            self.callbacks.close()
        try:
            if subscribed is not None and self._client is not None:
                await self._withdraw(subscribed, self._client)
        finally:
            self.callbacks.close()

    async def _withdraw(self, subscribed: Any, client: Client) -> None:
        """The server is told first: it goes on sending until then, and the client would drop what comes for a
        subscription that it does not know any more. After the round trip nothing more comes, and the server tells those
        who ask from now on that nobody answers. The client's own drain() has no such order: see RoundTrips."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                if client.is_connected:
                    await client._send_unsubscribe(subscribed._id)
                    await self._bus.round_trips(client.flush, _CLOSE_S)
                if not self.callbacks.inline:
                    await subscribed._pending_queue.join()
                    await self.callbacks.all_started()
        except _FOREIGN as e:
            _log.warning("messages to %s may be lost: it is closed, %s", self._subject, words(e))
        finally:
            with contextlib.suppress(*_FOREIGN):  # a closed connection has dropped it already
                await subscribed.unsubscribe()


class NatsBus(Bus):
    """One connection to NATS (a server or a cluster of them)."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        registry_ttl_s: float,
        registry_bucket: str,
        pending_messages: int,
        pending_bytes: int,
    ) -> None:
        self._servers = url.split(",")
        self.address = _shown(url)  # for people: it never shows a password
        self._name = name
        self.pending_messages = pending_messages
        self.pending_bytes = pending_bytes
        self.subscriptions: set[NatsSubscription] = set()
        self.round_trips = RoundTrips()
        self._stats = BusStats()
        self._client = Client()
        self._online = Online(f"NATS at {self.address}", url=self.address)
        self._complaints = Complaints(f"NATS at {self.address}", self._stats)
        self._revival: asyncio.Task[None] | None = None
        self._registry = BucketRegistry(JetStreamBucket(self, registry_bucket, registry_ttl_s))

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        registry_ttl_s: float = 2.5,
        registry_bucket: str = subjects.REGISTRY_BUCKET,
        connect_timeout_s: float = 10.0,
        pending_messages: int = 64 * 1024,
        pending_bytes: int = 64 * 1024 * 1024,
    ) -> Self:
        """Connect, waiting up to connect_timeout_s for a server that is only starting.

        `url`: `nats://[user:password@]host:port`, several with commas between. `name` is shown in NATS' monitoring.
        `pending_messages` and `pending_bytes`: what may wait in one subscription before messages are dropped.
        Raises BusError naming the URL and the last reason.
        """
        bus = cls(
            url,
            name=name,
            registry_ttl_s=registry_ttl_s,
            registry_bucket=registry_bucket,
            pending_messages=pending_messages,
            pending_bytes=pending_bytes,
        )
        bus._client = await bus._dial(connect_timeout_s)
        bus._online.up()
        return bus

    async def _dial(self, timeout_s: float) -> Client:
        client = Client()
        self._complaints.forget()
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    servers=list(self._servers),
                    name=self._name,
                    error_cb=self._on_error,
                    disconnected_cb=partial(self._on_disconnected, client),
                    reconnected_cb=partial(self._on_reconnected, client),
                    closed_cb=partial(self._on_closed, client),
                    reconnect_to_server_handler=self._next_server,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_BACKOFF_S[0] * 2,  # between the first attempts; later ones: _next_server
                    connect_timeout=_ATTEMPT_S,
                    ping_interval=_PING_S,
                    pending_size=PENDING_BYTES,
                    flush_timeout=_CALL_S,
                )
        except (*_FOREIGN, ValueError) as e:
            await _abandon(client)
            reason = (self._complaints.last or e) if isinstance(e, TimeoutError) else e
            raise BusError(
                f"no NATS server could be used at {self.address} within {timeout_s:g} s: {words(reason)}",
                url=self.address,
                timeout_s=timeout_s,
            ) from e
        return client

    # ------------------------------------------------------------ messages

    @property
    def max_payload_bytes(self) -> int:
        return int(self._client.max_payload)

    @property
    def connected(self) -> bool:
        return self._online.now

    @property
    def connected_since(self) -> float | None:
        """time.monotonic(); None while cut off."""
        return self._online.since

    @property
    def stats(self) -> BusStats:
        return self._stats

    @property
    def pending(self) -> Pending:
        return pending_of(self._client, (one.subscribed for one in self.subscriptions))

    def new_inbox(self) -> str:
        """A subject that nobody else uses."""
        return str(self._client.new_inbox())

    async def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: Headers | None = None
    ) -> None:
        check_payload(subject, data, headers, self._client.max_payload)
        try:
            await self._client.publish(subject, data, reply or "", dict(headers) if headers else None)
        except _FOREIGN as e:
            raise self._translated(e, subject) from e

    async def request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None) -> bytes:
        """While cut off it waits, within timeout_s, and sends only then: nothing arrives when nobody waits any more."""
        check_payload(subject, data, headers, self._client.max_payload)
        left_s = await self._online.wait(subject, timeout_s)
        try:
            got = await self._client.request(subject, data, timeout=left_s, headers=dict(headers) if headers else None)
        except nats.errors.NoRespondersError:
            raise nobody_answers(subject) from None
        except _FOREIGN as e:
            raise self._translated(e, subject, timeout_s) from e
        return bytes(got.data)

    def stream(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> AsyncIterator[bytes]:
        return stream_answers(self, self.new_inbox(), subject, data, timeout_s=timeout_s, headers=headers)

    async def subscribe(
        self, subject: str, callback: Callback, *, queue: str | None = None, inline: bool = False
    ) -> Subscription:
        left_s = await self._online.wait(subject, _CALL_S)
        callbacks = Callbacks(subject, callback, self._stats, inline=inline)
        subscription = NatsSubscription(self, subject, queue or "", callbacks)
        self.subscriptions.add(subscription)
        try:
            async with asyncio.timeout(left_s):
                await subscription.attach(self._client)
        except BaseException as e:
            await subscription.close()
            if isinstance(e, _FOREIGN):
                raise self._translated(e, subject, _CALL_S) from e
            raise
        return subscription

    async def serve(self, subject: str, responder: Responder, *, queue: str | None = None) -> Subscription:
        return await self.subscribe(subject, partial(answer, self, responder), queue=queue)

    async def flush(self, timeout_s: float = 5.0) -> None:
        left_s = await self._online.wait("the server", timeout_s)
        try:
            await self.round_trips(self._client.flush, left_s)
        except _FOREIGN as e:
            raise self._translated(e, "the server", timeout_s) from e

    def registry(self) -> Registry:
        return self._registry

    async def close(self) -> None:
        """Stop every callback, send what is unsent if the server is there, disconnect. Idempotent."""
        if self._online.closed:
            return
        self._online.closed = True
        if self._revival is not None:
            self._revival.cancel()
        subscriptions = list(self.subscriptions)
        await asyncio.gather(*(s.close() for s in subscriptions))
        await asyncio.gather(*(s.callbacks.cancel(_CLOSE_S) for s in subscriptions))
        with contextlib.suppress(*_FOREIGN):
            async with asyncio.timeout(_CLOSE_S):
                if self.connected:
                    await self.round_trips(self._client.flush, _CLOSE_S)
        await _abandon(self._client)
        self.round_trips.cancel()
        self._online.down()

    # ------------------------------------------------------------ the connection

    def _next_server(self, servers: list[Any], info: dict[str, Any]) -> tuple[Any, float]:
        """The server that failed least, and how long to wait before trying it: doubled with every failure."""
        first, longest = _BACKOFF_S
        server = min(servers, key=lambda s: int(s.reconnects))
        return server, min(longest, first * 2 ** min(server.reconnects, 16)) * random.uniform(0.5, 1.0)

    async def _on_disconnected(self, client: Client) -> None:
        if client is not self._client:
            return  # one that was given up, or never came to be used
        if self.connected and not self._online.closed:
            _log.warning("%s is cut off from NATS at %s", self._name, self.address)
        self._online.down()
        if not self._online.closed:
            asyncio.get_running_loop().call_later(_GIVE_UP_S, self._replace, client, self._stats.reconnects)

    async def _on_reconnected(self, client: Client) -> None:
        if client is not self._client:
            return
        self._stats.reconnects += 1
        self._online.up()
        _log.warning("%s is back on NATS at %s", self._name, self.address)

    async def _on_closed(self, client: Client) -> None:
        self._replace(client, self._stats.reconnects)

    def _replace(self, client: Client, num_reconnects: int) -> None:
        """Let a fresh client take over, unless this one is back since, was replaced, or was closed on purpose."""
        if self._online.closed or client is not self._client or num_reconnects != self._stats.reconnects:
            return
        if self._revival is None or self._revival.done():
            _log.error("the connection to NATS at %s is given up: %s", self.address, words(client.last_error))
            self._revival = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        """Go on with a fresh client: the old one gave up, after a protocol error for instance, or got nowhere."""
        await _abandon(self._client)
        attempt = 0
        while True:
            first, longest = _BACKOFF_S
            await asyncio.sleep(min(longest, first * 2 ** min(attempt, 16)))
            attempt += 1
            client = None
            try:
                client = await self._dial(_CALL_S)
                async with asyncio.timeout(_CALL_S):
                    for subscription in list(self.subscriptions):
                        await subscription.attach(client)
            except (BusError, *_FOREIGN) as e:
                _log.info("no new connection to NATS yet: %s", words(e))
                await _abandon(client)
                continue
            self._client = client
            await self._on_reconnected(client)
            return

    async def _on_error(self, e: Exception) -> None:
        if isinstance(e, nats.errors.SlowConsumerError):
            self._complaints.dropped(e, e.subject)
        else:
            broken = isinstance(e, (OSError, nats.errors.StaleConnectionError))
            self._complaints.reported(e, connecting=broken or not self.connected)

    def _translated(self, e: BaseException, subject: str, timeout_s: float = _CALL_S) -> BusError:
        if isinstance(e, TimeoutError):
            return timed_out(subject, timeout_s)
        for kind, message in _MESSAGES.items():
            if isinstance(e, kind):
                return BusError(message(subject, self.address), subject=subject, url=self.address)
        return BusError(f"{subject} at {self.address}: {words(e)}", subject=subject, url=self.address)


async def _abandon(client: Client | None) -> None:
    """Close a client, whatever state it is in."""
    if client is None:
        return
    if not client.is_connected:
        # It would write what is unsent into a socket that is gone, which some event loops answer with an exception
        # that leaves the client half closed.
        client._pending_data_size = 0
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSE_S):
            await client.close()


_MESSAGES: dict[type[BaseException], Callable[[str, str], str]] = {
    nats.errors.ConnectionClosedError: lambda subject, url: f"{subject}: the bus to {url} is closed",
    nats.errors.ConnectionDrainingError: lambda subject, url: f"{subject}: the bus to {url} is closing",
    nats.errors.OutboundBufferLimitError: lambda subject, url: (
        f"{subject}: cut off from NATS at {url}, and {PENDING_BYTES} unsent bytes wait already"
    ),
    nats.errors.BadSubjectError: lambda subject, url: (
        f"{subject!r} is no valid subject: tokens with dots between, no spaces, none empty"
    ),
}
