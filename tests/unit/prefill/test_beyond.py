"""What is left of a prompt's spans for a decode worker that has its beginning."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from distserve.transport.base import Span
from distserve_prefill.beyond import beyond


def test_targets_are_counted_from_the_first_block_that_is_lacking() -> None:
    span = Span(2, 5, (9, 4, 7, 1), (3, 4, 5, 6))
    assert beyond(span, 0) is span
    assert beyond(span, 2) == Span(2, 5, (9, 4, 7, 1), (1, 2, 3, 4))
    assert beyond(span, 5) == Span(2, 5, (7, 1), (0, 1))
    assert beyond(span, 6) == Span(2, 5, (1,), (0,))
    assert beyond(span, 7) is None


@given(
    blocks=st.lists(st.integers(1, 500), unique=True, min_size=1, max_size=40),
    cuts=st.sets(st.integers(1, 39)),
    num_layers=st.integers(1, 6),
    num_hits=st.integers(0, 45),
)
def test_every_layer_of_every_block_that_is_lacking_goes_once(
    blocks: list[int], cuts: set[int], num_layers: int, num_hits: int
) -> None:
    edges = [0, *sorted(c for c in cuts if c < len(blocks)), len(blocks)]
    spans = [
        Span(layer, layer + 1, tuple(blocks[a:b]), tuple(range(a, b)))
        for a, b in pairwise(edges)
        for layer in range(num_layers)
    ]
    left = [rest for span in spans if (rest := beyond(span, num_hits)) is not None]
    cells = Counter((s.layer_start, t, b) for s in left for t, b in zip(s.targets, s.source_blocks, strict=True))
    lacking = blocks[num_hits:]
    assert cells == Counter((layer, t, b) for layer in range(num_layers) for t, b in enumerate(lacking))
