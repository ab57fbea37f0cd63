"""Tiers from which nothing comes: what is left out with them, and what is not."""

import pytest

from distserve.errors import BlocksMissing, DeadlineExceeded, DistServeError, Overloaded, TransportUnavailable
from distserve.messages import TIERS
from distserve.worker.store.failing import FailingTiers
from tests.unit.worker.store.test_pauses import Clock

POOL, DRAM, DISK, OBJECT = (bytes([TIERS.index(t)]) for t in ("pool", "dram", "disk", "object"))
LATE = DeadlineExceeded("late")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def failing(clock: Clock) -> FailingTiers:
    return FailingTiers(lambda source: source != "gone", fetch_s=5.0, now=clock)


def test_a_disk_that_hangs_leaves_the_memory_above_it(failing: FailingTiers) -> None:
    failing.failed("n", DRAM * 3 + DISK, LATE)
    assert failing.usable("n", DRAM * 3 + DISK * 2 + DRAM) == 3
    assert failing.usable("n", OBJECT) == 0
    assert failing.usable("other", DISK) == 1


def test_what_keeps_memory_from_coming_keeps_all_of_it(failing: FailingTiers) -> None:
    failing.failed("n", DRAM, TransportUnavailable("no way"))
    assert failing.usable("n", DRAM + DISK) == failing.usable("n", DISK) == 0


def test_memory_that_comes_says_nothing_of_the_disk(failing: FailingTiers) -> None:
    failing.failed("n", DISK, LATE)
    failing.came("n", DRAM)
    assert failing.usable("n", DRAM + DISK) == 1
    failing.came("n", DRAM + DISK)
    assert failing.usable("n", DRAM + DISK) == 2


def test_when_the_pause_is_over_one_tries_it(failing: FailingTiers, clock: Clock) -> None:
    failing.failed("n", DISK, LATE)
    clock.now += 1.0
    assert failing.usable("n", DRAM + DISK) == 2
    failing.trying("n", DRAM)
    assert failing.usable("n", DRAM + DISK) == 2, "that was no try"
    failing.trying("n", DRAM + DISK)
    assert failing.usable("n", DRAM + DISK) == 1


@pytest.mark.parametrize("error", [BlocksMissing("gone"), Overloaded("full", retry_after_s=0.1)])
def test_what_is_said_at_once_is_no_failure(failing: FailingTiers, error: DistServeError) -> None:
    failing.failed("n", POOL, error)
    assert failing.usable("n", POOL) == 1


def test_of_who_has_left_nothing_is_kept(failing: FailingTiers) -> None:
    failing.failed("gone", POOL, LATE)
    failing.failed("n", POOL, LATE)
    assert (failing.usable("gone", POOL), failing.usable("n", POOL)) == (1, 0)
    failing.forget("n")
    assert failing.usable("n", POOL) == 1
