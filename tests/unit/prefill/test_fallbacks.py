"""A transport that does not reach one peer is left out there for a while, and never for good."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from distserve.errors import TransportUnavailable
from distserve.messages import Endpoint, LeaseRequest, RemoteRegion, TrafficClass
from distserve.transport.base import Lease, Receiver, Sender, Transfer
from distserve.transport.select import host_key
from distserve_prefill.fallbacks import FIRST_S, MOST_S, Fallbacks
from tests.contracts.transport.pools import SMALL
from tests.unit.prefill.decode_side import DecodeSide, World, layers, state

ERROR = TransportUnavailable("no route to the GID of d0")
ALL = ("shm", "rdma", "tcp")
ONLY = "same host; the only kind that both can use"  # as decode sees it


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_pause_doubles_up_to_a_bound_and_ends_for_good_when_it_works() -> None:
    clock = Clock()
    fallbacks = Fallbacks(ALL, trial_s=10, clock=clock)
    expected = FIRST_S
    for _ in range(10):
        assert fallbacks.kinds_for("d0") == ["shm", "rdma", "tcp"]
        assert fallbacks.failed("d0", "rdma", ERROR)
        assert fallbacks.reasons({"d0"}) == ["rdma to d0 failed: no route to the GID of d0"]
        clock.now += expected - 0.01
        assert fallbacks.kinds_for("d0") == ["shm", "tcp"]
        assert fallbacks.kinds_for("d1") == ["shm", "rdma", "tcp"]
        clock.now += 0.02
        expected = min(MOST_S, 2 * expected)
    assert expected == MOST_S
    assert fallbacks.kinds_for("d0") == ["shm", "rdma", "tcp"]
    assert fallbacks.failing("d0") == ["rdma"]
    assert fallbacks.worked("d0", "rdma")
    assert not fallbacks.worked("d0", "rdma")
    assert fallbacks.failing("d0") == fallbacks.reasons({"d0"}) == []
    assert fallbacks.failed("d0", "rdma", ERROR)
    clock.now += FIRST_S + 0.01  # from the beginning
    assert "rdma" in fallbacks.kinds_for("d0")
    assert fallbacks.counts == {("d0", "rdma"): 11}


def test_after_a_pause_one_hand_over_tries_and_the_others_do_not_wait_for_it() -> None:
    clock = Clock()
    fallbacks = Fallbacks(ALL, trial_s=10, clock=clock)
    fallbacks.failed("d0", "rdma", ERROR)
    clock.now += FIRST_S
    assert "rdma" in fallbacks.kinds_for("d0")
    assert "rdma" not in fallbacks.kinds_for("d0")
    clock.now += 10  # the one that tried was cancelled, say
    assert "rdma" in fallbacks.kinds_for("d0")


def test_a_worker_whose_pause_is_over_is_not_degraded_since_only_a_hand_over_can_find_out_more() -> None:
    """The gateway prefers workers that are not: one degraded until it has worked would get nothing to try it with."""
    clock = Clock()
    fallbacks = Fallbacks(ALL, trial_s=10, clock=clock)
    fallbacks.failed("d0", "rdma", ERROR)
    assert fallbacks.reasons({"d0"})
    clock.now += FIRST_S
    assert fallbacks.reasons({"d0"}) == []
    assert "rdma" in fallbacks.kinds_for("d0")
    fallbacks.failed("d0", "rdma", ERROR)
    assert fallbacks.reasons({"d0"})


def test_a_hand_over_that_fails_after_its_peer_has_left_degrades_nobody() -> None:
    fallbacks = Fallbacks(ALL)
    fallbacks.forget("d0")
    fallbacks.failed("d0", "rdma", ERROR)
    assert fallbacks.reasons({"d1"}) == []
    assert fallbacks.reasons({"d0", "d1"})


def test_hand_overs_that_fail_together_count_as_one_for_the_pause() -> None:
    clock = Clock()
    fallbacks = Fallbacks(ALL, clock=clock)
    for _ in range(8):
        assert fallbacks.failed("d0", "rdma", ERROR)
    clock.now += FIRST_S
    assert "rdma" in fallbacks.kinds_for("d0")
    assert fallbacks.counts == {("d0", "rdma"): 8}


def test_nothing_stands_in_for_a_forced_kind_unless_allowed() -> None:
    forced = Fallbacks(["rdma"], "rdma")
    assert not forced.failed("d0", "rdma", ERROR)
    assert forced.kinds_for("d0") == ["rdma"]
    assert forced.reasons({"d0"}) == []
    allowed = Fallbacks(["rdma", "shm", "tcp"], "rdma", may_fall_back=True)
    assert allowed.kinds_for("d0") == ["rdma"]
    assert allowed.failed("d0", "rdma", ERROR)
    assert allowed.kinds_for("d0") == ["shm", "tcp"]
    assert allowed.kinds_for("d1") == ["rdma"]


def test_tcp_is_never_left_out_in_auto_nor_the_last_kind() -> None:
    fallbacks = Fallbacks(ALL)
    assert not fallbacks.failed("d0", "tcp", ERROR)
    assert not fallbacks.failed("d0", "", ERROR)
    assert not Fallbacks(["rdma"]).failed("d0", "rdma", ERROR)
    assert fallbacks.kinds_for("d0") == list(ALL)
    assert fallbacks.failed("d0", "shm", ERROR)
    assert fallbacks.failed("d0", "rdma", ERROR)
    assert fallbacks.kinds_for("d0") == ["tcp"]
    without_tcp = Fallbacks(["shm", "rdma"])
    assert without_tcp.failed("d0", "rdma", ERROR)
    assert not without_tcp.failed("d0", "shm", ERROR)
    assert without_tcp.kinds_for("d0") == ["shm"]


def test_a_peer_that_left_is_forgotten() -> None:
    fallbacks = Fallbacks(ALL)
    fallbacks.failed("d0", "rdma", ERROR)
    fallbacks.failed("d1", "rdma", ERROR)
    fallbacks.forget("d0")
    assert fallbacks.reasons({"d0", "d1"}) == ["rdma to d1 failed: no route to the GID of d0"]
    assert fallbacks.counts == {("d1", "rdma"): 1}
    assert "rdma" in fallbacks.kinds_for("d0")


# ---------------------------------------------------------------- through a whole hand-over


class UnreachableReceiver(Receiver):
    """Grants, as one on a device would; its leases end only by being given up."""

    kind = "rdma"

    def __init__(self) -> None:
        self.revoked: list[int] = []

    async def start(self, on_commit: object, on_lost: object) -> None: ...

    async def stop(self) -> None: ...

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(kind="rdma", host=host_key(), address="a-1")

    def grant(self, lease: Lease) -> RemoteRegion:
        return RemoteRegion(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            endpoint=self.endpoint,
            block_ids=list(lease.block_ids),
            layout=SMALL,
        )

    async def revoke(self, lease_id: int, epoch: int | None = None) -> None:
        self.revoked.append(lease_id)

    def idle_s(self, lease_id: int) -> float | None:
        return 0.0


class UnconnectedSender(Sender):
    kind = "rdma"

    def __init__(self) -> None:
        self.num_opened = 0

    async def open(
        self, region: RemoteRegion, *, timeout_s: float, traffic_class: TrafficClass = "prefill", peer: str = ""
    ) -> Transfer:
        self.num_opened += 1
        raise TransportUnavailable("no queue pair could be connected", kind="rdma")

    async def stop(self) -> None: ...


class MendedReceiver(UnreachableReceiver):
    """Now its leases can be written to: by the sockets of another one."""

    def __init__(self, real: Receiver) -> None:
        self._real = real

    def grant(self, lease: Lease) -> RemoteRegion:
        return msgspec.structs.replace(self._real.grant(lease), endpoint=self.endpoint)

    async def revoke(self, lease_id: int, epoch: int | None = None) -> None:
        await self._real.revoke(lease_id, epoch)


class MendedSender(UnconnectedSender):
    def __init__(self, theirs: Receiver, real: Sender) -> None:
        self._theirs, self._real = theirs, real

    async def open(
        self, region: RemoteRegion, *, timeout_s: float, traffic_class: TrafficClass = "prefill", peer: str = ""
    ) -> Transfer:
        region = msgspec.structs.replace(region, endpoint=self._theirs.endpoint)
        return await self._real.open(region, timeout_s=timeout_s, traffic_class=traffic_class, peer=peer)


def offered(side: DecodeSide) -> list[list[str]]:
    return [m.transports for m in side.heard if isinstance(m, LeaseRequest)]


@pytest.fixture
async def w() -> AsyncIterator[World]:
    """Over tcp; both decode workers offer rdma too, which connects to neither."""
    async with AsyncExitStack() as stack:
        world = await World("tcp", stack).start()
        world.a.receivers["rdma"], world.b.receivers["rdma"] = UnreachableReceiver(), UnreachableReceiver()
        world.senders["rdma"] = UnconnectedSender()
        yield world
        for side in (world.a, world.b):
            if side.has_it:
                side.drop_adopted()
            await side.holds_nothing()


async def test_a_connection_that_fails_costs_the_request_nothing_but_a_second_question(w: World) -> None:
    w.fallbacks = Fallbacks(["rdma", "tcp"])
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await w.adopted(w.a, await handoff.commit(state))
    assert offered(w.a) == [["rdma", "tcp"], ["tcp"]]
    assert offered(w.b) == []  # the same decode worker, not another one
    assert w.fallbacks.counts == {("A", "rdma"): 1}
    assert w.fallbacks.reasons({"A"}) == ["rdma to A failed: no queue pair could be connected"]
    assert w.in_use.snapshot() == {"A": {"tcp": f"{ONLY}; rdma failed and is left out for now"}}
    assert list(w.a.in_use.snapshot()["p"]) == ["tcp"]  # the lease by rdma was granted, and never used


async def test_a_transport_that_fails_is_in_use_no_more(w: World) -> None:
    w.fallbacks = Fallbacks(["rdma", "tcp"])
    w.in_use.note("A", "rdma", "it worked once")
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await w.adopted(w.a, await handoff.commit(state))
    assert list(w.in_use.snapshot()["A"]) == ["tcp"]


async def test_once_it_works_again_what_stood_in_for_it_is_in_use_no_more(w: World) -> None:
    clock = Clock()
    w.fallbacks = Fallbacks(["rdma", "tcp"], clock=clock)
    w.fallbacks.failed("A", "rdma", ERROR)
    w.in_use.note("A", "tcp", "rdma failed and is left out for now")
    clock.now += FIRST_S
    w.a.receivers["rdma"], w.senders["rdma"] = MendedReceiver(w.a.receiver), MendedSender(w.a.receiver, w.sender)
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await w.adopted(w.a, await handoff.commit(state))
    assert w.in_use.snapshot() == {"A": {"rdma": "same host; preferred to tcp"}}
    assert w.fallbacks.failing("A") == []


async def test_a_worker_that_leaves_while_its_failed_lease_is_returned_is_not_asked_again(w: World) -> None:
    """A frozen one would take the second question and say nothing."""
    w.fallbacks = Fallbacks(["rdma", "tcp"])
    handoff = w.handoff()
    publish = w.bus.publish

    async def leaves(subject: str, data: bytes, **options: Any) -> None:
        if not options.get("reply"):  # the release
            handoff.peer_gone("A")
        await publish(subject, data, **options)

    w.bus.publish = leaves  # type: ignore[method-assign, assignment]
    await w.compute(handoff, layers())
    await w.adopted(w.b, await handoff.commit(state))
    assert offered(w.a) == [["rdma", "tcp"]]


async def test_forced_it_is_an_error_that_names_the_transport(w: World) -> None:
    w.fallbacks = Fallbacks(["rdma"], "rdma")
    handoff = w.handoff(give_up_s=0.1)
    await w.compute(handoff, layers())
    with pytest.raises(TransportUnavailable, match="no queue pair"):
        await handoff.commit(state)
    await handoff.abort("test")
    assert all(kinds == ["rdma"] for kinds in offered(w.a) + offered(w.b))
    assert w.fallbacks.counts == {}


async def test_forced_with_fallback_allowed_a_peer_without_the_kind_is_asked_for_another(w: World) -> None:
    del w.a.receivers["rdma"]
    w.fallbacks = Fallbacks(["rdma", "tcp"], "rdma", may_fall_back=True)
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await w.adopted(w.a, await handoff.commit(state))
    assert offered(w.a) == [["rdma"], ["tcp"]]
