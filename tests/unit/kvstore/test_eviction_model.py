"""Whatever happens, victims are what may go: random chains, uses, pins, quotas and evictions of two tiers."""

from __future__ import annotations

from typing import Literal

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from distserve.messages.store import Tier
from distserve_kvstore.columns import Entries
from distserve_kvstore.eviction import Policy, make_policy
from distserve_kvstore.index import BlockIndex
from tests.unit.kvstore.block_trees import Path, name, names, run

paths = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
tiers = st.sampled_from(["dram", "disk"])
CAPACITIES: dict[Tier, int] = {"dram": 10, "disk": 20}
QUOTA = 0.3


class EvictionMachine(RuleBasedStateMachine):
    kind: Literal["lru", "lfu"]

    @initialize()
    def begin(self) -> None:
        self.index = BlockIndex(1)
        self.policy: Policy = make_policy(self.kind, self.index, CAPACITIES, QUOTA)
        self.next_place = 0

    def column(self, tier: Tier) -> Entries:
        return self.index.dram if tier == "dram" else self.index.disk  # type: ignore[return-value]

    def add(self, entries: Entries, tier: Tier) -> None:
        new = entries[self.column(tier)[entries] < 0]
        self.column(tier)[new] = np.arange(self.next_place, self.next_place + len(new))
        self.next_place += len(new)
        self.policy.added(entries, tier)

    def take_out(self, entries: Entries, tier: Tier) -> None:
        self.column(tier)[entries] = -1
        self.policy.removed(entries, tier)
        self.index.remove_empty(entries)

    def evictable(self, tier: Tier) -> set[int]:
        """By the definition, looking at everything. Which VIP blocks are kept, within bounds, is the book's choice."""
        here = {int(e) for e in self.index.entries() if self.column(tier)[e] >= 0}
        inner = {int(self.index.parent[e]) for e in here}
        kept = self.policy._books[tier].kept
        return {e for e in here - inner if not self.index.num_pins[e] and not kept[e]}

    @rule(tip=paths, start=st.integers(0, 6), tier=tiers, batch=st.booleans(), conversation=st.sampled_from("_ab"))
    def store(self, tip: Path, start: int, tier: Tier, batch: bool, conversation: str) -> None:
        blocks = run(tip, min(start, len(tip) - 1))
        entries = self.index.insert(
            names(blocks),
            name(blocks[0][:-1]),
            len(blocks[0]) - 1,
            conversation=conversation.strip("_"),
            priority="batch" if batch else "normal",
        )
        self.add(entries, tier)

    @rule(tip=paths)
    def use(self, tip: Path) -> None:
        self.policy.used(self.index.longest_prefix(names(run(tip))))

    @rule(tip=paths, tier=tiers)
    def promote(self, tip: Path, tier: Tier) -> None:
        self.add(self.index.longest_prefix(names(run(tip))), tier)

    @rule(tip=paths)
    def pin(self, tip: Path) -> None:
        self.index.num_pins[self.index.longest_prefix(names(run(tip)))] += 1

    @rule()
    def unpin(self) -> None:
        pinned = np.flatnonzero(self.index.num_pins > 0).astype(np.int32)[:3]
        self.index.num_pins[pinned] -= 1
        self.policy.released(pinned[self.index.num_pins[pinned] == 0])
        self.index.remove_empty(pinned)

    @rule(conversation=st.sampled_from("ab"), on=st.booleans())
    def pin_conversation(self, conversation: str, on: bool) -> None:
        if on:
            self.index.conversations.pin("", conversation, 1.0)
        else:
            self.index.conversations.unpin("", conversation)

    @rule(tier=tiers, n=st.integers(1, 12))
    def evict(self, tier: Tier, n: int) -> None:
        victims = self.policy.victims(n, tier)
        assert len(victims) <= n
        for victim in victims:
            assert int(victim) in self.evictable(tier)
            if self.index.num_vips[victim]:  # only beyond the quota
                vips = (self.index.num_vips > 0) & (self.index.depth >= 0) & (self.column(tier) >= 0)
                assert np.count_nonzero(vips) > int(QUOTA * CAPACITIES[tier])
            self.take_out(victim[None], tier)
        if len(victims) < n:
            assert not self.evictable(tier)

    @rule(tier=tiers, n=st.integers(1, 12))
    def ask_twice(self, tier: Tier, n: int) -> None:
        assert self.policy.victims(n, tier).tolist() == self.policy.victims(n, tier).tolist()

    @rule(tip=paths, tier=tiers)
    def lose(self, tip: Path, tier: Tier) -> None:
        """A damaged block: from the middle of a chain, if it comes to that."""
        entries = self.index.find(name(tip))
        if entries[0] >= 0 and self.column(tier)[entries[0]] >= 0:
            self.take_out(entries, tier)

    @invariant()
    def books_are_right(self) -> None:
        self.index.check()
        self.policy.check()
        for tier, capacity in CAPACITIES.items():
            assert self.policy.num_kept(tier) <= int(QUOTA * capacity)


class LruMachine(EvictionMachine):
    kind = "lru"


class LfuMachine(EvictionMachine):
    kind = "lfu"


TestLru = LruMachine.TestCase
TestLfu = LfuMachine.TestCase
TestLru.settings = TestLfu.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_no_policy_loses_track_over_a_long_run(kind: Literal["lru", "lfu"]) -> None:
    """Enough blocks for logs to be copied, the window to move and counters to be halved."""
    rng = np.random.default_rng(5)
    index = BlockIndex(1)
    policy = make_policy(kind, index, {"dram": 500})
    for _ in range(1500):
        tip = (int(rng.zipf(1.3)) % 200, *([0] * int(rng.integers(1, 20))))
        entries = index.insert(names(run(tip)), name(()), 0)
        policy.used(entries[index.dram[entries] >= 0])
        index.dram[entries] = 1
        policy.added(entries, "dram")
        if (excess := int(np.count_nonzero(index.dram[index.entries()] >= 0)) - 500) > 0:
            victims = policy.victims(excess, "dram")
            assert len(victims) == excess
            index.dram[victims] = -1
            policy.removed(victims, "dram")
            index.remove(victims)
    index.check()
    policy.check()
    assert len(index) == 500
