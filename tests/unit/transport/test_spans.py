from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distserve.transport.base import Span
from distserve.transport.spans import SHORT, as_ids, paired_runs, pieces, runs, runs_of, spelled

ids = st.lists(st.integers(0, 12), max_size=30)


@given(ids)
def test_runs_cover_the_list_and_are_maximal(values: list[int]):
    array, covered = as_ids(values), []
    found = list(runs(array))
    for position, length in found:
        assert length
        part = values[position : position + length]
        assert part == list(range(part[0], part[0] + length))
        covered += part
    assert covered == values
    for (a, n), (b, _) in pairwise(found):
        assert values[a + n - 1] + 1 != values[b]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_paired_runs_count_up_on_both_sides(pairs: list[tuple[int, int]]):
    a, b = (as_ids([p[side] for p in pairs]) for side in (0, 1))
    copied: dict[int, tuple[int, int]] = {}
    for position, length in paired_runs(a, b):
        for k in range(length):
            copied[position + k] = (int(a[position]) + k, int(b[position]) + k)
    assert [copied[i] for i in range(len(pairs))] == pairs


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.integers(0, 100))
def test_runs_of_a_span_name_each_pair_in_order(pairs: list[tuple[int, int]], tail: int):
    pairs += [(20 + i, 40 + i) for i in range(tail)]  # long lists too
    span = Span(0, 1, tuple(source for source, _ in pairs), tuple(target for _, target in pairs))
    found = runs_of(span)
    assert [(source + i, target + i) for target, source, n in found for i in range(n)] == pairs
    for (t, s, n), (t2, s2, _) in pairwise(found):
        assert (t + n, s + n) != (t2, s2)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 9)), min_size=1, max_size=9))
def test_runs_spelled_out_count_up_from_each_first(runs_: list[tuple[int, int, int]]):
    for column, ids in enumerate(spelled(runs_)):
        assert ids.tolist() == [run[column] + i for run in runs_ for i in range(run[2])]


def test_a_span_of_neighbours_is_one_run():
    assert runs_of(Span(0, 1, (7, 8, 9), (2, 3, 4))) == [(2, 7, 3)]


@given(st.integers(0, 9), st.integers(0, 5), st.integers(0, 20), st.integers(1, 5000))
def test_pieces_cover_every_cell_once_within_the_limit(start: int, height: int, n: int, limit: int):
    span = Span(start, start + height, tuple(range(100, 100 + n)), tuple(range(n)))
    cells = []
    for piece in pieces(span, 64, limit):
        size = (piece.layer_stop - piece.layer_start) * len(piece.targets) * 64
        assert 0 < size <= max(limit, 64)
        for layer in range(piece.layer_start, piece.layer_stop):
            cells += [(layer, *pair) for pair in zip(piece.source_blocks, piece.targets, strict=True)]
    expected = [(layer, 100 + i, i) for layer in range(start, start + height) for i in range(n)]
    assert sorted(cells) == expected


def test_pieces_keep_whole_heights_where_they_fit():
    found = list(pieces(Span(0, 4, (1, 2, 3), (0, 1, 2)), 100, 800))
    assert [(p.layer_start, p.layer_stop, p.targets) for p in found] == [(0, 4, (0, 1)), (0, 4, (2,))]


def test_a_span_within_the_limit_is_passed_on_as_it_is():
    span = Span(1, 3, (4, 5), (0, 1))
    assert next(pieces(span, 10, 40)) is span
    assert as_ids((1, 2)).dtype == np.int64


@given(st.lists(st.booleans(), min_size=SHORT + 1, max_size=2 * SHORT), st.randoms())
def test_long_lists_give_the_same_runs_as_short_ones(steps, random):
    a, b = [0], [50]
    for step in steps:  # mostly neighbours on both sides
        a.append(a[-1] + (1 if step else random.randint(1, 2)))
        b.append(b[-1] + (1 if step else random.randint(1, 2)))
    for one, other in ((a, a), (a, b)):
        breaks = [i for i in range(1, len(a)) if one[i] != one[i - 1] + 1 or other[i] != other[i - 1] + 1]
        found = list(paired_runs(as_ids(one), as_ids(other)))
        assert [position for position, _ in found] == [0, *breaks]
        assert sum(length for _, length in found) == len(a)
    assert list(runs(as_ids(a))) == list(paired_runs(as_ids(a), as_ids(a)))
