"""What a worker has to do with blocks that are elsewhere: it asks store nodes and a decode worker for the beginning of
a prompt and has it written into its own pool; gives its own full blocks to the nodes; answers those who ask for blocks
of its pool; and tells gateways what it has. A store that is slow, wrong or gone is a miss, never a request's error.

    opening.py      open_store(): everything below, composed for a worker's main
    client.py       StoreClient: lookup, fetch, release, offer, streaming_offer
    nodes.py        which store nodes there are, and whose a segment is
    lookups.py      asking all that may have something at once, until a deadline; answers.py puts the answers together
    fetches.py      having what was found (found.py) written into blocks of ours
    arrivals.py     who is told of a commit, where several have leases at the same receivers
    giving.py       all offers, within a bound; offers.py is one segment on its way to its owner, cutting.py its part of
                    what is computed
    pauses.py       leaving out who fails: in nodes.py those that are silent, in failing.py tiers from which nothing
                    comes; detours.py transports that did not reach a peer
    pool_source.py  answers from our pool
    events.py       what is in our pool, told as it changes
    letters.py      messages that nobody waits for
    counts.py       what came of all that; metrics.py says it on /metrics

In a worker's main:

    leases = LeaseTable(first_epoch())                          # one for all: decode's Reservations takes it too
    arrivals = Arrivals(worker.on_commit, worker.on_lost)       # prefill, which has no others: Arrivals()
    kv_receivers = await receivers(..., on_commit=arrivals.on_commit, on_lost=arrivals.on_lost, stack=stack)
    store = await stack.enter_async_context(
        open_store(config, worker_id, bus, watch, plane, pool=parts.pool, layout=parts.model.layout, leases=leases,
                   arrivals=arrivals, receivers=kv_receivers, senders=kv_senders, on_freed=worker.on_freed)
    )
    # the door: a message of the kinds Store.ANSWERS goes to `await store.answer(message)`
    # draining: `await store.drain(grace_s)` once nothing is computed any more

All of it belongs to the event loop that owns the BlockPool, but LayerSink.layers_ready().
"""

from distserve.worker.store.arrivals import Arrivals
from distserve.worker.store.client import StoreClient
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.found import Found
from distserve.worker.store.giving import LayerSink
from distserve.worker.store.opening import Store, open_store

__all__ = ["Arrivals", "Found", "LayerSink", "Store", "StoreClient", "StoreCounts", "open_store"]
