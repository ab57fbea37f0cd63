"""Prompts that begin alike: what one of them computes the others need not."""

from collections.abc import Iterable, Sequence

from distserve.kv.block_pool import BlockPool
from distserve_prefill.job import Job


def computing_for(wanted: Sequence[bytes], started: Iterable[Job], pool: BlockPool) -> Job | None:
    """The started prompt that will be the first to have a block that is wanted and not here: the next that it names.
    Chains that part before it have another one there. wanted: names of blocks from a prompt's beginning on."""
    if not wanted:
        return None
    for other in started:
        depth, chain = other.sequence.num_named_blocks, other.sequence.chain
        if chain is None or not chain.hashes[depth : depth + 1] == list(wanted[depth : depth + 1]) != []:
            continue
        # Where its own beginning is in the pool no more, or is another's, what it names would not be found behind it.
        if len(pool.find(wanted[: depth + 1])) == depth:
            return other
    return None


def num_common(wanted: Sequence[bytes], others: Iterable[Job]) -> int:
    """Blocks that are wanted and that one of the others has or will have computed: its longest common beginning. (Equal
    names mean equal beginnings, so that it can be searched for by halves.)"""
    most = 0
    for other in others:
        if other.sequence.chain is None:
            continue
        hashes = other.sequence.chain.hashes
        low, high = 0, min(len(wanted), len(hashes))
        while low < high:
            middle = (low + high + 1) // 2
            if wanted[middle - 1] == hashes[middle - 1]:
                low = middle
            else:
                high = middle - 1
        most = max(most, low)
    return most
