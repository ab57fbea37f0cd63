"""One segment's blocks on their way to the node that is to keep them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from distserve import telemetry
from distserve.bus.base import Bus
from distserve.errors import (
    BusTimeout,
    Cancelled,
    DistServeError,
    MalformedMessage,
    NoResponders,
    NoWorker,
    TransportUnavailable,
)
from distserve.kv.hashing import tenant_of
from distserve.messages import (
    ChainRun,
    KVLayout,
    OfferedState,
    OfferGrant,
    OfferReleased,
    OfferRequest,
    Priority,
    RemoteRegion,
    decode_as,
    encode,
)
from distserve.telemetry import NO_SPAN, headers_of
from distserve.transport.base import Sender, Span, Transfer
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.cutting import wanted_of
from distserve.worker.store.detours import Detours
from distserve.worker.store.ending import ended
from distserve.worker.store.found import Source
from distserve.worker.store.letters import Letters
from distserve.worker.store.nodes import Nodes
from distserve.worker.store.traced import asking, followed, of_transfer, sent_to

log = logging.getLogger(__name__)

SPANS_AT_ONCE = 16  # of those that have waited for the grant: the loop has others to look after


@dataclass(frozen=True, slots=True)
class Route:
    """How blocks get from this worker to nodes: what all of its offers share."""

    bus: Bus
    nodes: Nodes
    letters: Letters
    senders: Mapping[str, Sender]
    kinds: Sequence[str]  # that we can write by, preferred first
    detours: Detours
    note_in_use: Callable[[str, str, str], None]  # InUse.note()
    counts: StoreCounts
    layout: KVLayout
    worker_id: str
    host_key: str
    ask_timeout_s: float
    connect_timeout_s: float
    commit_timeout_s: float


@dataclass(frozen=True, slots=True)
class Label:
    """Whose blocks they are. tenant: a hash of the cache salt."""

    tenant: str = ""
    conversation: str = ""
    priority: Priority = "normal"

    @classmethod
    def of(cls, cache_salt: str, conversation: str, traffic_class: str) -> Self:
        """Of a request that says so."""
        return cls(tenant_of(cache_salt), conversation, "batch" if traffic_class == "background" else "normal")


class SegmentOffer:
    """Two threads meet here: layers_ready() is for any thread, the rest for the loop. Layers that are ready before
    there is a grant are written when there is one. An offer that fails is dropped and counted."""

    def __init__(
        self,
        route: Route,
        key: bytes,
        run: ChainRun,
        num_blocks: int,
        label: Label,
        trace: telemetry.Span = NO_SPAN,
    ) -> None:
        """key: the segment's (kv/placement.py). run: with its parent. trace: whose part this is."""
        self.depths = range(run.start, run.start + num_blocks)
        self._route = route
        self._key = key
        self._run = run
        self._num_blocks = num_blocks
        self._label = label
        self._lock = threading.Lock()
        self._spans: deque[Span] = deque()  # ready, not written yet
        self._wanted: Sequence[int] = ()  # depths that the node takes, in the order of the region's blocks
        self._transfer: Transfer | None = None
        self._flowing: Transfer | None = None  # the same, once nothing waits: what is ready is written at once
        self._computed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # False: given up
        self._aborting: asyncio.Task[None] | None = None
        self._trace = trace
        self._span = NO_SPAN  # while it runs
        self._num_taken = 0
        self.node = ""  # that it goes to, once it is known

    def layers_ready(self, span: Span) -> None:
        """Targets are depths in the chain, all of this segment. Each layer of each block once."""
        with self._lock:
            if self._flowing is not None:
                self._write(self._flowing, (span,))
            else:
                self._spans.append(span)

    def end(self, *, computed: bool) -> None:
        """computed: every layer of every block has been reported. Else it is given up. Idempotent."""
        if not self._computed.done():
            self._computed.set_result(computed)

    def node_gone(self, worker_id: str) -> None:
        """The registry says that a node is gone: don't wait for its answer to a commit."""
        if worker_id == self.node and self._transfer is not None and self._aborting is None:
            self._aborting = asyncio.create_task(self._transfer.abort(f"{worker_id} is gone"))

    async def run(self) -> None:
        """Never raises but CancelledError. When it returns or raises the blocks are read no more."""
        self._span = asking("offer", self._trace, self._num_blocks)
        await followed(self._span, self._ran(), self._came_to)

    async def _ran(self) -> DistServeError | None:
        """None, or why it was not taken."""
        counts = self._route.counts
        try:
            self._num_taken, num_bytes = await self._given()
        except DistServeError as e:
            counts.num_dropped_blocks[e.code] += self._num_blocks
            level = logging.DEBUG if isinstance(e, Cancelled) else logging.INFO
            log.log(level, "%d blocks not given to %s: %s", self._num_blocks, self.node or "any node", e)
            return e
        counts.num_offered_blocks += self._num_taken
        counts.num_offered_bytes += num_bytes
        counts.num_unwanted_blocks += self._num_blocks - self._num_taken
        return None

    def _came_to(self) -> dict[str, str | int | float]:
        """For its trace."""
        moved = {} if self._transfer is None else of_transfer(self._transfer.facts)
        return moved | {"distserve.kv.blocks": self._num_taken}

    async def _given(self) -> tuple[int, int]:
        """Blocks and bytes that the node has taken."""
        nodes = self._route.nodes.owners(self._key)
        if not nodes:
            raise NoWorker("there is no store node", role="kvstore", retry_after_s=1.0)
        self.node = nodes[0]
        sent_to(self._span, Source("kvstore", self.node))
        opened = await self._open()
        if opened is None:
            return 0, 0
        transfer, num_wanted = opened
        try:
            self._transfer = transfer
            await self._catch_up(transfer)
            if not await self._computed:
                raise Cancelled("it was given up before it was computed")
            state = encode(OfferedState(worker=self._route.worker_id))
            num_bytes = await transfer.commit(state, timeout_s=self._route.commit_timeout_s)
        except BaseException as e:
            await ended(transfer.abort(str(e) or type(e).__name__))
            raise
        return num_wanted, num_bytes

    async def _open(self) -> tuple[Transfer, int] | None:
        """By the transport that the node chooses; where that does not reach it, by another. None: it wants nothing."""
        route = self._route
        while True:
            kinds = route.detours.kinds(self.node, route.kinds)
            grant = await self._ask(kinds)
            if grant.region is None or not grant.wanted:
                return None
            kind = grant.region.endpoint.kind
            if not self._fits(grant.wanted, grant.region):
                self._release(grant.region, "malformed")
                raise MalformedMessage(
                    f"{self.node} wants {len(grant.wanted)} of {self._num_blocks} blocks for a region of "
                    f"{len(grant.region.block_ids)}: must be as many, ascending, and no others",
                    field="wanted",
                )
            try:
                transfer = await self._connect(grant.region)
            except TransportUnavailable:
                self._release(grant.region, "it can't be reached")
                if not route.detours.failed(self.node, kind, kinds):
                    raise
                continue
            except BaseException:
                self._release(grant.region, "given up")
                raise
            self._wanted = [self._run.start + i for i in grant.wanted]
            route.note_in_use(self.node, kind, grant.reason)
            return transfer, len(grant.wanted)

    def _fits(self, wanted: Sequence[int], region: RemoteRegion) -> bool:
        ascending = all(before < after for before, after in pairwise((-1, *wanted, self._num_blocks)))
        return ascending and len(wanted) == len(region.block_ids)

    async def _ask(self, kinds: list[str]) -> OfferGrant:
        route, label = self._route, self._label
        request = OfferRequest(
            worker=route.worker_id,
            layout=route.layout,
            runs=[self._run],
            transports=kinds,
            host_key=route.host_key,
            tenant=label.tenant,
            conversation=label.conversation,
            priority=label.priority,
        )
        subject, asked_at = Source("kvstore", self.node).subject, time.monotonic()
        try:
            data = await route.bus.request(
                subject, encode(request), timeout_s=route.ask_timeout_s, headers=headers_of(self._span)
            )
        except (BusTimeout, NoResponders):
            route.nodes.was_silent(self.node)
            raise
        route.nodes.answered(self.node, time.monotonic() - asked_at)
        return decode_as(OfferGrant, data)

    async def _connect(self, region: RemoteRegion) -> Transfer:
        sender = self._route.senders.get(region.endpoint.kind)
        if sender is None:
            raise TransportUnavailable(f"this worker can't write by {region.endpoint.kind}", kind=region.endpoint.kind)
        return await sender.open(
            region, timeout_s=self._route.connect_timeout_s, traffic_class="background", peer=self.node
        )

    def _release(self, region: RemoteRegion, reason: str) -> None:
        released = OfferReleased(
            worker=self._route.worker_id, lease_id=region.lease_id, epoch=region.epoch, reason=reason
        )
        self._route.letters.post(Source("kvstore", self.node).subject, released)

    async def _catch_up(self, transfer: Transfer) -> None:
        """Writes what was ready before; what becomes ready from now on goes its way at once."""
        while True:
            with self._lock:
                some = [self._spans.popleft() for _ in range(min(SPANS_AT_ONCE, len(self._spans)))]
                self._write(transfer, some)
                if not self._spans:
                    self._flowing = transfer
                    return
            await asyncio.sleep(0)

    def _write(self, transfer: Transfer, spans: Sequence[Span]) -> None:
        """What the node wants of them. The lock is held."""
        wanted = [cut for span in spans if (cut := wanted_of(span, self._wanted)) is not None]
        if wanted:
            transfer.write(wanted)
