"""Passes in compiled code against the model's own: every kind of model, dtype and batch they take.

That greedy answers are `generate`'s is in test_engine_equals_generate.py, for compiled passes too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distserve.engine.attention import attention_backend
from distserve.engine.batching import Batch, Work
from distserve.engine.context import BatchContext
from distserve.engine.loaded import LoadedModel
from distserve.engine.model import load_model
from distserve.engine.native.build import NativeUnavailable
from distserve.engine.native.loader import TOLERANCE, Candidate, Compiling, worst_difference
from distserve.engine.native.model import MAX_ROWS, NativeModel
from distserve.engine.native.recognize import require_known
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import ModelRunner
from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import SamplingParams, SequenceKey, num_blocks_for
from distserve.worker.warmup import warm_up
from tests.tiny_models import Kind, make_tiny
from tests.unit.engine.conftest import COMPILED
from tests.unit.engine.engine_driver import Engine, prompt_of

TinyFolder = Callable[[Kind], Path]


def compiled(model: LoadedModel, threads: int = 1) -> NativeModel:
    compiling = Compiling(model.dtype)
    assert compiling.wait(300.0)
    return NativeModel(model, compiling.result(), threads)


class Side:
    """A cache of its own, filled by the model's own code or compiled, with tables that are never consecutive."""

    def __init__(self, model: LoadedModel, native: NativeModel | None, num_blocks: int = 300) -> None:
        self.native = native
        self.always_wide = False  # as passes over many tokens are, however few they are
        self.cache = PagedCache(model.layout, num_blocks)
        self.cache.pool[1:].fill_(float("nan"))  # what nobody wrote must not matter (block 0 is padding, kept at 0)
        self.runner = ModelRunner(model, self.cache)
        self.free = list(range(1, num_blocks))
        random.Random(5).shuffle(self.free)
        self.sequences: list[Sequence] = []

    def add(self, length: int, room: int = 8) -> None:
        blocks = [self.free.pop() for _ in range(num_blocks_for(length + room, self.cache.block_size))]
        number = len(self.sequences)
        key, prompt = SequenceKey(f"s{number}"), prompt_of(length + room, seed=number)
        self.sequences.append(Sequence(key, prompt, length, SamplingParams(max_tokens=8), block_table=blocks))

    @torch.inference_mode()
    def step(self, *counts: int) -> torch.Tensor:
        """The next so many tokens of each sequence: hidden states."""
        pairs = zip(self.sequences, counts, strict=True)
        batch = Batch([Work(s, s.num_computed_tokens, n, True) for s, n in pairs if n])
        context = BatchContext.build(batch, self.cache, attention_backend("sdpa", self.cache.layout, "cpu"))
        if self.native is None:
            hidden = self.runner._own_hidden(context)
        elif self.always_wide:
            hidden = self.native.hidden_of_many(context)
        else:
            hidden = self.native.hidden(context)
        for work in batch.work:
            work.sequence.num_computed_tokens += work.num_tokens
        return hidden


def sides(model: LoadedModel, native: NativeModel, *lengths: int) -> tuple[Side, Side]:
    both = Side(model, native), Side(model, None)
    for side in both:
        for length in lengths:
            side.add(length)
    return both


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape
    error = worst_difference(ours, theirs)
    assert error <= tolerance, f"off by {error:.1e}"


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", COMPILED)
def test_hidden_states_and_kv_are_the_models_own(kind: Kind, threads: int, wide: bool, tiny_folder: TinyFolder) -> None:
    """Chunks with and without a prefix beside decode steps, rows of one to three sequences at a time."""
    model = load_model(tiny_folder(kind), dtype="float32")
    ours, theirs = sides(model, compiled(model, threads), 40, 7, 90)
    ours.always_wide = wide
    for counts in ((13, 7, 30), (27, 1, 1), (1, 1, 59), (1, 0, 1), (1, 1, 1), (0, 0, 1)):
        assert_same(ours.step(*counts), theirs.step(*counts), 1e-5)
    for mine, stock in zip(ours.sequences, theirs.sequences, strict=True):
        whole = mine.num_computed_tokens // ours.cache.block_size
        assert mine.block_table == stock.block_table
        for block in mine.block_table[:whole]:
            torch.testing.assert_close(ours.cache.pool[block], theirs.cache.pool[block], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_half_precision_rounds_where_the_model_rounds(
    kind: Kind, dtype: str, wide: bool, tiny_folder: TinyFolder
) -> None:
    model = load_model(tiny_folder(kind), dtype=dtype)
    ours, theirs = sides(model, compiled(model), 40, 7)
    ours.always_wide = wide
    for counts in ((13, 7), (27, 1), (1, 1), (1, 0)):
        assert_same(ours.step(*counts), theirs.step(*counts), TOLERANCE[dtype])


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_long_contexts_are_cut_in_parts_for_threads(kind: Kind, threads: int, tiny_folder: TinyFolder) -> None:
    """Contexts of which one thread gets a part, with mistral's window inside a block and a sequence far shorter."""
    model = load_model(tiny_folder(kind), dtype="float32")
    ours, theirs = sides(model, compiled(model, threads), 1500, 70, 3)
    assert_same(ours.step(1500, 70, 3), theirs.step(1500, 70, 3), 1e-5)  # more rows than compiled code takes
    for counts in ((1, 0, 0), (1, 1, 1), (1, 1, 0)):
        assert_same(ours.step(*counts), theirs.step(*counts), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 8, 11, 33, MAX_ROWS])
def test_any_number_of_rows(rows: int, dtype: str, tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("llama"), dtype=dtype)
    ours, theirs = sides(model, compiled(model, 2), *([9] * rows))
    tolerance = 1e-5 if dtype == "float32" else TOLERANCE[dtype]
    for each in (9, 1):
        assert_same(ours.step(*([each] * rows)), theirs.step(*([each] * rows)), tolerance)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 33, 64, 70])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@torch.inference_mode()
def test_logits(rows: int, dtype: str, tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("llama"), dtype=dtype)
    hidden = torch.randn(rows, model.hidden_size, generator=torch.Generator().manual_seed(rows)).to(model.model.dtype)
    weight = model.model.get_output_embeddings().weight
    assert_same(compiled(model, 2).logits(hidden), hidden @ weight.T, 1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_blocks_of_other_sizes(block_size: int, tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("qwen2"), dtype="float32", block_size=block_size)
    ours, theirs = sides(model, compiled(model), 100, 17)
    for counts in ((30, 17), (33, 1), (1, 1), (1, 1)):
        assert_same(ours.step(*counts), theirs.step(*counts), 1e-5)


def test_other_models_are_named_as_such(tiny_folder: TinyFolder) -> None:
    with pytest.raises(NativeUnavailable, match="model type gemma3_text"):
        require_known(load_model(tiny_folder("gemma3")))


def test_a_part_nobody_knows_is_refused(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("llama"))
    model.base.layers[2].mlp.gate_proj = torch.nn.Sequential(model.base.layers[2].mlp.gate_proj)
    with pytest.raises(NativeUnavailable, match="linear layer of type Sequential"):
        require_known(model)
    model = load_model(tiny_folder("llama"))
    model.base.layers[1].extra = torch.nn.Identity()
    with pytest.raises(NativeUnavailable, match="extra"):
        require_known(model)


def test_a_compiled_pass_that_disagrees_is_never_used(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Its weights are another model's, the answers stay this one's."""
    model, other = load_model(tiny_folder("llama")), load_model(make_tiny("llama", tmp_path / "other", seed=9))
    compiling = Compiling(model.dtype)
    assert compiling.wait(300.0)
    candidate = Candidate(other, compiling, 1)
    engine, plain = Engine(model, candidate=candidate), Engine(model)
    answers = []
    for side in (engine, plain):
        sequence = side.add(prompt_of(40))
        side.run([sequence], 10)
        answers.append(sequence.token_ids)
    assert answers[0] == answers[1]
    assert "off by" in candidate.outcome


def test_without_compiled_code_the_models_own_serves(tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = load_model(tiny_folder("llama"))
    compiling = Compiling(model.dtype)
    assert compiling.wait(30.0)
    candidate = Candidate(model, compiling, 1)
    engine = Engine(model, candidate=candidate)
    sequence = engine.add(prompt_of(20))
    engine.run([sequence], 3)
    assert candidate.outcome == "as the model's own code: no C++ compiler (no-such-compiler)"


def test_a_trial_that_fails_by_itself_costs_no_answer(tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    model = load_model(tiny_folder("llama"))
    compiling = Compiling(model.dtype)
    assert compiling.wait(300.0)
    candidate = Candidate(model, compiling, 1)
    monkeypatch.setattr(NativeModel, "hidden_of_few", fail)
    engine, plain = Engine(model, candidate=candidate), Engine(model)
    answers = []
    for side in (engine, plain):
        sequence = side.add(prompt_of(40))
        side.run([sequence], 5)
        answers.append(sequence.token_ids)
    assert answers[0] == answers[1]
    assert "out of luck" in candidate.outcome


def test_a_pass_that_fails_beside_a_trial_fails_once(tiny_folder: TinyFolder) -> None:
    """Layers are told once, and the trial is not blamed: the next pass goes on with it."""
    model = load_model(tiny_folder("llama"))
    compiling = Compiling(model.dtype)
    assert compiling.wait(300.0)
    candidate = Candidate(model, compiling, 1)
    engine = Engine(model, candidate=candidate)
    sequence = engine.add(prompt_of(40))
    told: list[int] = []

    def fail_at_the_third(first: int, stop: int) -> None:
        told.extend(range(first, stop))
        if 2 in told:
            raise OSError("the peer is gone")

    sequence.block_table = [1, 2, 3]
    with pytest.raises(OSError, match="the peer is gone"):
        engine.runner.execute(Batch([Work(sequence, 0, 40, True)]), fail_at_the_third)
    assert told == [0, 1, 2]
    assert candidate.outcome == ""
    warm_up(engine.runner, BlockPool(40))
    assert candidate.outcome.startswith("compiled")


@pytest.mark.parametrize("wrong", ["scale", "cos", "norm_eps", "window"])
def test_a_trial_notices(wrong: str, tiny_folder: TinyFolder) -> None:
    """What a worker's warm-up computes is enough to see that any part of the model is not as it should be."""
    model = load_model(tiny_folder("llama"))
    compiling = Compiling(model.dtype)
    assert compiling.wait(300.0)
    candidate = Candidate(model, compiling, 1)
    assert candidate.prepare()
    native = candidate._native
    assert native is not None
    if wrong == "scale":
        native._model.scale *= 1.5
    elif wrong == "norm_eps":
        native._model.norm_eps = 0.1
    elif wrong == "cos":
        with torch.inference_mode():
            native._rope[0].fill_(0.3)
    else:
        native._layers[1].window = 8
    runner = ModelRunner(model, PagedCache(model.layout, 40), candidate=candidate)
    warm_up(runner, BlockPool(40))
    assert "off by" in candidate.outcome


def test_a_token_id_out_of_range_is_refused(tiny_folder: TinyFolder) -> None:
    engine = Engine.load_compiled(tiny_folder("llama"))
    for length in (5, 100):
        sequence = engine.add([*prompt_of(length), engine.model.vocab_size])
        with pytest.raises(IndexError, match=f"must be 0 to {engine.model.vocab_size - 1}"):
            engine.step([sequence])
