"""One forward pass over a ragged batch: decode steps and prefill chunks together, through stock model code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from distserve.engine.attention import attention_backend
from distserve.engine.batching import Batch, Sampled, Work
from distserve.engine.context import BatchContext
from distserve.engine.head import Head
from distserve.engine.loaded import LoadedModel
from distserve.engine.native.loader import Candidate
from distserve.engine.native.model import MAX_ROWS, NativeModel
from distserve.engine.paged_cache import DTYPES, PagedCache
from distserve.engine.sampler import Sampler
from distserve.engine.sequence import Sequence
from distserve.errors import DistServeError
from distserve.kv.layout import require_same
from distserve.messages import TokenLogprob

if TYPE_CHECKING:  # they need Triton
    from distserve.engine.fused.model import FusedModel
    from distserve.engine.graphs.steps import Step, StepContext, StepGraphs

# Prompt rows that go through the output layer together when their logprobs are asked for: bounds the logits' memory.
PROMPT_LOGITS_ROWS = 256


class ModelRunner:
    """Runs batches of one model on one cache. It changes no sequence; one thread at a time may use it."""

    def __init__(
        self,
        model: LoadedModel,
        cache: PagedCache,
        *,
        keep_hidden: bool = False,
        attention: str = "auto",
        candidate: Candidate | None = None,
    ) -> None:
        """keep_hidden: Sampled.last_hidden is filled. candidate: tried on the first pass it can take, and used from
        then on if it agrees. Raises LayoutMismatch if the cache is not of this model."""
        require_same(model.layout, cache.layout)
        self.model = model
        self.cache = cache
        self.keep_hidden = keep_hidden
        self.sampler = Sampler(model.vocab_size, model.eos_token_ids, str(model.device))
        self._backend = attention_backend(attention, cache.layout, str(cache.device))
        self._head = Head(model)
        self._candidate = candidate
        self._native: NativeModel | None = None
        self._steps: StepGraphs | None = None
        self._fused: FusedModel | None = None
        self._prompt_logprobs: WeakKeyDictionary[Sequence, list[TokenLogprob]] = WeakKeyDictionary()

    @property
    def attention(self) -> str:
        """The backend's name."""
        return self._backend.name

    def fuse(self) -> None:
        """From now on, passes run in fewer kernels where the model is of a kind that is known (fused/model.py) and the
        outcome is that of its own code up to rounding; says which. For the thread that will run them."""
        if self._backend.name != "triton":
            return
        from distserve.engine.fused.trial import fused_model

        self._fused = fused_model(self.model, self._backend)

    def record_steps(self, max_num_seqs: int, max_model_len: int) -> None:
        """From now on, steps of up to so many sequences are played back as recorded (graphs/steps.py), where the
        backend can be recorded. Takes seconds; for the thread that will run them."""
        if self._backend.name != "triton":
            return
        from distserve.engine.graphs.steps import StepGraphs

        steps = StepGraphs(
            self.model,
            self.cache,
            self._device_hidden,
            self._head,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        steps.record()
        self._steps = steps

    @torch.inference_mode()
    def execute(
        self,
        batch: Batch,
        on_layers: Callable[[int, int], None] | None = None,
        on_begun: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        """Compute KV of the batch's tokens and the next token of each Work that samples, in the batch's order.

        on_layers(a, b) is called, in this thread, as soon as layers [a, b) of every block touched by the batch are
        final for this pass; all layers are reported, in order, once. With keep_hidden, last_hidden is the hidden
        state after the final norm, [hidden_size] in the model's dtype, of the last token computed (of a sequence
        without output, the last prompt token).

        on_begun() is called, in this thread, when all is set for the model's pass: what another thread does in Python
        before that holds the pass up, since Python runs one thread at a time.
        """
        if not batch.work:
            return []
        if self._steps is not None and on_layers is None and (step := self._steps.play(batch)) is not None:
            if on_begun is not None:
                on_begun()
            return self._sampled(batch, step)
        context = BatchContext.build(batch, self.cache, self._backend, on_layers)
        if on_begun is not None:
            on_begun()
        hidden = self._hidden(context)
        first = context.first_rows()
        prompt_logprobs = {
            id(w): done for w in batch.work if (done := self._note_prompt(w, hidden, first[id(w)])) is not None
        }
        sampling = [w for w in batch.work if w.samples]
        if not sampling:
            return []
        last = _rows(hidden, [first[id(w)] + w.num_tokens - 1 for w in sampling])
        tokens = self.sampler.sample(self._logits(last), [w.sequence for w in sampling])
        states = [_to_bytes(row) for row in last] if self.keep_hidden else [b""] * len(sampling)
        return [
            Sampled(w.sequence, token, logprob, state, prompt_logprobs.get(id(w)))
            for w, (token, logprob), state in zip(sampling, tokens, states, strict=True)
        ]

    def _sampled(self, batch: Batch, step: Step) -> list[Sampled]:
        """What execute() returns, of a step that was played."""
        at = [i for i, work in enumerate(batch.work) if work.samples]
        sequences = [batch.work[i].sequence for i in at]
        best = step.best if len(at) == len(batch.work) else step.best[:, at]
        tokens = self.sampler.sample(_rows(step.logits, at), sequences, best)
        states = [_to_bytes(step.hidden[i]) for i in at] if self.keep_hidden else [b""] * len(at)
        return [
            Sampled(sequence, token, logprob, state)
            for sequence, (token, logprob), state in zip(sequences, tokens, states, strict=True)
        ]

    @torch.inference_mode()
    def forward_logits(self, batch: Batch) -> torch.Tensor:
        """Like execute, without sampling: logits [n, vocab_size] of the works that sample, in the batch's order."""
        context = BatchContext.build(batch, self.cache, self._backend)
        hidden = self._hidden(context)
        first = context.first_rows()
        return self._logits(_rows(hidden, [first[id(w)] + w.num_tokens - 1 for w in batch.work if w.samples]))

    @torch.inference_mode()
    def sample_from_hidden(self, sequence: Sequence, hidden: bytes, dtype: str) -> Sampled:
        """The next token of a sequence whose last token's hidden state (Sampled.last_hidden) is known.

        Raises DistServeError if `hidden` is not [hidden_size] in the model's dtype.
        """
        size = self.model.hidden_size * DTYPES[self.model.dtype].itemsize
        if dtype != self.model.dtype or len(hidden) != size:
            raise DistServeError(
                f"last_hidden is {len(hidden)} bytes of {dtype}, must be {size} bytes of {self.model.dtype}"
            )
        state = torch.frombuffer(bytearray(hidden), dtype=DTYPES[dtype]).to(self.model.device)
        ((token, logprob),) = self.sampler.sample(self._logits(state[None]), [sequence])
        return Sampled(sequence, token, logprob, hidden)

    def _hidden(self, context: BatchContext) -> torch.Tensor:
        """[T, hidden_size] after the final norm, in the context's row order."""
        if self._native is not None:
            return self._native.hidden(context)
        if self._candidate is not None:
            return self._try(self._candidate, context)
        return self._device_hidden(context)

    def _try(self, candidate: Candidate, context: BatchContext) -> torch.Tensor:
        """The pass by the model's own code, and compiled beside it, to see whether they agree."""
        tried: tuple[torch.Tensor, ...] = ()
        try:
            tried = candidate.try_pass(context)
        except Exception as e:
            candidate.give_up(e)
        hidden = self._own_hidden(context)  # what fails here is the pass, not the trial
        if tried:
            try:
                self._native = candidate.compare(context, tried, hidden)
            except Exception as e:
                candidate.give_up(e)
        if candidate.outcome:
            self._candidate = None
        return hidden

    def _device_hidden(self, context: BatchContext | StepContext) -> torch.Tensor:
        return self._own_hidden(context) if self._fused is None else self._fused.hidden(context)

    def _own_hidden(self, context: BatchContext | StepContext) -> torch.Tensor:
        """By the model's own code."""
        hidden: torch.Tensor = self.model.base(
            input_ids=context.flat_ids[None],
            position_ids=context.flat_positions[None],
            use_cache=False,
            paged=context,
        )[0][0]
        if context.layers_written != self.model.layout.num_layers:
            raise DistServeError(
                f"{context.layers_written} layers of {self.model.name} wrote KV, must be {self.model.layout.num_layers}"
            )
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size]."""
        if self._native is not None and len(hidden) <= MAX_ROWS:
            return self._native.logits(hidden)
        return self._head(hidden)

    def _note_prompt(self, work: Work, hidden: torch.Tensor, first: int) -> list[TokenLogprob] | None:
        """Add this chunk's prompt logprobs to the sequence's; all of them when the chunk ends the prompt."""
        sequence = work.sequence
        top_n = sequence.sampling.prompt_logprobs
        if top_n is None or sequence.num_output_tokens:
            return None
        # Row p predicts token p + 1; the last prompt token predicts output.
        stop = min(work.start + work.num_tokens, sequence.num_prompt_tokens - 1)
        found = [] if work.start == 0 else self._prompt_logprobs.get(sequence, [])
        if len(found) != work.start:
            raise DistServeError(
                f"prompt_logprobs of {sequence.key} need the whole prompt computed here in order: "
                f"tokens before {len(found)} were, this chunk starts at {work.start}"
            )
        for begin in range(work.start, stop, PROMPT_LOGITS_ROWS):
            end = min(begin + PROMPT_LOGITS_ROWS, stop)
            logits = self._head(hidden[first + begin - work.start : first + end - work.start])
            found += self.sampler.prompt_logprobs(logits, sequence.token_ids[begin + 1 : end + 1], top_n)
        if work.start + work.num_tokens < sequence.num_prompt_tokens:
            self._prompt_logprobs[sequence] = found
            return None
        self._prompt_logprobs.pop(sequence, None)
        return found


def _rows(hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """hidden[rows], which is `hidden` itself when steps alone make a batch, in its order."""
    return hidden if rows == list(range(len(hidden))) else hidden[rows]


def _to_bytes(row: torch.Tensor) -> bytes:
    """A vector's bytes, little-endian."""
    return row.contiguous().cpu().view(torch.uint8).numpy().tobytes()
