"""One sequence's way to a decode worker, over a memory bus and real transports: refusals, losses, and every exit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from distserve.errors import LeaseRevoked, NoResponders, NoWorker, TransportError, WorkerLost
from distserve.messages import LeaseRelease, LeaseRequest, RemoteRegion, Slo
from distserve.telemetry import begin
from distserve.transport.base import Transfer
from distserve_prefill.attempts import Attempts
from distserve_prefill.handoff import Handoff
from tests.contracts.transport.pools import SMALL
from tests.spans import collected
from tests.unit.prefill.decode_side import World, layers, state
from tests.waiting import until


@pytest.fixture(params=["shm", "tcp"])
async def w(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """At the end nobody holds anything, and of its trace nothing is open."""
    async with AsyncExitStack() as stack:
        spans = stack.enter_context(collected())
        world = await World(request.param, stack).start()
        world.attempts = Attempts(begin("process prefill"))
        yield world
        assert "handoff" not in spans.open
        for side in (world.a, world.b):
            if side.has_it:
                side.drop_adopted()
            await side.holds_nothing()


async def granted(handoff: Handoff) -> None:
    assert handoff._opening is not None
    async with asyncio.timeout(5):
        await asyncio.wait({handoff._opening})


async def part_written(w: World) -> Handoff:
    """A hand-over to A of which half the layers have arrived."""
    handoff = w.handoff()
    await granted(handoff)
    await w.compute(handoff, layers(0, 2))
    blocks = w.a.blocks
    await until(lambda: w.has_come(w.a, blocks, layers(0, 2)), 5, "half the layers have come")
    return handoff


# ---------------------------------------------------------------- the way there


async def test_layers_are_written_as_they_become_ready(w: World) -> None:
    handoff = await part_written(w)
    await w.compute(handoff, layers(2))
    shipped = await handoff.commit(state)
    await w.adopted(w.a, shipped)
    assert (shipped.kind, shipped.num_bytes) == (w.kind, 3 * 8192)
    assert [t.written for t in w.sender.transfers] == [layers()]
    assert [t.awaited for t in w.sender.transfers] == [layers(SMALL.num_layers - 1)]
    assert {(flow.direction, flow.peer) for flow in w.meter.snapshot()} == {("sent", "A")}


async def test_decode_waits_for_all_that_is_written_once_nothing_is_left_to_compute(w: World) -> None:
    filling = await w.a.fill()
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await until(lambda: w.a.reservations.num_waiting == 1, 5, "A keeps the question in its queue")
    w.a.empty(filling)
    await w.adopted(w.a, await handoff.commit(state))
    assert [t.awaited for t in w.sender.transfers] == [layers()]


async def test_what_became_ready_before_the_lease_is_written_in_order_when_it_comes(w: World) -> None:
    filling = await w.a.fill()
    handoff = w.handoff()
    await w.compute(handoff, layers(0, 3))
    await until(lambda: w.a.reservations.num_waiting == 1, 5, "A keeps the question in its queue")
    assert not w.sender.transfers
    w.a.empty(filling)
    await granted(handoff)
    await w.compute(handoff, layers(3))
    await w.adopted(w.a, await handoff.commit(state))
    assert [t.written for t in w.sender.transfers] == [layers()]


async def test_a_prompt_computed_long_before_the_lease_waits_in_commit(w: World) -> None:
    filling = await w.a.fill()
    handoff = w.handoff()
    await w.compute(handoff, layers())
    num_states: list[int] = []
    committing = asyncio.create_task(handoff.commit(lambda: num_states.append(len(w.sender.transfers)) or state()))
    await until(lambda: w.a.reservations.num_waiting == 1, 5)
    assert not num_states  # made just before it is sent: deadlines and timings run on meanwhile
    w.a.empty(filling)
    await w.adopted(w.a, await committing)
    assert num_states == [1]


@pytest.mark.parametrize("why", ["full", "draining", "not there"])
async def test_where_the_first_refuses_the_next_gets_everything_from_the_same_blocks(w: World, why: str) -> None:
    filling = None
    if why == "full":
        filling = await w.a.fill()
    elif why == "draining":
        w.a.reservations.draining = True
    else:
        w.order = ["ghost", "B"]
    handoff = w.handoff(wait_s=0.1)
    await w.compute(handoff, layers())
    shipped = await handoff.commit(state)
    if filling is not None:
        w.a.empty(filling)
    await w.adopted(w.b, shipped)
    assert [t.written for t in w.sender.transfers] == [layers()]


async def test_a_decode_worker_that_leaves_while_it_is_asked_is_not_waited_for(w: World) -> None:
    filling = await w.a.fill()
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await until(lambda: w.a.reservations.num_waiting == 1, 5)
    handoff.peer_gone("B")  # not the one that is asked
    await asyncio.sleep(0.05)
    assert w.a.num_heard(LeaseRelease) == 0
    handoff.peer_gone("A")
    async with asyncio.timeout(5):  # A would keep it for 20 s
        shipped = await handoff.commit(state)
    await until(lambda: w.a.reservations.num_waiting == 0, 5, "A, which lives after all, forgets the question")
    w.a.empty(filling)
    await w.adopted(w.b, shipped)


async def test_a_lease_revoked_in_mid_transfer_goes_elsewhere_with_every_span(w: World) -> None:
    handoff = await part_written(w)
    lost = w.a.grant.lease
    w.a.reservations.draining = True  # it will not have it again
    w.a.reservations.release(lost.lease_id, lost.epoch, "test")
    await w.compute(handoff, layers(2))
    await w.adopted(w.b, await handoff.commit(state))
    assert [t.written for t in w.sender.transfers] == [layers(), layers()]


async def test_a_lease_revoked_in_mid_transfer_may_be_had_again(w: World) -> None:
    w.order = ["A"]
    handoff = await part_written(w)
    lost = w.a.grant.lease
    w.a.reservations.release(lost.lease_id, lost.epoch, "test")
    await w.compute(handoff, layers(2))
    await w.adopted(w.a, await handoff.commit(state))
    assert w.a.num_heard(LeaseRequest) == 2


async def test_a_receiver_that_dies_in_mid_transfer_costs_nothing_but_time(w: World) -> None:
    handoff = await part_written(w)
    await w.a.receiver.stop()
    await w.a.bus.close()
    await w.a.reservations.close()
    await w.compute(handoff, layers(2))
    await w.adopted(w.b, await handoff.commit(state))


async def test_a_decode_worker_frozen_in_mid_commit_is_not_waited_for_once_it_is_gone(w: World) -> None:
    frozen = asyncio.Event()
    w.a.receiver.committed = lambda *_: frozen.set()  # type: ignore[attr-defined]
    handoff = w.handoff()
    await w.compute(handoff, layers())
    committing = asyncio.create_task(handoff.commit(state))
    await until(frozen.is_set, 5, "A has everything, and says nothing")
    handoff.peer_gone("A")
    async with asyncio.timeout(3):  # less than the commit's own time
        await w.adopted(w.b, await committing)
    assert w.a.num_heard(LeaseRequest) == 1, "one that is gone is not asked again"


async def test_a_decode_worker_that_leaves_while_it_is_connected_to_is_not_used(w: World) -> None:
    handoff, connect = w.handoff(), w.sender.open

    async def leaves(region: RemoteRegion, **how: Any) -> Transfer:
        opened = await connect(region, **how)
        if handoff.decode_worker == "A":
            handoff.peer_gone("A")
        return opened

    w.sender.open = leaves  # type: ignore[method-assign]
    await w.compute(handoff, layers())
    await w.adopted(w.b, await handoff.commit(state))
    assert not w.sender.transfers[0].written
    assert w.a.num_heard(LeaseRequest) == 1


async def test_a_lone_decode_worker_that_is_gone_ends_the_hand_over_at_once(w: World) -> None:
    w.order = ["A"]
    filling = await w.a.fill()
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await until(lambda: w.a.reservations.num_waiting == 1, 5)
    handoff.peer_gone("A")
    async with asyncio.timeout(5):  # A would be asked for 20 s more
        with pytest.raises(WorkerLost, match="A left"):
            await handoff.commit(state)
    await until(lambda: w.a.reservations.num_waiting == 0, 5)
    w.a.empty(filling)


async def test_a_commit_whose_answer_got_lost_is_not_made_twice(w: World) -> None:
    """Two decode workers with one sequence would both stream it."""
    w.sender.lose_answers = 1
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await w.adopted(w.a, await handoff.commit(state))
    assert w.b.num_heard(LeaseRequest) == 0


# ---------------------------------------------------------------- nobody left


async def test_with_no_candidate_left_the_last_refusal_is_raised(w: World) -> None:
    w.a.reservations.draining = True
    w.order = ["A", "ghost"]
    handoff = w.handoff(give_up_s=0.0)
    await w.compute(handoff, layers())
    with pytest.raises(NoResponders, match="ghost"):
        await handoff.commit(state)
    await handoff.abort("released")


async def test_with_no_candidate_at_all_the_role_is_named(w: World) -> None:
    w.order = []
    handoff = w.handoff(give_up_s=0.0)
    with pytest.raises(NoWorker) as e:
        await handoff.commit(state)
    assert e.value.role == "decode"
    await handoff.abort("released")


async def test_a_worker_that_is_full_now_is_asked_again_until_the_time_is_up(w: World) -> None:
    w.order = ["A"]
    filling = await w.a.fill()
    handoff = w.handoff(wait_s=0.05)
    await w.compute(handoff, layers())
    committing = asyncio.create_task(handoff.commit(state))
    await until(lambda: w.a.num_heard(LeaseRequest) >= 2, 5, "A is asked again")
    w.a.empty(filling)
    await w.adopted(w.a, await committing)


async def test_each_decode_worker_is_told_what_is_left_of_the_promise(w: World) -> None:
    w.a.reservations.draining = True
    handoff = w.handoff(slo=Slo(priority="vip", ttft_s=0.5, tpot_s=0.05))
    await w.compute(handoff, layers())
    await w.adopted(w.b, await handoff.commit(state))
    (first,) = [m.slo for m in w.a.heard if isinstance(m, LeaseRequest)]
    (second,) = [m.slo for m in w.b.heard if isinstance(m, LeaseRequest)]
    assert first.ttft_s is not None
    assert second.ttft_s is not None
    assert second.ttft_s < first.ttft_s < 0.5
    assert (second.priority, second.tpot_s) == ("vip", 0.05)


async def test_a_transfer_that_fails_with_nobody_left_raises_its_error(w: World) -> None:
    w.order = ["A"]
    handoff = await part_written(w)
    lost = w.a.grant.lease
    w.order = []
    w.a.reservations.release(lost.lease_id, lost.epoch, "test")
    await w.compute(handoff, layers(2))
    with pytest.raises(LeaseRevoked, match="was revoked"):
        await handoff.commit(state)
    await handoff.abort("released")
    with pytest.raises(TransportError):
        await w.sender.transfers[0].commit(b"", timeout_s=1)


# ---------------------------------------------------------------- given up


async def gone_without_trace(w: World, handoff: Handoff) -> None:
    """After abort() the source blocks have another owner: none of their bytes goes anywhere."""
    w.overwrite()
    await w.compute(handoff, layers())  # a pass that cannot be stopped goes on reporting
    await w.a.holds_nothing()
    await w.b.holds_nothing()
    assert not w.saw_overwriting(w.a)
    assert not w.saw_overwriting(w.b)
    assert not w.a.has_it


async def test_aborted_before_it_has_asked(w: World) -> None:
    handoff = w.handoff()
    await handoff.abort("test")
    await gone_without_trace(w, handoff)
    assert w.a.heard == []


async def test_aborted_before_the_grant_leaves_nobody_waiting_at_the_decode_worker(w: World) -> None:
    filling = await w.a.fill()
    handoff = w.handoff()
    await w.compute(handoff, layers(0, 2))
    await until(lambda: w.a.reservations.num_waiting == 1, 5)
    await handoff.abort("test")
    await until(lambda: w.a.reservations.num_waiting == 0, 5, "it is out of the queue, in which it holds up others")
    w.a.empty(filling)
    await gone_without_trace(w, handoff)
    assert not w.sender.transfers


async def test_aborted_while_the_grant_is_on_its_way(w: World) -> None:
    handoff, aborting = w.handoff(), list[asyncio.Task[None]]()

    def abort() -> None:  # A has granted, prefill doesn't know yet
        w.a.before_answer = lambda: None
        assert w.a.reservations.num_granted == 1
        aborting.append(asyncio.create_task(handoff.abort("test")))

    w.a.before_answer = abort
    await until(lambda: bool(aborting), 5)
    await aborting[0]
    await gone_without_trace(w, handoff)
    assert not w.sender.transfers


async def test_aborted_after_the_grant(w: World) -> None:
    handoff = w.handoff()
    await granted(handoff)
    await handoff.abort("test")
    await gone_without_trace(w, handoff)


async def test_aborted_in_mid_transfer(w: World) -> None:
    handoff = await part_written(w)
    await handoff.abort("test")
    await gone_without_trace(w, handoff)


async def test_aborted_with_spans_on_their_way(w: World) -> None:
    handoff = w.handoff()
    await granted(handoff)
    await w.compute(handoff, layers())
    await handoff.abort("test")
    await gone_without_trace(w, handoff)


async def test_aborted_after_the_commit_changes_nothing(w: World) -> None:
    handoff = w.handoff()
    await w.compute(handoff, layers())
    shipped = await handoff.commit(state)
    await handoff.abort("released")
    await w.a.bus.flush()
    await w.adopted(w.a, shipped)
    assert w.a.num_heard(LeaseRelease) == 0


async def test_aborted_twice_and_at_once(w: World) -> None:
    handoff = await part_written(w)
    await asyncio.gather(handoff.abort("one"), handoff.abort("two"))
    await handoff.abort("three")
    await gone_without_trace(w, handoff)
    assert w.a.num_heard(LeaseRelease) == 1


async def test_every_abort_returns_only_when_the_blocks_are_read_no_more(w: World) -> None:
    handoff = await part_written(w)
    w.sender.may_abort.clear()
    first = asyncio.create_task(handoff.abort("one"))
    await w.sender.aborting.wait()
    second = asyncio.create_task(handoff.abort("two"))
    done, _ = await asyncio.wait({first, second}, timeout=0.1)
    assert not done
    w.sender.may_abort.set()
    await asyncio.gather(first, second)
    assert w.sender.num_aborted
    await gone_without_trace(w, handoff)


async def cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    async with asyncio.timeout(5):
        await asyncio.wait({task})
    assert task.cancelled()


async def test_a_commit_cancelled_while_it_waits_for_the_grant(w: World) -> None:
    filling = await w.a.fill()
    handoff = w.handoff()
    await w.compute(handoff, layers())
    committing = asyncio.create_task(handoff.commit(state))
    await until(lambda: w.a.reservations.num_waiting == 1, 5)
    await cancelled(committing)
    await handoff.abort("released")
    w.a.empty(filling)
    await gone_without_trace(w, handoff)


async def test_a_commit_cancelled_while_it_waits_to_be_acknowledged(w: World) -> None:
    handoff = w.handoff()
    await w.compute(handoff, layers())

    def state_and_cancel() -> bytes:  # the state goes out before the loop turns again, the answer comes after
        asyncio.get_running_loop().call_soon(committing.cancel)
        return state()

    committing = asyncio.create_task(handoff.commit(state_and_cancel))
    async with asyncio.timeout(5):
        await asyncio.wait({committing})
    assert committing.cancelled()
    await handoff.abort("released")
    w.overwrite()
    if w.a.has_it:  # the commit was faster: then it is whole, and the gateway, which cancelled, tells decode too
        w.a.drop_adopted()
    await gone_without_trace(w, handoff)


async def test_a_commit_cancelled_while_it_lets_go_of_a_failed_transfer(w: World) -> None:
    """The transfer's end outlasts the cancelled commit: abort() waits for it, or blocks would go back too early."""
    handoff = await part_written(w)
    lost = w.a.grant.lease
    w.a.reservations.release(lost.lease_id, lost.epoch, "test")
    await w.compute(handoff, layers(2))
    w.sender.may_abort.clear()
    committing = asyncio.create_task(handoff.commit(state))
    async with asyncio.timeout(5):
        await w.sender.aborting.wait()
    await cancelled(committing)
    aborting = asyncio.create_task(handoff.abort("released"))
    done, _ = await asyncio.wait({aborting}, timeout=0.1)
    assert not done, "the failed transfer may still be read from"
    w.sender.may_abort.set()
    await aborting
    assert w.sender.num_aborted == 1
    await gone_without_trace(w, handoff)
