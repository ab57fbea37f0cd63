"""The end of a job whose first token is drawn and that decode is to go on with."""

import asyncio
import logging
import time

from distserve.engine.batching import Sampled
from distserve.errors import DistServeError
from distserve.messages import encode
from distserve.worker.outbox import Outbox
from distserve_prefill.job import Job
from distserve_prefill.state import state_of

log = logging.getLogger(__name__)


async def hand_over(job: Job, sampled: Sampled, outbox: Outbox, *, hidden_dtype: str) -> None:
    """Until decode has adopted it and answers for it, or it was cancelled, or has failed, which its gateway is told.
    Its blocks and its hand-over are the caller's to release, whatever happened."""
    job.phase = "handoff"
    sampled_at = time.time()
    assert job.handoff is not None
    if job.cancelled:  # between the pass and this task's start
        return

    def state() -> bytes:
        return encode(
            state_of(
                job,
                sampled,
                prefill_worker=outbox.worker_id,
                hidden_dtype=hidden_dtype,
                sampled_at_unix_s=sampled_at,
            )
        )

    job.committing = committing = asyncio.create_task(job.handoff.commit(state), name=f"commit {job.key}")
    await asyncio.wait({committing})  # its own deadlines bound it
    if committing.cancelled():
        return
    error = committing.exception()
    if error is None:
        job.shipped = committing.result()
        job.ends("handed_over")
        outbox.drop((job.key,))  # decode answers for it from now on
        return
    if not isinstance(error, DistServeError):
        log.error("hand-over of %s", job.key, exc_info=error)
        error = DistServeError(f"hand-over failed: {type(error).__name__}: {error}")
    job.ends("error", error)
    outbox.finish(job.key, "error", error=error)
