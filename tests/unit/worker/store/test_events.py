"""What a pool holds, as those who route requests come to know it."""

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.kv.block_pool import BlockPool
from distserve.messages import EVENT_HASH_BYTES, KVEvents, KVSnapshotRequest, decode_as, encode
from distserve.worker.store.counts import StoreCounts
from distserve.worker.store.events import MAX_BYTES, EventPublisher
from distserve.worker.store.snapshots import KEEP_S, MAX_KEPT, Snapshots
from tests.unit.worker.store.peers import chain, net
from tests.waiting import until


def name(i: int) -> bytes:
    return i.to_bytes(EVENT_HASH_BYTES, "little") + bytes(24)


def names(*numbers: int) -> list[bytes]:
    return [name(i) for i in numbers]


def parts(packed: bytes) -> set[bytes]:
    return {packed[i : i + EVENT_HASH_BYTES] for i in range(0, len(packed), EVENT_HASH_BYTES)}


class Listener:
    """Keeps up a copy, as a gateway does."""

    def __init__(self) -> None:
        self.here: set[bytes] = set()
        self.heard: list[KVEvents] = []

    async def __call__(self, delivery: Delivery) -> None:
        events = decode_as(KVEvents, delivery.data)
        self.heard.append(events)
        assert not parts(events.stored) & parts(events.removed)
        self.here = (self.here | parts(events.stored)) - parts(events.removed)

    @property
    def serials(self) -> list[int]:
        return [events.serial for events in self.heard]


async def test_changes_are_told_in_few_messages_with_a_number_each():
    async with net() as n:
        worker, gateway = await n.peer("worker", num_blocks=41), await n.peer("gateway")
        listener = Listener()
        await gateway.bus.subscribe(subjects.kv_events(), listener, inline=True)
        c, d = chain(20), chain(30, salt="d")
        for i in range(20):
            worker.holds(c, i, i + 1)
        await until(lambda: len(listener.here) == 20)
        assert len(listener.heard) == 1
        worker.holds(d)  # ten of the others go
        await until(
            lambda: listener.here == {x[:EVENT_HASH_BYTES] for x in worker.pool.names} and len(listener.heard) > 1
        )
        assert len(listener.here) == 40
        worker.pool.drop_cached()
        await until(lambda: not listener.here)
        assert listener.serials == list(range(1, len(listener.heard) + 1))
        assert {events.worker for events in listener.heard} == {"worker"}


async def test_what_comes_and_goes_between_two_messages_is_told_as_it_is_in_the_end():
    async with MemoryBus(MemoryHub()) as bus:
        pool = BlockPool(5)
        publisher = EventPublisher(bus, pool, StoreCounts(), worker_id="w")
        listener = Listener()
        await bus.subscribe(subjects.kv_events(), listener, inline=True)
        ids = pool.allocate(2)
        pool.name(ids, names(1, 2))
        pool.free(ids)
        pool.drop_cached()
        ids = pool.allocate(1)
        pool.name(ids, names(1))
        await publisher.flush()
        await until(lambda: len(listener.heard) == 1)
        assert (parts(listener.heard[0].stored), parts(listener.heard[0].removed)) == (
            {name(1)[:8]},
            {name(2)[:8]},
        )
        publisher.close()


async def test_a_message_that_is_lost_leaves_a_gap_in_the_numbers():
    hub = MemoryHub(max_payload_bytes=100)
    async with MemoryBus(hub) as bus, MemoryBus(hub) as other:
        pool = BlockPool(40)
        publisher = EventPublisher(bus, pool, StoreCounts(), worker_id="w")
        listener = Listener()
        await other.subscribe(subjects.kv_events(), listener, inline=True)
        pool.name(pool.allocate(1), names(1))
        await publisher.flush()
        await until(lambda: listener.serials == [1])
        hub.max_payload_bytes = 10
        pool.name(pool.allocate(1), names(2))
        await publisher.flush()
        hub.max_payload_bytes = 100
        pool.name(pool.allocate(1), names(3))
        await publisher.flush()
        await until(lambda: listener.serials == [1, 3])
        snapshot = publisher.snapshot(KVSnapshotRequest())
        assert (snapshot.serial, snapshot.total, parts(snapshot.stored)) == (
            3,
            3,
            parts(b"".join(map(_short, (1, 2, 3)))),
        )
        publisher.close()


def _short(i: int) -> bytes:
    return name(i)[:EVENT_HASH_BYTES]


async def test_a_large_pool_is_told_in_messages_and_pages_of_a_bounded_size():
    async with MemoryBus(MemoryHub()) as bus:
        num = 3 * MAX_BYTES // EVENT_HASH_BYTES + 5
        pool = BlockPool(num + 1)
        publisher = EventPublisher(bus, pool, StoreCounts(), worker_id="w")
        listener = Listener()
        await bus.subscribe(subjects.kv_events(), listener, inline=True)
        pool.name(pool.allocate(num), names(*range(num)))
        await publisher.flush()
        await until(lambda: len(listener.here) == num)
        assert len(listener.heard) == 4
        assert max(len(encode(events)) for events in listener.heard) < 64 * 1024

        seen: set[bytes] = set()
        first = publisher.snapshot(KVSnapshotRequest())
        pages, offset = [first], len(first.stored) // EVENT_HASH_BYTES
        while offset < first.total:
            # It goes on changing meanwhile: the pages are of one moment all the same.
            block = pool.find([name(offset)])
            pool.free(block)
            pool.drop_cached()
            await publisher.flush()
            pages.append(publisher.snapshot(KVSnapshotRequest(offset=offset, serial=first.serial)))
            offset += len(pages[-1].stored) // EVENT_HASH_BYTES
        assert {(page.serial, page.total) for page in pages} == {(first.serial, num)}
        assert max(len(encode(page)) for page in pages) < 64 * 1024
        for page in pages:
            seen |= parts(page.stored)
        assert len(seen) == num
        assert publisher.snapshot(KVSnapshotRequest()).total == num - 3
        publisher.close()


async def test_two_who_read_at_once_get_the_pages_of_a_moment_each():
    async with MemoryBus(MemoryHub(max_payload_bytes=1000)) as bus:
        pool = BlockPool(200)
        publisher = EventPublisher(bus, pool, StoreCounts(), worker_id="w")
        ids = pool.allocate(150)
        pool.name(ids, names(*range(150)))
        await publisher.flush()
        before = {x[:EVENT_HASH_BYTES] for x in pool.names}
        one = [publisher.snapshot(KVSnapshotRequest())]
        pool.free(ids[:40])
        pool.drop_cached()  # all that lies behind moves up
        await publisher.flush()
        after = {x[:EVENT_HASH_BYTES] for x in pool.names}
        other = [publisher.snapshot(KVSnapshotRequest())]
        for pages in (one, other):
            while (offset := sum(len(page.stored) for page in pages) // EVENT_HASH_BYTES) < pages[0].total:
                pages.append(publisher.snapshot(KVSnapshotRequest(offset=offset, serial=pages[0].serial)))
        for pages, held in ((one, before), (other, after)):
            assert {page.serial for page in pages} == {pages[0].serial}
            assert parts(b"".join(page.stored for page in pages)) == held
        publisher.close()


def test_few_moments_are_kept_and_none_for_long():
    taken = iter(range(100))
    snapshots = Snapshots(lambda: b"%d" % next(taken))
    assert snapshots.of(None, 0, 0.0) == (0, b"0")
    assert snapshots.of(None, 0, 1.0) == (0, b"0"), "of the same moment, for another reader"
    for serial in range(1, MAX_KEPT + 1):
        assert snapshots.of(None, serial, 2.0) == (serial, b"%d" % serial)
    assert len(snapshots) == MAX_KEPT
    assert snapshots.of(0, 9, 3.0) == (9, b"%d" % (MAX_KEPT + 1)), "moment 0 is kept no more"
    assert snapshots.of(3, 9, 4.0) == (3, b"3")
    snapshots.drop_old(3.5 + KEEP_S)
    assert len(snapshots) == 1
    assert snapshots.of(3, 9, 4.0 + KEEP_S) == (3, b"3")
    snapshots.drop_old(5.0 + 2 * KEEP_S)
    assert len(snapshots) == 0


async def test_a_bus_that_takes_small_messages_gets_small_ones():
    async with MemoryBus(MemoryHub(max_payload_bytes=1000)) as bus:
        pool = BlockPool(200)
        publisher = EventPublisher(bus, pool, StoreCounts(), worker_id="w")
        listener = Listener()
        await bus.subscribe(subjects.kv_events(), listener, inline=True)
        pool.name(pool.allocate(199), names(*range(199)))
        await publisher.flush()
        await until(lambda: len(listener.here) == 199)
        assert len(publisher.snapshot(KVSnapshotRequest()).stored) <= 500
        publisher.close()


async def test_a_closed_publisher_hears_nothing():
    async with MemoryBus(MemoryHub()) as bus:
        pool, counts = BlockPool(5), StoreCounts()
        publisher = EventPublisher(bus, pool, counts, worker_id="w")
        publisher.close()
        pool.name(pool.allocate(1), names(1))
        await publisher.flush()
        assert counts.num_event_messages == 0
