"""Blocks by content: asking who holds them, having them written to one's own pool, giving them to a store.

Two kinds of service hold blocks that others may want: store nodes (role "kvstore") and decode workers (those that their
sequences left behind). Both answer PrefixRequest and FetchRequest alike. Hashes are packed: HASH_BYTES each, one after
the other (kv/hashing.py).
"""

from typing import Annotated, Literal

import msgspec

from distserve.messages.base import Message, NonNegativeInt, Part, Priority, TrafficClass
from distserve.messages.leases import KVLayout, RemoteRegion

Tier = Literal["pool", "dram", "disk", "object"]

MAX_DEPTH = (1 << 31) - 1  # of a chain's end: no sequence comes near
Depth = Annotated[int, msgspec.Meta(ge=0, le=MAX_DEPTH)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=366 * 86_400.0)]  # neither "not a number" nor for ever


class ChainRun(Part, frozen=True):
    """Blocks that follow one another in a chain."""

    start: Depth  # of the first: 0 is a prompt's first block
    hashes: bytes  # packed
    parent: bytes = (
        b""  # hash before the first (a root hash at depth 0); where a chain is stored, not where it's sought
    )


class PrefixRequest(Message, frozen=True):
    """How much of each run is here, from its first block on, unbroken? Answered by PrefixReply.

    With pin_s above 0 what is found counts as used, and a store node does not evict it for so long, or until
    BlocksReleased, or until the asker leaves the registry. (A decode worker's own sequences come first: it pins
    nothing.) With 0 it is an existence check: nothing is renewed.
    """

    asker: str  # worker id
    layout: str  # fingerprint (kv/layout.py); another one finds nothing
    runs: list[ChainRun]
    pin_s: Seconds = 0.0


class PrefixReply(Message, frozen=True):
    num_found: list[int]  # of each run
    tiers: list[bytes] = []  # of each run, for each block found: its place in TIERS, the fastest that holds it
    pin_id: int = 0  # 0: nothing is pinned


TIERS: tuple[Tier, ...] = ("pool", "dram", "disk", "object")


class BlocksReleased(Message, frozen=True):
    """Published: a pin is no longer needed. Unknown ids are ignored."""

    asker: str
    pin_id: int


class FetchRequest(Message, frozen=True):
    """Write these blocks, in order, to the region: block i of the runs together goes to region.block_ids[i]. Answered
    by FetchReply once they are committed, or an ErrorReply (BlocksMissing: fewer are here than were found; the lease
    is then the asker's to revoke)."""

    asker: str
    region: RemoteRegion
    runs: list[ChainRun]
    pin_id: int = 0  # given back by this fetch, whatever becomes of it
    traffic_class: TrafficClass = "prefill"  # a prefill waits; else background
    timeout_s: Seconds = 10.0


class FetchReply(Message, frozen=True):
    num_bytes: int
    tiers: dict[Tier, int] = {}  # blocks from each
    seconds: float = 0.0


class FetchedState(Message, frozen=True):
    """What travels with the commit of a fetch (SequenceState's counterpart)."""

    source: str  # worker id of who wrote
    num_blocks: int


class OfferRequest(Message, frozen=True):
    """Worker -> store node: blocks that it may keep. Answered by OfferGrant (at once: an offer never waits), or
    ErrorReply: Overloaded (no room, or too many offers), LayoutMismatch, Draining."""

    worker: str
    layout: KVLayout
    runs: list[ChainRun]  # with parent
    transports: list[str]  # kinds that the worker can write by
    host_key: str
    tenant: str = ""  # a hash of the cache salt, "" for none: what can be deleted together
    conversation: str = ""
    priority: Priority = "normal"


class OfferGrant(Message, frozen=True):
    """Which of them it wants: region.block_ids[i] takes block wanted[i] of the runs together. None: no region."""

    wanted: list[int] = []
    region: RemoteRegion | None = None
    ttl_s: float = 0.0
    reason: str = ""  # why by this transport


class OfferedState(Message, frozen=True):
    """What travels with the commit of an offer. The node knows the rest by the lease."""

    worker: str


class OfferReleased(Message, frozen=True):
    """Published: it will write no more under this lease (given up, not committed)."""

    worker: str
    lease_id: int
    epoch: int
    reason: str = ""


class TouchRequest(Message, frozen=True):
    """Counts as a use of what is here of these blocks, as a pinned lookup does, without pinning or fetching them: for
    who goes on from a copy of its own. Answered by StoreDone."""

    asker: str
    runs: list[ChainRun]


class PinRequest(Message, frozen=True):
    """Keep what is here of a conversation, and what comes of it, for ttl_s, within kvstore.vip_quota: never evicted
    meanwhile. Pinned again, the time counts anew. Answered by StoreDone, or Overloaded (over the quota: names it)."""

    tenant: str
    conversation: str
    ttl_s: Seconds = 3600.0


class UnpinRequest(Message, frozen=True):
    tenant: str
    conversation: str


class DeleteRequest(Message, frozen=True):
    """Forget a conversation's blocks that no other one runs through, or, without a conversation, all of a tenant's.
    On disk and in the object store too, for good. Answered by StoreDone."""

    tenant: str
    conversation: str = ""


class StoreDone(Message, frozen=True):
    """num_blocks: touched, pinned, unpinned, deleted or pruned."""

    num_blocks: int


class StoreStatsRequest(Message, frozen=True):
    pass


class TierStats(Part, frozen=True):
    num_blocks: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0  # 0: no limit of its own
    num_hits: int = 0  # blocks found there, pinned lookups only
    num_read_blocks: int = 0
    num_written_blocks: int = 0
    num_evicted: dict[str, int] = {}  # by reason
    num_errors: int = 0
    state: str = "ok"  # or why it isn't used at the moment


class StoreStats(Message, frozen=True):
    node: str
    layout: str  # fingerprint; "" until the node knows one
    num_blocks: int  # in the index, whatever tier
    num_conversations: int
    num_pinned: int
    num_leases: int
    num_lookups: int
    num_looked_up_blocks: int
    num_hit_blocks: int
    uptime_s: float
    tiers: dict[Tier, TierStats] = {}


class StoreListRequest(Message, frozen=True):
    """Conversations, `limit` of them after `after`, in order of their names."""

    after: str = ""
    limit: int = 100


class ConversationStats(Part, frozen=True):
    tenant: str
    conversation: str
    num_blocks: int
    idle_s: float
    pinned_s: float  # what is left; 0: not pinned
    priority: Priority


class StoreList(Message, frozen=True):
    conversations: list[ConversationStats]


class StorePruneRequest(Message, frozen=True):
    """Evict until at most so many blocks are left below memory, and give their space back (compaction)."""

    keep_blocks: NonNegativeInt


class StoreVerifyRequest(Message, frozen=True):
    """Read every block on disk and check it; what is damaged is set aside. Answered by StoreVerified, in seconds to
    minutes: ask with a long timeout."""


class StoreVerified(Message, frozen=True):
    num_good: int
    num_damaged: int
    num_unreadable: int = 0  # the disk refused them this time; they stay


class KVEvents(Message, frozen=True):
    """Published on subjects.kv_events(): blocks that a worker or node has from now on, or has no more. For routing,
    where eight bytes of a hash are enough: a wrong hint costs time, not an answer."""

    worker: str
    serial: int  # grows by one with each message of this worker; a gap: ask for a snapshot
    stored: bytes = b""  # EVENT_HASH_BYTES each
    removed: bytes = b""


EVENT_HASH_BYTES = 8


class KVSnapshotRequest(Message, frozen=True):
    """Gateway -> worker: everything that it holds, from number `offset` on. The pages after the first are asked for by
    the first one's `serial`, so that all are of one moment."""

    offset: NonNegativeInt = 0
    serial: NonNegativeInt | None = None  # None: of now


class KVSnapshot(Message, frozen=True):
    """A page of what was held when events had come to `serial`. Of another serial than was asked for: that moment is
    kept no more, begin again."""

    worker: str
    serial: int
    total: int
    stored: bytes
