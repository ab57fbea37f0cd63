"""What a sequence leaves behind, given to the store."""

from distserve.worker.store.client import StoreClient
from distserve_decode.live import Live


def offer(store: StoreClient, live: Live) -> None:
    """Its full blocks that nobody has offered yet, generated ones included, while it still holds them. What it says
    next in the conversation begins with them. In the background: no wait, no error."""
    sequence = live.sequence
    first, stop = live.num_offered_blocks, sequence.num_named_blocks
    if sequence.chain is not None and first < stop:
        store.offer(sequence.chain, first, sequence.block_table[first:stop], live.label)
