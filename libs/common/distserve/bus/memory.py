"""The bus within one process: for tests, and for services that run in one process on purpose.

A MemoryHub is what the server is to NATS; every MemoryBus attached to it is one connection. It keeps to what NATS
does: at most once, groups share, a request without a subscriber fails at once, a subscription that has too many
messages waiting drops the rest, nothing larger than the limit is taken, and a connection can be cut.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from functools import partial

from distserve.bus.base import Bus, BusStats, Callback, Delivery, Headers, Pending, Registry, Responder, Subscription
from distserve.bus.callbacks import Callbacks
from distserve.bus.exchange import (
    answer,
    check_payload,
    nobody_answers,
    says_nobody_answers,
    stream_answers,
    timed_out,
)
from distserve.bus.memory_bucket import MemoryBucket, MemoryStore
from distserve.bus.online import Online
from distserve.bus.registry import BucketRegistry
from distserve.errors import BusError

PENDING_BYTES = 2 * 1024 * 1024
"""Unsent bytes that a bus holds while it is cut off; publish() beyond it raises BusError."""

_CALL_S = 10.0
_CLOSE_S = 2.0

_log = logging.getLogger(__name__)


class MemoryHub:
    """Carries messages between its buses. Belongs to one event loop."""

    def __init__(self, *, max_payload_bytes: int = 1024 * 1024, pending_messages: int = 64 * 1024) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.pending_messages = pending_messages
        self.store = MemoryStore()
        self._subscriptions: list[MemorySubscription] = []
        self._turns: dict[tuple[str, str], itertools.count[int]] = {}

    def cut(self, bus: "MemoryBus") -> None:
        """Part a bus from the hub: what is sent to it is lost, what it publishes waits."""
        bus.online.down()

    def heal(self, bus: "MemoryBus") -> None:
        if bus.connected or bus.online.closed:
            return
        bus.stats.reconnects += 1
        bus.online.up()
        for delivery in bus.take_unsent():
            self.route(delivery)

    def forget(self) -> None:
        """Lose the registry's entries, as a server that was started again with an empty store."""
        self.store.clear()

    def add(self, subscription: "MemorySubscription") -> None:
        self._subscriptions.append(subscription)

    def remove(self, subscription: "MemorySubscription") -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def route(self, delivery: Delivery) -> None:
        """Hand a message to every subscription, and to one of each group, that it is for."""
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        found = False
        for subscription in self._subscriptions:
            if not subscription.bus.connected or not matches(subscription.pattern, delivery.subject):
                continue
            found = True
            if subscription.queue is None:
                subscription.offer(delivery)
            else:
                groups.setdefault((subscription.subject, subscription.queue), []).append(subscription)
        for group, members in groups.items():
            turn = next(self._turns.setdefault(group, itertools.count()))
            members[turn % len(members)].offer(delivery)
        if not found and delivery.reply is not None:
            self.route(Delivery(delivery.reply, b"", None, {"Status": "503"}))


def matches(pattern: list[str], subject: str) -> bool:
    """NATS' wildcards: `*` is one token, `>` at the end is one or more."""
    tokens = subject.split(".")
    for i, wanted in enumerate(pattern):
        if wanted == ">":
            return len(tokens) > i
        if i >= len(tokens) or (wanted != "*" and wanted != tokens[i]):
            return False
    return len(tokens) == len(pattern)


class MemorySubscription(Subscription):
    """Made by MemoryBus.subscribe. A pump task takes waiting messages to the callback, one after another."""

    def __init__(self, bus: "MemoryBus", subject: str, queue: str | None, callbacks: Callbacks) -> None:
        self.bus = bus
        self.subject = subject
        self.pattern = subject.split(".")
        self.queue = queue
        self.callbacks = callbacks
        self._waiting: asyncio.Queue[Delivery] = asyncio.Queue(bus.hub.pending_messages)
        self._pump_task = asyncio.create_task(self._pump())

    @property
    def waiting(self) -> list[Delivery]:
        """What has come and whose callback has not been started."""
        return list(self._waiting._queue)  # type: ignore[attr-defined]

    def offer(self, delivery: Delivery) -> None:
        try:
            self._waiting.put_nowait(delivery)
        except asyncio.QueueFull:
            self.bus.stats.slow_consumer_drops += 1
            _log.error("a message to %s is dropped: its callback is too slow", delivery.subject)

    async def _pump(self) -> None:
        while True:
            delivery = await self._waiting.get()
            try:
                await self.callbacks.deliver(delivery)
            finally:
                self._waiting.task_done()

    async def close(self) -> None:
        self.bus.hub.remove(self)
        self.bus.subscriptions.discard(self)
        try:
            if not self.callbacks.inline and not self.callbacks.closed:
                async with asyncio.timeout(_CLOSE_S):
                    await self._waiting.join()
                    await self.callbacks.all_started()
        except TimeoutError:
            _log.warning("%d messages to %s are dropped: it is closed", self._waiting.qsize(), self.subject)
        finally:
            self.callbacks.close()
            self._pump_task.cancel()


class MemoryBus(Bus):
    """One service's connection to a hub."""

    _inboxes = itertools.count()

    def __init__(self, hub: MemoryHub, *, name: str = "", registry_ttl_s: float = 2.5) -> None:
        self.hub = hub
        self.name = name
        self.subscriptions: set[MemorySubscription] = set()
        self.online = Online("the hub")
        self.online.up()
        self._stats = BusStats()
        self._unsent: list[Delivery] = []
        self._registry = BucketRegistry(MemoryBucket(self, hub.store, registry_ttl_s))

    @property
    def max_payload_bytes(self) -> int:
        return self.hub.max_payload_bytes

    @property
    def connected(self) -> bool:
        return self.online.now

    @property
    def connected_since(self) -> float | None:
        """time.monotonic(); None while cut off."""
        return self.online.since

    @property
    def stats(self) -> BusStats:
        return self._stats

    @property
    def pending(self) -> Pending:
        waiting = [d for one in self.subscriptions for d in one.waiting] + self._unsent
        return Pending(len(waiting), sum(len(d.data) for d in waiting))

    def take_unsent(self) -> list[Delivery]:
        """What was published during a cut; the caller sends it."""
        unsent, self._unsent = self._unsent, []
        return unsent

    async def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: Headers | None = None
    ) -> None:
        self.online.check_open()
        check_subject(subject)
        check_payload(subject, data, headers, self.hub.max_payload_bytes)
        delivery = Delivery(subject, bytes(data), reply, dict(headers or {}))
        if self.connected:
            self.hub.route(delivery)
            return
        if sum(len(d.data) for d in self._unsent) + len(data) > PENDING_BYTES:
            raise BusError(f"{subject}: cut off from the hub, and {PENDING_BYTES} unsent bytes wait already")
        self._unsent.append(delivery)

    async def request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None) -> bytes:
        check_payload(subject, data, headers, self.hub.max_payload_bytes)
        deadline = time.monotonic() + timeout_s
        await self.online.wait(subject, timeout_s)
        answers: asyncio.Queue[Delivery] = asyncio.Queue(1)
        async with await self.subscribe(inbox := self._new_inbox(), answers.put, inline=True):
            await self.publish(subject, data, reply=inbox, headers=headers)
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    got = await answers.get()
            except TimeoutError:
                raise timed_out(subject, timeout_s) from None
        if says_nobody_answers(got):
            raise nobody_answers(subject)
        return got.data

    def stream(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> AsyncIterator[bytes]:
        return stream_answers(self, self._new_inbox(), subject, data, timeout_s=timeout_s, headers=headers)

    async def subscribe(
        self, subject: str, callback: Callback, *, queue: str | None = None, inline: bool = False
    ) -> Subscription:
        await self.online.wait(subject, _CALL_S)
        check_subject(subject)
        callbacks = Callbacks(subject, callback, self._stats, inline=inline)
        subscription = MemorySubscription(self, subject, queue, callbacks)
        self.subscriptions.add(subscription)
        self.hub.add(subscription)
        return subscription

    async def serve(self, subject: str, responder: Responder, *, queue: str | None = None) -> Subscription:
        return await self.subscribe(subject, partial(answer, self, responder), queue=queue)

    async def flush(self, timeout_s: float = 5.0) -> None:
        await self.online.wait("the hub", timeout_s)

    def registry(self) -> Registry:
        return self._registry

    async def close(self) -> None:
        if self.online.closed:
            return
        self.online.closed = True
        subscriptions = list(self.subscriptions)
        await asyncio.gather(*(s.close() for s in subscriptions))
        await asyncio.gather(*(s.callbacks.cancel(_CLOSE_S) for s in subscriptions))
        self.online.down()

    def _new_inbox(self) -> str:
        return f"_INBOX.{next(MemoryBus._inboxes)}"


def check_subject(subject: str) -> None:
    """Raises BusError for what NATS would refuse."""
    if not all(subject.split(".")) or any(c.isspace() for c in subject):
        raise BusError(
            f"{subject!r} is no valid subject: tokens with dots between, no spaces, none empty", subject=subject
        )
