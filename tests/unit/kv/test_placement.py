from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.kv.placement import SEGMENT_BLOCKS, owners, segment_key, segments

KEYS = [sha256(i.to_bytes(4, "little")).digest() for i in range(4000)]
node_names = st.sets(st.text("abcdefgh-0123456789", min_size=1, max_size=12), min_size=1, max_size=12)


@given(st.integers(0, 300), st.integers(0, 300))
def test_segments_cover_a_range_once_and_each_lies_within_one(first: int, num: int):
    parts = list(segments(first, first + num))
    assert [depth for part in parts for depth in part] == list(range(first, first + num))
    assert all(part.start // SEGMENT_BLOCKS == part[-1] // SEGMENT_BLOCKS for part in parts)
    assert all(part.start % SEGMENT_BLOCKS == 0 for part in parts[1:])


def test_the_key_of_a_segment_is_its_first_block_wherever_one_begins_in_it():
    hashes = KEYS[:200]
    assert {segment_key(hashes, depth) for depth in range(64, 128)} == {hashes[64]}
    assert [segment_key(hashes, d) for d in (0, 63, 128, 199)] == [hashes[0], hashes[0], hashes[128], hashes[192]]


@given(node_names, st.sampled_from(KEYS), st.integers(1, 5))
def test_owners_are_in_an_order_that_hangs_on_the_names_alone(nodes: set[str], key: bytes, n: int):
    whole = owners(key, sorted(nodes), len(nodes))
    assert sorted(whole) == sorted(nodes)
    assert owners(key, sorted(nodes, reverse=True), len(nodes)) == whole
    assert owners(key, nodes, n) == whole[:n]


def test_nobody_owns_anything_where_there_are_no_nodes():
    assert owners(KEYS[0], [], 3) == []


@given(node_names, st.text("xyz", min_size=1, max_size=5))
def test_a_node_that_joins_takes_some_and_nothing_else_moves(nodes: set[str], newcomer: str):
    for key in KEYS[:200]:
        before, after = owners(key, nodes, len(nodes)), owners(key, [*nodes, newcomer], len(nodes) + 1)
        # The order of the others stays: its owner is either the one it was or the newcomer.
        assert [node for node in after if node != newcomer] == before


@given(node_names, st.data())
def test_a_segment_of_a_node_that_leaves_goes_to_the_next_in_its_order(nodes: set[str], data: st.DataObject):
    leaver = data.draw(st.sampled_from(sorted(nodes)))
    for key in KEYS[:200]:
        before = owners(key, nodes, len(nodes))
        after = owners(key, nodes - {leaver}, len(nodes))
        assert after == [node for node in before if node != leaver]


@pytest.mark.parametrize("num_nodes", [2, 3, 8, 20])
def test_each_node_owns_its_share(num_nodes: int):
    nodes = [f"kvstore-{i}" for i in range(num_nodes)]
    owned = dict.fromkeys(nodes, 0)
    for key in KEYS:
        owned[owners(key, nodes)[0]] += 1
    share = len(KEYS) / num_nodes
    # Binomial: five standard deviations, the keys are fixed.
    slack = 5 * (share * (1 - 1 / num_nodes)) ** 0.5
    assert all(abs(num - share) < slack for num in owned.values()), owned


def test_the_share_of_a_node_that_leaves_is_spread_over_all_others():
    nodes = [f"kvstore-{i}" for i in range(5)]
    heirs = dict.fromkeys(nodes[1:], 0)
    orphans = [key for key in KEYS if owners(key, nodes)[0] == nodes[0]]
    for key in orphans:
        heirs[owners(key, nodes[1:])[0]] += 1
    assert min(heirs.values()) > len(orphans) / 4 * 0.7, heirs


def test_placement_is_the_same_in_every_process_and_release():
    """Else nodes and workers of two releases would look in different places."""
    nodes = ["kvstore-a", "kvstore-b", "kvstore-c"]
    order = ["".join(node[-1] for node in owners(key, nodes, 3)) for key in KEYS[:6]]
    assert order == ["abc", "abc", "cba", "bca", "bac", "bca"]
