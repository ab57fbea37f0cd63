"""A store that gives back something else than it was given is found out."""

import numpy as np
import pytest

from benchmarks.store_bytes import Bytes
from benchmarks.store_values import MIB, SIZES, Load

LOAD = Load(SIZES["64KiB"], 4 * MIB)


@pytest.fixture
def held() -> Bytes:
    return Bytes(LOAD, np.zeros(2 * LOAD.total_bytes, np.uint8))


def test_what_was_put_is_right(held: Bytes) -> None:
    held.stamp(1)
    held.target[:] = held.source
    held.check()


def test_one_wrong_byte_is_found_and_its_value_named(held: Bytes) -> None:
    held.stamp(1)
    held.target[:] = held.source
    held.target[5, 777] ^= 1
    with pytest.raises(ValueError, match="1 of 64 values are wrong, the first is number 5"):
        held.check()


def test_values_of_an_earlier_turn_are_wrong(held: Bytes) -> None:
    held.stamp(1)
    held.target[:] = held.source
    held.stamp(2)
    with pytest.raises(ValueError, match="64 of 64"):
        held.check()


def test_two_values_in_each_others_place_are_wrong(held: Bytes) -> None:
    held.stamp(1)
    held.target[:] = held.source
    held.target[[3, 4]] = held.target[[4, 3]]
    with pytest.raises(ValueError, match="2 of 64"):
        held.check()


def test_what_did_not_come_is_wrong(held: Bytes) -> None:
    held.stamp(1)
    held.target[:] = held.source
    held.blank()
    with pytest.raises(ValueError, match="64 of 64"):
        held.check()
