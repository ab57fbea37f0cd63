"""Asks after sequences that have been silent, and declares a worker lost when there is good reason to.

    decode is known to hold it, or did both phases -> ask decode
    else ask prefill; it is gone, or says `unknown` or `finished` -> ask decode, which has it now or nobody has

A worker counts as lost for a sequence after two questions without an answer (no responder, or a time-out with no
heartbeat or token meanwhile), when it does not know the sequence, or when the registry says it is gone and it does
not answer either. While the bus is cut, and for one TTL after, silence proves nothing.
"""

import asyncio
import logging
import time

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.errors import BusError, BusTimeout, DeadlineExceeded, DistServeError, NoResponders, PayloadTooLarge
from distserve.messages import SequenceStatus, StatusReply, StatusRequest, decode_as, encode
from distserve_gateway.live import LiveSequence
from distserve_gateway.streams import Streams

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 0.9  # two of them are longer than a beat, so a worker that lives is heard meanwhile
GONE_TIMEOUT_S = 0.3  # of a worker that the registry has given up
MAX_STRIKES = 2
MAX_SOFT_STRIKES = 8
MAX_KEYS = 256


class SilenceWatch:
    """run() it as a task next to Streams."""

    def __init__(self, bus: Bus, streams: Streams, *, ttl_s: float = 2.5) -> None:
        self._bus = bus
        self._streams = streams
        self._ttl_s = ttl_s
        self._trust_from = 0.0  # silence proves nothing before this
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Look at every live sequence several times within the silence that is allowed. Until cancelled."""
        tick_s = min(0.1, self._streams.silence_s / 5)
        try:
            while True:
                await asyncio.sleep(tick_s)
                try:
                    self._look(time.monotonic())
                except Exception:
                    log.exception("looking after silent streams failed")
        finally:
            for task in self._asking:
                task.cancel()

    def _look(self, now: float) -> None:
        connected = self._bus.connected
        if not connected:
            self._trust_from = now + self._ttl_s
        due: dict[tuple[str, str], list[LiveSequence]] = {}
        for sequence in self._streams:
            if now >= sequence.deadline:
                self._streams.fail(sequence, DeadlineExceeded("the request took longer than its deadline allows"))
            elif connected and sequence.accepted and not sequence.asking and now >= sequence.ask_at:
                due.setdefault((sequence.owner, sequence.owner_worker), []).append(sequence)
        for (role, worker), sequences in due.items():
            for i in range(0, len(sequences), MAX_KEYS):
                self._start(role, worker, sequences[i : i + MAX_KEYS])

    def _start(self, role: str, worker: str, sequences: list[LiveSequence]) -> None:
        task = asyncio.create_task(self._ask(role, worker, sequences))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, role: str, worker: str, sequences: list[LiveSequence]) -> None:
        asked_at = time.monotonic()
        for sequence in sequences:
            sequence.asking = True
        gone = not self._streams.workers.present(worker)
        request = StatusRequest(
            gateway=self._streams.gateway_id,
            sequences=[(sequence.key, len(sequence.token_ids)) for sequence in sequences],
        )
        by_key = {sequence.key: sequence for sequence in sequences}
        try:
            data = await self._bus.request(
                subjects.worker(role, worker),
                encode(request),
                timeout_s=GONE_TIMEOUT_S if gone else ANSWER_TIMEOUT_S,
            )
            reply = decode_as(StatusReply, data)
            self._streams.workers.heard(worker)
            for status in reply.sequences:
                sequence_asked = by_key.pop(status.key, None)
                if sequence_asked is not None:
                    self._answered(sequence_asked, role, worker, status)
            for sequence in by_key.values():  # left out of the answer
                self._answered(sequence, role, worker, SequenceStatus(sequence.key, "unknown"))
        except (NoResponders, BusTimeout) as e:
            for sequence in sequences:
                self._unanswered(sequence, role, worker, isinstance(e, NoResponders), asked_at)
        except PayloadTooLarge as e:
            self._too_large(role, worker, sequences, e)
        except BusError as e:
            log.info("could not ask %s worker %s after its sequences: %s", role, worker, e)
            self._later(sequences)
        except DistServeError as e:
            log.warning("%s worker %s answers a status request with an error: %s", role, worker, e)
            self._later(sequences)
        finally:
            for sequence in sequences:
                sequence.asking = False

    def _too_large(self, role: str, worker: str, sequences: list[LiveSequence], error: PayloadTooLarge) -> None:
        """What the worker has for these does not fit one message: ask for each alone; one alone can't be had."""
        if len(sequences) == 1:
            self._streams.fail(sequences[0], error)
            return
        for sequence in sequences:
            self._start(role, worker, [sequence])

    def _later(self, sequences: list[LiveSequence]) -> None:
        for sequence in sequences:
            sequence.ask_at = time.monotonic() + self._streams.silence_s

    def _answered(self, sequence: LiveSequence, role: str, worker: str, status: SequenceStatus) -> None:
        if sequence.done or sequence.attempt != status.key.attempt:
            return
        if status.chunk is not None:
            num_before = len(sequence.token_ids)
            self._streams.receive(status.chunk, worker)
            if sequence.done or len(sequence.token_ids) > num_before:
                return
        if (role, worker) != (sequence.owner, sequence.owner_worker):
            return  # it has moved on since the question: the answer says nothing of its new worker
        if sequence.suspect and status.phase in ("queued", "prefill", "handoff"):
            # Decode waits for what a lost prefill worker can't send; a commit that is being verified gets its time.
            sequence.ask_at = time.monotonic() + self._streams.silence_s / 2
            self._strike(sequence, at_most=MAX_STRIKES)
        elif status.phase not in ("unknown", "finished"):
            sequence.decode_seen = sequence.decode_seen or role == "decode"
            self._streams.note_life(sequence)
        elif role == "prefill":
            sequence.owner = "decode"  # handed over, or nobody has it: decode knows
            sequence.ask_at = 0.0
        else:
            log.info("%s worker %s says %s of %s", role, worker, status.phase, sequence.key)
            sequence.ask_at = time.monotonic() + self._streams.silence_s / 2
            self._strike(sequence, at_most=1 if status.phase == "unknown" else MAX_STRIKES)

    def _unanswered(self, sequence: LiveSequence, role: str, worker: str, no_responders: bool, asked_at: float) -> None:
        if sequence.done or sequence.last_heard > asked_at or sequence.owner != role:
            return
        now = time.monotonic()
        log.info(
            "%s worker %s does not answer for %s (%s)",
            role,
            worker,
            sequence.key,
            "nobody there" if no_responders else "time-out",
        )
        sequence.ask_at = now + self._streams.silence_s / 2 if no_responders else now
        if now < self._trust_from:
            return
        gone = not self._streams.workers.present(worker)
        if not no_responders and not gone and self._streams.workers.heard_since(worker, asked_at):
            sequence.soft_strikes += 1
            if sequence.soft_strikes < MAX_SOFT_STRIKES:
                return
            sequence.strikes = MAX_STRIKES
        self._strike(sequence, at_most=1 if gone else MAX_STRIKES)

    def _strike(self, sequence: LiveSequence, at_most: int) -> None:
        sequence.strikes += 1
        if sequence.strikes < at_most:
            return
        if sequence.owner == "prefill":
            sequence.suspect = sequence.owner_worker
            sequence.owner = "decode"  # it may have been handed over before its prefill worker died
            sequence.strikes = 0
            sequence.ask_at = 0.0
            return
        if not sequence.decode_seen and sequence.prefill_worker is not None:
            # Prefill hands over to another decode worker if the one it was told refuses: ask them all.
            sequence.tried.append(sequence.decode_worker)
            others = [w.worker_id for w in self._streams.workers.of_role("decode") if w.worker_id not in sequence.tried]
            if others:
                sequence.decode_worker = others[0]
                sequence.strikes = 0
                sequence.ask_at = 0.0
                return
        self._streams.fail(sequence, sequence.lost())
