"""An engine that computes nothing, for faults and timing that a real one can't be made to show."""

import threading
from collections.abc import Callable

from distserve.engine.batching import Batch, Sampled
from distserve.engine.sequence import Sequence
from distserve.messages import KVLayout, SamplingParams, TokenLogprob

LAYOUT = KVLayout(weights="w", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, rope="{}")
EOS = 2


class FakeSampler:
    def validate(self, sampling: SamplingParams) -> None: ...


class FakeRunner:
    """Every sequence's next token is 100 + its output position. `gate` holds a pass up; `fail` makes it raise; a
    sequence whose request_id starts with "nan" gets no token."""

    def __init__(self) -> None:
        self.sampler = FakeSampler()
        self.gate = threading.Event()
        self.gate.set()
        self.in_pass = threading.Event()
        self.fail: Exception | None = None
        self.num_passes = 0

    def execute(
        self,
        batch: Batch,
        on_layers: Callable[[int, int], None] | None = None,
        on_begun: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        if on_begun is not None:
            on_begun()
        self.in_pass.set()
        assert self.gate.wait(10)
        self.in_pass.clear()
        self.num_passes += 1
        if self.fail is not None:
            raise self.fail
        for work in batch.work:
            assert len(work.sequence.block_table) * LAYOUT.block_size >= work.start + work.num_tokens
        if on_layers is not None:
            for layer in range(LAYOUT.num_layers):
                on_layers(layer, layer + 1)
        return [self._sampled(w.sequence) for w in batch.work if w.samples]

    def sample_from_hidden(self, sequence: Sequence, hidden: bytes, dtype: str) -> Sampled:
        assert hidden
        return self._sampled(sequence)

    def _sampled(self, sequence: Sequence) -> Sampled:
        if sequence.key.request_id.startswith("nan"):
            return Sampled(sequence, -1)
        token = 100 + sequence.num_output_tokens
        return Sampled(sequence, token, TokenLogprob(token, -0.1), last_hidden=b"h" * 16)
