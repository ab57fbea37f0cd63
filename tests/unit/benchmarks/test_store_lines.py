"""A driver is asked line by line, and whatever becomes of it is told in words."""

import sys
from pathlib import Path

import pytest

from benchmarks import store_lines
from benchmarks.store_lines import Driver, DriverError

SCRIPT = """
import os
from benchmarks.store_lines import own_stdout, serve

class Store:
    def put(self, turn):
        print("a library's chatter")
        return 0.25 * turn
    def get(self, turn):
        if turn == 9:
            os._exit(3)
        raise KeyError("value 7")
    def clear(self, turn):
        pass

answers = own_stdout()
serve(Store(), answers)
"""


def driver(tmp_path: Path, script: str = SCRIPT) -> Driver:
    return Driver([sys.executable, "-c", script], tmp_path / "log")


def test_it_answers_with_seconds(tmp_path: Path) -> None:
    with driver(tmp_path) as d:
        d.wait_ready()
        assert d.ask("put", 2) == 0.5
        assert d.ask("clear", 2) == 0.0


def test_what_a_library_prints_is_no_answer_but_in_the_log(tmp_path: Path) -> None:
    with driver(tmp_path) as d:
        d.wait_ready()
        d.ask("put", 1)
    assert "a library's chatter" in d.tail()


def test_its_error_is_told_and_it_goes_on(tmp_path: Path) -> None:
    with driver(tmp_path) as d:
        d.wait_ready()
        with pytest.raises(DriverError, match="KeyError: 'value 7'"):
            d.ask("get", 1)
        assert d.ask("put", 1) == 0.25


def test_one_that_dies_is_told_with_its_status(tmp_path: Path) -> None:
    with driver(tmp_path) as d:
        d.wait_ready()
        with pytest.raises(DriverError, match="status 3"):
            d.ask("get", 9)


def test_one_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    with driver(tmp_path, "raise SystemExit('no such wheel')") as d, pytest.raises(DriverError, match="no such wheel"):
        d.wait_ready()


def test_one_that_is_silent_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_lines, "READY_S", 0.2)
    with driver(tmp_path, "import sys; sys.stdin.read()") as d, pytest.raises(DriverError, match=r"within 0\.2 s"):
        d.wait_ready()
