"""What a worker has to do with blocks that are elsewhere: it asks store nodes and a decode worker for the beginning of
a prompt and has it written into its own pool; gives its own full blocks to the nodes; answers those who ask for blocks
of its pool; and tells gateways what it has. A store that is slow, wrong or gone is a miss, never a request's error.

    sharing.py      share(): the receivers of a worker's pool and its part in the store, for its main
    opening.py      open_store(): everything below, composed
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

    sharing = await stack.enter_async_context(
        share(config, worker_id, bus, watch, parts, plane, senders, receives=True, on_freed=worker.on_freed,
              on_commit=worker.on_commit, on_lost=worker.on_lost)  # of hand-overs: prefill, which takes none, has none
    )
    store = sharing.store
    # the door: a message of the kinds Store.ANSWERS goes to `await store.answer(message)`
    # draining: `await store.drain(grace_s)` once nothing is computed any more

All of it belongs to the event loop that owns the BlockPool, but LayerSink.layers_ready().
"""

from distserve.worker.store.arrivals import Arrivals
from distserve.worker.store.client import StoreClient
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.found import Found
from distserve.worker.store.giving import LayerSink
from distserve.worker.store.offers import Label
from distserve.worker.store.opening import Store, open_store
from distserve.worker.store.sharing import Sharing, share

__all__ = [
    "Arrivals",
    "Found",
    "Label",
    "LayerSink",
    "Sharing",
    "Store",
    "StoreClient",
    "StoreCounts",
    "open_store",
    "share",
]
