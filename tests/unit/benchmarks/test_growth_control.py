"""What the growth benchmark says of a curve."""

import pytest

from benchmarks.growth_control import slope


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_a_slope_is_the_exponent(power: float) -> None:
    sizes = [1, 10, 100]
    assert slope(sizes, [3 * s**power for s in sizes]) == pytest.approx(power)
