"""Which started prompt has in the making what another lacks."""

from types import SimpleNamespace
from typing import Any

from distserve.kv.block_pool import BlockPool
from distserve_prefill.alike import computing_for

NAMES = [bytes([i]) * 32 for i in range(1, 6)]


def started(num_named: int, names: list[bytes] = NAMES) -> Any:
    """A prompt with so many of its blocks named by now."""
    chain = SimpleNamespace(hashes=names)
    return SimpleNamespace(sequence=SimpleNamespace(num_named_blocks=num_named, chain=chain))


def pool_with(names: list[bytes]) -> BlockPool:
    pool = BlockPool(10)
    pool.name(pool.allocate(len(names)), names)
    return pool


def test_it_is_the_one_whose_next_block_is_the_first_that_is_missing() -> None:
    one = started(2)
    assert computing_for(NAMES, [one], pool_with(NAMES[:2])) is one
    other = started(2, [*NAMES[:2], b"x" * 32])
    assert computing_for(NAMES, [other], pool_with(NAMES[:2])) is None, "their chains have parted"


def test_one_that_computes_again_what_is_here_hides_no_other() -> None:
    again, deeper = started(1), started(3)
    assert computing_for(NAMES, [again, deeper], pool_with(NAMES[:3])) is deeper


def test_nobody_waits_for_blocks_that_would_not_be_found_since_those_before_them_are_gone() -> None:
    assert computing_for(NAMES, [started(3)], pool_with(NAMES[:1])) is None
