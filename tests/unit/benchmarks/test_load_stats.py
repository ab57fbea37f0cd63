"""The arithmetic of measurements."""

import math

import pytest

from benchmarks.load_stats import Spread, growth_exponent, percentile, quiet_rounds, ratios


def test_percentiles_lie_between_the_nearest_values() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 0) == 1.0
    assert percentile(values, 50) == 2.5
    assert percentile(values, 100) == 4.0
    assert percentile(values, 75) == pytest.approx(3.25)
    assert percentile([7.0], 99) == 7.0
    assert math.isnan(percentile([], 50))


def test_a_spread_shows_its_range_only_where_there_is_one() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([3.0, 1.0, 2.0]).text(1) == "2.0 (1.0 to 3.0)"
    assert Spread.of([1234.56]).text(1) == "1,234.6"
    assert Spread.of([]).text() == "-"


def test_ratios_are_made_within_rounds_that_both_have() -> None:
    ours = {1: 10.0, 2: 30.0, 3: 8.0}
    theirs = {1: 5.0, 2: 10.0, 4: 1.0}
    assert ratios(ours, theirs) == Spread(2.5, 2.0, 3.0, 2)
    assert ratios(ours, {}).num == 0


def test_a_slow_minute_that_hits_both_leaves_the_ratio_alone() -> None:
    assert ratios({1: 10.0, 2: 40.0}, {1: 20.0, 2: 80.0}) == Spread(0.5, 0.5, 0.5, 2)


def test_rounds_in_which_others_worked_are_dropped() -> None:
    kept = quiet_rounds({1: 0.05, 2: 0.4, 3: 0.1}, limit=0.1)
    assert kept.rounds == {1, 3}
    assert kept.quiet


def test_without_a_quiet_round_the_quietest_is_kept_and_marked() -> None:
    kept = quiet_rounds({1: 0.5, 2: 0.3, 3: 0.9}, limit=0.1)
    assert kept.rounds == {2}
    assert not kept.quiet
    assert quiet_rounds({}, limit=0.1).rounds == frozenset()


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_growth_of_a_power_is_that_power(power: float) -> None:
    sizes = [1.0, 10.0, 100.0]
    assert growth_exponent(sizes, [3 * s**power for s in sizes]) == pytest.approx(power)
