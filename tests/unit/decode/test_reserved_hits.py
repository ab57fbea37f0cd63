"""Leases for prompts of which the pool holds the beginning: it is not leased, not counted as room, and never lost."""

import asyncio

import pytest

from distserve.errors import InvalidRequest, KVError, Overloaded
from distserve.kv.hashing import pack
from distserve.messages import LeaseGrant, LeaseRequest
from tests.unit.decode.test_reservations import World, ask, commit_of, waiting

NAMES = [bytes([i]) * 32 for i in range(1, 20)]


def asked(name: str, num_tokens: int, names: list[bytes] = NAMES, wait_s: float = 5.0) -> LeaseRequest:
    request = ask(name, 1, wait_s)
    fields = {f: getattr(request, f) for f in request.__struct_fields__}
    return LeaseRequest(**fields | {"num_tokens": num_tokens, "hashes": pack(names[: num_tokens // 16])})


def cache(w: World, num: int) -> list[int]:
    """Blocks NAMES[:num], left by a sequence that has ended."""
    blocks = w.pool.allocate(num)
    w.pool.name(blocks, NAMES[:num])
    w.pool.free(blocks)
    return blocks


async def grant(w: World, name: str, num_tokens: int, wait_s: float = 5.0) -> LeaseGrant:
    return await w.reservations.grant(asked(name, num_tokens, wait_s=wait_s))


async def nothing_is_used(w: World) -> None:
    await asyncio.wait_for(w.reservations.close(), 5)
    w.pool.check()
    assert (w.pool.num_used, len(w.reservations)) == (0, 0)


async def test_what_is_here_is_not_leased_and_is_the_sequences_with_the_commit() -> None:
    w = World()
    held = cache(w, 3)
    granted = await grant(w, "a", 80)
    assert (granted.num_hit_blocks, len(granted.region.block_ids)) == (3, 2)
    assert not set(held) & set(granted.region.block_ids)
    assert w.pool.num_used == 3 + 2 + 1
    reservation = w.reservations.commit(commit_of(granted))
    assert reservation.blocks[:5] == held + granted.region.block_ids
    assert reservation.hit_names == NAMES[:3]
    w.pool.free(reservation.blocks)
    assert w.pool.find(NAMES) == held
    await nothing_is_used(w)


@pytest.mark.parametrize(("num_tokens", "hits"), [(15, 0), (16, 0), (17, 1), (48, 2), (49, 3), (64, 3), (100, 4)])
async def test_a_block_at_least_is_leased_and_hits_are_whole_ones(num_tokens: int, hits: int) -> None:
    w = World()
    cache(w, 4)
    granted = await grant(w, "a", num_tokens)
    assert granted.num_hit_blocks == hits
    assert len(granted.region.block_ids) == -(-num_tokens // 16) - hits >= 1
    await nothing_is_used(w)


async def test_the_bytes_that_the_transport_is_chosen_by_are_those_that_go() -> None:
    w = World()
    cache(w, 3)
    await grant(w, "a", 80)
    assert w.sizes == [2 * 2 * 2 * 16 * 1 * 4 * 4]
    await nothing_is_used(w)


@pytest.mark.parametrize("end", ["released", "lost", "expired", "cancelled", "worker gone", "closed"])
async def test_a_lease_that_ends_badly_gives_its_hits_back_and_the_next_finds_them(end: str) -> None:
    w = World()
    held = cache(w, 3)
    granted = await grant(w, "a", 80)
    lease, epoch = granted.region.lease_id, granted.region.epoch
    if end == "released":
        w.reservations.release(lease, epoch, "given up")
    elif end == "lost":
        w.reservations.lost(lease, epoch, ConnectionError("cut"))
    elif end == "expired":
        w.receiver.silent_s = 1.5
        w.reservations.expire()
    elif end == "cancelled":
        w.reservations.cancel(asked("a", 80).key)
    elif end == "worker gone":
        w.reservations.worker_gone("p")
    else:
        await w.reservations.close()
    for _ in range(10):
        if not len(w.reservations):
            break
        await asyncio.sleep(0)
    w.pool.check()
    assert (w.pool.num_used, w.pool.num_cached) == (0, 3)
    if end != "closed":
        again = await grant(w, "a", 80)
        assert again.num_hit_blocks == 3
    assert w.pool.find(NAMES) == held
    await nothing_is_used(w)


async def test_two_leases_may_stand_on_the_same_hits() -> None:
    w = World()
    cache(w, 3)
    one, two = await grant(w, "a", 56), await grant(w, "b", 56)
    assert one.num_hit_blocks == two.num_hit_blocks == 3
    assert w.pool.num_used == 3 + 2 * 2
    w.reservations.release(one.region.lease_id, one.region.epoch, "given up")
    await asyncio.sleep(0)
    assert w.pool.num_used == 3 + 2
    await nothing_is_used(w)


async def test_hits_are_no_room_for_the_rest_of_their_prompt() -> None:
    """Ten blocks, of which four are cached and four used: of a prompt of eight the hits are no place for the others."""
    w = World(growth=0)
    cache(w, 4)
    used = w.pool.allocate(4)
    with pytest.raises(Overloaded, match="no room for 8 KV blocks"):
        await grant(w, "a", 128, wait_s=0.01)
    assert (w.pool.num_used, w.pool.num_cached) == (4, 4), "and they are still there"
    assert len((await grant(w, "b", 96)).region.block_ids) == 2
    w.pool.free(used)
    await nothing_is_used(w)


async def test_who_waits_for_room_has_what_is_here_when_there_is() -> None:
    w = World(growth=0)
    used = w.pool.allocate(8)
    waiter = asyncio.create_task(grant(w, "a", 80))
    await waiting(w, 1)
    w.pool.name(used[:3], NAMES[:3])
    w.reservations.room_changed()
    granted = await waiter
    assert (granted.num_hit_blocks, len(granted.region.block_ids)) == (3, 2)
    w.pool.free(used)
    await nothing_is_used(w)


async def test_cached_blocks_make_room_for_leases() -> None:
    w = World()
    cache(w, 10)
    granted = await w.grant("a", 9)
    assert (granted.num_hit_blocks, len(granted.region.block_ids)) == (0, 9)
    await nothing_is_used(w)


async def test_names_that_are_no_chains_are_refused() -> None:
    w = World()
    cache(w, 1)
    with pytest.raises(InvalidRequest, match="twice"):
        await w.reservations.grant(asked("a", 80, [NAMES[0]] * 5))
    request = asked("a", 80)
    fields = {f: getattr(request, f) for f in request.__struct_fields__}
    with pytest.raises(KVError, match="multiple of 32"):
        await w.reservations.grant(LeaseRequest(**fields | {"hashes": b"x" * 33}))
    assert w.pool.num_used == 0
    await nothing_is_used(w)
