"""The tables of a simulation."""

from benchmarks.sim.decode import Steps
from benchmarks.sim.figures import Figures, figures
from benchmarks.sim.machines import GPU_8B
from benchmarks.sim.prefill import SIDES, Worker
from benchmarks.sim.report import bound_tokens, fairness_table, kept_table, shares_table, steps_table, ttft_table
from benchmarks.sim.traces import prompts

NAN = float("nan")


def played() -> list[Figures]:
    trace = prompts(GPU_8B, 0.6, 40, 1)
    return [figures([Worker(GPU_8B, side).play(trace)], GPU_8B, 0.6) for side in SIDES]


def cells(table: str) -> list[list[str]]:
    """The rows below the head, each as wide as that."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows[2:]


def test_every_table_has_a_row_for_each_side_and_load() -> None:
    found = played()
    for table in (kept_table(found), ttft_table(found), fairness_table(found)):
        assert [row[:2] for row in cells(table)] == [["0.6", side.name] for side in SIDES]


def test_what_there_was_none_of_is_left_empty() -> None:
    kept = cells(kept_table([figures([Worker(GPU_8B, SIDES[0]).play([])], GPU_8B, 0.6)]))
    assert kept == [["0.6", "fcfs", *[""] * 8, "0.0", ""]]


def test_only_fair_sharing_has_a_bound() -> None:
    """4 passes and one, and a block of 16 for each of 12 flows."""
    assert bound_tokens(2048) == 5 * 2048 + 12 * 16
    assert [row[-2] == "" for row in cells(fairness_table(played()))] == [True, False, False]
    runs = [Worker(GPU_8B, side).saturate(100_000) for side in SIDES[:2]]
    assert [row[-2] for row in cells(shares_table(runs))] == ["", f"{bound_tokens(runs[1].pass_tokens):,}"]


def test_steps_are_told_with_what_they_cost() -> None:
    run = Steps("slo", 0.9, 0.995, {"vip": 0.99, "normal": 1.0, "batch": NAN}, 9000.4, (0.0119, 0.0402), 3)
    assert cells(steps_table([run])) == [["0.9", "slo", "99.5", "99.0", "100.0", "9,000", "11.9 / 40.2", "3"]]
