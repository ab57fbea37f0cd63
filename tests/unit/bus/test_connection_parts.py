"""The parts of a bus's connection that need no server: whether it is there, what was complained of, round trips."""

import asyncio
import logging

import pytest

from distserve.bus.base import BusStats
from distserve.bus.complaints import Complaints
from distserve.bus.online import Online
from distserve.bus.round_trip import RoundTrips
from distserve.errors import BusError, BusTimeout


async def test_waiting_for_a_connection_leaves_the_rest_of_the_time() -> None:
    online = Online("the hub")
    waiting = asyncio.create_task(online.wait("x", 5.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    online.up()
    assert 0 < await waiting < 5.0
    assert await online.wait("x", 5.0) == 5.0
    assert online.now
    assert online.since is not None


async def test_no_connection_in_time_names_subject_and_place() -> None:
    online = Online("the hub")
    online.up()
    online.down()
    with pytest.raises(BusTimeout, match=r"cut off from the hub; .* from x within 0\.01 s"):
        await online.wait("x", 0.01)


async def test_a_closed_bus_takes_nothing_even_while_it_is_connected() -> None:
    online = Online("NATS at nats://n:1", url="nats://n:1")
    online.up()
    online.closed = True
    with pytest.raises(BusError, match="the bus to NATS at nats://n:1 is closed") as e:
        await online.wait("x", 1.0)
    assert e.value.url == "nats://n:1"


def test_a_refusal_explains_more_than_the_broken_connections_after_it() -> None:
    complaints = Complaints("here", BusStats())
    refusal = OSError("Authorization Violation")
    for e in (OSError("first"), refusal, OSError("later")):
        complaints.reported(e, connecting=True)
    assert complaints.last is refusal
    complaints.forget()
    complaints.reported(OSError("another attempt"), connecting=True)
    assert str(complaints.last) == "another attempt"


def test_each_complaint_counts_once_under_its_kind(caplog: pytest.LogCaptureFixture) -> None:
    stats = BusStats()
    complaints = Complaints("here", stats)
    with caplog.at_level(logging.WARNING):
        complaints.reported(OSError("reset"), connecting=True)
        assert caplog.records == []  # a connection that is being made is no fault
        complaints.reported(OSError("Permissions Violation for Publish to x"), connecting=True)
        complaints.reported(ValueError("odd"), connecting=False)
        for _ in range(1000):
            complaints.dropped(ValueError("slow"), "x")
    assert (stats.permission_denials, stats.errors, stats.slow_consumer_drops) == (1, 1, 1000)
    assert len(caplog.records) < 10, "a flood of drops is no flood of lines"


async def test_a_late_answer_leaves_its_ping_running() -> None:
    trips, answered, ended = RoundTrips(), asyncio.Event(), 0

    async def ping(timeout_s: int) -> None:
        nonlocal ended
        await answered.wait()
        ended += 1

    with pytest.raises(TimeoutError):
        await trips(ping, 0.01)
    answered.set()
    await trips(ping, 5)
    assert ended == 4


async def test_round_trips_end_with_the_bus() -> None:
    trips, cancelled = RoundTrips(), asyncio.Event()

    async def ping(timeout_s: int) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        await trips(ping, 0.01)
    trips.cancel()
    async with asyncio.timeout(5):
        await cancelled.wait()


async def test_what_a_ping_raises_reaches_its_caller() -> None:
    async def ping(timeout_s: int) -> None:
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        await RoundTrips()(ping, 5)
