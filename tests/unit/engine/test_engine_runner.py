"""What a runner promises besides the right tokens."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from distserve.engine.batching import Batch, Work
from distserve.engine.model import load_model
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import PROMPT_LOGITS_ROWS, ModelRunner
from distserve.engine.sequence import Sequence
from distserve.errors import DistServeError, LayoutMismatch
from distserve.messages import SamplingParams
from tests.tiny_models import MAX_MODEL_LEN, Kind, make_tiny
from tests.unit.engine.engine_driver import GREEDY, Engine, Reference, prompt_of

Pair = tuple[Engine, Reference]


def test_layers_are_reported_in_order_once_when_their_kv_is_final(llama: Engine) -> None:
    sequences = [llama.add(prompt_of(20)), llama.add(prompt_of(3))]
    seen: list[tuple[int, int]] = []
    copies: list[torch.Tensor] = []

    def on_layers(start: int, stop: int) -> None:
        seen.append((start, stop))
        copies.append(llama.cache.pool[:, start:stop].clone())

    batch = Batch()
    for sequence, table in zip(sequences, ([5, 9], [2]), strict=True):
        sequence.block_table = table
        batch.work.append(Work(sequence, 0, len(sequence.token_ids), True))
    llama.cache.pool.zero_()
    llama.runner.execute(batch, on_layers)
    assert seen == [(n, n + 1) for n in range(llama.model.layout.num_layers)]
    for (start, stop), copy in zip(seen, copies, strict=True):
        assert torch.equal(copy, llama.cache.pool[:, start:stop])
        assert (copy[[5, 9, 2]] != 0).any(dim=-1).sum() == 2 * 2 * 23  # keys and values, two heads, 23 tokens


def test_a_pass_writes_into_no_block_but_its_own(llama: Engine) -> None:
    sequence = llama.add(prompt_of(40))
    sequence.block_table = [7, 3, 11]
    llama.cache.pool.fill_(0.5)
    llama.runner.execute(Batch([Work(sequence, 0, 40, True)]))
    others = [b for b in range(llama.cache.num_blocks) if b not in (7, 3, 11)]
    assert (llama.cache.pool[others] == 0.5).all()


def test_results_come_in_the_batch_s_order_and_only_for_works_that_sample(llama: Engine) -> None:
    lengths = [30, 1, 12, 1, 50]
    alone = []
    for length in lengths:
        sequence = llama.add(prompt_of(length))
        alone.append(llama.step([sequence])[0].token_id)
        llama.release(sequence)
    sequences = [llama.add(prompt_of(length)) for length in lengths]
    batch = Batch()
    for i, sequence in enumerate(sequences):
        sequence.block_table = list(range(1 + 5 * i, 6 + 5 * i))
        batch.work.append(Work(sequence, 0, len(sequence.token_ids), samples=i != 2))
    sampled = llama.runner.execute(batch)
    assert [s.sequence for s in sampled] == [sequences[i] for i in (0, 1, 3, 4)]
    assert [s.token_id for s in sampled] == [alone[i] for i in (0, 1, 3, 4)]
    logits = llama.runner.forward_logits(batch)
    assert logits.argmax(-1).tolist() == [s.token_id for s in sampled]
    assert llama.runner.execute(Batch()) == []


def test_steps_of_any_length_and_order_give_each_sequence_its_own_token(llama: Engine) -> None:
    sequences = [llama.add(prompt_of(length)) for length in (9, 40, 3, 25)]
    llama.step(sequences)
    for order in ([1, 3, 0, 2], [2, 0, 3, 1], [0, 2]):  # the first is the order of rows: longest first
        chosen = [sequences[i] for i in order]
        alone = [llama.runner.execute(Batch([_step_of(s)]))[0].token_id for s in chosen]
        batch = Batch([_step_of(s) for s in chosen])
        sampled = llama.runner.execute(batch)
        assert [s.sequence for s in sampled] == chosen
        assert [s.token_id for s in sampled] == alone


def _step_of(sequence: Sequence) -> Work:
    return Work(sequence, len(sequence.token_ids) - 1, 1, samples=True)


def test_on_begun_is_called_once_before_any_layer_is_written(llama: Engine) -> None:
    told: list[str] = []
    sequence = llama.add(prompt_of(20))
    sequence.block_table = [1, 2]
    batch = Batch([Work(sequence, 0, 20, True)])
    llama.runner.execute(batch, lambda a, b: told.append(f"{a}-{b}"), lambda: told.append("begun"))
    assert told[0] == "begun"
    assert told.count("begun") == 1
    assert len(told) > 1


def test_the_runner_changes_no_sequence(llama: Engine) -> None:
    sequence = llama.add(prompt_of(18))
    sequence.block_table = [4, 6, 8]
    llama.runner.execute(Batch([Work(sequence, 0, 18, True)]))
    assert (sequence.token_ids, sequence.num_computed_tokens, sequence.block_table) == (prompt_of(18), 0, [4, 6, 8])


def test_the_last_hidden_state_gives_the_same_first_token_elsewhere(pair: Pair) -> None:
    """Prefill's hidden state, as bytes, sampled by another runner that has never seen the prompt."""
    engine, _ = pair
    prefill, decode = Engine(engine.model, 60, keep_hidden=True), ModelRunner(engine.model, engine.cache)
    for sampling in (GREEDY, SamplingParams(max_tokens=9, seed=11, temperature=1.0, top_p=0.95, logprobs=2)):
        sequences = [prefill.add(prompt_of(n), sampling) for n in (9, 1, 33)]
        for sampled in prefill.step(sequences, chunk=32) + prefill.step(sequences[2:], chunk=32):
            sequence = sampled.sequence
            assert len(sampled.last_hidden) == 4 * engine.model.hidden_size
            there = engine.add(sequence.token_ids[: sequence.num_prompt_tokens], sampling)
            there.key = sequence.key
            again = decode.sample_from_hidden(there, sampled.last_hidden, "float32")
            assert again.token_id == sampled.token_id
            if sampling.logprobs is not None:
                assert again.logprob is not None
                assert sampled.logprob is not None
                assert again.logprob.logprob == pytest.approx(sampled.logprob.logprob, abs=1e-5)
        for sequence in sequences:
            prefill.release(sequence)


def test_hidden_states_pass_through_all_that_follows_the_base_model(tmp_path: Path) -> None:
    """Gemma's final logit softcap is behind the output layer; a head that forgot it would still give the same
    greedy token, so the logprobs are compared."""
    folder = make_tiny("gemma3", tmp_path / "capped")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"final_logit_softcapping": null', '"final_logit_softcapping": 3.0'))
    model = load_model(folder)
    assert model.model.config.final_logit_softcapping == 3.0
    engine = Engine(model, 20, keep_hidden=True)
    sampling = msgspec.structs.replace(GREEDY, logprobs=1)
    sequence = engine.add(prompt_of(12), sampling)
    (sampled,) = engine.step([sequence])
    stock = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        wanted = stock(torch.tensor([prompt_of(12)])).logits[0, -1].log_softmax(-1)
    again = engine.runner.sample_from_hidden(engine.add(prompt_of(12), sampling), sampled.last_hidden, "float32")
    assert again.logprob is not None
    assert again.logprob.logprob == pytest.approx(float(wanted[sampled.token_id]), abs=1e-4)


def test_a_hidden_state_of_the_wrong_size_or_dtype_is_refused(llama: Engine) -> None:
    size = 4 * llama.model.hidden_size
    for hidden, dtype in ((b"\0" * (size - 4), "float32"), (b"\0" * size, "bfloat16")):
        with pytest.raises(DistServeError, match=f"last_hidden is {len(hidden)} bytes of {dtype}, must be {size}"):
            llama.runner.sample_from_hidden(llama.add(prompt_of(3)), hidden, dtype)


@pytest.mark.parametrize("chunk", [10_000, 16, 90])
def test_prompt_logprobs_are_complete_after_the_last_chunk(pair: Pair, chunk: int) -> None:
    engine, reference = pair
    length = PROMPT_LOGITS_ROWS + 20
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    sequence, other = engine.add(prompt_of(length), sampling), engine.add(prompt_of(4))
    found = []
    while not sequence.num_output_tokens:
        for sampled in engine.step([other, sequence], chunk):
            if sampled.sequence is other:
                assert sampled.prompt_logprobs is None
            else:
                found.append(sampled.prompt_logprobs)
    (logprobs,) = found
    assert logprobs is not None
    wanted = reference.logits(prompt_of(length)).log_softmax(-1)
    assert [one.token_id for one in logprobs] == prompt_of(length)[1:]
    for row, one in enumerate(logprobs):
        assert one.logprob == pytest.approx(float(wanted[row, one.token_id]), abs=1e-3)
        assert [i for i, _ in one.top] == wanted[row].topk(2).indices.tolist()
    (later,) = [s for s in engine.step([sequence, other]) if s.sequence is sequence]
    assert later.prompt_logprobs is None
    for one in (sequence, other):
        engine.release(one)


def test_prompt_logprobs_of_a_dropped_sequence_are_forgotten(llama: Engine) -> None:
    sequence = llama.add(prompt_of(40), msgspec.structs.replace(GREEDY, prompt_logprobs=0))
    llama.step([sequence], chunk=16)
    assert len(llama.runner._prompt_logprobs) == 1
    llama.release(sequence)
    del sequence
    gc.collect()
    assert len(llama.runner._prompt_logprobs) == 0


def test_prompt_logprobs_without_the_start_of_the_prompt_are_refused(llama: Engine) -> None:
    sequence = llama.add(prompt_of(40), msgspec.structs.replace(GREEDY, prompt_logprobs=0))
    sequence.block_table = [1, 2, 3]
    with pytest.raises(DistServeError, match="need the whole prompt computed here"):
        llama.runner.execute(Batch([Work(sequence, 16, 24, True)]))


def test_a_cache_of_another_layout_is_refused_by_the_field(llama: Engine) -> None:
    other = msgspec.structs.replace(llama.model.layout, block_size=32)
    with pytest.raises(LayoutMismatch) as e:
        ModelRunner(llama.model, PagedCache(other, 4))
    assert (e.value.field, e.value.ours, e.value.theirs) == ("block_size", 16, 32)


@pytest.mark.parametrize(
    ("start", "num", "table", "message"),
    [
        (0, 0, [1], "must be a part"),
        (0, 11, [1], "must be a part"),
        (-1, 3, [1], "must be a part"),
        (0, 10, [], "has 0 blocks, 10 tokens need 1"),
    ],
)
def test_impossible_work_is_refused(llama: Engine, start: int, num: int, table: list[int], message: str) -> None:
    sequence = llama.add(prompt_of(10))
    sequence.block_table = table
    with pytest.raises(DistServeError, match=message):
        llama.runner.execute(Batch([Work(sequence, start, num, True)]))


def test_nothing_is_nan_up_to_the_longest_context(pair: Pair) -> None:
    engine, _ = pair
    sequence = engine.add(prompt_of(MAX_MODEL_LEN - 1))
    engine.step([sequence], chunk=1500)
    engine.step([sequence])
    assert sequence.num_output_tokens == 1
    last = Batch([Work(sequence, MAX_MODEL_LEN - 1, 1, True)])
    assert engine.runner.forward_logits(last).isfinite().all()
    assert math.isfinite(float(engine.cache.pool.abs().max()))
    engine.release(sequence)


def test_bfloat16_stays_near_float32(tiny_folder: Callable[[Kind], Path]) -> None:
    folder = tiny_folder("llama")
    logits = []
    for dtype in ("float32", "bfloat16"):
        engine = Engine(load_model(folder, dtype=dtype), 30)
        sequence = engine.add(prompt_of(50))
        engine.step([sequence], chunk=40)
        sequence.block_table.append(29)
        logits.append(engine.runner.forward_logits(Batch([Work(sequence, 40, 10, True)]))[0].float())
    assert (logits[0] - logits[1]).norm() / logits[0].norm() < 0.1
