"""Parts of spans. Block 1000 + d is at depth d."""

from hypothesis import given
from hypothesis import strategies as st

from distserve.transport.base import Span
from distserve.worker.store.cutting import wanted_of, within
from distserve.worker.store.giving import Offer
from distserve.worker.store.offers import SegmentOffer


def span(start: int, stop: int) -> Span:
    return Span(2, 3, tuple(range(1000 + start, 1000 + stop)), tuple(range(start, stop)))


@given(st.integers(0, 200), st.integers(1, 100), st.integers(0, 200), st.integers(1, 100))
def test_within_a_range_is_what_both_have(start: int, num: int, first: int, size: int) -> None:
    both = [d for d in range(start, start + num) if d in range(first, first + size)]
    cut = within(span(start, start + num), range(first, first + size))
    assert cut == (span(both[0], both[-1] + 1) if both else None)


@given(st.integers(0, 100), st.integers(1, 70), st.sets(st.integers(0, 130)).map(sorted))
def test_of_a_span_the_node_gets_what_it_wants_where_it_wants_it(start: int, num: int, wanted: list[int]) -> None:
    pairs = [(1000 + d, wanted.index(d)) for d in range(start, start + num) if d in wanted]
    cut = wanted_of(span(start, start + num), wanted)
    if cut is None:
        assert not pairs
    else:
        assert list(zip(cut.source_blocks, cut.targets, strict=True)) == pairs
        assert (cut.layer_start, cut.layer_stop) == (2, 3)


def test_a_whole_span_is_not_copied() -> None:
    whole = span(64, 96)
    assert within(whole, range(64, 128)) is whole


class Part:
    """A segment of 64 that notes what it is told."""

    def __init__(self, start: int, stop: int) -> None:
        self.depths = range(start, stop)
        self.told: list[Span] = []

    def layers_ready(self, span: Span) -> None:
        self.told.append(span)


def told(*spans: Span) -> list[list[Span]]:
    """To the parts of an offer of blocks [10, 200)."""
    parts = [Part(10, 64), Part(64, 128), Part(128, 192), Part(192, 200)]
    as_parts: list[SegmentOffer] = parts  # type: ignore[assignment]
    offer = Offer([], 10, list(range(1010, 1200)), as_parts)
    for one in spans:
        offer.layers_ready(one)
    return [part.told for part in parts]


def test_each_segment_is_told_of_its_own_blocks_and_of_nothing_else() -> None:
    assert told(span(64, 96)) == [[], [span(64, 96)], [], []]
    assert told(span(60, 70)) == [[span(60, 64)], [span(64, 70)], [], []]
    assert told(span(0, 10), span(200, 210)) == [[], [], [], []], "what is not on offer"
    assert told(span(0, 300)) == [[span(10, 64)], [span(64, 128)], [span(128, 192)], [span(192, 200)]]
