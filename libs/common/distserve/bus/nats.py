"""The bus on NATS. The only file that knows the client library: its exceptions are translated here.

The client reconnects by itself, for ever, and keeps subscriptions, waiting requests and up to PENDING_BYTES of
unsent messages over a cut. Some errors of the server make it give up for good; then a fresh client takes over.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client

from distserve.bus import subjects
from distserve.bus.base import Bus, BusStats, Callback, Delivery, Headers, Registry, Responder, Subscription
from distserve.bus.callbacks import Callbacks
from distserve.bus.exchange import answer, check_payload, nobody_answers, stream_answers, timed_out
from distserve.bus.jetstream import JetStreamBucket
from distserve.bus.registry import BucketRegistry
from distserve.errors import BusError

PENDING_BYTES = 2 * 1024 * 1024
"""Unsent bytes that the client holds. While cut off, publish() beyond it raises BusError."""

_BACKOFF_S = (0.05, 1.0)  # first and longest wait between attempts; well within a TTL, so that a cut costs no entry
_ATTEMPT_S = 2  # for one attempt to connect
_PING_S = 2  # an idle connection that is dead is noticed after three of these
_CALL_S = 10.0  # for (un)subscribing
_CLOSE_S = 2.0
_GIVE_UP_S = 30.0  # a client that has not reconnected by then is replaced, in case its attempts have ended unnoticed
_LATE_S = 60  # an answer to a ping that is later than this will not come
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
        self._subscribed: Any = None
        self._client: Client | None = None

    async def attach(self, client: Client) -> None:
        """Subscribe on a client; returns when the server knows."""
        self._client = client
        self._subscribed = await client.subscribe(
            self._subject,
            queue=self._queue,
            cb=self._on_message,
            pending_msgs_limit=self._bus.pending_messages,
            pending_bytes_limit=self._bus.pending_bytes,
        )
        await self._bus.round_trip(client, _CALL_S)
        if self.callbacks.closed:  # meanwhile
            await self.close()

    async def _on_message(self, message: Any) -> None:
        headers = message.headers or _NO_HEADERS
        await self.callbacks.deliver(Delivery(message.subject, message.data, message.reply or None, headers))

    async def close(self) -> None:
        self.callbacks.close()
        subscribed, self._subscribed = self._subscribed, None
        self._bus.subscriptions.discard(self)
        if subscribed is not None and self._client is not None:
            # A closed connection has dropped it already. The round trip is for those who ask from now on: once close()
            # has returned, the server tells them that nobody answers.
            with contextlib.suppress(*_FOREIGN):
                async with asyncio.timeout(_CLOSE_S):
                    await subscribed.unsubscribe()
                    await self._bus.round_trip(self._client, _CLOSE_S)


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
        self.connected_since: float | None = None  # time.monotonic(); None while cut off
        self._stats = BusStats()
        self._client = Client()
        self._online = asyncio.Event()
        self._closing = False
        self._revival: asyncio.Task[None] | None = None
        self._round_trips: set[asyncio.Task[None]] = set()
        self._last_error: BaseException | None = None
        self._last_slow_log = 0.0
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
        bus._went_online()
        return bus

    async def _dial(self, timeout_s: float) -> Client:
        client = Client()
        self._last_error = None
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
            reason = self._last_error if isinstance(e, TimeoutError) and self._last_error else e
            raise BusError(
                f"no NATS server could be used at {self.address} within {timeout_s:g} s: {_words(reason)}",
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
        return self.connected_since is not None

    @property
    def stats(self) -> BusStats:
        return self._stats

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
        left_s = await self._until_online(subject, timeout_s)
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
        left_s = await self._until_online(subject, _CALL_S)
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
        left_s = await self._until_online("the server", timeout_s)
        try:
            await self.round_trip(self._client, left_s)
        except _FOREIGN as e:
            raise self._translated(e, "the server", timeout_s) from e

    async def round_trip(self, client: Client, timeout_s: float) -> None:
        """Returns when the server has taken everything sent before; raises TimeoutError.

        Two pings, since the client writes a ping at once but what was sent before it a moment later: the first one's
        answer shows that all of that is on its way, the second one's that it has arrived. Pings are left running when
        they take longer: cancelled, they would leave a dead future behind that ends the client's reader when the
        server's late answer comes.
        """

        async def ping_twice() -> None:
            await client.flush(timeout=_LATE_S)
            await client.flush(timeout=_LATE_S)

        task = asyncio.create_task(ping_twice())
        self._round_trips.add(task)
        task.add_done_callback(self._round_trips.discard)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
            raise TimeoutError
        task.result()

    def registry(self) -> Registry:
        return self._registry

    async def close(self) -> None:
        """Stop every callback, send what is unsent if the server is there, disconnect. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._revival is not None:
            self._revival.cancel()
        subscriptions = list(self.subscriptions)
        await asyncio.gather(*(s.close() for s in subscriptions))
        await asyncio.gather(*(s.callbacks.cancel(_CLOSE_S) for s in subscriptions))
        with contextlib.suppress(*_FOREIGN):
            async with asyncio.timeout(_CLOSE_S):
                if self.connected:
                    await self.round_trip(self._client, _CLOSE_S)
        await _abandon(self._client)
        for task in self._round_trips:
            task.cancel()
        self.connected_since = None

    # ------------------------------------------------------------ the connection

    async def _until_online(self, subject: str, timeout_s: float) -> float:
        """What is left of timeout_s once there is a connection."""
        if self._closing:
            raise BusError(f"the bus to {self.address} is closed", url=self.address)
        if self._online.is_set():
            return timeout_s
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._online.wait()
        except TimeoutError:
            raise timed_out(
                subject, timeout_s, f"cut off from NATS at {self.address}; nothing was sent, no answer"
            ) from None
        return max(0.001, timeout_s - (time.monotonic() - began))

    def _went_online(self) -> None:
        self.connected_since = time.monotonic()
        self._online.set()

    def _next_server(self, servers: list[Any], info: dict[str, Any]) -> tuple[Any, float]:
        """The server that failed least, and how long to wait before trying it: doubled with every failure."""
        first, longest = _BACKOFF_S
        server = min(servers, key=lambda s: int(s.reconnects))
        return server, min(longest, first * 2 ** min(server.reconnects, 16)) * random.uniform(0.5, 1.0)

    async def _on_disconnected(self, client: Client) -> None:
        if client is not self._client:
            return  # one that was given up, or never came to be used
        if self.connected and not self._closing:
            _log.warning("%s is cut off from NATS at %s", self._name, self.address)
        self.connected_since = None
        self._online.clear()
        if not self._closing:
            asyncio.get_running_loop().call_later(_GIVE_UP_S, self._replace, client, self._stats.reconnects)

    async def _on_reconnected(self, client: Client) -> None:
        if client is not self._client:
            return
        self._stats.reconnects += 1
        self._went_online()
        _log.warning("%s is back on NATS at %s", self._name, self.address)

    async def _on_closed(self, client: Client) -> None:
        self._replace(client, self._stats.reconnects)

    def _replace(self, client: Client, num_reconnects: int) -> None:
        """Let a fresh client take over, unless this one is back since, was replaced, or was closed on purpose."""
        if self._closing or client is not self._client or num_reconnects != self._stats.reconnects:
            return
        if self._revival is None or self._revival.done():
            _log.error("the connection to NATS at %s is given up: %s", self.address, _words(client.last_error))
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
                _log.info("no new connection to NATS yet: %s", _words(e))
                await _abandon(client)
                continue
            self._client = client
            await self._on_reconnected(client)
            return

    async def _on_error(self, e: Exception) -> None:
        if not _is_refusal(self._last_error):  # a refusal explains more than the broken connections that follow it
            self._last_error = e
        if isinstance(e, nats.errors.SlowConsumerError):
            self._stats.slow_consumer_drops += 1
            now = time.monotonic()
            if now - self._last_slow_log > 1.0:
                self._last_slow_log = now
                _log.error(
                    "messages to %s are dropped (%d so far on this bus): its callback is too slow",
                    e.subject,
                    self._stats.slow_consumer_drops,
                )
        elif "permissions violation" in str(e).lower():
            self._stats.permission_denials += 1
            _log.error("NATS at %s refused: %s", self.address, _words(e))
        elif not self._online.is_set() or isinstance(e, (OSError, nats.errors.StaleConnectionError)):
            _log.debug("connecting to NATS at %s: %s", self.address, _words(e))
        else:
            self._stats.errors += 1
            _log.error("NATS client error at %s: %s", self.address, _words(e))

    def _translated(self, e: BaseException, subject: str, timeout_s: float = _CALL_S) -> BusError:
        if isinstance(e, TimeoutError):
            return timed_out(subject, timeout_s)
        for kind, words in _WORDS.items():
            if isinstance(e, kind):
                return BusError(words(subject, self.address), subject=subject, url=self.address)
        return BusError(f"{subject} at {self.address}: {_words(e)}", subject=subject, url=self.address)


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


def _is_refusal(e: BaseException | None) -> bool:
    return e is not None and "authorization" in str(e).lower()


def _words(e: BaseException | None) -> str:
    return f"{type(e).__name__}: {e}" if e is not None else "no reason given"


_WORDS: dict[type[BaseException], Callable[[str, str], str]] = {
    nats.errors.ConnectionClosedError: lambda subject, url: f"{subject}: the bus to {url} is closed",
    nats.errors.ConnectionDrainingError: lambda subject, url: f"{subject}: the bus to {url} is closing",
    nats.errors.OutboundBufferLimitError: lambda subject, url: (
        f"{subject}: cut off from NATS at {url}, and {PENDING_BYTES} unsent bytes wait already"
    ),
    nats.errors.BadSubjectError: lambda subject, url: (
        f"{subject!r} is no valid subject: tokens with dots between, no spaces, none empty"
    ),
}
