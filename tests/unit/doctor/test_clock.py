"""Offsets of clocks: the arithmetic, the judgement, and the services that tell their time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.doctor.clock import Offset, check_clocks, judge, measure, one_a_host
from distserve.errors import DistServeError, MalformedMessage
from distserve.messages import (
    ClockReply,
    ClockRequest,
    Endpoint,
    SequenceKey,
    SequenceStatus,
    SubmitReply,
    SubmitRequest,
    WorkerInfo,
    decode_as,
    encode,
)
from distserve.worker.clock import tell_time
from distserve.worker.door import Door
from distserve.worker.outbox import Outbox
from tests.unit.gateway.scripted import says, serving

MS = 1_000_000  # nanoseconds


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryHub(), name="test", registry_ttl_s=1.0) as made:
        yield made


@given(
    st.integers(-(10**12), 10**12), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0)
)
def test_the_truth_is_within_the_uncertainty(offset: int, there: int, back: int, dwell: int, start: int) -> None:
    """Whatever the two ways take, even if one takes all the time."""
    t1 = start
    t2 = t1 + there + offset
    t3 = t2 + dwell
    t4 = t3 - offset + back
    found = Offset.of(t1, t2, t3, t4)
    assert abs(found.offset_s - offset / 1e9) <= found.uncertainty_s + 1e-9
    assert found.uncertainty_s == pytest.approx((there + back) / 2e9)


@pytest.mark.parametrize(
    ("offset_s", "uncertainty_s", "status"),
    [
        (0.0, 0.0001, "ok"),
        (0.0009, 0.0001, "ok"),
        (-0.0011, 0.0001, "warn"),
        (0.0011, 0.0001, "warn"),
        (0.004, 0.005, "ok"),  # the measurement cannot tell it from none
        (0.006, 0.005, "warn"),
    ],
)
def test_over_a_millisecond_is_a_warning_if_it_can_be_told(offset_s: float, uncertainty_s: float, status: str) -> None:
    found = judge(Offset(offset_s, uncertainty_s), "d0")
    assert found.status == status
    assert f"{uncertainty_s * 1e3:.3f}" in found.found


async def test_a_clock_that_is_ahead_is_measured(bus: MemoryBus) -> None:
    async def ahead(delivery: Delivery) -> bytes:
        told = decode_as(ClockReply, await tell_time(delivery))
        return encode(
            ClockReply(received_unix_ns=told.received_unix_ns + 250 * MS, sent_unix_ns=told.sent_unix_ns + 250 * MS)
        )

    async with await bus.serve(subjects.worker("decode", "d0"), ahead):
        found = await measure(bus, subjects.worker("decode", "d0"))
    assert abs(found.offset_s - 0.25) <= found.uncertainty_s
    assert found.uncertainty_s < 0.2


async def test_only_a_clock_request_is_answered() -> None:
    request = Delivery("x", encode(ClockRequest()))
    reply = decode_as(ClockReply, await tell_time(request))
    assert 0 <= reply.sent_unix_ns - reply.received_unix_ns < 10**9
    with pytest.raises(MalformedMessage):
        await tell_time(Delivery("x", encode(reply)))


def info(worker_id: str, boot_id: str, role: str = "decode") -> WorkerInfo:
    key = f"{boot_id}-4026531840" if boot_id else ""
    endpoints = [Endpoint(kind="tcp", host="10.0.0.2", address="10.0.0.2:7000")]
    return WorkerInfo(worker_id=worker_id, role=role, host_key=key, endpoints=endpoints)  # type: ignore[arg-type]


def test_one_worker_of_each_kernel_is_asked() -> None:
    found = one_a_host([info("d1", "b-1"), info("g0", "b-1", "gateway"), info("p0", "b-2"), info("g1", "", "gateway")])
    assert [w.worker_id for w in found.values()] == ["d1", "p0", "g1"]


async def test_workers_that_do_not_answer_are_left_out_by_name(bus: MemoryBus) -> None:
    async def broken(delivery: Delivery) -> bytes:
        raise MalformedMessage("this worker has no answer to ClockRequest")

    async with (
        await bus.serve(subjects.worker("decode", "d0"), tell_time),
        await bus.serve(subjects.worker("decode", "old"), broken),
    ):
        found = await check_clocks(bus, [info("d0", "a"), info("gone", "b"), info("old", "c")])
    assert [(f.subject, f.status) for f in found] == [
        ("d0 (10.0.0.2)", "ok"),
        ("gone (10.0.0.2)", "skip"),
        ("old (10.0.0.2)", "skip"),
    ]
    (nobody,) = await check_clocks(bus, [])
    assert nobody.status == "skip"


class Idle:
    """A worker that is never asked for more than the time."""

    def submit(self, request: SubmitRequest) -> SubmitReply:
        raise AssertionError("not asked for")

    def status_of(self, key: SequenceKey, position: int) -> SequenceStatus:
        raise AssertionError("not asked for")

    def cancel(self, key: SequenceKey, error: DistServeError | None = None) -> None:
        raise AssertionError("not asked for")


async def test_every_workers_door_tells_the_time(bus: MemoryBus) -> None:
    door = Door(Idle(), Outbox(bus, "p0", forget_s=60.0))
    async with await bus.serve(subjects.worker("prefill", "p0"), door):
        found = await measure(bus, subjects.worker("prefill", "p0"))
    assert abs(found.offset_s) <= found.uncertainty_s  # it is this host's own clock


async def test_a_gateway_and_its_workers_are_all_asked_on_their_own_subjects() -> None:
    async with serving(says("x")) as cluster:
        asker = MemoryBus(cluster.hub, name="doctor", registry_ttl_s=2.5)  # type: ignore[attr-defined]
        async with asker, asker.registry().watch() as watch:
            found = await check_clocks(asker, watch.snapshot.values())
    assert {f.subject.split()[0] for f in found} == {"p0", "d0", "gw"}
    assert {f.status for f in found} == {"ok"}
