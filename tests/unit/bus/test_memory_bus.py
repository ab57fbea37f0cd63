"""What is particular to the memory bus; everything else is the contract suite's."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.bus import callbacks
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub, matches
from distserve.errors import PayloadTooLarge
from tests.waiting import until


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b.*", "x.b.y", True),
        ("a.>", "a.b", True),
        ("a.>", "a.b.c.d", True),
        ("a.>", "a", False),
        (">", "a", True),
    ],
)
def test_wildcards_match_as_in_nats(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern.split("."), subject) is expected


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.data())
def test_a_pattern_made_from_a_subject_matches_it(tokens: list[str], data: st.DataObject) -> None:
    pattern = [data.draw(st.sampled_from([token, "*"])) for token in tokens]
    assert matches(pattern, ".".join(tokens))
    assert matches([*pattern[: data.draw(st.integers(0, len(tokens) - 1))], ">"], ".".join(tokens))


async def test_the_payload_limit_can_be_set() -> None:
    async with MemoryBus(MemoryHub(max_payload_bytes=8)) as bus:
        await bus.publish("x", bytes(8))
        with pytest.raises(PayloadTooLarge, match=r"9 bytes.*at most 8"):
            await bus.publish("x", bytes(9))


async def test_a_slow_consumer_drops_the_newest_and_is_counted() -> None:
    gate = asyncio.Event()
    got: list[bytes] = []

    async def slow(delivery: Delivery) -> None:
        await gate.wait()
        got.append(delivery.data)

    async with MemoryBus(MemoryHub(pending_messages=5)) as bus:
        await bus.subscribe("x", slow, inline=True)
        for i in range(20):
            await bus.publish("x", b"%d" % i)
        assert bus.stats.slow_consumer_drops == 15
        gate.set()
        await until(lambda: len(got) == 5)
    assert got == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_group_takes_turns() -> None:
    hub = MemoryHub()
    counts = [0, 0, 0]
    async with MemoryBus(hub) as sender, MemoryBus(hub) as bus:
        for i in range(3):

            async def callback(delivery: Delivery, i: int = i) -> None:
                counts[i] += 1

            await bus.subscribe("x", callback, queue="g")
        for _ in range(9):
            await sender.publish("x", b"")
        await until(lambda: sum(counts) == 9)
    assert counts == [3, 3, 3]


async def test_what_is_sent_to_a_cut_bus_is_lost_and_what_it_published_comes_with_the_heal() -> None:
    hub = MemoryHub()
    async with MemoryBus(hub) as here, MemoryBus(hub) as there:
        got_here: list[bytes] = []
        got_there: list[bytes] = []

        async def at_here(delivery: Delivery) -> None:
            got_here.append(delivery.data)

        async def at_there(delivery: Delivery) -> None:
            got_there.append(delivery.data)

        await here.subscribe("to.here", at_here)
        await there.subscribe("to.there", at_there)
        hub.cut(here)
        assert (here.connected, there.connected) == (False, True)
        await there.publish("to.here", b"lost")
        await here.publish("to.there", b"kept")
        assert got_there == []
        hub.heal(here)
        hub.heal(here)  # idempotent
        await there.publish("to.here", b"after")
        await until(lambda: got_here == [b"after"] and got_there == [b"kept"])
        assert here.stats.reconnects == 1


async def test_only_so_many_callbacks_of_a_subscription_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "MAX_RUNNING", 3)
    gate = asyncio.Event()
    started: list[bytes] = []

    async def callback(delivery: Delivery) -> None:
        started.append(delivery.data)
        await gate.wait()

    async with MemoryBus(MemoryHub()) as bus:
        await bus.subscribe("x", callback)
        for i in range(10):
            await bus.publish("x", b"%d" % i)
        await until(lambda: len(started) == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(started) == 3
        gate.set()
        await until(lambda: len(started) == 10)
    assert started == [b"%d" % i for i in range(10)]
