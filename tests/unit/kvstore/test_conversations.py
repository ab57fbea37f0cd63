"""Conversations: what they run through, what may be deleted with them, what their pins keep."""

from __future__ import annotations

import numpy as np
import pytest

from distserve.errors import Overloaded
from distserve_kvstore.conversations import Conversation
from distserve_kvstore.eviction import make_policy
from distserve_kvstore.index import BlockIndex
from tests.unit.kvstore.block_trees import Path, name, names, run

SHARED: Path = (0, 0)


def insert(index: BlockIndex, tip: Path, conversation: str = "", start: int = 0) -> None:
    blocks = run(tip, start)
    index.insert(names(blocks), name(tip[:start]), start, "tenant", conversation)
    index.check()


def get(index: BlockIndex, conversation: str) -> Conversation:
    one = index.conversations.get("tenant", conversation)
    assert one is not None
    return one


def two_talks() -> BlockIndex:
    index = BlockIndex()
    insert(index, (*SHARED, 1, 1), "a")
    insert(index, (*SHARED, 2), "b")
    return index


def test_a_turn_moves_its_conversations_end() -> None:
    index = two_talks()
    insert(index, (*SHARED, 1, 1, 1, 1), "a")
    insert(index, (*SHARED, 1, 1, 1, 1, 2), "a", start=6)
    assert len(get(index, "a").tips) == 1
    assert get(index, "a").num_blocks == 7
    assert index.num_conversations[index.find(names(run((*SHARED, 1))))].tolist() == [2, 2, 1]


def test_a_piece_that_closes_a_gap_belongs_to_who_runs_through_both_sides() -> None:
    """The middle comes last, said to be of the conversation whose beginning and end are here: it counts once."""
    index = BlockIndex()
    tip = (0, 1, 2, 3, 0, 1)
    insert(index, tip[:2], "a")
    insert(index, tip, "a", start=4)
    insert(index, tip, "b", start=4)
    assert len(get(index, "a").tips) == 2
    insert(index, tip[:4], "a", start=2)
    assert get(index, "a").num_blocks == get(index, "b").num_blocks == 6
    assert index.num_conversations[index.find(names(run(tip)))].tolist() == [2] * 6


def test_an_end_that_another_conversation_went_beyond_is_no_end_once_its_own_does_too() -> None:
    index = BlockIndex()
    insert(index, (0, 0), "a")
    insert(index, (0, 0, 0, 0), "b")
    insert(index, (0, 0, 0, 0, 0), "a", start=4)
    assert len(get(index, "a").tips) == 1
    insert(index, (0, 0, 0), "a")
    assert index.num_conversations[index.find(names(run((0,) * 5)))].tolist() == [2, 2, 2, 2, 1]


def test_ends_on_both_sides_of_a_gap_become_one_when_another_closes_it() -> None:
    index = BlockIndex()
    insert(index, (0, 0, 0), "a", start=2)
    insert(index, (0,), "a")
    insert(index, (0, 0, 0, 0))
    insert(index, (0, 0), "a")
    assert len(get(index, "a").tips) == 1
    assert index.num_conversations[index.find(names(run((0,) * 4)))].tolist() == [1, 1, 1, 0]


def test_a_branch_that_is_evicted_leaves_the_other_as_the_end() -> None:
    index = BlockIndex()
    insert(index, (0, 0, 0), "a")
    insert(index, (0, 1), "a")
    index.remove(index.find(name((0, 1))))
    assert len(get(index, "a").tips) == 1
    insert(index, (0, 0), "a")
    assert get(index, "a").num_blocks == 3


def test_a_branch_is_a_second_end() -> None:
    index = BlockIndex()
    insert(index, (0, 0, 0, 0), "a")
    insert(index, (0, 0, 1, 1, 1), "a")
    assert len(get(index, "a").tips) == 2
    assert get(index, "a").num_blocks == 7


def test_deleting_takes_only_what_no_other_conversation_runs_through() -> None:
    index = two_talks()
    entries = index.conversations.deletable("tenant", "a")
    assert index.hashes_of(entries) == names([(*SHARED, 1, 1), (*SHARED, 1)])
    index.conversations.forget("tenant", "a")
    index.remove(entries)
    index.check()
    assert index.find(names(run((*SHARED, 2)))).min() >= 0
    assert index.conversations.get("tenant", "a") is None


def test_deleting_spares_blocks_above_those_of_unnamed_requests() -> None:
    index = BlockIndex()
    insert(index, (0, 0, 0), "a")
    insert(index, (0, 0, 1))
    assert index.hashes_of(index.conversations.deletable("tenant", "a")) == name((0, 0, 0))


def test_deleting_spares_where_another_conversation_ends() -> None:
    index = BlockIndex()
    insert(index, (0, 0, 0, 0), "a")
    insert(index, (0, 0), "b")
    assert index.hashes_of(index.conversations.deletable("tenant", "a")) == names([(0, 0, 0, 0), (0, 0, 0)])


def test_all_of_a_tenant_can_go() -> None:
    index = two_talks()
    index.insert(names(run((3, 3))), name(()), 0, "other", "a")
    entries = index.of_tenant("tenant")
    index.conversations.forget("tenant")
    index.remove(entries)
    index.check()
    assert len(index) == 2
    assert [one.tenant for one in index.conversations.list()] == ["other"]


def test_an_evicted_end_moves_to_its_parent() -> None:
    index = two_talks()
    index.remove(index.find(name((*SHARED, 1, 1))))
    index.check()
    assert get(index, "a").num_blocks == 3
    insert(index, (*SHARED, 1, 0), "a")
    assert get(index, "a").num_blocks == 4


def test_a_conversation_without_blocks_is_forgotten_unless_it_is_pinned() -> None:
    index = two_talks()
    index.conversations.pin("tenant", "b", until=10.0)
    index.remove(index.of_tenant("tenant"))
    assert [one.name for one in index.conversations.list()] == ["b"]
    index.conversations.expire(10.0)
    assert len(index.conversations) == 0
    index.check()


def test_a_pin_over_the_quota_is_refused_with_its_figures_and_changes_nothing() -> None:
    index = two_talks()
    index.conversations.vip_limit = 4
    assert index.conversations.pin("tenant", "a", until=10.0) == 4
    with pytest.raises(Overloaded) as refused:
        index.conversations.pin("tenant", "b", until=10.0)
    assert (refused.value.wanted, refused.value.held, refused.value.limit) == (1, 4, 4)
    assert not get(index, "b").pinned_until
    index.check()


def test_a_pin_lasts_until_its_time_and_pinned_again_longer() -> None:
    index = two_talks()
    index.conversations.pin("tenant", "a", until=10.0)
    index.conversations.pin("tenant", "a", until=20.0)
    assert not index.conversations.expire(19.9)
    assert index.conversations.num_vip_blocks == 4
    assert [one.name for one in index.conversations.expire(20.0)] == ["a"]
    assert index.conversations.num_vip_blocks == 0
    index.check()


def test_a_later_turn_of_a_pinned_conversation_is_pinned_too() -> None:
    index = two_talks()
    index.conversations.pin("tenant", "b", until=10.0)
    insert(index, (*SHARED, 2, 2), "b")
    assert index.num_vips[index.find(names(run((*SHARED, 2, 2))))].tolist() == [1] * 4


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_a_pinned_conversation_is_not_evicted_until_its_pin_is_over(kind: str) -> None:
    index = two_talks()
    policy = make_policy(kind, index, {"dram": 10}, vip_quota=0.5)  # type: ignore[arg-type]
    entries = index.entries()
    index.dram[entries] = 1
    policy.added(entries, "dram")
    index.conversations.pin("tenant", "b", until=10.0)
    assert index.hashes_of(policy.victims(5, "dram")) == names([(*SHARED, 1, 1), (*SHARED, 1)])
    index.conversations.expire(10.0)
    assert len(policy.victims(5, "dram")) == 5
    policy.check()


@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_beyond_a_tiers_quota_pinned_blocks_compete(kind: str) -> None:
    """Five blocks pinned, three may be kept: the beginning of the chain, as it is worth most."""
    index = BlockIndex()
    policy = make_policy(kind, index, {"dram": 10}, vip_quota=0.3)  # type: ignore[arg-type]
    insert(index, (0, 0, 0, 0, 0), "a")
    entries = index.find(names(run((0, 0, 0, 0, 0))))
    index.dram[entries] = 1
    policy.added(entries, "dram")
    index.conversations.pin("tenant", "a", until=10.0)
    assert policy.num_kept("dram") == 3
    assert policy.victims(9, "dram").tolist() == entries[:2:-1].tolist()


def test_conversations_are_listed_by_name_some_at_a_time() -> None:
    index = BlockIndex()
    for i, talk in enumerate(["d", "a", "c", "b"]):
        insert(index, (0, i), talk)
    index.insert(names(run((1,))), name(()), 0, "z", "b")
    listed = [(one.name, one.tenant) for one in index.conversations.list(limit=2)]
    assert listed == [("a", "tenant"), ("b", "tenant"), ("b", "z")], "a name is listed with all of its tenants"
    assert [one.name for one in index.conversations.list(after="b", limit=9)] == ["c", "d"]


def test_a_long_chain_of_many_conversations_costs_a_tip_each() -> None:
    index = BlockIndex()
    shared = np.random.default_rng(0).bytes(32 * 500)
    for i in range(200):
        index.insert(shared + name((i,)), name(()), 0, "tenant", f"talk {i}")
    assert index.num_conversations[index.find(shared)].tolist() == [200] * 500
    assert sum(len(one.tips) for one in index.conversations.list(limit=1000)) == 200
    index.check()
