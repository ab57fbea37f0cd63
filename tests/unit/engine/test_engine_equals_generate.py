"""Greedy output in float32 is transformers' generate's, token for token, however the work is cut and mixed."""

from __future__ import annotations

import random

import pytest

from tests.unit.engine.engine_driver import Engine, Reference, prompt_of

Pair = tuple[Engine, Reference]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 48, 65, 127, 300, 700])
def test_a_single_prompt_of_any_length(pair: Pair, length: int) -> None:
    engine, reference = pair
    sequence = engine.add(prompt_of(length))
    engine.run([sequence], 10)
    reference.assert_continued(sequence)
    engine.release(sequence)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 129])
def test_a_prompt_computed_in_chunks(pair: Pair, chunk: int) -> None:
    engine, reference = pair
    sequence = engine.add(prompt_of(70 if chunk == 1 else 260))
    engine.run([sequence], 6, chunk)
    reference.assert_continued(sequence)
    engine.release(sequence)


def test_several_prompts_in_one_pass(pair: Pair) -> None:
    engine, reference = pair
    sequences = [engine.add(prompt_of(n)) for n in (5, 200, 1, 16, 90, 33)]
    engine.run(sequences, 12)
    for sequence in sequences:
        reference.assert_continued(sequence)
        engine.release(sequence)


def test_sequences_that_join_and_leave_midway(pair: Pair) -> None:
    """A random schedule: joins, leaves, chunked prefills beside decode steps, blocks reused by the next owner."""
    engine, reference = pair
    draw = random.Random(3)
    before = engine.num_free
    waiting = [engine.add(prompt_of(draw.choice([1, 8, 15, 16, 17, 40, 100, 180]), seed=i)) for i in range(10)]
    running, done = [], []
    while waiting or running:
        if waiting and (not running or draw.random() < 0.4):
            running.append(waiting.pop())
        draw.shuffle(running)
        engine.step(running, chunk=draw.choice([1, 16, 50, 200]))
        for sequence in [s for s in running if s.num_output_tokens >= 8]:
            running.remove(sequence)
            engine.release(sequence)
            done.append(sequence)
    for sequence in done:
        reference.assert_continued(sequence)
    assert engine.num_free == before


def test_a_preempted_sequence_recomputes_prompt_and_output(pair: Pair) -> None:
    engine, reference = pair
    victim, other = engine.add(prompt_of(75)), engine.add(prompt_of(20))
    engine.run([victim, other], 9)
    engine.release(victim)
    engine.run([other], 14)
    engine.run([victim, other], 20, chunk=32)
    reference.assert_continued(victim)
    reference.assert_continued(other)
    for sequence in (victim, other):
        engine.release(sequence)
