"""Sequences to sample for, and the slow, plain reference that the sampler is held against."""

import math
from typing import Any, cast

import torch

from distserve.engine.noise import Streams
from distserve.engine.sequence import Sequence
from distserve.messages import SamplingParams, SequenceKey


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **params: Any) -> Sequence:
    prompt = [1, 2, 3] if prompt is None else prompt
    params.setdefault("max_tokens", 1000)
    tokens = prompt + (output or [])
    return Sequence(SequenceKey("r"), tokens, len(prompt), SamplingParams(**params))


def at_position(position: int, **params: Any) -> Sequence:
    """A sequence that draws its token number `position`. Only the length of its tokens is ever looked at, so a range
    stands for them: ten thousand long lists would be gigabytes."""
    params.setdefault("max_tokens", 10**9)
    return Sequence(SequenceKey("r"), cast("list[int]", range(position)), 1, SamplingParams(**params))


def noise_of(s: Sequence, vocab: int) -> list[float]:
    found: list[float] = Streams.of([s], torch.device("cpu")).gumbel(torch.arange(vocab).unsqueeze(0))[0].tolist()
    return found


def survivors(logits: list[float], p: SamplingParams) -> tuple[list[int], float]:
    """Ids that the filters leave, by their definitions, and how near (relative) a cut was to going the other way."""
    order = sorted((i for i, x in enumerate(logits) if x > -math.inf), key=lambda i: (-logits[i], i))
    peak = max(logits)
    weight = {i: math.exp((logits[i] - peak) / p.temperature) for i in order}
    margin = math.inf
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p < 1:
        total = math.fsum(weight[i] for i in order)
        kept: list[int] = []
        mass = 0.0
        for i in order:
            margin = min(margin, abs(mass / total - p.top_p)) if kept else margin
            if kept and mass / total >= p.top_p:
                break
            kept.append(i)
            mass += weight[i]
        order = kept
    if p.min_p:
        margin = min([margin, *(abs(weight[i] - p.min_p) / p.min_p for i in order if weight[i] < 1)])
        order = [i for i in order if weight[i] >= p.min_p]
    return order, margin


def reference_token(logits: list[float], s: Sequence) -> int:
    p = s.sampling
    if p.temperature == 0:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    noise, peak = noise_of(s, len(logits)), max(logits)
    return max(survivors(logits, p)[0], key=lambda i: (logits[i] - peak) / p.temperature + noise[i])
