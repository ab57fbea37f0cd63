"""A decode step of up to so many sequences, recorded once and played back: one launch from Python in place of hundreds.

For each bucket of sizes there is one recording, made at warm-up; a batch takes the smallest that holds it, and what is
left of that is padding, which writes to block 0 and whose outcome nobody reads. Recordings share their memory, since
only one plays at a time.

    inputs, one copy to the device:   token id | position | row of the block table      of each sequence
    recorded:                         embedding, layers, norm, output layer, the largest logit and its id
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from distserve.engine.attention import kernels
from distserve.engine.batching import Batch
from distserve.engine.context import check_work
from distserve.engine.graphs.tables import DeviceTables
from distserve.engine.loaded import LoadedModel
from distserve.engine.paged_cache import PagedCache
from distserve.engine.sequence import Sequence
from distserve.errors import DistServeError

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


class StepContext:
    """What a model's attention writes to and reads from in a recording: in place of a BatchContext, and its own plan.

    inputs: int32 [3, n] on the device: token ids, positions, rows of the block table.
    """

    def __init__(self, cache: PagedCache, tables: DeviceTables, inputs: torch.Tensor) -> None:
        self.cache = cache
        self.layers_written = 0
        self.plan = self
        self._table = tables.table
        self.flat_ids, self.flat_positions, self._rows = inputs
        size = cache.block_size
        blocks = self._table[self._rows, self.flat_positions // size]
        self.slots = blocks.long() * size + self.flat_positions % size
        cores = torch.cuda.get_device_properties(cache.device).multi_processor_count
        self._splits = kernels.num_splits(inputs.shape[1], cache.layout.num_kv_heads, cores)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        kernels.store(key, value, self.cache.layer(layer), self.slots)
        self.note_written(layer, layer + 1)

    def note_written(self, first: int, stop: int) -> None:
        self.layers_written = stop

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        skip_decode: bool = False,
    ) -> torch.Tensor:
        return kernels.decode(
            query,
            self.cache.layer(layer),
            self._table,
            self._rows,
            self.flat_positions,
            scale=scale,
            splits=self._splits,
            window=window,
            softcap=softcap,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The outcome of a step, on the device, valid until the next one plays. hidden [n, hidden_size], logits [n, vocab],
    in the batch's order; best: float64 [2, n], of each row the largest logit and its id."""

    hidden: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    graph: Any
    inputs: torch.Tensor
    outcome: Step


class StepGraphs:
    """Belongs to the engine's thread, which must be the one that records."""

    def __init__(
        self,
        model: LoadedModel,
        cache: PagedCache,
        hidden: Callable[[StepContext], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """hidden(context): [n, hidden_size] after the final norm, KV written; logits of it: [n, vocab_size]."""
        self._model = model
        self._cache = cache
        self._hidden = hidden
        self._logits = logits
        blocks = -(-max_model_len // cache.block_size)
        self._tables = DeviceTables(2 * max_num_seqs, blocks, cache.device)
        self._sizes = [n for n in BUCKETS if n < max_num_seqs] + [max_num_seqs]
        self._recordings: dict[int, _Recording] = {}
        self._staging = torch.zeros(3 * max_num_seqs, dtype=torch.int32, pin_memory=True)

    @property
    def num_recorded(self) -> int:
        return len(self._recordings)

    @torch.inference_mode()
    def record(self) -> None:
        """Every bucket, the largest first, so that the others fit into its memory. Takes seconds."""
        began = time.monotonic()
        pool = None
        for size in reversed(self._sizes):
            recording = self._record(size, pool)
            pool = pool or recording.graph.pool()
            self._recordings[size] = recording
        log.info("%d decode steps recorded in %.1f s", len(self._sizes), time.monotonic() - began)

    def _record(self, size: int, pool: Any) -> _Recording:
        device = self._cache.device
        inputs = torch.zeros(3, size, dtype=torch.int32, device=device)
        inputs[2] = self._tables.padding_row
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are made, libraries choose theirs
                self._run(inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outcome = self._run(inputs)
        return _Recording(graph, inputs, outcome)

    def _run(self, inputs: torch.Tensor) -> Step:
        context = StepContext(self._cache, self._tables, inputs)
        hidden = self._hidden(context)
        if context.layers_written != self._model.layout.num_layers:
            raise DistServeError(f"{context.layers_written} layers of {self._model.name} wrote KV in a step")
        logits = self._logits(hidden)
        largest, ids = logits[:, : self._model.vocab_size].max(dim=1)
        return Step(hidden, logits, torch.stack((largest.double(), ids.double())))

    @torch.inference_mode()
    def play(self, batch: Batch) -> Step | None:
        """A step of a batch that holds steps alone. None, and nothing has happened, if it is not such a one, or too
        large."""
        n = len(batch.work)
        at = bisect_left(self._sizes, n)
        if at == len(self._sizes) or self._sizes[at] not in self._recordings:
            return None
        if any(work.num_tokens != 1 or _wants_prompt(work.sequence) for work in batch.work):
            return None
        for work in batch.work:
            check_work(work, self._cache.block_size)
        rows = self._tables.rows([work.sequence for work in batch.work])
        if rows is None:
            return None
        size = self._sizes[at]
        recording = self._recordings[size]
        padding = size - n
        numbers = [work.sequence.token_ids[work.start] for work in batch.work] + [0] * padding
        numbers += [work.start for work in batch.work] + [0] * padding
        numbers += rows + [self._tables.padding_row] * padding
        self._staging[: 3 * size] = torch.tensor(numbers, dtype=torch.int32)
        recording.inputs.view(-1).copy_(self._staging[: 3 * size], non_blocking=True)
        recording.graph.replay()
        step = recording.outcome
        return Step(step.hidden[:n], step.logits[:n], step.best[:, :n])


def _wants_prompt(sequence: Sequence) -> bool:
    """Logprobs of prompt tokens, which a step does not give."""
    return sequence.sampling.prompt_logprobs is not None and not sequence.num_output_tokens
