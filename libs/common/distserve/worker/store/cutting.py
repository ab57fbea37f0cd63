"""Parts of a Span. Its targets, depths in a chain, follow one another, so nothing is looked at block by block: engines
report every layer of every chunk, from the thread that computes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from distserve.transport.base import Span


def within(span: Span, depths: range) -> Span | None:
    """What of it is in `depths`; None if nothing is."""
    first = span.targets[0]
    start, stop = max(0, depths.start - first), min(len(span.targets), depths.stop - first)
    if start >= stop:
        return None
    if stop - start == len(span.targets):
        return span
    return Span(span.layer_start, span.layer_stop, span.source_blocks[start:stop], span.targets[start:stop])


def wanted_of(span: Span, wanted: Sequence[int]) -> Span | None:
    """For a region that takes `wanted`, ascending depths: with its block numbers as targets, i for wanted[i]."""
    first = span.targets[0]
    start, stop = bisect_left(wanted, first), bisect_left(wanted, first + len(span.targets))
    if start == stop:
        return None
    if stop - start == len(span.targets):
        blocks = span.source_blocks
    else:
        blocks = tuple(span.source_blocks[depth - first] for depth in wanted[start:stop])
    return Span(span.layer_start, span.layer_stop, blocks, tuple(range(start, stop)))
