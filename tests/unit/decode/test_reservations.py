"""Who holds which blocks under which lease, and that every block comes back, once."""

import asyncio

import pytest

from distserve.errors import Cancelled, Draining, InvalidRequest, LayoutMismatch, LeaseRevoked, Overloaded
from distserve.kv.block_pool import BlockPool
from distserve.kv.lease import LeaseTable
from distserve.messages import Endpoint, KVLayout, LeaseGrant, LeaseRequest, RemoteRegion, SequenceKey
from distserve.transport.base import Commit, Lease, Receiver
from distserve.transport.select import Choice
from distserve.worker.in_use import InUse
from distserve_decode.reservations import Reservations
from tests.waiting import until

LAYOUT = KVLayout(weights="w", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, rope="{}")


class SlowFence(Receiver):
    """A receiver whose fences close only when the test says so: a real one closes in microseconds."""

    kind = "shm"

    def __init__(self) -> None:
        self.may_fence = asyncio.Event()
        self.may_fence.set()
        self.silent_s = 0.0

    async def start(self, on_commit: object, on_lost: object) -> None: ...

    async def stop(self) -> None: ...

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(kind="shm", host="h", address="a")

    def grant(self, lease: Lease) -> RemoteRegion:
        return RemoteRegion(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            endpoint=self.endpoint,
            block_ids=list(lease.block_ids),
            layout=LAYOUT,
        )

    async def revoke(self, lease_id: int, epoch: int | None = None) -> None:
        await self.may_fence.wait()

    def idle_s(self, lease_id: int) -> float | None:
        return self.silent_s


class World:
    def __init__(self, num_blocks: int = 10, growth: int = 1, max_waiting: int = 8) -> None:
        self.pool = BlockPool(num_blocks + 1)
        self.receiver = SlowFence()
        self.may_grant = True
        self.freed: list[int] = []
        self.sizes: list[int] = []  # of the leases asked for, bytes
        self.in_use = InUse()
        self.reservations = Reservations(
            self.pool,
            LeaseTable(),
            {"shm": self.receiver},
            LAYOUT,
            choose=self.choose,
            in_use=self.in_use,
            growth_blocks=growth,
            ttl_s=1.0,
            may_grant=lambda: self.may_grant,
            on_freed=lambda: self.freed.append(self.pool.num_free),
            max_waiting=max_waiting,
        )

    def choose(self, offered: list[Endpoint], kinds: list[str], host_key: str, *, num_bytes: int) -> Choice:
        self.sizes.append(num_bytes)
        return Choice(offered[0], "a test says so")

    async def grant(self, name: str, num_blocks: int, wait_s: float = 5.0, worker: str = "p") -> LeaseGrant:
        return await self.reservations.grant(ask(name, num_blocks, wait_s, worker))

    async def idle(self) -> None:
        await asyncio.wait_for(self.reservations.close(), 5)
        self.pool.check()
        assert self.pool.num_free == self.pool.num_total
        assert len(self.reservations) == 0


def ask(name: str, num_blocks: int, wait_s: float = 5.0, worker: str = "p") -> LeaseRequest:
    return LeaseRequest(
        key=SequenceKey(name),
        prefill_worker=worker,
        num_tokens=num_blocks * 16,
        layout=LAYOUT,
        transports=["shm"],
        host_key="h",
        wait_s=wait_s,
    )


def commit_of(grant: LeaseGrant) -> Commit:
    return Commit(grant.region.lease_id, grant.region.epoch, b"", 0)


async def waiting(world: World, count: int) -> None:
    await until(lambda: world.reservations.num_waiting == count, 5)


async def test_a_lease_exposes_the_prompts_blocks_and_holds_room_to_grow() -> None:
    w = World()
    grant = await w.grant("a", 3)
    assert len(grant.region.block_ids) == 3
    assert w.pool.num_used == 4
    reservation = w.reservations.commit(commit_of(grant))
    assert reservation.blocks[:3] == grant.region.block_ids
    w.pool.free(reservation.blocks)
    await w.idle()


async def test_the_transport_is_chosen_by_the_leases_bytes_and_its_reason_is_told() -> None:
    w = World()
    grant = await w.grant("a", 3, worker="p7")
    assert w.sizes == [3 * 2 * 2 * 16 * 1 * 4 * 4]  # blocks of 2 layers, K and V, 16 tokens, 1 head of 4 float32
    assert grant.reason == "a test says so"
    assert w.in_use.snapshot() == {}, "nothing has gone by it yet, and perhaps nothing ever does"
    w.pool.free(w.reservations.commit(commit_of(grant)).blocks)
    assert w.in_use.snapshot() == {"p7": {"shm": "a test says so"}}
    await w.idle()


async def test_a_full_pool_grants_in_order_as_blocks_come_back() -> None:
    w = World()
    first = await w.grant("a", 8)
    big = asyncio.create_task(w.grant("big", 6))
    small = asyncio.create_task(w.grant("small", 1))
    await waiting(w, 2)
    assert not small.done()  # it would not fit beside, and must not overtake for ever
    w.pool.free(w.reservations.commit(commit_of(first)).blocks)
    w.reservations.room_changed()
    assert len((await big).region.block_ids) == 6
    assert len((await small).region.block_ids) == 1
    await w.idle()


async def test_no_room_in_time_is_overloaded_and_says_how_much_there_is() -> None:
    w = World()
    await w.grant("a", 8)
    with pytest.raises(Overloaded, match=r"no room for 4 KV blocks within 0\.01 s"):
        await w.grant("b", 4, wait_s=0.01)
    await w.idle()


async def test_a_prompt_that_never_fits_is_refused_at_once() -> None:
    w = World()
    with pytest.raises(InvalidRequest, match=r"11 KV blocks.*has 10"):
        await w.grant("a", 11)


async def test_a_prompt_as_large_as_the_pool_is_granted_without_room_to_grow() -> None:
    w = World()
    assert len((await w.grant("a", 10)).region.block_ids) == 10
    await w.idle()


async def test_a_lease_that_ends_tells_that_blocks_are_free() -> None:
    w = World()
    grant = await w.grant("a", 3)
    w.reservations.lost(grant.region.lease_id, grant.region.epoch, ConnectionError("cut"))
    assert w.freed == [10]
    await w.idle()


async def test_a_lost_lease_of_an_older_epoch_takes_nothing_from_the_slots_next() -> None:
    w = World()
    first = await w.grant("a", 3)
    w.pool.free(w.reservations.commit(commit_of(first)).blocks)
    second = await w.grant("b", 3)
    assert second.region.lease_id == first.region.lease_id, "the slot is used again"
    w.reservations.lost(first.region.lease_id, first.region.epoch, ConnectionError("late news"))
    assert w.reservations.num_granted == 1
    await w.idle()


async def test_draining_turns_those_away_that_wait() -> None:
    w = World()
    first = await w.grant("a", 8)
    waiter = asyncio.create_task(w.grant("b", 5))
    await waiting(w, 1)
    draining = asyncio.create_task(w.reservations.drain(5))
    with pytest.raises(Draining):
        await waiter
    w.pool.free(w.reservations.commit(commit_of(first)).blocks)
    await draining
    await w.idle()


async def test_a_queue_that_is_full_refuses_at_once() -> None:
    w = World(max_waiting=1)
    await w.grant("a", 8)
    waiter = asyncio.create_task(w.grant("b", 5))
    await waiting(w, 1)
    with pytest.raises(Overloaded, match="1 hand-overs wait for room, the limit is 1"):
        await w.grant("c", 1)
    waiter.cancel()
    await w.idle()


async def test_another_layout_is_refused_by_the_fields_name() -> None:
    w = World()
    request = ask("a", 1)
    other = LeaseRequest(**{f: getattr(request, f) for f in request.__struct_fields__} | {"layout": _other()})
    with pytest.raises(LayoutMismatch, match="head_dim"):
        await w.reservations.grant(other)


def _other() -> KVLayout:
    return KVLayout(weights="w", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, rope="{}")


async def test_blocks_return_only_after_the_fence_and_a_late_commit_finds_nothing() -> None:
    w = World()
    grant = await w.grant("a", 3)
    w.receiver.may_fence.clear()
    w.reservations.release(grant.region.lease_id, grant.region.epoch, "given up")
    await asyncio.sleep(0)
    assert w.pool.num_used == 4
    with pytest.raises(LeaseRevoked):
        w.reservations.commit(commit_of(grant))
    w.receiver.may_fence.set()
    await w.idle()


async def test_a_stale_epoch_releases_nothing() -> None:
    w = World()
    grant = await w.grant("a", 3)
    w.reservations.release(grant.region.lease_id, grant.region.epoch - 1, "an older life")
    assert w.reservations.num_granted == 1
    await w.idle()


async def test_a_cancelled_sequence_gives_up_its_lease_or_its_place_in_the_queue() -> None:
    w = World()
    await w.grant("a", 8)
    waiter = asyncio.create_task(w.grant("b", 5))
    await waiting(w, 1)
    assert w.reservations.cancel(SequenceKey("b"))
    with pytest.raises(Cancelled):
        await waiter
    assert w.reservations.cancel(SequenceKey("a"))
    assert not w.reservations.cancel(SequenceKey("a"))
    await w.idle()


async def test_a_prefill_worker_that_is_gone_loses_its_leases_and_nobody_elses() -> None:
    w = World()
    await w.grant("a", 2, worker="dead")
    kept = await w.grant("b", 2, worker="alive")
    w.reservations.worker_gone("dead")
    assert w.reservations.num_granted == 1
    w.pool.free(w.reservations.commit(commit_of(kept)).blocks)
    await w.idle()


async def test_a_silent_lease_expires() -> None:
    w = World()
    await w.grant("a", 2)
    w.reservations.expire()
    assert w.reservations.num_granted == 1
    w.receiver.silent_s = 1.5
    w.reservations.expire()
    assert w.reservations.num_granted == 0
    await w.idle()


async def test_nothing_is_granted_while_preempted_sequences_wait() -> None:
    w = World()
    w.may_grant = False
    waiter = asyncio.create_task(w.grant("a", 1))
    await waiting(w, 1)
    w.reservations.room_changed()
    assert not waiter.done()
    w.may_grant = True
    w.reservations.room_changed()
    await waiter
    await w.idle()


async def test_an_asker_that_is_cancelled_while_it_waits_holds_nothing() -> None:
    w = World()
    await w.grant("a", 8)
    waiter = asyncio.create_task(w.grant("b", 5))
    await waiting(w, 1)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert w.reservations.num_waiting == 0
    await w.idle()
