"""Prompts in compiled code: chunks in the same call as decode steps, where the processor multiplies pairs of bfloat16.

Elsewhere the same tests go through torch's products.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distserve.engine.attention import attention_backend
from distserve.engine.batching import Batch, Work
from distserve.engine.context import BatchContext
from distserve.engine.model import load_model
from distserve.engine.native.model import ROWS_A_CALL
from tests.tiny_models import Kind
from tests.unit.engine.conftest import COMPILED
from tests.unit.engine.test_native_forward import assert_same, compiled, sides

TinyFolder = Callable[[Kind], Path]

# Of a row of hidden states of the tiny models (seen: up to 0.026); a mask that is off by one token is 0.2 and more.
ROUNDING = 0.04


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", COMPILED)
def test_chunks_of_any_size_beside_decode_steps(kind: Kind, threads: int, tiny_folder: TinyFolder) -> None:
    """Parts of a tile of 16 and 32 queries, with and without a prefix; rows that threads prepare together and alone."""
    model = load_model(tiny_folder(kind), dtype="bfloat16")
    ours, theirs = sides(model, compiled(model, threads), 300, 90, 41)
    for counts in ((17, 33, 2), (80, 1, 16), (1, 31, 15), (150, 1, 0), (2, 2, 3), (1, 1, 1)):
        assert_same(ours.step(*counts), theirs.step(*counts), ROUNDING)


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_chunks_over_blocks_of_other_sizes(block_size: int, tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("qwen2"), dtype="bfloat16", block_size=block_size)
    ours, theirs = sides(model, compiled(model), 150, 37)
    for counts in ((70, 30), (75, 5), (5, 2), (1, 1)):
        assert_same(ours.step(*counts), theirs.step(*counts), ROUNDING)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_long_prompt_in_one_pass(kind: Kind, tiny_folder: TinyFolder) -> None:
    """More rows than are packed at a time, more tokens than one step of the softmax takes."""
    model = load_model(tiny_folder(kind), dtype="bfloat16")
    ours, theirs = sides(model, compiled(model, 2), 700)
    for count in (690, 10, 1):
        assert_same(ours.step(count), theirs.step(count), ROUNDING)


@pytest.mark.parametrize("rows", [3, ROWS_A_CALL // 2, ROWS_A_CALL + 1])
@torch.inference_mode()
def test_layers_are_told_in_order_and_once(rows: int, tiny_folder: TinyFolder) -> None:
    """And many rows before the last layer is computed, so that transfers hide behind the rest."""
    model = load_model(tiny_folder("llama"), dtype="bfloat16")
    native = compiled(model)
    side, _ = sides(model, native, rows)
    told: list[tuple[int, int]] = []
    (sequence,) = side.sequences
    batch = Batch([Work(sequence, 0, rows, True)])
    native.hidden(
        BatchContext.build(
            batch, side.cache, attention_backend("sdpa", side.cache.layout, "cpu"), lambda *layers: told.append(layers)
        )
    )
    num_layers = model.layout.num_layers
    assert [first for first, _ in told] == [0, *(stop for _, stop in told[:-1])]
    assert told[-1][1] == num_layers
    if rows == 3:
        assert len(told) == 1
    elif rows > ROWS_A_CALL:
        assert len(told) == num_layers
    else:
        assert len(told) >= 2
