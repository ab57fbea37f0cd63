"""Finds a pair of workers that takes a sequence, within a deadline."""

import asyncio
import time

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import (
    BusError,
    BusTimeout,
    DistServeError,
    Draining,
    InvalidRequest,
    NoResponders,
    NoWorker,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
)
from distserve.messages import SubmitReply, SubmitRequest, decode_as, encode
from distserve.telemetry import inject
from distserve_gateway.live import LiveSequence
from distserve_gateway.routing import RETRY_AFTER_S, Route, choose
from distserve_gateway.streams import Streams

PAUSE_S = 0.1  # after every worker has refused


class Dispatch:
    """Every try is an attempt of its own, so that one that got through unseen is void.

    submit_timeout_s: for all tries of a sequence; reply_timeout_s: for one worker's answer.
    """

    def __init__(
        self, bus: Bus, streams: Streams, *, submit_timeout_s: float = 5.0, reply_timeout_s: float = 2.0
    ) -> None:
        self._bus = bus
        self._streams = streams
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
        while True:
            if sequence.done:
                _raise_end(sequence)
                return
            try:
                route = choose(workers.snapshot, workers.model, workers.in_flight, excluded)
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
            except (InvalidRequest, PayloadTooLarge):
                raise
            except (Unavailable, BusError) as e:
                refusal = e
                excluded.add(route.prefill_worker or route.decode_worker)

    async def _try(self, sequence: LiveSequence, route: Route, timeout_s: float) -> None:
        role = "prefill" if route.prefill_worker else "decode"
        worker = route.prefill_worker or route.decode_worker
        sequence.place(route.prefill_worker, route.decode_worker)
        self._streams.placed(sequence)
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
        )
        try:
            reply = await self._bus.request(
                subjects.worker(role, worker), encode(request), timeout_s=timeout_s, headers=inject()
            )
            decode_as(SubmitReply, reply)
        except DistServeError as e:
            if sequence.done:  # ended while we waited; Streams has told the worker
                _raise_end(sequence)
                return
            if sequence.token_ids:  # so it was taken, whatever became of the reply
                self._streams.accepted(sequence)
                return
            self._streams.displaced(sequence, cancel=not isinstance(e, NoResponders | Unavailable))
            sequence.withdraw()
            raise
        if not sequence.done:
            self._streams.accepted(sequence)

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
