"""The watch's own rules, on a bucket whose faults a test decides."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from distserve.bus.base import BusStats, RegistryEvent, Subscription
from distserve.bus.bucket import Bucket, Change, Entry
from distserve.bus.registry import BucketRegistry
from distserve.bus.watch import LiveWatch
from distserve.errors import BusTimeout
from distserve.messages import WorkerInfo, encode
from tests.waiting import until

TTL_S = 0.2


class Nothing(Subscription):
    async def close(self) -> None:
        pass


class FaultyBucket(Bucket):
    """Holds what the test puts there, tells only what the test tells, and answers listings as slowly as it says."""

    def __init__(self) -> None:
        self.ttl_s = TTL_S
        self.stats = BusStats()
        self.held: dict[str, Entry] = {}
        self.since: float | None = time.monotonic()
        self.listing_takes_s = 0.0
        self.listing_fails = False
        self.num_listings = 0
        self.during_listing: Callable[[], None] = lambda: None
        self.tell: Callable[[Change], None] = lambda change: None

    @property
    def connected_since(self) -> float | None:
        return self.since

    async def open(self) -> None:
        pass

    async def put(self, key: str, value: bytes) -> None:
        self.held[key] = Entry(len(self.held) + 1, value)

    async def delete(self, key: str) -> None:
        self.held[key] = Entry(len(self.held) + 1, None)

    async def entries(self, timeout_s: float) -> Mapping[str, Entry]:
        held = dict(self.held)
        self.num_listings += 1
        self.during_listing()
        await asyncio.sleep(self.listing_takes_s)
        if self.listing_fails:
            raise BusTimeout("no answer", subject="listing", timeout_s=timeout_s)
        return held

    async def follow(self, callback: Callable[[Change], None]) -> Subscription:
        self.tell = callback
        return Nothing()


def info(worker_id: str = "p1", beat: int = 0) -> WorkerInfo:
    return WorkerInfo(worker_id=worker_id, role="prefill", beat=beat)


def change(kind: str, revision: int, beat: int = 0) -> Change:
    value = encode(info(beat=beat)) if kind == "put" else None
    return Change("prefill.p1", kind, Entry(revision, value))  # type: ignore[arg-type]


@pytest.fixture
def bucket() -> FaultyBucket:
    made = FaultyBucket()
    made.held["prefill.p1"] = Entry(1, encode(info()))
    return made


@pytest.fixture
async def watch(bucket: FaultyBucket) -> AsyncIterator[LiveWatch]:
    async with LiveWatch(bucket) as entered:
        yield entered


async def test_an_expiry_told_while_contact_is_fresh_is_not_believed(watch: LiveWatch, bucket: FaultyBucket) -> None:
    bucket.tell(change("expired", 2))
    assert "p1" in watch.snapshot


async def test_an_expiry_told_after_a_ttl_of_contact_is_believed_at_once(
    watch: LiveWatch, bucket: FaultyBucket
) -> None:
    entered = time.monotonic()
    while time.monotonic() - entered < 1.5 * TTL_S:
        bucket.tell(change("put", 2))
        await asyncio.sleep(0.01)
    bucket.tell(change("expired", 3))
    assert "p1" not in watch.snapshot


async def test_a_silent_entry_that_the_bucket_lacks_has_expired_though_nobody_said_so(
    watch: LiveWatch, bucket: FaultyBucket
) -> None:
    bucket.held.clear()
    events: list[RegistryEvent] = []
    watch.on_event(events.append)
    await watch.wait_for(lambda s: not s, timeout_s=5)
    assert events == [RegistryEvent("gone", "p1", None, "expired")]


async def test_a_silent_entry_that_was_deleted_has_left(watch: LiveWatch, bucket: FaultyBucket) -> None:
    bucket.held["prefill.p1"] = Entry(2, None)
    events: list[RegistryEvent] = []
    watch.on_event(events.append)
    await watch.wait_for(lambda s: not s, timeout_s=5)
    assert events == [RegistryEvent("gone", "p1", None, "left")]


async def test_renewals_that_were_not_told_are_found_in_the_bucket(watch: LiveWatch, bucket: FaultyBucket) -> None:
    events: list[RegistryEvent] = []
    watch.on_event(events.append)
    entered = time.monotonic()
    revision = 1
    while time.monotonic() - entered < 6 * TTL_S:
        revision += 1
        bucket.held["prefill.p1"] = Entry(revision, encode(info(beat=revision)))
        await asyncio.sleep(TTL_S / 4)
    assert {e.kind for e in events} == {"put"}
    assert watch.snapshot["p1"].beat > 1


async def test_an_entry_that_a_bucket_with_a_longer_ttl_keeps_is_given_up(
    watch: LiveWatch, bucket: FaultyBucket
) -> None:
    began = time.monotonic()
    await watch.wait_for(lambda s: not s, timeout_s=5)
    assert time.monotonic() - began >= 1.9 * TTL_S


async def test_while_the_bucket_cannot_be_read_nobody_expires_and_afterwards_trust_takes_a_ttl(
    watch: LiveWatch, bucket: FaultyBucket
) -> None:
    bucket.listing_fails = True
    bucket.held.clear()
    await until(lambda: bucket.num_listings >= 4)
    assert "p1" in watch.snapshot
    bucket.listing_fails = False
    await watch.wait_for(lambda s: not s, timeout_s=5)


async def test_an_answer_slower_than_half_a_ttl_counts_as_a_cut(watch: LiveWatch, bucket: FaultyBucket) -> None:
    bucket.held.clear()
    bucket.listing_takes_s = 0.6 * TTL_S
    await until(lambda: bucket.num_listings >= 4)
    assert "p1" in watch.snapshot
    bucket.listing_takes_s = 0.0
    await watch.wait_for(lambda s: not s, timeout_s=5)


async def test_while_cut_off_the_bucket_is_not_even_asked(watch: LiveWatch, bucket: FaultyBucket) -> None:
    bucket.since = None
    bucket.held.clear()
    asked = bucket.num_listings
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 5 * TTL_S)
    assert bucket.num_listings == asked
    assert "p1" in watch.snapshot
    bucket.tell(change("expired", 2))
    assert "p1" in watch.snapshot


async def test_back_from_a_cut_newcomers_and_leavers_are_known_at_once_and_the_dead_after_a_ttl(
    watch: LiveWatch, bucket: FaultyBucket
) -> None:
    bucket.since = None
    bucket.held = {"prefill.p2": Entry(1, encode(info("p2")))}
    bucket.since = back = time.monotonic()
    await watch.wait_for(lambda s: set(s) == {"p1", "p2"}, timeout_s=5)
    await watch.wait_for(lambda s: "p1" not in s, timeout_s=5)
    assert time.monotonic() - back >= TTL_S


@pytest.mark.parametrize("kind", ["put", "left"])
async def test_a_change_during_the_first_listing_is_newer_than_the_listing(bucket: FaultyBucket, kind: str) -> None:
    bucket.during_listing = lambda: bucket.tell(change(kind, 7, beat=7))
    async with LiveWatch(bucket) as watch:
        beats = {worker_id: known.beat for worker_id, known in watch.snapshot.items()}
        assert beats == ({"p1": 7} if kind == "put" else {})


async def test_a_watch_that_cannot_list_does_not_enter(bucket: FaultyBucket) -> None:
    bucket.listing_fails = True
    with pytest.raises(BusTimeout):
        async with BucketRegistry(bucket).watch():
            pass


async def test_a_condition_that_raises_reaches_who_waits(watch: LiveWatch, bucket: FaultyBucket) -> None:
    waiting = asyncio.create_task(watch.wait_for(lambda s: s["p1"].beat == 9 and s["absent"].beat == 1, timeout_s=5))
    await asyncio.sleep(0)
    bucket.tell(change("put", 2, beat=9))
    with pytest.raises(KeyError):
        await waiting
