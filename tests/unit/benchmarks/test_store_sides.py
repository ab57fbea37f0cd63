"""The sides that need no peer, with real processes: what is put is got, and from where it should come."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.store_lines import DriverError
from benchmarks.store_sides import Side, module_side, store_side
from benchmarks.store_values import MIB, SIZES, Load
from distserve.bus.embedded import EmbeddedNats

LOAD = Load(SIZES["64KiB"], 8 * MIB)
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def url() -> Iterator[str]:
    with EmbeddedNats() as nats:
        yield nats.url


def put_and_get(side: Side, turn: int) -> None:
    for verb in ("put", "get"):
        side.prepare(verb)
        assert side.measure(verb, turn) > 0
    side.clear(turn)


def test_the_floor_gives_back_what_it_was_given(tmp_path: Path) -> None:
    with module_side("floor", "store_floor", LOAD, tmp_path) as side:
        put_and_get(side, 0)
        put_and_get(side, 1)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_node_gives_back_what_it_was_given_until_it_is_cleared(kind: str, url: str, tmp_path: Path) -> None:
    with store_side(url, kind, "dram", LOAD, tmp_path) as side:
        put_and_get(side, 0)
        put_and_get(side, 1)
        with pytest.raises(DriverError, match="0 blocks have come, 0 were found, of 64"):
            side.measure("get", 0)


def test_from_disk_is_from_disk(url: str, tmp_path: Path) -> None:
    with store_side(url, "shm", "disk", LOAD, tmp_path) as side:
        put_and_get(side, 0)
        side.measure("put", 1)  # and without a new node:
        with pytest.raises(DriverError, match="must be disk alone"):
            side.measure("get", 1)
