"""Asking all that may have the next blocks of a chain, at once, until a deadline."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Sequence

from distserve.bus.base import Bus
from distserve.errors import BusTimeout, DistServeError, NoResponders
from distserve.kv.hashing import pack
from distserve.kv.placement import segment_key, segments
from distserve.messages import TIERS, BlocksReleased, ChainRun, PrefixReply, PrefixRequest, decode_as, encode
from distserve.telemetry import NO_SPAN, Span, headers_of
from distserve.worker.store.answers import Answer, Asked, Segment, put_together, settled
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.failing import FailingTiers
from distserve.worker.store.found import Found, Piece, Pin, Source
from distserve.worker.store.letters import Letters
from distserve.worker.store.nodes import Nodes
from distserve.worker.store.traced import asking, followed, of_answer

log = logging.getLogger(__name__)

MAX_SEGMENTS = 24  # in one question: under 64 KiB of hashes
_SLOWEST = len(TIERS) - 1
LATE_S = 2.0  # after the deadline an answer is still taken, to give its pin back


class Lookups:
    """Every segment is asked for at the nodes that may have it, its owner and as many more as hold replicas, and at one
    decode worker. A dead node is not asked, and the next in rank stands in; one that is silent is a miss at the
    deadline, and left out for a while (nodes.py). So is what fetches have failed to bring (failing.py)."""

    def __init__(
        self,
        bus: Bus,
        nodes: Nodes,
        failing: FailingTiers,
        letters: Letters,
        counts: StoreCounts,
        *,
        asker: str,
        fingerprint: str,
        timeout_s: float,
        pin_s: float,
        replicas: int,
    ) -> None:
        """replicas: nodes that hold a hot or pinned segment, the owner included."""
        self._bus = bus
        self._nodes = nodes
        self._failing = failing
        self._letters = letters
        self._counts = counts
        self._asker = asker
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s
        self._pin_s = pin_s
        self._replicas = replicas
        self._asking: set[asyncio.Task[PrefixReply | None]] = set()  # those that nobody waits for any more, too

    async def find(self, hashes: Sequence[bytes], first: int, stop: int, holder: str, span: Span = NO_SPAN) -> Found:
        """Of blocks [first, stop) of the chain with these hashes, from depth 0. Never raises but CancelledError; what
        has been pinned in vain is given back."""
        asked = [Asked(Segment(d.start, pack(hashes[d.start : d.stop]))) for d in segments(first, stop)]
        tasks = self._ask_all(asked, hashes, holder, span)
        if not tasks:
            return Found(first)
        self._counts.num_lookups += 1
        self._counts.num_sought_blocks += stop - first
        pins: list[Pin] = []
        waiting = set(tasks)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            while waiting and not settled(asked):
                left_s = deadline - asyncio.get_running_loop().time()
                done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    pins.append(self._note(tasks[task], task.result()))
            pieces = self._to_be_had(put_together(asked))
        except asyncio.CancelledError:
            self._late(waiting, tasks, silent=False)
            self.give_back(pins)
            raise
        self._late(waiting, tasks, silent=not settled(asked))
        used = {piece.pin for piece in pieces}
        self.give_back([pin for pin in pins if pin not in used])
        found = Found(first, pieces, tuple(used))
        self._counts.num_hit_blocks.update(found.tiers)
        return found

    def give_back(self, pins: Sequence[Pin]) -> None:
        for pin in pins:
            if pin.taken():
                self._letters.post(pin.source.subject, BlocksReleased(asker=self._asker, pin_id=pin.pin_id))

    async def stop(self) -> None:
        """Late answers are waited for no more: their pins end by their time."""
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(set(self._asking), timeout=LATE_S)

    # ------------------------------------------------------------ asking

    def _ask_all(
        self, asked: Sequence[Asked], hashes: Sequence[bytes], holder: str, span: Span
    ) -> dict[asyncio.Task[PrefixReply | None], tuple[Source, list[Asked]]]:
        """One question for each source, more only where it would be too long."""
        of: dict[Source, list[Asked]] = {}
        if holder and (worker := self._nodes.worker(holder)) is not None:
            of[worker] = list(asked)
        for one in asked:
            for node in self._nodes.owners(segment_key(hashes, one.segment.start), self._replicas):
                of.setdefault(Source("kvstore", node), []).append(one)
        tasks: dict[asyncio.Task[PrefixReply | None], tuple[Source, list[Asked]]] = {}
        for source, about in of.items():
            self._nodes.asking(source.worker_id)
            for i in range(0, len(about), MAX_SEGMENTS):
                part = about[i : i + MAX_SEGMENTS]
                task = asyncio.create_task(self._asked(source, part, span), name=f"lookup at {source.worker_id}")
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
                tasks[task] = source, part
                for one in part:
                    one.num_waiting += 1
        return tasks

    async def _asked(self, source: Source, about: Sequence[Asked], parent: Span) -> PrefixReply | None:
        """None if it has no answer. Its part of the trace ends when it has, or when nobody will take it any more."""
        span = asking("lookup", parent, sum(len(one.segment) for one in about), source)
        reply: PrefixReply | None = None

        async def ask() -> DistServeError | None:
            nonlocal reply
            try:
                reply = await self._ask(source, about, span)
            except DistServeError as e:
                log.info("%s has no answer to a lookup: %s", source.worker_id, e)
                return e
            return None

        await followed(span, ask(), lambda: {} if reply is None else of_answer(reply))
        return reply

    async def _ask(self, source: Source, about: Sequence[Asked], span: Span) -> PrefixReply:
        """Raises why there is no answer."""
        request = PrefixRequest(
            asker=self._asker,
            layout=self._fingerprint,
            runs=[ChainRun(start=one.segment.start, hashes=one.segment.hashes) for one in about],
            pin_s=self._pin_s,
        )
        asked_at = time.monotonic()
        try:
            reply = decode_as(
                PrefixReply,
                await self._bus.request(
                    source.subject, encode(request), timeout_s=self._timeout_s + LATE_S, headers=headers_of(span)
                ),
            )
        except DistServeError as e:
            if isinstance(e, BusTimeout | NoResponders):
                self._nodes.was_silent(source.worker_id)
            raise
        self._nodes.answered(source.worker_id, time.monotonic() - asked_at)
        if len(reply.num_found) != len(about):
            log.warning(
                "%s was asked for %d runs and answers for %d", source.worker_id, len(about), len(reply.num_found)
            )
            return PrefixReply(num_found=[0] * len(about), pin_id=reply.pin_id)
        return reply

    def _note(self, to: tuple[Source, list[Asked]], reply: PrefixReply | None) -> Pin:
        """An answer, or that there is none, about each segment."""
        source, about = to
        pin = Pin(source, 0 if reply is None else reply.pin_id)
        for i, one in enumerate(about):
            one.num_waiting -= 1
            num = 0 if reply is None else min(reply.num_found[i], len(one.segment))
            if reply is not None and num:
                told = reply.tiers[i][:num] if i < len(reply.tiers) else b""
                # What it does not say, or what is no tier here, is taken for the slowest.
                tiers = bytes(min(place, _SLOWEST) for place in told).ljust(num, bytes([_SLOWEST]))
                one.answers.append(Answer(tiers[: self._failing.usable(source.worker_id, tiers)], pin))
        return pin

    def _to_be_had(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Without what another prompt has begun to try again since the answers came; this one tries the rest."""
        usable: list[Piece] = []
        for piece in pieces:
            num = self._failing.usable(piece.pin.source.worker_id, piece.tiers)
            if num:
                usable.append(piece.beginning(num))
            if num < len(piece):
                break
        for pin in {piece.pin for piece in usable}:
            tiers = b"".join(piece.tiers for piece in usable if piece.pin is pin)
            self._failing.trying(pin.source.worker_id, tiers)
        return tuple(usable)

    def _late(
        self,
        waiting: set[asyncio.Task[PrefixReply | None]],
        tasks: dict[asyncio.Task[PrefixReply | None], tuple[Source, list[Asked]]],
        *,
        silent: bool,
    ) -> None:
        """Nobody waits for these any more. silent: they had their time."""
        for task in waiting:
            source = tasks[task][0]
            if silent and not task.done():
                self._counts.num_silent += 1
                self._nodes.was_silent(source.worker_id)
                log.warning("%s did not answer a lookup within %.3g s", source.worker_id, self._timeout_s)
            task.add_done_callback(functools.partial(self._too_late, source))

    def _too_late(self, source: Source, task: asyncio.Task[PrefixReply | None]) -> None:
        if not task.cancelled() and (reply := task.result()) is not None:
            self.give_back([Pin(source, reply.pin_id)])
