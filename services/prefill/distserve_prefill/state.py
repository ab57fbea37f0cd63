"""What decode needs to go on with a sequence: the state that travels with the commit of a hand-over."""

import math
import time

from distserve.engine.batching import Sampled
from distserve.messages import SequenceState
from distserve_prefill.job import Job


def state_of(
    job: Job, sampled: Sampled, *, prefill_worker: str, hidden_dtype: str, sampled_at_unix_s: float
) -> SequenceState:
    """As it is now: made just before it is sent, since what is left of deadline and promise goes with it."""
    request, sequence = job.request, job.sequence
    return SequenceState(
        key=job.key,
        model=request.model,
        gateway=request.gateway,
        prefill_worker=prefill_worker,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        sampling=sequence.sampling,
        first_logprob=sampled.logprob,
        prompt_logprobs=sampled.prompt_logprobs,
        last_hidden=sampled.last_hidden,
        last_hidden_dtype=hidden_dtype if sampled.last_hidden else "",
        timings=job.timings(),
        sampled_at_unix_s=sampled_at_unix_s,
        deadline_s=None if job.deadline == math.inf else max(0.0, job.deadline - time.monotonic()),
        slo=job.slo,
        num_cached_tokens=sequence.num_cached_tokens,
        cache_salt=request.cache_salt,
        conversation=request.conversation,
    )
