"""A TTFT counts only if the blocks came from the tier that was to be measured."""

import pytest

from benchmarks.store_ttft import BLOCK, CASES, KNOWN, Run, WrongTier, check, table

BLOCKS = KNOWN // BLOCK
NONE = {"dram": 0, "disk": 0}


@pytest.mark.parametrize(
    ("case", "cached", "came"),
    [
        ("none", 0, NONE),
        ("pool", KNOWN, NONE),
        ("dram", KNOWN, {"dram": BLOCKS, "disk": 0}),
        ("disk", KNOWN, {"dram": 0, "disk": BLOCKS}),
    ],
)
def test_what_came_from_where_it_should_counts(case: str, cached: int, came: dict[str, int]) -> None:
    check(case, cached, came)


@pytest.mark.parametrize(
    ("case", "cached", "came"),
    [
        ("none", BLOCK, NONE),
        ("pool", KNOWN, {"dram": BLOCKS, "disk": 0}),
        ("pool", KNOWN - BLOCK, NONE),
        ("dram", KNOWN, NONE),
        ("dram", KNOWN, {"dram": BLOCKS - 1, "disk": 1}),
        ("disk", KNOWN, {"dram": BLOCKS, "disk": 0}),
        ("disk", 0, {"dram": 0, "disk": BLOCKS}),
    ],
)
def test_what_came_from_elsewhere_does_not(case: str, cached: int, came: dict[str, int]) -> None:
    with pytest.raises(WrongTier, match=case):
        check(case, cached, came)


def test_ratios_are_made_within_a_round() -> None:
    """0.5 and 0.1: of the medians it would be 0.14."""
    runs = [Run("none", 0, 1.0, 0.0), Run("dram", 0, 0.5, 0.0), Run("none", 1, 10.0, 0.0), Run("dram", 1, 1.0, 0.0)]
    assert "| dram | 750 (500 to 1,000) | 0.300 (0.100 to 0.500) |" in table(runs)


def test_every_case_has_a_row() -> None:
    assert [line.split(" | ")[0].strip("| ") for line in table([]).splitlines()[2:]] == list(CASES)
