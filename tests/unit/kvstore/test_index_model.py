"""The index does what a dict would: random runs, removals, tiers, conversations and pins, against a plain model."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from distserve_kvstore.index import BlockIndex
from tests.unit.kvstore.block_trees import Path, name, names, run

paths = st.lists(st.integers(0, 3), min_size=1, max_size=9).map(tuple)
conversations = st.sampled_from(["", "a", "b", "c"])
TENANTS = ("t0", "t1", "t2", "t3")


@dataclass
class Block:
    tenant: str
    tier: str = ""
    pins: int = 0


@dataclass
class Talk:
    blocks: set[Path] = field(default_factory=set)
    pinned: bool = False


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(1)  # so that it must grow
        self.blocks: dict[Path, Block] = {}
        self.talks: dict[tuple[str, str], Talk] = {}

    def entry(self, path: Path) -> int:
        return int(self.index.find(name(path))[0])

    def children(self, path: Path) -> set[Path]:
        return {other for other in self.blocks if other[:-1] == path}

    def settle(self) -> None:
        """A conversation runs through the parents of its blocks, as far as they are here, unbroken; one without blocks
        and pin is forgotten."""
        for talk in self.talks.values():
            talk.blocks &= set(self.blocks)
            for path in list(talk.blocks):
                while (path := path[:-1]) in self.blocks:
                    talk.blocks.add(path)
        self.talks = {key: talk for key, talk in self.talks.items() if talk.blocks or talk.pinned}

    @rule(tip=paths, start=st.integers(0, 8), conversation=conversations)
    def insert(self, tip: Path, start: int, conversation: str) -> None:
        blocks = run(tip, min(start, len(tip) - 1))
        tenant = TENANTS[tip[0]]
        entries = self.index.insert(names(blocks), name(blocks[0][:-1]), len(blocks[0]) - 1, tenant, conversation)
        for path in blocks:
            self.blocks.setdefault(path, Block(tenant))
        if conversation:
            self.talks.setdefault((tenant, conversation), Talk()).blocks |= set(blocks)
        self.settle()
        assert self.index.hashes_of(entries) == names(blocks)
        assert self.index.depth[entries].tolist() == [len(path) - 1 for path in blocks]

    @rule(tip=paths, tier=st.sampled_from(["dram", "disk", "object", ""]))
    def move(self, tip: Path, tier: str) -> None:
        if tip in self.blocks:
            for column in ("dram", "disk", "object"):
                getattr(self.index, column)[self.entry(tip)] = 7 if column == tier else -1
            self.blocks[tip].tier = tier

    @rule(tip=paths, step=st.sampled_from([1, -1]))
    def count_pins(self, tip: Path, step: int) -> None:
        if tip in self.blocks and self.blocks[tip].pins + step >= 0:
            self.index.num_pins[self.entry(tip)] += step
            self.blocks[tip].pins += step

    @rule(chosen=st.lists(paths, max_size=5))
    def remove_what_can_go(self, chosen: list[Path]) -> None:
        here = [path for path in dict.fromkeys(chosen) if path in self.blocks]
        removed = self.index.remove_empty(np.array([self.entry(path) for path in here], np.int32))
        gone: list[Path] = []
        for path in sorted(here, key=len, reverse=True):
            while path in self.blocks:
                block = self.blocks[path]
                if block.tier or block.pins or self.children(path):
                    break
                gone.append(path)
                del self.blocks[path]
                path = path[:-1]
        self.settle()
        assert len(removed) == len(gone)

    @rule(tip=paths)
    def remove_everything_below(self, tip: Path) -> None:
        doomed = [path for path in self.blocks if path[: len(tip)] == tip]
        if tip not in self.blocks or any(self.blocks[path].pins for path in doomed):
            return
        entries = np.array(self.index._links.below(self.entry(tip)), np.int32)
        for column in ("dram", "disk", "object"):
            getattr(self.index, column)[entries] = -1
        self.index.remove(entries)
        # Descendants of it that are cut off from it by a gap stay.
        reached = {tip}
        for path in sorted(doomed, key=len):
            if path[:-1] in reached:
                reached.add(path)
        for path in reached:
            del self.blocks[path]
        self.settle()

    @rule(tenant=st.sampled_from(TENANTS), conversation=st.sampled_from(["a", "b", "c"]), on=st.booleans())
    def pin_conversation(self, tenant: str, conversation: str, on: bool) -> None:
        if on:
            self.index.conversations.pin(tenant, conversation, 1.0)
            self.talks.setdefault((tenant, conversation), Talk()).pinned = True
        else:
            self.index.conversations.unpin(tenant, conversation)
            if talk := self.talks.get((tenant, conversation)):
                talk.pinned = False
            self.settle()

    @rule(tenant=st.sampled_from(TENANTS), conversation=conversations)
    def forget(self, tenant: str, conversation: str) -> None:
        self.index.conversations.forget(tenant, conversation)
        for key in list(self.talks):
            if key[0] == tenant and conversation in ("", key[1]):
                del self.talks[key]

    @rule(tip=paths)
    def look_up(self, tip: Path) -> None:
        expected = 0
        for path in run(tip):
            if path not in self.blocks or not self.blocks[path].tier:
                break
            expected += 1
        assert len(self.index.longest_prefix(names(run(tip)))) == expected

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        index = self.index
        index.check()
        assert len(index) == len(self.blocks)
        for path, block in self.blocks.items():
            entry = self.entry(path)
            assert index.hash_of(entry) == name(path)
            assert index.parent_hash_of(entry) == name(path[:-1])
            assert index.tenant_of(entry) == block.tenant
            assert sorted(map(index.hash_of, index.children_of(entry))) == sorted(map(name, self.children(path)))
            through = [talk for talk in self.talks.values() if path in talk.blocks]
            assert index.num_conversations[entry] == len(through)
            assert index.num_vips[entry] == sum(talk.pinned for talk in through)
        assert len(index.conversations) == len(self.talks)
        for (tenant, conversation), talk in self.talks.items():
            one = index.conversations.get(tenant, conversation)
            assert one is not None
            found = index.conversations.blocks_of(one)
            assert sorted(map(index.hash_of, found)) == sorted(map(name, talk.blocks))

    @invariant()
    def deletes_only_what_is_a_conversations_own(self) -> None:
        for (tenant, conversation), talk in self.talks.items():
            expected: set[Path] = set()
            for path in sorted(talk.blocks, key=len, reverse=True):
                others = [t for t in self.talks.values() if path in t.blocks]
                if len(others) == 1 and self.children(path) <= expected:
                    expected.add(path)
            found = self.index.conversations.deletable(tenant, conversation)
            assert [self.index.hash_of(entry) for entry in found] == [
                self.index.hash_of(entry) for entry in self.index.deepest_first(found)
            ]
            assert sorted(map(self.index.hash_of, found)) == sorted(map(name, expected))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
