"""Which layers of which blocks go out when, as a pass reports its layers."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.engine.batching import Batch, Work, chunk_tokens
from distserve.engine.sequence import Sequence
from distserve.kv.layout import layer_block_bytes
from distserve.messages import KVLayout, SamplingParams, SequenceKey, num_blocks_for
from distserve.transport.base import Span
from distserve_prefill.spans import LayerFeed, prefix_span

LAYOUT = KVLayout(weights="w", dtype="float32", num_layers=8, num_kv_heads=1, head_dim=4, block_size=16, rope="{}")
LAYER_BLOCK = layer_block_bytes(LAYOUT)


class Noted:
    """Stands where the hand-over does, and keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.awaited: list[Span] = []

    def layers_ready(self, span: Span, *, awaited: bool = False) -> None:
        self.spans.append(span)
        self.awaited += [span] if awaited else []

    @property
    def layers(self) -> list[tuple[int, int]]:
        return [(s.layer_start, s.layer_stop) for s in self.spans]


def sequence(num_tokens: int, first_block: int = 1, block_size: int = 16) -> Sequence:
    """With blocks in an order that is not that of their ids."""
    blocks = list(range(first_block, first_block + num_blocks_for(num_tokens, block_size)))[::-1]
    return Sequence(SequenceKey("a"), [7] * num_tokens, num_tokens, SamplingParams(max_tokens=4), block_table=blocks)


def feed(work: list[Work], noted: list[Noted | None], span_bytes: int, layout: KVLayout = LAYOUT) -> LayerFeed:
    return LayerFeed(Batch(work), [[] if n is None else [n] for n in noted], layout, span_bytes=span_bytes)


def one_by_one(feed: LayerFeed, num_layers: int = 8) -> None:
    for layer in range(num_layers):
        feed(layer, layer + 1)


@pytest.mark.parametrize(
    ("span_bytes", "expected"),
    [
        (1, [(i, i + 1) for i in range(8)]),  # less than a layer: a layer
        (3 * LAYER_BLOCK, [(i, i + 1) for i in range(8)]),
        (6 * LAYER_BLOCK, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (9 * LAYER_BLOCK, [(0, 3), (3, 6), (6, 8)]),  # the rest goes out with the last layer
        (1000 * LAYER_BLOCK, [(0, 8)]),
    ],
)
def test_a_span_has_as_many_layers_as_make_up_span_bytes(span_bytes: int, expected: list[tuple[int, int]]) -> None:
    noted, s = Noted(), sequence(48)
    one_by_one(feed([Work(s, 0, 48, samples=True)], [noted], span_bytes))
    assert noted.layers == expected
    assert all((span.source_blocks, span.targets) == ((3, 2, 1), (0, 1, 2)) for span in noted.spans)


def test_a_span_goes_out_no_later_than_its_last_layer() -> None:
    noted, s = Noted(), sequence(48)
    layer_feed = feed([Work(s, 0, 48, samples=True)], [noted], 9 * LAYER_BLOCK)
    seen = []
    for layer in range(8):
        layer_feed(layer, layer + 1)
        seen.append(len(noted.spans))
    assert seen == [0, 0, 1, 1, 1, 2, 2, 3]


def test_a_pass_that_reports_all_layers_at_once_ships_them_at_once() -> None:
    noted, s = Noted(), sequence(48)
    feed([Work(s, 0, 48, samples=True)], [noted], 1)(0, 8)
    assert noted.layers == [(0, 8)]


def test_a_chunk_covers_its_own_blocks_under_their_numbers_in_the_prompt() -> None:
    noted, s = Noted(), sequence(70)  # blocks 5 4 3 2 1, the last one holds 6 tokens
    feed([Work(s, 32, 32, samples=False)], [noted], 1 << 20)(0, 8)
    feed([Work(s, 64, 6, samples=True)], [noted], 1 << 20)(0, 8)
    assert [(x.source_blocks, x.targets) for x in noted.spans] == [((3, 2), (2, 3)), ((1,), (4,))]


def test_decode_waits_for_the_last_layers_of_the_last_chunk_alone() -> None:
    noted, s = Noted(), sequence(70)
    one_by_one(feed([Work(s, 0, 64, samples=False)], [noted], 1))
    assert noted.awaited == []
    one_by_one(feed([Work(s, 64, 6, samples=True)], [noted], 6 * LAYER_BLOCK))
    assert noted.awaited == [Span(6, 8, (1,), (4,))]


def test_of_a_pass_that_reports_all_layers_at_once_decode_waits_for_everything() -> None:
    noted, s = Noted(), sequence(48)
    feed([Work(s, 0, 48, samples=True)], [noted], 1)(0, 8)
    assert noted.awaited == noted.spans


def test_each_sequence_of_a_pass_has_its_own_stride_and_who_stays_here_has_none() -> None:
    long, short = Noted(), Noted()
    work = [
        Work(sequence(64), 0, 64, samples=True),
        Work(sequence(32, first_block=9), 0, 32, samples=True),  # ends with its first token: no hand-over
        Work(sequence(16, first_block=20), 0, 16, samples=True),
    ]
    one_by_one(feed(work, [long, None, short], 4 * LAYER_BLOCK))
    assert long.layers == [(i, i + 1) for i in range(8)]
    assert short.layers == [(0, 4), (4, 8)]
    assert {b for x in long.spans for b in x.source_blocks} == {1, 2, 3, 4}
    assert {b for x in short.spans for b in x.source_blocks} == {20}


def test_takers_of_each_sequence_are_asked_for() -> None:
    with pytest.raises(ValueError, match="zip"):
        feed([Work(sequence(16), 0, 16, samples=True)], [], 1)


def test_all_who_take_a_sequences_layers_are_told_alike() -> None:
    handoff, offer, s = Noted(), Noted(), sequence(48)
    one_by_one(LayerFeed(Batch([Work(s, 0, 48, samples=True)]), [[handoff, offer]], LAYOUT, span_bytes=6 * LAYER_BLOCK))
    assert handoff.spans == offer.spans
    assert handoff.layers == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_a_sequences_prefix_hits_are_one_span_of_all_layers() -> None:
    s = sequence(70)
    assert prefix_span(s, LAYOUT) is None
    s.num_computed_tokens = 32
    assert prefix_span(s, LAYOUT) == Span(0, 8, (5, 4), (0, 1))


@given(
    num_tokens=st.integers(1, 400),
    budgets=st.lists(st.integers(16, 200), min_size=1),
    block_size=st.sampled_from([8, 16]),
    num_layers=st.integers(1, 12),
    span_bytes=st.integers(1, 40 * LAYER_BLOCK),
    steps=st.lists(st.integers(1, 4), min_size=1),
)
def test_over_the_chunks_of_a_prompt_every_layer_of_every_block_goes_out_once(
    num_tokens: int, budgets: list[int], block_size: int, num_layers: int, span_bytes: int, steps: list[int]
) -> None:
    """However the prompt is cut into passes, and however many layers a pass reports at a time."""
    layout = msgspec.structs.replace(LAYOUT, num_layers=num_layers, block_size=block_size)
    noted, s = Noted(), sequence(num_tokens, block_size=block_size)
    num_passes = 0
    while s.num_uncomputed_tokens:
        num = chunk_tokens(s, budgets[num_passes % len(budgets)], block_size)
        start = s.num_computed_tokens
        layer_feed = feed([Work(s, start, num, samples=start + num == num_tokens)], [noted], span_bytes, layout)
        layer = 0
        while layer < num_layers:
            stop = min(num_layers, layer + steps[layer % len(steps)])
            layer_feed(layer, stop)
            layer = stop
        s.num_computed_tokens += num
        num_passes += 1
    cells = Counter((layer, t) for x in noted.spans for layer in range(x.layer_start, x.layer_stop) for t in x.targets)
    assert set(cells) == {(layer, t) for layer in range(num_layers) for t in range(len(s.block_table))}
    assert set(cells.values()) == {1}
    for span in noted.spans:
        assert span.source_blocks == tuple(s.block_table[t] for t in span.targets)
        held = (span.layer_stop - span.layer_start) * len(span.targets) * layer_block_bytes(layout)
        most = max(span_bytes, len(span.targets) * layer_block_bytes(layout))
        # a report may bring up to four layers more than the stride wants
        assert held <= most + 3 * len(span.targets) * layer_block_bytes(layout)
