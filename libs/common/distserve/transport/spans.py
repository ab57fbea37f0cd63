"""Cutting and joining block lists: pure arithmetic over ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from distserve.errors import KVError
from distserve.transport.base import Span

Ids: TypeAlias = npt.NDArray[np.int64]
Run: TypeAlias = tuple[int, int, int]  # first target, first source block, how many: both count up by one
SHORT = 64  # ids; up to here a loop is faster than numpy


def as_ids(ids: object) -> Ids:
    return np.asarray(ids, dtype=np.int64)


def runs(ids: Ids) -> Iterator[tuple[int, int]]:
    """(position, length) of each maximal stretch of consecutive ids: ids[position : position + length] counts up by
    one. The stretches cover the list in order."""
    if len(ids) <= SHORT:
        return _short_runs(ids.tolist(), ids.tolist())
    return _between(np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1, len(ids))


def paired_runs(a: Ids, b: Ids) -> Iterator[tuple[int, int]]:
    """As runs(), for stretches in which both lists count up by one: each is one strided copy."""
    if len(a) <= SHORT:
        return _short_runs(a.tolist(), b.tolist())
    breaks = np.flatnonzero((a[1:] - a[:-1] != 1) | (b[1:] - b[:-1] != 1)) + 1
    return _between(breaks, len(a))


def runs_of(span: Span) -> list[Run]:
    """The span's blocks as runs, in order."""
    targets, sources, count = span.targets, span.source_blocks, len(span.targets)
    if not count:
        return []
    target, source = targets[0], sources[0]
    if targets == tuple(range(target, target + count)) and sources == tuple(range(source, source + count)):
        return [(target, source, count)]
    short = count <= SHORT
    found = _short_runs(targets, sources) if short else paired_runs(as_ids(targets), as_ids(sources))
    return [(targets[i], sources[i], length) for i, length in found]


def spelled(runs: Sequence[tuple[int, ...]]) -> list[Ids]:
    """Runs of (first, ..., how many), spelled out: for each of the firsts the list of what counts up from it."""
    table = np.array(runs, np.int64)
    counts = table[:, -1]
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return [np.repeat(table[:, i], counts) + places for i in range(table.shape[1] - 1)]


def _short_runs(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[int, int]]:
    """For short lists, where numpy's fixed costs are larger than the work."""
    start = 0
    for i in range(1, len(a)):
        if a[i] != a[i - 1] + 1 or b[i] != b[i - 1] + 1:
            yield start, i - start
            start = i
    if a:
        yield start, len(a) - start


def _between(breaks: npt.NDArray[np.intp], stop: int) -> Iterator[tuple[int, int]]:
    start = 0
    for end in [*breaks.tolist(), stop]:
        yield start, end - start
        start = end


def check_span(span: Span, num_layers: int, num_sources: int, num_targets: int) -> None:
    """Raises KVError for a span that no receiver could take: layers or blocks that do not exist."""
    if not 0 <= span.layer_start < span.layer_stop <= num_layers:
        raise KVError(
            f"a span of layers [{span.layer_start}, {span.layer_stop}), must be within [0, {num_layers})",
            layer_start=span.layer_start,
            layer_stop=span.layer_stop,
        )
    if len(span.source_blocks) != len(span.targets):
        raise KVError(f"a span of {len(span.source_blocks)} source blocks and {len(span.targets)} targets")
    if not span.targets:
        return
    for name, ids, bound in (
        ("source block", span.source_blocks, num_sources),
        ("target", span.targets, num_targets),
    ):
        if min(ids) < 0 or max(ids) >= bound:
            raise KVError(f"a span names {name} {max(ids)} (lowest {min(ids)}), must be within 0..{bound - 1}")


def pieces(span: Span, layer_bytes: int, limit_bytes: int) -> Iterator[Span]:
    """The span cut into spans of about limit_bytes at most (at least one layer of one block each).

    Whole heights are kept where they fit, since neighbouring full blocks join into one run; a block larger than the
    limit is cut between layers.
    """
    height = span.layer_stop - span.layer_start
    num_blocks = len(span.source_blocks)
    if height * num_blocks * layer_bytes <= limit_bytes:
        if height and num_blocks:
            yield span
        return
    layers = min(height, max(1, limit_bytes // layer_bytes))
    blocks = max(1, limit_bytes // (layers * layer_bytes))
    for i in range(0, num_blocks, blocks):
        for layer in range(span.layer_start, span.layer_stop, layers):
            yield Span(
                layer,
                min(layer + layers, span.layer_stop),
                span.source_blocks[i : i + blocks],
                span.targets[i : i + blocks],
            )
