"""What is asked of a prefill worker: checked, and made a job."""

import math
import time

from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.errors import InvalidRequest
from distserve.kv.block_pool import BlockPool
from distserve.messages import KVLayout, SubmitRequest, num_blocks_for
from distserve.worker.admission import check_prompt
from distserve.worker.prefixes import Prefixes
from distserve_prefill.job import Job


class Intake:
    def __init__(
        self, runner: ModelRunner, pool: BlockPool, prefixes: Prefixes, layout: KVLayout, *, max_model_len: int
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._prefixes = prefixes
        self._layout = layout
        self._max_model_len = max_model_len

    def job(self, request: SubmitRequest) -> Job:
        """Received now; nothing is held for it yet. Raises InvalidRequest for what can never be served here."""
        self._check(request)
        sequence = Sequence(request.key, list(request.token_ids), request.num_prompt_tokens, request.sampling)
        sequence.chain = self._prefixes.chain_of(request)
        deadline = math.inf if request.deadline_s is None else time.monotonic() + request.deadline_s
        return Job(request, sequence, deadline)

    def _check(self, request: SubmitRequest) -> None:
        self._runner.sampler.validate(request.sampling)
        check_prompt(request, self._max_model_len)
        blocks = num_blocks_for(len(request.token_ids), self._layout.block_size)
        if blocks > self._pool.num_total:
            raise InvalidRequest(
                f"the prompt needs {blocks} KV blocks, this prefill worker has {self._pool.num_total}: "
                "raise kv.num_blocks",
                param="token_ids",
            )
