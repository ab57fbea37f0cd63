"""Prompts whose turn has not come: what others hold of them is fetched, then they stand in the scheduler's queue."""

import asyncio
import logging
from collections.abc import Callable

from distserve.worker.fetching import Fetching
from distserve_prefill.course import Course
from distserve_prefill.job import Job
from distserve_prefill.predicting import check
from distserve_prefill.scheduler import Scheduler

log = logging.getLogger(__name__)


class Waiting:
    """Belongs to the event loop. A prompt with nothing to fetch passes those that fetch; one that has fetched takes its
    place in the queue by the time of its arrival."""

    def __init__(self, scheduler: Scheduler, fetching: Fetching) -> None:
        self._scheduler = scheduler
        self._fetching = fetching
        self._fetched_for: set[Job] = set()
        self.on_queued: Callable[[], None] = lambda: None  # the scheduler has one more

    def __len__(self) -> int:
        return len(self._scheduler.waiting) + len(self._fetched_for)

    @property
    def num_fetched_for(self) -> int:
        return len(self._fetched_for)

    @property
    def num_tokens(self) -> int:
        """To be computed yet, of those that have begun too."""
        return self._scheduler.num_waiting_tokens + sum(j.sequence.num_uncomputed_tokens for j in self._fetched_for)

    @property
    def course(self) -> Course:
        """What will become of all that wait and have begun, if nothing else comes."""
        return self._scheduler.course(j.place for j in self._fetched_for if j.place is not None)

    def check(self, job: Job) -> float | None:
        """Before it is added: seconds from now to its first token, None if that can't be told. Raises SloUnattainable.

        Another worker's blocks are counted as had if the gateway says who has them, those that the store may have are
        not: who has nothing must not get a promise for what may be there. The time to fetch is not known."""
        num_held = None
        if job.request.holder and self._fetching.may_help(job.sequence, job.request.holder):
            num_held = self._scheduler.num_wanted_tokens(job)
        job.place = self._scheduler.place_of(job, num_held)
        return check(self.course, job.place, spare=self._scheduler.model.spare)

    def add(self, job: Job) -> None:
        if self._fetching.may_help(job.sequence, job.request.holder):
            self._fetched_for.add(job)
            job.fetching = asyncio.create_task(self._fetch(job), name=f"fetch for {job.key}")
        else:
            self._queue(job)

    def remove(self, job: Job) -> None:
        """It waits no more, and is not taken up again. Something may be written to the pool for it until job.fetching
        has ended."""
        self._scheduler.remove(job)
        self._fetched_for.discard(job)
        if job.fetching is not None:
            job.fetching.cancel()

    def _queue(self, job: Job) -> None:
        self._scheduler.add(job)
        self.on_queued()

    async def _fetch(self, job: Job) -> None:
        try:
            await self._fetching.bring(job.sequence, job.request.holder, span=job.span)
        except Exception:
            log.exception("nothing fetched for %s, it is computed", job.key)
        if job in self._fetched_for:  # else it was removed meanwhile
            self._fetched_for.remove(job)
            self._queue(job)
