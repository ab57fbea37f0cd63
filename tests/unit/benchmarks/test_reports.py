"""From cells to tables."""

import pytest

from benchmarks.all_rows import control_plane_rows, engine_rows, growth_rows, start_rows, transport_rows
from benchmarks.engine_vs_vllm_report import report
from benchmarks.growth import Point, table
from benchmarks.load import Case, Figures
from benchmarks.load_cells import Cell, Series

CASE = Case(streams=1, prompt=128, output=64, requests=2)


def cell(side: str, number: int, speed: float, *, others: float = 0.0, idle: float = 0.0) -> Cell:
    figures = Figures(speed, ttfts_s=[0.1, 0.3], tpots_s=[1 / speed, 1 / speed], gaps_s=[1 / speed] * 3)
    return Cell(side, CASE, number, figures, 1.9, idle, 0.01, others, tries=1)


def test_rounds_that_others_disturbed_do_not_count() -> None:
    cells = [cell("a", 1, 10.0), cell("a", 2, 99.0, others=0.3), cell("a", 3, 99.0, idle=0.3), cell("a", 4, 30.0)]
    found = Series.of(cells, "a", CASE)
    assert list(found.cells) == [1, 4]
    assert found.quiet
    assert found.spread("tokens_per_s").median == 20.0
    assert found.pooled("ttfts_s", 100) == 0.3


def test_a_ratio_needs_both_sides_of_a_round() -> None:
    cells = [cell("a", 1, 10.0), cell("a", 2, 30.0), cell("b", 1, 5.0), cell("b", 2, 5.0, others=1.0)]
    ours, theirs = Series.of(cells, "a", CASE), Series.of(cells, "b", CASE)
    assert ours.ratio(theirs, "tokens_per_s").median == 2.0
    assert ours.ratio(theirs, "tpot_p50").median == pytest.approx(0.5)
    assert ours.ratio(theirs, "tokens_per_s").num == 1


def test_the_report_has_figures_ratios_and_the_floor() -> None:
    cells = [cell("colocated", 1, 20.0), cell("vllm", 1, 10.0), cell("vllm", 2, 10.0, others=0.5)]
    floor = {"weight_bytes": 250e6, "bytes_per_s": {"1": [8e9], "2": [5e9, 10e9]}}
    text = report({"conditions": {"CPU": "x"}, "floor": floor, "sides": ["colocated", "vllm"], "cells": cells})
    assert "| 128/64 x 1 | colocated | 20.0 | 200 / 298 | 50.0 / 50.0 | 50 | 1.90 |" in text
    assert "| 128/64 x 1 | 2.00 | 1.00 | 0.50 | 0.50 |" in text
    assert "| 128/64 x 1 | colocated | 50.0 | 25.0 (2 cores) | 2.00 |" in text


def test_a_side_that_was_disturbed_in_every_round_is_marked() -> None:
    cells = [cell("colocated", 1, 20.0, others=0.5), cell("vllm", 1, 10.0)]
    floor = {"weight_bytes": 1.0, "bytes_per_s": {"1": [1.0]}}
    text = report({"conditions": {}, "floor": floor, "sides": ["colocated", "vllm"], "cells": cells})
    assert "| colocated * |" in text
    assert "| vllm |" in text
    assert "| 128/64 x 1 | 2.00 * | 1.00 * | 0.50 * | 0.50 * |" in text
    assert "*: others used the cores" in text


def test_cells_become_rows_of_the_one_table() -> None:
    found = {
        "cells": [cell("colocated", 1, 20.0).as_json(), cell("colocated", 2, 10.0).as_json()],
        "floor": {"weight_bytes": 250e6, "bytes_per_s": {"1": [8e9], "2": [5e9, 10e9]}},
    }
    rows = engine_rows(found)
    assert rows[0].what == "colocated, 1 stream, 128 in, 64 out"
    assert rows[0].figure.startswith("15.0 (10.0 to 20.0) tokens/s, TTFT P50 200")
    assert rows[1].figure == "25.0 ms: weights read at 10.0 GB/s"


def test_other_benchmarks_become_rows_too() -> None:
    speeds = {"shm, 4 in flight|1 MiB": 2.0, "memcpy|1 MiB": 4.0, "tcp, 4 in flight|1 MiB": 1.0}
    speeds["socket, 4 in flight|1 MiB"] = 2.0
    transport = {name: {"gb_per_s": [v, 2 * v]} for name, v in speeds.items()}
    assert transport_rows(transport)[0].figure.endswith("0.50 (0.50 to 0.50) of memcpy")
    parts = ("start", "imports", "load", "warm_up", "register", "known", "first_answer")
    assert start_rows({"runs": [dict.fromkeys(parts, 1.0) | {"total": 7.0}]})[0].figure.startswith("7.0 s: start 1.0,")
    plane = {"side": "ours", "clients": 1, "tokens": 64, "req/s": 200.0, "TTFT P50 ms": 1.5, "CPU us/token": 30.0}
    assert control_plane_rows([plane])[0].figure == "200 requests/s, TTFT P50 1.50 ms, 30 us CPU a token"
    growth = {"requests in flight": [{"size": 1, "cpu_s": 0.1}, {"size": 4, "cpu_s": 0.02}]}
    assert growth_rows(growth)[0].figure == "1: 100.0, 4: 20.0"


def test_what_grows_faster_than_its_input_is_marked() -> None:
    steady, square = Point(10, 0.1, 0.1, 0.1, 0.0), Point(100, 1.0, 10.0, 0.1, 0.0)
    assert "| +1.00, +2.00!, +0.00 |" in table("prompt tokens", [steady, square])
