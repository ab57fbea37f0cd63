"""Traffic is a pure function of its fields."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.bench.errors import BadOption
from distserve.bench.lengths import Fixed, Uniform, power_law
from distserve.bench.prompts import Words
from distserve.bench.trace import Entry, read_trace
from distserve.bench.traffic import Ask, Traffic
from distserve.bench.words import CANDIDATES

WORDS = Words(CANDIDATES, overhead=3, source="")
LENGTHS = st.one_of(
    st.integers(1, 900).map(Fixed),
    st.tuples(st.integers(1, 50), st.integers(50, 900)).map(lambda b: Uniform(*b)),
    st.integers(5, 100).map(lambda mean: power_law(mean, 1, 900)),
)
ENTRIES = st.lists(
    st.tuples(st.floats(0, 100), st.integers(1, 1500), st.integers(1, 50), st.lists(st.integers(0, 9), max_size=3)),
    min_size=1,
    max_size=20,
).map(lambda rows: tuple(Entry(at, i, o, tuple(b)) for at, i, o, b in sorted(rows)))
TRAFFIC = st.one_of(
    st.builds(
        Traffic,
        st.sampled_from(["poisson", "constant"]),
        st.integers(0, 99),
        st.floats(0.1, 500),
        input=LENGTHS,
        output=LENGTHS,
    ),
    st.builds(
        Traffic, st.just("closed"), st.integers(0, 99), concurrency=st.integers(1, 64), input=LENGTHS, output=LENGTHS
    ),
    st.builds(Traffic, st.just("trace"), st.integers(0, 99), trace=ENTRIES, speed=st.floats(0.1, 100)),
)


def first(traffic: Traffic, num: int) -> list[tuple[Ask, str]]:
    return [(ask, WORDS.text(ask)) for ask in itertools.islice(traffic.asks(), num)]


@given(TRAFFIC, st.integers(0, 30), st.integers(0, 30))
def test_the_same_fields_give_the_same_requests_texts_and_times(traffic: Traffic, few: int, more: int) -> None:
    assert first(traffic, few) == first(replace(traffic), few)
    assert first(traffic, few) == first(traffic, few + more)[:few]


@given(TRAFFIC)
def test_times_do_not_run_backwards_and_lengths_are_at_least_one(traffic: Traffic) -> None:
    asks = [ask for ask, _ in first(traffic, 30)]
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(asks))
    assert all(ask.num_input >= 1 and ask.num_output >= 1 for ask in asks)
    assert [ask.index for ask in asks] == list(range(len(asks)))


def test_another_process_draws_the_same() -> None:
    """No order of a set, no hash of a text, that differs from process to process."""
    code = (
        "from distserve.bench.traffic import Traffic; from distserve.bench.prompts import UNCHECKED; import itertools;"
        "t = Traffic('poisson', 7, 4.0);"
        "print([(a.at_s, UNCHECKED.text(a)[:80]) for a in itertools.islice(t.asks(), 5)])"
    )
    seen = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
        for _ in range(2)
    }
    assert len(seen) == 1


@pytest.mark.parametrize("change", [{"seed": 2}, {"part": 1}])
def test_another_seed_or_part_gives_other_requests(change: dict[str, Any]) -> None:
    traffic = Traffic("poisson", 1, 4.0, input=Fixed(50))  # of one length: the words must differ
    mine, others = first(traffic, 20), first(replace(traffic, **change), 20)
    assert all(a.at_s != b.at_s and text != other for (a, text), (b, other) in zip(mine, others, strict=True))


def test_a_poisson_rate_is_kept_on_average_and_a_constant_one_exactly() -> None:
    asks = list(itertools.islice(Traffic("poisson", 3, 8.0).asks(), 4000))
    assert asks[-1].at_s / 4000 == pytest.approx(1 / 8, rel=0.05)
    gaps = sorted(b.at_s - a.at_s for a, b in itertools.pairwise(asks))
    assert gaps[len(gaps) // 2] == pytest.approx(0.693 / 8, rel=0.1)  # the median of an exponential
    assert [a.at_s for a in itertools.islice(Traffic("constant", 3, 8.0).asks(), 4)] == [0, 0.125, 0.25, 0.375]


# ---------------------------------------------------------------- traces

LINES = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [1, 2]},
    {"timestamp": 2000, "input_length": 700, "output_length": 7, "hash_ids": [8, 9]},
]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_a_trace_is_played_in_its_order_and_at_its_speed(tmp_path: Path) -> None:
    entries = read_trace("--trace", write(tmp_path / "t.jsonl", [*map(json.dumps, LINES), ""]))
    asks = list(Traffic("trace", trace=tuple(entries), speed=4.0).asks())
    assert [(a.at_s, a.num_input, a.num_output) for a in asks] == [(0, 1100, 5), (0.25, 700, 7), (0.5, 700, 6)]


def test_equal_blocks_are_equal_text_and_nothing_else_is(tmp_path: Path) -> None:
    entries = read_trace("--trace", write(tmp_path / "t.jsonl", list(map(json.dumps, LINES))))
    long, other, short = (WORDS.text(a).split() for a in Traffic("trace", trace=tuple(entries)).asks())
    assert (len(long), len(short)) == (1098, 698)  # one word is the anchor, which counts in the overhead of 3
    assert long[:698] == short  # blocks 1 and 2
    assert sum(a == b for a, b in zip(long, other, strict=False)) < 100


def test_another_seed_gives_other_blocks_and_another_part_the_same(tmp_path: Path) -> None:
    """Else a server's cache would hold them from the run before; slices of one comparison are one conversation."""
    entries = tuple(read_trace("--trace", write(tmp_path / "t.jsonl", list(map(json.dumps, LINES)))))
    one, part, two = (
        first(Traffic("trace", seed, trace=entries, part=part), 1)[0][1].split()
        for seed, part in ((1, 0), (1, 1), (2, 0))
    )
    assert one[:1025] == part[:1025]
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 100


def test_a_trace_without_blocks_shares_nothing() -> None:
    entries = (Entry(0, 300, 1), Entry(1, 300, 1))
    a, b = (text for _, text in first(Traffic("trace", trace=entries), 2))
    assert a.split()[1:9] != b.split()[1:9]


def test_parts_of_a_trace_are_consecutive_and_whole() -> None:
    entries = tuple(Entry(float(i), 10 + i, 1) for i in range(10))
    parts = Traffic("trace", trace=entries).parts(3)
    assert [e for part in parts for e in part.trace] == list(entries)
    assert all(next(part.asks()).at_s == 0 for part in parts)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2: .*truncated|line 2"),
        ('{"timestamp": 1}', "line 2: .*input_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "at least 1"),
        ('{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}', "2 hash_ids of 512 tokens"),
        ('{"timestamp": "x", "input_length": 512, "output_length": 1}', "line 2: .*timestamp"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(BadOption, match=why):
        read_trace("--trace", write(tmp_path / "t.jsonl", [json.dumps(LINES[0]), line]))


def test_a_trace_that_is_empty_or_away(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="holds no requests"):
        read_trace("--trace", write(tmp_path / "t.jsonl", [""]))
    with pytest.raises(BadOption, match="No such file"):
        read_trace("--trace", tmp_path / "away.jsonl")
