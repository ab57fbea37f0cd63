"""Moves one sequence's KV to a decode worker while it is being computed, and its state when it is.

Two threads meet here. The engine's thread reports layers as they are written (`layers_ready`); the event loop asks
for the lease, opens the transfer and commits. Whatever became ready before the lease came is written when it does;
all spans are remembered, so that a hand-over that fails can go to another decode worker from the same blocks. Each
decode worker is sent what it lacks: blocks at the beginning that it has already are left out when a span is written.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import (
    AlreadyAdopted,
    BusError,
    BusTimeout,
    DistServeError,
    KVError,
    NoWorker,
    TransportError,
    TransportUnavailable,
    Unavailable,
    WorkerLost,
)
from distserve.messages import LeaseGrant, LeaseRelease, LeaseRequest, decode_as, encode
from distserve.transport.base import Sender, Span, Transfer
from distserve.worker.in_use import InUse
from distserve_prefill.attempts import Attempts
from distserve_prefill.beyond import beyond
from distserve_prefill.fallbacks import Fallbacks
from distserve_prefill.promise import after

log = logging.getLogger(__name__)

# Failures that another decode worker, or a later attempt, may not have.
_MAY_PASS = (TransportError, Unavailable, BusError, WorkerLost, KVError)


@dataclass(frozen=True, slots=True)
class Shipped:
    """What a finished hand-over was: for timings and metrics."""

    decode_worker: str
    kind: str
    num_bytes: int
    seconds: float  # from the call of commit() to the acknowledged adoption


class Handoff:
    def __init__(
        self,
        bus: Bus,
        ask: LeaseRequest,
        candidates: Callable[[set[str]], str | None],
        sender_for: Callable[[str], Sender],
        fallbacks: Fallbacks,
        in_use: InUse,
        *,
        connect_timeout_s: float,
        commit_timeout_s: float,
        give_up_s: float,
        deadline: float = math.inf,
        attempts: Attempts | None = None,
    ) -> None:
        """`ask.transports` is filled in for each decode worker, from `fallbacks`; of `ask.slo`, which counts from now
        on, what is left when it is asked; it may wait `ask.wait_s`, but not beyond the `deadline` (time.monotonic()).
        `candidates(tried)`: the decode worker to ask next, None if there is none left. `sender_for(kind)`: the sender
        for a granted endpoint's kind. `give_up_s`: how long to try again. `attempts`: what is told of each."""
        self._bus = bus
        self._ask = ask
        self._made_at = time.monotonic()
        self._deadline = deadline
        self._candidates = candidates
        self._sender_for = sender_for
        self._fallbacks = fallbacks
        self._in_use = in_use
        self._attempts = attempts or Attempts()
        self._connect_timeout_s = connect_timeout_s
        self._commit_timeout_s = commit_timeout_s
        self._lock = threading.Lock()
        self._spans: list[Span] = []  # all that is ready, in order
        self._computed = False  # nothing comes after those
        self._transfer: Transfer | None = None
        self._num_hit_blocks = 0  # at the beginning of the prompt, not wanted by that transfer
        self._give_up_s = give_up_s
        self._give_up_at = math.inf
        self._pause_s = 0.05
        self._tried: set[str] = set()  # in this round
        self._asked_again: set[str] = set()
        self._gone: set[str] = set()  # left the registry while this depended on them
        self._parting: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[Transfer] | None = None
        self._asking: asyncio.Task[bytes] | None = None
        self._grant: LeaseGrant | None = None
        self._last_failure: DistServeError | None = None  # of an attempt: what is raised when nobody is left to ask
        self.decode_worker: str | None = None

    def start(self) -> None:
        """Ask for the lease now, beside the forward pass. Failures surface in commit()."""
        self._opening = asyncio.create_task(self._open(), name=f"lease {self._ask.key}")
        self._opening.add_done_callback(_retrieved)

    def layers_ready(self, span: Span, *, awaited: bool = False) -> None:
        """Any thread: these layers of these blocks are final. The span's targets are block numbers of the prompt; each
        layer of each block comes once. awaited: they are the prompt's last."""
        with self._lock:
            self._spans.append(span)
            self._computed = awaited
            if self._transfer is not None:
                self._write(self._transfer, (span,))

    def _write(self, transfer: Transfer, spans: Sequence[Span]) -> None:
        """What its decode worker lacks of them. The lock is held."""
        wanted = [rest for span in spans if (rest := beyond(span, self._num_hit_blocks)) is not None]
        if wanted:
            transfer.write(wanted, awaited=self._computed)

    async def commit(self, state: Callable[[], bytes]) -> Shipped:
        """Finish: every span written, then the state (made just before it is sent); returns when decode has adopted.

        A failure that another decode worker, or the same one a little later, may not have is tried again, until
        give_up_s after the first one: nothing is computed twice for it. Afterwards, or when it raises, the blocks are
        read no more.
        """
        started = time.monotonic()
        while True:
            transfer: Transfer | None = None
            try:
                assert self._opening is not None
                transfer = await self._opening
                num_bytes = await transfer.commit(state(), timeout_s=self._commit_timeout_s)
            except AlreadyAdopted as e:
                log.info("hand-over of %s had worked: %s", self._ask.key, e)
                return self._shipped(0, started)
            except _MAY_PASS as e:
                self._attempts.failed(e)
                await self._failed(transfer, e)
                self.start()
                continue
            except Exception as e:
                self._attempts.failed(e)
                raise
            return self._shipped(num_bytes, started)

    def _shipped(self, num_bytes: int, started: float) -> Shipped:
        assert self.decode_worker is not None
        self._attempts.end()
        kind = self._grant.region.endpoint.kind if self._grant is not None else ""
        self._grant = None  # its lease has ended
        return Shipped(self.decode_worker, kind, num_bytes, time.monotonic() - started)

    async def _failed(self, transfer: Transfer | None, error: DistServeError) -> None:
        """After one attempt: let go of it and get ready for the next, or raise the error again."""
        worker = self.decode_worker
        log.warning("hand-over of %s to %s failed: %s", self._ask.key, worker, error)
        self._last_failure = error
        await self._let_go(str(error))
        self._give_up_at = min(self._give_up_at, time.monotonic() + self._give_up_s)
        if transfer is not None and worker is not None and worker not in self._asked_again | self._gone:
            # It may have adopted, with its answer lost: it says so when asked again, and two must not decode this.
            self._asked_again.add(worker)
            self._tried.discard(worker)
            return
        if self._candidates(self._tried | self._gone) is None:
            if self._candidates(set(self._gone)) is None or time.monotonic() >= self._give_up_at:
                raise error
            self._tried.clear()
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(1.0, 2 * self._pause_s)

    async def abort(self, reason: str) -> None:
        """Give up. Idempotent; afterwards the blocks are read no more. Never raises."""
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
        await self._let_go(reason)
        self._attempts.end()

    def peer_gone(self, worker_id: str) -> None:
        """The registry says that a decode worker is gone: wait neither for its grant nor for its answer to a commit,
        and ask it no more: a frozen one would take the question and say nothing."""
        if worker_id != self.decode_worker or worker_id in self._gone:
            return
        self._gone.add(worker_id)
        if self._asking is not None:
            self._asking.cancel()
        elif (transfer := self._transfer) is not None:  # its end wakes commit()
            self._parting = asyncio.create_task(transfer.abort(f"decode worker {worker_id} is gone"))

    async def _open(self) -> Transfer:
        """A lease and a transfer on it, from the first candidate that gives both."""
        last = self._last_failure
        while (worker := self._candidates(self._tried | self._gone)) is not None:
            self.decode_worker = worker
            self._tried.add(worker)
            try:
                transfer = await self._open_at(worker)
            except asyncio.CancelledError:
                await self._release("cancelled")
                raise
            except AlreadyAdopted:
                raise
            except _MAY_PASS as e:
                self._attempts.failed(e)
                log.warning("no lease for %s from %s: %s", self._ask.key, worker, e)
                await self._release(str(e))
                last = e
                continue
            assert self._grant is not None
            with self._lock:
                self._transfer, self._num_hit_blocks = transfer, self._grant.num_hit_blocks
                self._write(transfer, self._spans)
            return transfer
        raise last or NoWorker("no decode worker can take the sequence", role="decode", retry_after_s=1.0)

    async def _open_at(self, worker: str) -> Transfer:
        """By the transport that decode chooses; where that does not reach it and another may stand in, asked again."""
        while True:
            self._grant = None
            kinds = self._fallbacks.kinds_for(worker)
            kind = kinds[0] if len(kinds) == 1 else ""
            try:
                self._grant = grant = await self._ask_for_lease(worker, kinds)
                self._attempts.granted(grant)
                kind = grant.region.endpoint.kind
                sender = self._sender_for(kind)
                transfer = await sender.open(
                    grant.region,
                    timeout_s=self._connect_timeout_s,
                    traffic_class=self._ask.traffic_class,
                    peer=worker,
                )
                self._attempts.opened(transfer)
            except TransportUnavailable as e:
                self._attempts.failed(e)
                if worker in self._gone or not self._fallbacks.failed(worker, kind, e):
                    raise
                self._in_use.drop(worker, kind)
                await self._release(str(e))
                if worker in self._gone:  # meanwhile: a frozen one would take the question and say nothing
                    raise
                continue
            if worker in self._gone:  # while it connected, when peer_gone() found nothing to end
                await transfer.abort(f"decode worker {worker} is gone")
                raise WorkerLost(f"decode worker {worker} left while it was connected to", worker=worker, role="decode")
            if self._fallbacks.worked(worker, kind):
                self._in_use.forget(worker)  # what stood in for it, and why
            # Decode knows only what it was offered.
            left_out = [k for k in self._fallbacks.failing(worker) if k not in kinds]
            why = [grant.reason, *(f"{k} failed and is left out for now" for k in left_out)]
            self._in_use.note(worker, kind, "; ".join(why))
            return transfer

    async def _ask_for_lease(self, worker: str, kinds: list[str]) -> LeaseGrant:
        """Raises WorkerLost if the worker leaves the registry meanwhile: its answer may never come. Whatever ends
        the asking without an answer is told to the worker, which may hold the request in its queue."""
        subject = subjects.worker("decode", worker)
        now = time.monotonic()
        wait_s = max(0.0, min(self._ask.wait_s, self._deadline - now))
        slo = after(self._ask.slo, now - self._made_at)
        ask = msgspec.structs.replace(self._ask, transports=kinds, slo=slo, wait_s=wait_s)
        headers = self._attempts.ask(worker)
        request = self._bus.request(subject, encode(ask), timeout_s=ask.wait_s + 2.0, headers=headers)
        self._asking = asking = asyncio.ensure_future(request)
        try:
            await asyncio.wait({asking})
            if asking.cancelled():
                raise WorkerLost(f"decode worker {worker} left before it gave a lease", worker=worker, role="decode")
            return decode_as(LeaseGrant, asking.result())
        except (asyncio.CancelledError, WorkerLost, BusTimeout):
            await self._publish(worker, LeaseRelease(key=self._ask.key, reason="asks no more"))
            raise
        finally:
            self._asking = None
            asking.cancel()

    async def _let_go(self, reason: str) -> None:
        """End the transfer, if there is one, and the lease. The transfer is forgotten only once it has ended: when
        this is cancelled, or runs twice, every caller of abort() still waits for that end."""
        if (transfer := self._transfer) is not None:
            await transfer.abort(reason)
            with self._lock:
                if self._transfer is transfer:
                    self._transfer = None
        await self._release(reason)

    async def _release(self, reason: str) -> None:
        """Tell the decode worker that nothing more comes under the grant (an aborted transfer says so too)."""
        grant, self._grant = self._grant, None
        if grant is not None and self.decode_worker is not None:
            region = grant.region
            release = LeaseRelease(key=self._ask.key, lease_id=region.lease_id, epoch=region.epoch, reason=reason)
            await self._publish(self.decode_worker, release)

    async def _publish(self, worker: str, release: LeaseRelease) -> None:
        try:
            await self._bus.publish(subjects.worker("decode", worker), encode(release))
        except BusError as e:
            log.warning("release of a lease not sent, it will expire: %s", e)


def _retrieved(task: asyncio.Task[Transfer]) -> None:
    if not task.cancelled():
        task.exception()
