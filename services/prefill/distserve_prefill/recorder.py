"""What is kept of jobs for people to see: figures of all of them, spans of those that are traced."""

import time
from collections.abc import Sequence

from distserve.engine.batching import Batch
from distserve.errors import DistServeError
from distserve.worker.figures import WorkerFigures
from distserve.worker.untold import Untold
from distserve_prefill.job import Job
from distserve_prefill.stay import stay_of


class Recorder:
    """Is told of each job's turns as they come, on the event loop."""

    def __init__(self, figures: WorkerFigures, worker_id: str) -> None:
        self.figures = figures
        self.untold = Untold()
        self._worker_id = worker_id

    def accepted(self, job: Job) -> None:
        job.stay = stay_of(job.request, self._worker_id, job.accepted_at, self.untold)

    def begun(self, job: Job) -> None:
        """Its first pass is next."""
        self.figures.queue.observe(job.started_at - job.accepted_at)
        if job.stay:
            job.stay.begin(job.started_at)

    def passed(
        self,
        batch: Batch,
        jobs: Sequence[Job],
        lasted: tuple[float, float],
        seconds: float,
        error: DistServeError | None,
    ) -> None:
        """A pass is over. lasted: from when to when, on the monotonic clock; seconds: of computing; error: why it
        failed."""
        if error is None:
            self.figures.prompts.note(seconds, num_sequences=len(jobs), num_tokens=batch.num_tokens)
        for work, job in zip(batch.work, jobs, strict=True):
            if job.stay:
                job.stay.passed(work, batch, lasted, error)

    def sampled(self, job: Job) -> None:
        """Its first token is drawn."""
        self.figures.prefill.observe(job.sampled_at - job.started_at)

    def ended(self, job: Job) -> None:
        """It holds nothing here any more."""
        self.figures.ended(job.outcome, job.error)
        if job.shipped is not None and job.shipped.kind:
            self.figures.handed_over(job.shipped.kind, job.shipped.seconds)
        if job.stay:
            job.stay.end(job.outcome, job.error, time.monotonic())
