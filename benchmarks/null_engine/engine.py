"""The engine that computes nothing: what `worker.boot.build_engine` gives, without model and cache."""

import asyncio
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from benchmarks.null_engine.model import EOS, FIRST_TOKEN, LAYOUT, MAX_MODEL_LEN, NUM_TOKENS, VOCAB_SIZE
from distserve.config import Config
from distserve.engine.batching import Batch, Sampled
from distserve.engine.loaded import LoadedModel
from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.machine import available_bytes
from distserve.messages import SamplingParams
from distserve.sizing import pool_size
from distserve.transport.base import PoolMemory
from distserve.worker.boot import EngineParts
from distserve.worker.isolation import Isolation
from distserve.worker.realtime import EngineRole

P = ParamSpec("P")
T = TypeVar("T")


class NullEngineThread:
    """In place of an EngineThread: there is nothing to compute beside the event loop, and a thread's two hand-overs a
    step would cost more than all else that a token needs here. Each pass is a turn of the loop, or lasts `pass_s`."""

    def __init__(self, pass_s: float = 0.0) -> None:
        self._pass_s = pass_s

    def start(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return asyncio.ensure_future(self.run(function, *args, **kwargs))

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        await asyncio.sleep(self._pass_s)
        return function(*args, **kwargs)

    def close(self) -> None:
        """Nothing runs beside the loop."""


class NullSampler:
    def validate(self, sampling: SamplingParams) -> None:
        """Takes anything: nothing is sampled."""


class NullRunner:
    """In place of a ModelRunner. A sequence's token at output position i is FIRST_TOKEN + i, in a circle."""

    def __init__(self) -> None:
        self.sampler = NullSampler()

    def execute(
        self,
        batch: Batch,
        on_layers: Callable[[int, int], None] | None = None,
        on_begun: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        """One token for each work that samples; the layers are reported as written."""
        if on_begun is not None:
            on_begun()
        if on_layers is not None:
            on_layers(0, LAYOUT.num_layers)
        return [Sampled(work.sequence, _token(work.sequence)) for work in batch.work if work.samples]

    def sample_from_hidden(self, sequence: Sequence, hidden: bytes, dtype: str) -> Sampled:
        """The same token as execute() would give."""
        return Sampled(sequence, _token(sequence))


def _token(sequence: Sequence) -> int:
    return FIRST_TOKEN + sequence.num_output_tokens % NUM_TOKENS


def build_null_engine(config: Config, *, role: EngineRole, max_num_seqs: int, keep_hidden: bool) -> EngineParts:
    """In place of `build_engine`, with its arguments; a pool of as many blocks, of 128 bytes each."""
    size = pool_size(
        config.kv,
        config.model,
        block_bytes=block_bytes(LAYOUT),
        model_max_len=MAX_MODEL_LEN,
        available_bytes=available_bytes(),
        max_num_seqs=max_num_seqs,
    )
    blocks = np.zeros((size.num_blocks, LAYOUT.num_layers, layer_block_bytes(LAYOUT)), dtype=np.uint8)
    shape = types.SimpleNamespace(intermediate_size=4)
    model = types.SimpleNamespace(config=types.SimpleNamespace(get_text_config=lambda decoder: shape))
    loaded = LoadedModel(
        model=model,
        base=None,
        layout=LAYOUT,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(EOS,),
        vocab_size=VOCAB_SIZE,
        hidden_size=1,
        name="null",
        dtype=LAYOUT.dtype,
        device=torch.device("cpu"),
    )
    pool = BlockPool(size.num_blocks)
    return EngineParts(loaded, size, None, pool, NullRunner(), PoolMemory(LAYOUT, blocks), Isolation())
