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
    BusTimeout,
    DistServeError,
    Draining,
    NoResponders,
    NoWorker,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from distserve.messages import SubmitReply, SubmitRequest, decode_as, encode
from distserve.telemetry import inject
from distserve_gateway.affinity import Affinity
from distserve_gateway.costs import Demand
from distserve_gateway.live import LiveSequence
from distserve_gateway.routing import RETRY_AFTER_S, Kind, Route, choose
from distserve_gateway.streams import Streams

log = logging.getLogger(__name__)

PAUSE_S = 0.1  # after every worker has refused


class Dispatch:
    """Every try is an attempt of its own, so that one that got through unseen is void.

    submit_timeout_s: for all tries of a sequence; reply_timeout_s: for one worker's answer; max_local_prefill_tokens:
    what a decode worker may compute of a prompt that it holds; on_route: told of every route that was taken.
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
    ) -> None:
        self._bus = bus
        self._streams = streams
        self._affinity = affinity
        self._max_local_prefill_tokens = max_local_prefill_tokens
        self._on_route = on_route
        self._submit_timeout_s = submit_timeout_s
        self._reply_timeout_s = reply_timeout_s

    async def submit(self, sequence: LiveSequence) -> None:
        """Returns once a worker has accepted it. It must be live already (Streams.add).

        Raises NoWorker at once if a role has none, Overloaded or NoWorker if none accepted in time, InvalidRequest
        and its kinds if a worker finds the request at fault, and what ended it if something did meanwhile (Cancelled,
        DeadlineExceeded, Draining).
        """
        workers = self._streams.workers
        give_up = time.monotonic() + self._submit_timeout_s
        excluded: set[str] = set()
        refusal: DistServeError | None = None
        demand = self._demand(sequence)
        while True:
            if sequence.done:
                _raise_end(sequence)
                return
            try:
                route = choose(workers.snapshot, workers.model, workers.load, excluded, demand)
            except NoWorker:
                if refusal is None or not excluded:
                    raise
                if time.monotonic() + PAUSE_S > give_up:
                    raise self._final(refusal) from refusal
                excluded.clear()
                await asyncio.sleep(PAUSE_S)
                continue
            left = give_up - time.monotonic()
            if left <= 0:
                raise self._final(refusal or BusTimeout("no worker answered in time"))
            try:
                await self._try(sequence, route, min(left, self._reply_timeout_s))
                return
            except PayloadTooLarge:
                raise
            except DistServeError as e:
                if route.kind == "local":  # it may have evicted what it held, or be busy: prefill takes it then
                    demand = replace(demand, max_local_tokens=0)
                    if isinstance(e, BusError | Draining):
                        refusal = e
                        excluded.add(route.decode_worker)
                    continue
                if not isinstance(e, Unavailable | BusError):
                    raise
                refusal = e
                excluded.add(route.first_worker)

    async def _try(self, sequence: LiveSequence, route: Route, timeout_s: float) -> None:
        role = "prefill" if route.prefill_worker else "decode"
        log.debug("%s output %d: %s", sequence.request_id, sequence.index, route)
        sequence.place(route.prefill_worker, route.decode_worker)
        self._streams.placed(sequence, route.num_uncached, local=route.kind == "local")
        request = SubmitRequest(
            key=sequence.key,
            model=self._streams.workers.model,
            gateway=self._streams.gateway_id,
            token_ids=sequence.prompt_ids + sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling,
            decode_worker=route.decode_worker if route.prefill_worker else None,
            traffic_class=sequence.traffic_class,
            deadline_s=max(0.0, sequence.deadline - time.monotonic()),
            cache_salt=sequence.cache_salt,
            conversation=sequence.conversation,
            holder=route.holder,
        )
        try:
            reply = await self._bus.request(
                subjects.worker(role, route.first_worker), encode(request), timeout_s=timeout_s, headers=inject()
            )
            decode_as(SubmitReply, reply)
        except DistServeError as e:
            if sequence.done:  # ended while we waited; Streams has told the worker
                _raise_end(sequence)
                return
            if sequence.token_ids:  # so it was taken, whatever became of the reply
                self._accepted(sequence, route)
                return
            self._streams.displaced(sequence, cancel=not isinstance(e, NoResponders | Unavailable))
            sequence.withdraw()
            raise
        if not sequence.done:
            self._accepted(sequence, route)

    def _accepted(self, sequence: LiveSequence, route: Route) -> None:
        self._streams.accepted(sequence)
        self._affinity.note(sequence.cache_salt, sequence.conversation, sequence.prefill_worker, sequence.decode_worker)
        self._on_route(route.kind)

    def _demand(self, sequence: LiveSequence) -> Demand:
        last = self._affinity.last(sequence.cache_salt, sequence.conversation)
        return Demand(sequence.num_prompt_tokens, sequence.held, last, self._max_local_prefill_tokens)

    def _final(self, refusal: DistServeError) -> DistServeError:
        model = self._streams.workers.model
        if isinstance(refusal, Overloaded | Draining):
            return Overloaded(
                f"every worker of model {model!r} is busy: {refusal.message}",
                retry_after_s=refusal.fields.get("retry_after_s") or RETRY_AFTER_S,
            )
        return NoWorker(
            f"no worker of model {model!r} answers: {refusal.message}", model=model, retry_after_s=RETRY_AFTER_S
        )


def _raise_end(sequence: LiveSequence) -> None:
    """Raise what ended it; return if its last token did, whatever became of the reply to its submission."""
    if sequence.error is not None:
        raise sequence.error
