"""What a trace shows of a hand-over: a span for each lease that is asked for, over real transports."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from distserve.errors import Cancelled, DistServeError, TransportUnavailable
from distserve.kv.layout import block_bytes
from distserve.messages import LeaseRequest, RemoteRegion
from distserve.telemetry import NO_SPAN, Span, begin
from distserve.transport.base import Transfer
from distserve.transport.options import DSCP
from distserve_prefill.attempts import Attempts
from distserve_prefill.fallbacks import Fallbacks
from tests.contracts.transport.pools import SMALL
from tests.spans import Spans, collected, id_of, links_of, seconds_of
from tests.unit.prefill.decode_side import KEY, DecodeSide, World, layers, state
from tests.waiting import until


class Traced:
    """A world whose hand-overs are part of a trace."""

    def __init__(self, world: World, spans: Spans) -> None:
        self.world = world
        self.spans = spans
        self.stay = begin("process prefill")
        self.faults: list[DistServeError] = []
        world.attempts = Attempts(self.stay, self.faults.append)

    def ended(self, num: int) -> list[ReadableSpan]:
        """So many hand-overs that ended one after another, each the stay's child; none is open."""
        assert "handoff" not in self.spans.open
        found = self.spans.named("handoff")
        assert len(found) == num
        assert [span.parent.span_id for span in found if span.parent] == [self.stay.get_span_context().span_id] * num
        for before, after in itertools.pairwise(found):
            assert links_of(after) == [id_of(before)]
            assert (before.end_time or 0) <= (after.start_time or 0)
        assert links_of(found[0]) == []
        return found


@pytest.fixture(params=["shm", "tcp"])
async def t(request: pytest.FixtureRequest) -> AsyncIterator[Traced]:
    async with AsyncExitStack() as stack:
        spans = stack.enter_context(collected())
        world = await World(request.param, stack).start()
        yield Traced(world, spans)
        for side in (world.a, world.b):
            if side.has_it:
                side.drop_adopted()


def of(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("distserve."): value for name, value in (span.attributes or {}).items()}


def asked(side: DecodeSide) -> list[Span]:
    return [span for m, span in zip(side.heard, side.heard_from, strict=True) if isinstance(m, LeaseRequest)]


async def test_it_says_what_was_moved_and_how_long_it_took(t: Traced) -> None:
    w = t.world
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await w.adopted(w.a, await handoff.commit(state))
    [span] = t.ended(1)
    found = of(span)
    wait_s, wire_s = found.pop("transfer.wait_s"), found.pop("transfer.wire_s")
    assert found == {
        "messaging.system": "nats",
        "messaging.operation.type": "send",
        "messaging.destination.name": "distserve.v1.decode.A",
        "attempt": 1,
        "route.decode_worker": "A",
        "transfer.transport": w.kind,
        "transfer.traffic_class": "prefill",
        "transfer.dscp": DSCP["prefill"],
        "transfer.hit_blocks": 0,
        "transfer.blocks": 3,
        "transfer.bytes": 3 * block_bytes(SMALL),
    }
    assert wait_s > 0
    assert wire_s > 0
    assert wait_s + wire_s <= seconds_of(span)
    assert span.kind.name == "CLIENT"
    assert span.status.status_code is StatusCode.UNSET
    assert t.faults == []


async def test_the_question_carries_it_so_that_decodes_part_is_below_it(t: Traced) -> None:
    w = t.world
    w.a.reservations.draining = True
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await w.adopted(w.b, await handoff.commit(state))
    first, second = t.ended(2)
    for span, side in ((first, w.a), (second, w.b)):
        [context] = asked(side)
        assert context.get_span_context().span_id == id_of(span)


async def test_time_in_decodes_queue_is_waited_for_and_not_on_the_wire(t: Traced) -> None:
    w = t.world
    filling = await w.a.fill()
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await until(lambda: w.a.reservations.num_waiting == 1, 5)
    asyncio.get_running_loop().call_later(0.3, w.a.empty, filling)
    await w.adopted(w.a, await handoff.commit(state))
    [span] = t.ended(1)
    assert of(span)["transfer.wait_s"] > 0.25
    assert of(span)["transfer.wire_s"] < 0.25


async def test_one_that_is_tried_elsewhere_links_to_the_one_before_and_its_error_is_a_fault(t: Traced) -> None:
    w = t.world
    w.order = ["ghost", "A", "B"]
    w.a.reservations.draining = True
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await w.adopted(w.b, await handoff.commit(state))
    spans = t.ended(3)
    assert [(of(s)["attempt"], of(s)["route.decode_worker"], of(s).get("error.type", "")) for s in spans] == [
        (1, "ghost", "no_responders"),
        (2, "A", "draining"),
        (3, "B", ""),
    ]
    assert [s.status.status_code is StatusCode.ERROR for s in spans] == [True, True, False]
    assert [e.code for e in t.faults] == ["no_responders", "draining"]


async def test_a_transfer_that_breaks_says_how_far_it_had_come(t: Traced) -> None:
    w = t.world
    handoff = w.handoff()
    await w.compute(handoff, layers(0, 2))
    await until(lambda: w.a.reservations.num_granted == 1, 5)
    lost = w.a.grant.lease
    await until(lambda: w.has_come(w.a, lost.block_ids, layers(0, 2)), 5)
    w.a.reservations.draining = True
    w.a.reservations.release(lost.lease_id, lost.epoch, "test")
    await w.compute(handoff, layers(2))
    await w.adopted(w.b, await handoff.commit(state))
    broken, adopted = (of(span) for span in t.ended(3)[::2])  # A, asked once more, refuses
    assert broken["error.type"] == "lease_revoked"
    assert (broken["transfer.transport"], broken["transfer.blocks"], broken["transfer.bytes"]) == (w.kind, 3, 0)
    assert adopted["transfer.bytes"] == 3 * block_bytes(SMALL)


async def test_one_whose_answer_got_lost_is_asked_after_and_has_not_failed(t: Traced) -> None:
    w = t.world
    w.sender.lose_answers = 1
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await w.adopted(w.a, await handoff.commit(state))
    lost, found = t.ended(2)
    assert [of(span).get("error.type", "") for span in (lost, found)] == ["peer_lost", ""]
    assert found.status.status_code is StatusCode.UNSET


async def test_a_transport_that_does_not_reach_is_an_attempt_of_its_own(t: Traced) -> None:
    w, connect = t.world, t.world.sender.open
    w.fallbacks = Fallbacks([w.kind, "another"])

    async def unreachable(region: RemoteRegion, **how: Any) -> Transfer:
        w.sender.open = connect  # type: ignore[method-assign]
        raise TransportUnavailable("no way there", kind=w.kind)

    w.sender.open = unreachable  # type: ignore[method-assign]
    handoff = w.handoff(give_up_s=0.5)
    await w.compute(handoff, layers())
    committing = asyncio.create_task(handoff.commit(state))
    await asyncio.wait({committing}, timeout=5)
    await handoff.abort("released")
    first = t.spans.named("handoff")[0]
    assert of(first)["error.type"] == "transport_unavailable"
    assert of(first)["transfer.transport"] == w.kind
    assert len(t.spans.named("handoff")) > 1
    assert "handoff" not in t.spans.open


async def test_with_nobody_left_the_last_error_ends_the_sequence_and_is_no_fault(t: Traced) -> None:
    w = t.world
    w.order = ["A", "ghost"]
    w.a.reservations.draining = True
    handoff = w.handoff(give_up_s=0.0)
    await w.compute(handoff, layers())
    with pytest.raises(DistServeError):
        await handoff.commit(state)
    await handoff.abort("released")
    first, last = t.ended(2)
    assert (of(first)["error.type"], of(last)["error.type"]) == ("draining", "no_responders")
    assert [e.code for e in t.faults] == ["draining"]


async def test_a_refusal_that_is_final_is_its_error(t: Traced) -> None:
    w = t.world
    w.a.worker.cancel(KEY)
    handoff = w.handoff()
    with pytest.raises(Cancelled):
        await handoff.commit(state)
    await handoff.abort("released")
    [span] = t.ended(1)
    assert of(span)["error.type"] == "cancelled"
    assert t.faults == []


async def test_one_given_up_ends_without_an_error(t: Traced) -> None:
    w = t.world
    filling = await w.a.fill()
    handoff = w.handoff()
    await until(lambda: w.a.reservations.num_waiting == 1, 5)
    await handoff.abort("cancelled")
    await handoff.abort("again")
    [span] = t.ended(1)
    assert span.status.status_code is StatusCode.UNSET
    assert "transfer.wait_s" not in of(span)
    w.a.empty(filling)


@pytest.mark.parametrize("begins", [lambda: NO_SPAN, lambda: begin("over")])
async def test_a_stay_that_is_not_recorded_costs_its_hand_overs_nothing(t: Traced, begins: Callable[[], Span]) -> None:
    w, stay = t.world, begins()
    stay.end()
    w.attempts = Attempts(stay, t.faults.append)
    w.order = ["ghost", "A"]
    handoff = w.handoff()
    await w.compute(handoff, layers())
    await w.adopted(w.a, await handoff.commit(state))
    assert t.spans.named("handoff") == []
    assert asked(w.a) == [NO_SPAN]
    assert [e.code for e in t.faults] == ["no_responders"]
