"""Having what was found written into blocks of our own pool, by each source under one lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distserve.bus.base import Bus, RegistryEvent
from distserve.errors import (
    DeadlineExceeded,
    DistServeError,
    KVError,
    TransportUnavailable,
    WorkerLost,
)
from distserve.kv.layout import block_bytes
from distserve.kv.lease import LeaseTable
from distserve.messages import (
    TIERS,
    ChainRun,
    FetchReply,
    FetchRequest,
    KVLayout,
    RemoteRegion,
    TrafficClass,
    decode_as,
    encode,
)
from distserve.telemetry import NO_SPAN, Span, headers_of
from distserve.transport.base import Lease, Receiver
from distserve.transport.select import Choice
from distserve.worker.store.arrivals import Arrivals
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.detours import Detours
from distserve.worker.store.ending import all_ended, ended
from distserve.worker.store.failing import FailingTiers
from distserve.worker.store.found import Found, Piece, Pin, Source
from distserve.worker.store.nodes import Nodes
from distserve.worker.store.traced import asking, by_tier, followed

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Share:
    """What one source writes under one pin."""

    pin: Pin
    pieces: list[Piece] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    came: bool = False
    num_bytes: int = 0  # that came
    kind: str = ""  # of transport, the last that was tried
    span: Span = NO_SPAN

    @property
    def source(self) -> Source:
        return self.pin.source

    @property
    def tiers(self) -> bytes:
        """Of all of its blocks."""
        return b"".join(piece.tiers for piece in self.pieces)


class Fetches:
    """A fetch is partly successful where a source fails: what counts is the unbroken beginning."""

    def __init__(
        self,
        bus: Bus,
        nodes: Nodes,
        failing: FailingTiers,
        leases: LeaseTable,
        receivers: Mapping[str, Receiver],
        arrivals: Arrivals,
        counts: StoreCounts,
        detours: Detours,
        layout: KVLayout,
        *,
        choose: Callable[..., Choice],
        note_in_use: Callable[[str, str, str], None],
        give_back: Callable[[Sequence[Pin]], None],
        asker: str,
    ) -> None:
        """choose: transport.select.choose() with what is configured filled in. note_in_use: InUse.note(). give_back:
        pins."""
        self._bus = bus
        self._nodes = nodes
        self._failing = failing
        self._leases = leases
        self._receivers = receivers
        self._arrivals = arrivals
        self._counts = counts
        self._detours = detours
        self._note_in_use = note_in_use
        self._layout = layout
        self._choose = choose
        self._give_back = give_back
        self._asker = asker
        self._waiting: dict[asyncio.Future[None], str] = {}  # for a source, which may leave

    def on_registry(self, event: RegistryEvent) -> None:
        """Nobody waits for one that is gone."""
        if event.kind == "gone":
            for gone in [f for f, source in self._waiting.items() if source == event.worker_id and not f.done()]:
                gone.set_result(None)

    async def fetch(
        self,
        found: Found,
        block_ids: Sequence[int],
        *,
        timeout_s: float,
        traffic_class: TrafficClass,
        span: Span = NO_SPAN,
    ) -> int:
        """How many blocks from the first on have come. No byte reaches block_ids any more when it returns or raises."""
        found, spare = _cut(found, block_ids), found.pins
        shares = _shares(found, block_ids)
        self._give_back([pin for pin in spare if pin not in {share.pin for share in shares}])
        if not shares:
            return 0
        tasks = {asyncio.create_task(self._take(s, timeout_s, traffic_class, span), name="fetch"): s for s in shares}
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                broken = [share.pieces[0].start for task, share in tasks.items() if task in done and not share.came]
                for task in waiting:
                    if broken and tasks[task].pieces[0].start > min(broken):
                        task.cancel()  # what it brings would stand after a gap
        finally:
            for task in tasks:
                task.cancel()
            await all_ended(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        came = {share.pin for share in shares if share.came}
        num = 0
        for piece in found.pieces:
            if piece.pin not in came:
                break
            num += len(piece)
        return num

    async def _take(self, share: Share, timeout_s: float, traffic_class: TrafficClass, parent: Span) -> None:
        """Never raises but CancelledError."""
        share.span = asking("fetch", parent, len(share.block_ids), share.source)
        taking = self._taken(share, timeout_s, traffic_class)
        await followed(share.span, taking, lambda: self._came_to(share))

    def _came_to(self, share: Share) -> dict[str, str | int | float]:
        """For its trace."""
        made: dict[str, str | int | float] = {"distserve.transfer.transport": share.kind} if share.kind else {}
        if not share.came:
            return made | {"distserve.kv.blocks": 0}
        tiers = Counter(TIERS[place] for place in share.tiers)
        num_tokens = len(share.block_ids) * self._layout.block_size
        return made | by_tier(tiers) | {"distserve.kv.bytes": share.num_bytes, "distserve.kv.cached_tokens": num_tokens}

    async def _taken(self, share: Share, timeout_s: float, traffic_class: TrafficClass) -> DistServeError | None:
        """None, and it came; or why not."""
        self._counts.num_fetches += 1
        started = time.monotonic()
        error: DistServeError
        try:
            async with asyncio.timeout(timeout_s):
                num_bytes = await self._by_any(share, timeout_s, traffic_class)
        except TimeoutError:
            error = DeadlineExceeded(f"they are not here within {timeout_s:g} s", timeout_s=timeout_s)
        except DistServeError as e:
            error = e
        else:
            share.came, share.num_bytes = True, num_bytes
            self._failing.came(share.source.worker_id, share.tiers)
            self._counts.num_fetched_blocks += len(share.block_ids)
            self._counts.num_fetched_bytes += num_bytes
            self._counts.fetch_seconds += time.monotonic() - started
            return None
        finally:
            self._give_back([share.pin])
        self._failing.failed(share.source.worker_id, share.tiers, error)
        self._counts.num_failed_fetches[error.code] += 1
        log.warning("%d blocks not fetched from %s: %s", len(share.block_ids), share.source.worker_id, error)
        return error

    async def _by_any(self, share: Share, timeout_s: float, traffic_class: TrafficClass) -> int:
        """By the transport that suits best; where that does not reach the source, by another. The bytes."""
        info = self._nodes.info(share.source)
        if info is None:
            raise WorkerLost(f"{share.source.worker_id} is gone", worker=share.source.worker_id, role=share.source.role)
        while True:
            kinds = self._detours.kinds(share.source.worker_id, info.transports)
            choice = self._choose(
                [r.endpoint for r in self._receivers.values()],
                kinds,
                info.host_key,
                num_bytes=len(share.block_ids) * block_bytes(self._layout),
            )
            share.kind = kind = choice.endpoint.kind
            try:
                num_bytes = await self._under_lease(share, self._receivers[kind], timeout_s, traffic_class)
            except TransportUnavailable as e:
                if not self._detours.failed(share.source.worker_id, kind, kinds):
                    raise
                log.warning("%s cannot reach us by %s: %s", share.source.worker_id, kind, e)
                continue
            self._note_in_use(share.source.worker_id, kind, choice.reason)
            return num_bytes

    async def _under_lease(
        self, share: Share, receiver: Receiver, timeout_s: float, traffic_class: TrafficClass
    ) -> int:
        lease = self._leases.grant(share.source.worker_id, share.block_ids, timeout_s, time.monotonic())
        arrival = self._arrivals.expect(lease)
        try:
            region = receiver.grant(lease)
            await self._written(share, region, arrival, timeout_s, traffic_class)
        finally:
            self._arrivals.forget(lease)
            await ended(self._close(lease, receiver, arrival))
        return arrival.result()

    async def _written(
        self,
        share: Share,
        region: RemoteRegion,
        arrival: asyncio.Future[int],
        timeout_s: float,
        traffic_class: TrafficClass,
    ) -> None:
        """Returns when all has come, or raises why it does not."""
        request = FetchRequest(
            asker=self._asker,
            region=region,
            runs=[ChainRun(start=piece.start, hashes=piece.hashes) for piece in share.pieces],
            pin_id=share.pin.pin_id if share.pin.held else 0,
            traffic_class=traffic_class,
            timeout_s=timeout_s,
        )
        source = share.source
        asking = asyncio.create_task(self._ask(share, encode(request), timeout_s), name=f"fetch at {source.worker_id}")
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[gone] = source.worker_id
        try:
            first: set[asyncio.Future[Any]] = {asking, arrival, gone}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                arrival.result()
                share.pin.taken()  # whoever has written has given it back
                return
            if asking.done():
                asking.result()
                raise KVError(f"{source.worker_id} says that it has written, and nothing has come")
            raise WorkerLost(f"{source.worker_id} left while it wrote", worker=source.worker_id, role=source.role)
        finally:
            del self._waiting[gone]
            asking.cancel()
            await all_ended([asking])

    async def _ask(self, share: Share, request: bytes, timeout_s: float) -> FetchReply:
        """Its answer. Where there is none the pin stays ours to give back: whether it got there isn't known."""
        data = await self._bus.request(
            share.source.subject, request, timeout_s=timeout_s + 1.0, headers=headers_of(share.span)
        )
        share.pin.taken()
        return decode_as(FetchReply, data)

    async def _close(self, lease: Lease, receiver: Receiver, arrival: asyncio.Future[int]) -> None:
        """The end of the lease: committed, or fenced."""
        if not (arrival.done() and arrival.exception() is None):
            await receiver.revoke(lease.lease_id, lease.epoch)
        self._leases.revoke(lease.lease_id, lease.epoch)


def _cut(found: Found, block_ids: Sequence[int]) -> Found:
    """Raises KVError for more blocks than were found."""
    if len(block_ids) > len(found):
        raise KVError(
            f"{len(block_ids)} blocks to fetch to, {len(found)} were found",
            num_blocks=len(block_ids),
            expected=len(found),
        )
    return found.beginning(len(block_ids))


def _shares(found: Found, block_ids: Sequence[int]) -> list[Share]:
    """By pin, each with its blocks in the order of its pieces."""
    shares: dict[Pin, Share] = {}
    at = 0
    for piece in found.pieces:
        share = shares.setdefault(piece.pin, Share(piece.pin))
        share.pieces.append(piece)
        share.block_ids += block_ids[at : at + len(piece)]
        at += len(piece)
    return list(shares.values())
