"""The tables of the stores' throughput, and their rows in the one table."""

from dataclasses import asdict

from benchmarks.all_rows import Row, store_rows, store_ttft_rows
from benchmarks.store_report import Cell, Failure, tables


def cell(side: str, verb: str, turn: int, seconds: float, client_s: float = 0.0, server_s: float = 0.0) -> Cell:
    return Cell(side, "1MiB", verb, turn, 1_000_000_000, seconds, client_s, server_s, others=0.0)


CELLS = [
    cell("DistServe, shm", "put", 0, 0.5, client_s=0.1, server_s=0.2),
    cell("floor", "put", 0, 0.25),
    cell("DistServe, shm", "put", 1, 2.0, client_s=0.3, server_s=0.2),
    cell("floor", "put", 1, 1.0),
    cell("DistServe, shm", "put", 2, 1.0),
    cell("floor", "put", 2, 0.25),
]


def test_a_cell_is_the_median_of_its_rounds_with_the_lowest_and_the_highest() -> None:
    assert "| DistServe, shm | 1.00 (0.50 to 2.00) |" in tables(CELLS, [])


def test_a_ratio_is_made_within_each_round() -> None:
    """0.5, 0.5 and 0.25; of the medians it would be 0.25."""
    assert "| put, of floor | 0.50 (0.25 to 0.50) |" in tables(CELLS, [])


def test_cpu_is_of_all_rounds_together() -> None:
    mib = 3e9 / (1 << 20)
    assert f"| DistServe, shm | {0.4e6 / mib:,.0f} + {0.4e6 / mib:,.0f} |" in tables(CELLS, [])


def test_a_cell_that_was_not_measured_is_a_dash() -> None:
    got = tables([*CELLS, cell("floor", "get", 0, 1.0)], [])
    assert "| DistServe, shm | - |" in got


def test_what_failed_is_named() -> None:
    assert tables(CELLS, [Failure("Other, tcp", "1MiB", "no segment")]).endswith(
        "Other, tcp at 1MiB failed: no segment"
    )


def test_sides_become_rows_of_the_one_table() -> None:
    failure = asdict(Failure("Other, tcp", "1MiB", "no segment"))
    assert store_rows({"cells": [asdict(c) for c in CELLS], "failures": [failure]}) == [
        Row("store, DistServe, shm, values of 1MiB", "put 1.00 (0.50 to 2.00) GB/s, get - GB/s"),
        Row("store, floor, values of 1MiB", "put 4.00 (1.00 to 4.00) GB/s, get - GB/s"),
        Row("store, Other, tcp, values of 1MiB", "failed"),
    ]


def test_ttft_becomes_rows_with_ratios_within_rounds() -> None:
    found = [{"case": case, "turn": 0, "ttft_s": s} for case, s in (("none", 2.0), ("dram", 0.5))]
    assert store_ttft_rows(found) == [
        Row("TTFT, 90 % of 2,000 tokens known to none", "2,000 ms"),
        Row("TTFT, 90 % of 2,000 tokens known to dram", "500 ms, 0.25 of uncached"),
    ]
