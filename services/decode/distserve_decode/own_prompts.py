"""Prompts that this worker computes itself: any, if it is colocated or if no prefill worker can take them; else those
that its pool holds but for a few tokens, so that no others' steps wait long for them."""

from collections.abc import Callable

from distserve.engine.sequence import Sequence
from distserve.errors import Overloaded
from distserve.messages import Slo, SubmitRequest
from distserve.telemetry import NO_SPAN, Span
from distserve.worker.admission import check_prompt, check_queue
from distserve.worker.prefixes import Prefixes
from distserve_decode.bringing import Bringing
from distserve_decode.limits import Limits
from distserve_decode.prospects import Prospects
from distserve_decode.scheduler import Scheduler

RETRY_AFTER_S = 0.1


class OwnPrompts:
    """Belongs to the event loop. take() -> fetching (where others may have more of it) -> the scheduler's queue -> its
    running ones; a prompt that may not queue goes to the last at once, or nowhere."""

    def __init__(
        self,
        scheduler: Scheduler,
        prefixes: Prefixes,
        bringing: Bringing,
        prospects: Prospects,
        limits: Limits,
        *,
        may_start: Callable[[], bool],
        on_queued: Callable[[], None],
    ) -> None:
        """may_start(): one more sequence may begin, ahead of none that waits. on_queued(): the scheduler has one
        more."""
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._bringing = bringing
        self._limits = limits
        self._prospects = prospects
        self._may_start = may_start
        self._on_queued = on_queued

    def take(
        self, request: SubmitRequest, check: Callable[[Sequence], None], span: Span = NO_SPAN
    ) -> tuple[Sequence, float | None]:
        """It is in the scheduler, or on its way there: remove() it in the end. And when its first token is to be
        expected, seconds from now. `check` may refuse it. span: of its stay.

        Raises InvalidRequest; SloUnattainable; Overloaded if the queue is full, or, where it may not queue, if it is
        not one of those that this worker computes, or can't begin now: a prefill worker may take it.
        """
        may_queue = self._limits.colocated or request.may_queue
        if may_queue:
            check_queue(self._scheduler.num_waiting, self._limits.max_waiting)
        check_prompt(request, self._limits.max_model_len)
        sequence = Sequence(request.key, list(request.token_ids), request.num_prompt_tokens, request.sampling)
        check(sequence)
        sequence.chain = self._prefixes.chain_of(request)
        if not may_queue:
            self._check_short(sequence)
        ttft_s = self._prospects.first_token_s(sequence, request.slo)
        if not may_queue:
            self._begin(sequence, request.slo)
        else:
            is_arriving = self._bringing.start(sequence, request.holder, self._has_arrived, span=span)
            self._scheduler.submit(sequence, request.slo, is_arriving=is_arriving)
        self._on_queued()
        return sequence, ttft_s

    def remove(self, sequence: Sequence) -> None:
        """Wherever it stands; its blocks are free afterwards. Not while a pass that holds it is running."""
        self._bringing.give_up(sequence)
        self._scheduler.remove(sequence)

    def _check_short(self, sequence: Sequence) -> None:
        num, most = (
            len(sequence.token_ids) - self._prefixes.num_held_tokens(sequence),
            self._limits.max_local_prefill_tokens,
        )
        if num > most:
            raise Overloaded(
                f"{num} of the prompt's {len(sequence.token_ids)} tokens are not held here, this decode worker "
                f"computes at most {most} itself (decode.max_local_prefill_tokens)",
                retry_after_s=RETRY_AFTER_S,
            )

    def _begin(self, sequence: Sequence, slo: Slo) -> None:
        if not self._may_start() or not self._scheduler.admit(sequence, slo):
            raise Overloaded("this decode worker has no room for a prompt of its own", retry_after_s=RETRY_AFTER_S)

    def _has_arrived(self, sequence: Sequence) -> None:
        self._scheduler.resume(sequence)
        self._on_queued()
