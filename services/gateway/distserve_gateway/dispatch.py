"""Finds workers that take a sequence, within a deadline."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import (
    BusError,
    DistServeError,
    NoResponders,
    NoWorker,
    PayloadTooLarge,
    SloUnattainable,
    Unavailable,
)
from distserve.messages import Slo, SubmitReply, SubmitRequest, decode_as, encode
from distserve.telemetry import headers_of
from distserve_gateway.affinity import Affinity
from distserve_gateway.costs import Demand
from distserve_gateway.live import LiveSequence
from distserve_gateway.route import Kind, Route
from distserve_gateway.routing import choose
from distserve_gateway.sending import sending
from distserve_gateway.streams import Streams
from distserve_gateway.tries import PAUSE_S, Tries

log = logging.getLogger(__name__)


class Dispatch:
    """Every try is an attempt of its own, so that one that got through unseen is void.

    submit_timeout_s: for all tries of a sequence; reply_timeout_s: for one worker's answer; max_local_prefill_tokens:
    what a decode worker may compute itself while there are prefill workers; on_route: told of every route that was
    taken; on_late: of every sequence that was refused for its promise, and whether a worker was asked; on_retry: of
    every try after a sequence's first, with the code of the error that the one before ended with.
    """

    def __init__(
        self,
        bus: Bus,
        streams: Streams,
        affinity: Affinity,
        *,
        submit_timeout_s: float = 5.0,
        reply_timeout_s: float = 2.0,
        max_local_prefill_tokens: int = 0,
        on_route: Callable[[Kind], None] = lambda kind: None,
        on_late: Callable[[bool], None] = lambda asked: None,
        on_retry: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._bus = bus
        self._streams = streams
        self._affinity = affinity
        self._max_local_prefill_tokens = max_local_prefill_tokens
        self._on_route = on_route
        self._on_late = on_late
        self._on_retry = on_retry
        self._submit_timeout_s = submit_timeout_s
        self._reply_timeout_s = reply_timeout_s
        self._late: tuple[str, SloUnattainable] = "", SloUnattainable("")  # the last request so refused

    async def submit(self, sequence: LiveSequence) -> None:
        """Returns once a worker has accepted it. It must be live already (Streams.add).

        Raises NoWorker at once if a role has none, SloUnattainable as soon as its first token can't come as promised,
        Overloaded or NoWorker if none accepted in time, InvalidRequest and its kinds if a worker finds the request at
        fault, and what ended it if something did meanwhile (Cancelled, DeadlineExceeded, Draining).
        """
        model, standing = self._streams.workers.model, sequence.standing
        tries = Tries(model, sequence.terms, due=standing.due, give_up=time.monotonic() + self._submit_timeout_s)
        try:
            request_id, refusal = self._late
            if request_id == sequence.request_id:  # lost with its other output: nothing more is looked into for it
                raise SloUnattainable(refusal.message, **refusal.fields)
            await self._submit(sequence, tries)
        except SloUnattainable as e:
            self._late = sequence.request_id, SloUnattainable(e.message, **e.fields)  # without e's frames, and prompt
            self._on_late(tries.was_refused)
            raise

    async def _submit(self, sequence: LiveSequence, tries: Tries) -> None:
        demand, failed = self._demand(sequence), ""
        while True:
            if sequence.done:
                _raise_end(sequence)
                return
            now = time.monotonic()
            tries.check(now)
            try:
                route = self._choose(tries, demand, now)
            except NoWorker as e:
                tries.again(e, now)
                await asyncio.sleep(PAUSE_S)
                continue
            if failed:
                self._on_retry(failed)
            try:
                await self._try(sequence, route, min(tries.left_s(now), self._reply_timeout_s))
                return
            except PayloadTooLarge:
                raise
            except DistServeError as e:
                failed = e.code
                if route.is_favour:  # it may have evicted what it held, or be busy: prefill takes it then
                    demand = replace(demand, max_local_tokens=0)
                    tries.declined(route, e)
                elif isinstance(e, Unavailable | BusError | SloUnattainable):
                    tries.refused(route, e)
                else:
                    raise

    def _choose(self, tries: Tries, demand: Demand, now: float) -> Route:
        """Raises NoWorker, and SloUnattainable where nobody is left to ask who would be in time."""
        workers = self._streams.workers
        snapshot = workers.snapshot
        if tries.absent:
            snapshot = {name: info for name, info in snapshot.items() if name not in tries.absent}
        try:
            return choose(snapshot, workers.model, workers.load, tries.excluded, demand, now)
        except SloUnattainable as e:
            raise tries.soonest(e) from None

    async def _try(self, sequence: LiveSequence, route: Route, timeout_s: float) -> None:
        role = "prefill" if route.prefill_worker else "decode"
        log.debug("%s output %d: %s", sequence.request_id, sequence.index, route)
        sequence.place(route.prefill_worker, route.decode_worker)
        self._streams.placed(sequence, route.num_uncached, local=route.is_local)
        now, terms = time.monotonic(), sequence.terms
        ttft_s = None if terms.ttft_s is None else sequence.standing.due - now
        request = SubmitRequest(
            key=sequence.key,
            model=self._streams.workers.model,
            gateway=self._streams.gateway_id,
            token_ids=sequence.prompt_ids + sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling,
            decode_worker=route.decode_worker if route.prefill_worker else None,
            traffic_class=sequence.traffic_class,
            deadline_s=max(0.0, sequence.deadline - now),
            cache_salt=sequence.cache_salt,
            conversation=sequence.conversation,
            slo=Slo(priority=terms.priority, ttft_s=ttft_s, tpot_s=terms.tpot_s),
            may_queue=route.kind == "alone",
            holder=route.holder,
        )
        subject = subjects.worker(role, route.first_worker)
        try:
            with sending(sequence, route, role, subject) as span:
                data = await self._bus.request(subject, encode(request), timeout_s=timeout_s, headers=headers_of(span))
                reply = decode_as(SubmitReply, data)
        except DistServeError as e:
            if sequence.done:  # ended while we waited; Streams has told the worker
                _raise_end(sequence)
                return
            if sequence.token_ids:  # so it was taken, whatever became of the reply
                self._accepted(sequence, route)
                return
            self._streams.displaced(sequence, cancel=not isinstance(e, NoResponders | Unavailable | SloUnattainable))
            sequence.withdraw()
            raise
        if reply.ttft_s is not None and ttft_s is not None and sequence.sent is not None:
            _, sent = sequence.sent
            sent.ready_at = time.monotonic() + reply.ttft_s
        if not sequence.done:
            self._accepted(sequence, route)
        elif sequence.error is None:  # its last token overtook the reply
            self._on_route(route.kind)

    def _accepted(self, sequence: LiveSequence, route: Route) -> None:
        self._streams.accepted(sequence)
        self._affinity.note(sequence.cache_salt, sequence.conversation, sequence.prefill_worker, sequence.decode_worker)
        self._on_route(route.kind)

    def _demand(self, sequence: LiveSequence) -> Demand:
        last = self._affinity.last(sequence.cache_salt, sequence.conversation)
        return Demand(
            sequence.num_prompt_tokens,
            sequence.held,
            last,
            self._max_local_prefill_tokens,
            sequence.standing,
            sequence.terms.ttft_s,
            sequence.terms.tpot_s,
        )


def _raise_end(sequence: LiveSequence) -> None:
    """Raise what ended it; return if its last token did, whatever became of the reply to its submission."""
    if sequence.error is not None:
        raise sequence.error
