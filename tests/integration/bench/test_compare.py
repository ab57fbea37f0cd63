"""Two servers under the same traffic."""

import itertools

import pytest

from distserve.bench.document import Ratio
from tests.integration.bench.scripted import Scripted, measured, serving, streaming


async def test_the_slower_server_is_slower_by_as_much_as_it_is() -> None:
    async with (
        serving(Scripted(streaming(ttft_s=0.02, gap_s=0.01), model="fast")) as a,
        serving(Scripted(streaming(ttft_s=0.06, gap_s=0.02, overhead=9), tokenize=9, model="slow")) as b,
    ):
        document = await measured(
            a, compare=b.url, rate=25.0, requests=60, slices=6, output="5", warmup="2", input="uniform:min=20,max=40"
        )
        assert [side.server.model for side in document.sides] == ["fast", "slow"]
        # The same words, shorter by what the other's template takes.
        for mine, others in zip(a.answers, b.answers, strict=True):
            assert mine.text.startswith(others.text)
            assert len(mine.text.split()) == len(others.text.split()) + 9
        assert order(a, b) == "ABBAABBAABBA"
        assert [side.summary.num_input_as_asked for side in document.sides] == [60, 60]
    ratios = {ratio.figure: ratio for ratio in document.ratios}
    assert_near(ratios["ttft p50"], 3.0)
    assert_near(ratios["itl p50"], 2.0)
    assert ratios["ttft p99"].ratio is None  # 60 samples are too few
    assert all(len(side.windows) == 6 for side in document.sides)
    assert {r.server for r in document.results} == {"A", "B"}


def assert_near(ratio: Ratio, value: float) -> None:
    assert ratio.ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low <= ratio.ratio <= ratio.high
    assert ratio.ratio == pytest.approx(value, rel=0.35)
    assert ratio.low > 1.0


def order(a: Scripted, b: Scripted) -> str:
    """Whose turn it was, slice by slice, without the probes and the warm-up."""
    warm = 2
    times = sorted([(x.at_s, "A") for x in a.answers[warm:]] + [(x.at_s, "B") for x in b.answers[warm:]])
    runs = [(name, len(list(group))) for name, group in itertools.groupby(name for _, name in times)]
    return "".join(name * (num // 10) for name, num in runs)


async def test_answers_that_end_behind_a_slice_take_time_as_well_as_they_bring_tokens() -> None:
    """Three slices of 0.2 s with one answer each, of 0.1 and 0.6 s."""
    async with (
        serving(Scripted(streaming(ttft_s=0.1), model="fast")) as a,
        serving(Scripted(streaming(ttft_s=0.6), model="slow")) as b,
    ):
        document = await measured(a, compare=b.url, rate=2.0, constant=True, duration="600ms", slices=3)
    ratios = {ratio.figure: ratio for ratio in document.ratios}
    for figure, value in (("output tokens/s", 0.1 / 0.6), ("requests/s", 0.1 / 0.6)):
        assert ratios[figure].ratio == pytest.approx(value, rel=0.2)


async def test_one_server_against_itself_is_no_different() -> None:
    async with serving(Scripted(streaming(ttft_s=0.03, gap_s=0.01))) as a:
        document = await measured(a, compare=a.url, concurrency=2, requests=60, slices=6, output="5", warmup="2")
    ratio = {r.figure: r for r in document.ratios}["ttft p50"]
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low <= 1.02
    assert ratio.high >= 0.98
