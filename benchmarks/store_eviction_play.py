"""A trace played against the store's own index and policies, and against the best that could have been."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.store_eviction_traces import Trace
from distserve.errors import Overloaded
from distserve_kvstore.eviction import make_policy
from distserve_kvstore.index import BlockIndex

ROOT = bytes(32)


@dataclass(frozen=True, slots=True)
class Played:
    """Blocks. A hit is a block of a request's unbroken beginning that was there when it came."""

    num_asked: int
    num_hits: int
    num_vip_asked: int = 0
    num_vip_hits: int = 0
    num_vip_lost: int = 0  # pinned, and evicted when all pinned blocks together were within the quota
    num_vip_over: int = 0  # pinned, and evicted when they were more
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_asked

    @property
    def vip_hit_rate(self) -> float:
        return self.num_vip_hits / max(1, self.num_vip_asked)


def play(
    trace: Trace,
    kind: Literal["lru", "lfu"],
    capacity: int,
    *,
    vip_every: int = 0,
    pin: bool = True,
    quota: float = 0.25,
) -> Played:
    """Every block asked for is stored; then as many leave as are more than `capacity`. vip_every: every so many-th
    conversation is a VIP's, and pinned if `pin` and the quota allows. `seconds`: what policy and index took."""
    index = BlockIndex(2 * capacity)
    policy = make_policy(kind, index, {"dram": capacity}, quota if vip_every else 0.0)
    index.conversations.vip_limit = int(quota * capacity)
    names = np.random.default_rng(0).integers(0, 2**63, (len(trace.depths), 4), np.uint64)
    asked = hits = vip_asked = vip_hits = vip_lost = vip_over = 0
    began = time.perf_counter()
    for i, (chain, talk) in enumerate(zip(trace.chains, trace.talks, strict=True)):
        hashes = names[chain].tobytes()
        found = index.longest_prefix(hashes)
        policy.used(found)
        vip = bool(vip_every) and talk >= 0 and talk % vip_every == 0
        entries = index.insert(hashes, ROOT, 0, conversation=str(talk) if vip else "")
        new = entries[len(found) :]
        index.dram[new] = 0
        if vip and pin:
            _pin(index, str(talk), until=i + 2000.0)
        index.conversations.expire(float(i))
        policy.added(new, "dram")
        asked, hits = asked + len(chain), hits + len(found)
        vip_asked, vip_hits = vip_asked + vip * len(chain), vip_hits + vip * len(found)
        if len(index) > capacity:
            victims = policy.victims(len(index) - capacity, "dram")
            num_vips = int(np.count_nonzero(index.num_vips[victims]))
            over = min(num_vips, max(0, index.conversations.num_vip_blocks - int(quota * capacity)))
            vip_lost, vip_over = vip_lost + num_vips - over, vip_over + over
            index.dram[victims] = -1
            policy.removed(victims, "dram")
            index.remove(victims)
    seconds = time.perf_counter() - began
    index.check()
    policy.check()
    return Played(asked, hits, vip_asked, vip_hits, vip_lost, vip_over, seconds)


def _pin(index: BlockIndex, name: str, until: float) -> None:
    """If that is within the quota; else the conversation is one as others."""
    try:
        index.conversations.pin("", name, until)
    except Overloaded:
        return


def play_optimal(trace: Trace, capacity: int) -> Played:
    """Belady's MIN (A Study of Replacement Algorithms for a Virtual-Storage Computer, IBM Systems Journal 5(2), 1966):
    the block whose next use is farthest goes, the deepest of those that are equally far. A block is
    used whenever one below it is, so that this cuts chains from their ends by itself, and no other choice of blocks,
    leaves only or any, has more hits."""
    last = len(trace.chains)
    following = np.full(len(trace.depths), last, np.int64)  # next use of each block, seen from the request
    next_uses: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    for i in range(last - 1, -1, -1):
        next_uses.append(following[trace.chains[i]])
        following[trace.chains[i]] = i
    next_uses.reverse()
    held: dict[int, int] = {}  # block -> its next use
    farthest: list[tuple[int, int, int]] = []  # with entries of the past
    asked = hits = 0
    for i, chain in enumerate(trace.chains):
        asked += len(chain)
        for block, use in zip(chain.tolist(), next_uses[i].tolist(), strict=True):
            hits += block in held
            if use < last:
                held[block] = use
                heapq.heappush(farthest, (-use, -trace.depths[block], block))
            else:
                held.pop(block, None)  # never again
        while len(held) > capacity:
            use, _, block = heapq.heappop(farthest)
            if held.get(block) == -use:
                del held[block]
    return Played(asked, hits)
