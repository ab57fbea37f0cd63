"""Prompts that this worker computes itself: any, if it is colocated; else those that its pool holds but for a few
tokens, so that no others' steps wait long for them."""

import asyncio
import logging
from collections.abc import Callable, Collection

from distserve.engine.sequence import Sequence
from distserve.errors import Overloaded
from distserve.messages import SubmitRequest
from distserve.worker.admission import check_prompt, check_queue
from distserve.worker.fetching import Fetching
from distserve.worker.prefixes import Prefixes
from distserve_decode.limits import Limits
from distserve_decode.scheduler import Scheduler

log = logging.getLogger(__name__)

RETRY_AFTER_S = 0.1


class OwnPrompts:
    """Belongs to the event loop. take() -> fetching (colocated, where the store may have more of it) -> the scheduler's
    queue -> its running ones; a prompt that is not this worker's trade goes to the last at once, or nowhere."""

    def __init__(
        self,
        scheduler: Scheduler,
        prefixes: Prefixes,
        fetching: Fetching,
        limits: Limits,
        *,
        may_start: Callable[[], bool],
        on_queued: Callable[[], None],
    ) -> None:
        """may_start(): one more sequence may begin, ahead of none that waits. on_queued(): the scheduler has one
        more, or the pool has room again."""
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._fetching = fetching
        self._limits = limits
        self._may_start = may_start
        self._on_queued = on_queued
        self._tasks: dict[Sequence, asyncio.Task[None]] = {}  # those given up stay until they have ended

    @property
    def fetched_for(self) -> Collection[Sequence]:
        """Those that are not in the queue yet."""
        return self._tasks.keys()

    def waits(self, sequence: Sequence) -> bool:
        return sequence in self._tasks or sequence in self._scheduler.waiting

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self._tasks)

    def take(self, request: SubmitRequest, check: Callable[[Sequence], None]) -> Sequence:
        """It is in the scheduler, or on its way there: remove() it in the end. `check` may refuse it.

        Raises InvalidRequest, and Overloaded if the queue is full, or, where the worker is not colocated, if it is not
        one of those that it computes, or can't begin now: a prefill worker may take it.
        """
        if self._limits.colocated:
            check_queue(self.num_waiting, self._limits.max_waiting)
        check_prompt(request, self._limits.max_model_len)
        sequence = Sequence(request.key, list(request.token_ids), request.num_prompt_tokens, request.sampling)
        check(sequence)
        sequence.chain = self._prefixes.chain_of(request)
        if not self._limits.colocated:
            self._begin(sequence)
        elif self._fetching.may_help(sequence, request.holder):
            self._tasks[sequence] = task = asyncio.create_task(self._fetch(sequence, request.holder))
            task.add_done_callback(lambda _: self._ended(sequence))
        else:
            self._scheduler.submit(sequence)
        self._on_queued()
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Wherever it stands; its blocks are free afterwards. Not while a pass that holds it is running."""
        if (task := self._tasks.get(sequence)) is not None:
            task.cancel()
        self._scheduler.remove(sequence)

    def _ended(self, sequence: Sequence) -> None:
        """Nothing is fetched for it any more: what it had room for is free again, also where it was given up."""
        del self._tasks[sequence]
        self._on_queued()

    def _begin(self, sequence: Sequence) -> None:
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
        if not self._may_start() or not self._scheduler.admit(sequence):
            raise Overloaded("this decode worker has no room for a prompt of its own", retry_after_s=RETRY_AFTER_S)

    async def _fetch(self, sequence: Sequence, holder: str) -> None:
        """What others hold of it comes first. (They join the queue in the order in which that is done.)"""
        try:
            await self._fetching.bring(sequence, holder)
        except Exception:
            log.exception("nothing fetched for %s, it is computed", sequence.key)
        self._scheduler.submit(sequence)
        self._on_queued()
