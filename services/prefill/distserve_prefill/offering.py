"""A prompt's new blocks, given to the store while they are computed."""

from distserve.worker.store.client import StoreClient
from distserve.worker.store.giving import LayerSink
from distserve.worker.store.offers import Label
from distserve_prefill.job import Job


def offered(store: StoreClient, job: Job, block_size: int) -> LayerSink | None:
    """An offer of all full blocks that are to be computed, begun before its first pass; None if there are none. It
    travels in the background class, and neither first token nor hand-over waits for it."""
    sequence, request = job.sequence, job.request
    if sequence.chain is None:
        return None
    first = sequence.num_computed_tokens // block_size
    blocks = sequence.block_table[first : len(sequence.chain)]
    if not blocks:
        return None
    label = Label.of(request.cache_salt, request.conversation, request.traffic_class)
    return store.streaming_offer(sequence.chain, first, blocks, label, span=job.span)
