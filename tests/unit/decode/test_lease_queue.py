"""Who of those that wait for a lease is granted one next, and that nobody waits for ever."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from distserve.messages import Endpoint, LeaseRequest, Priority, SequenceKey, Slo
from distserve.transport.select import Choice
from distserve_decode.lease_queue import MAX_OVERTAKEN, LeaseQueue
from distserve_decode.reservation import Ask, Waiter
from tests.unit.decode.test_reservations import LAYOUT

CHOICE = Choice(Endpoint(kind="shm", host="h", address="a"), "")
RANK = {"vip": 0, "normal": 1, "batch": 2}


def waiter(name: str, priority: Priority, loop: asyncio.AbstractEventLoop) -> Waiter:
    request = LeaseRequest(
        key=SequenceKey(name),
        prefill_worker="p",
        num_tokens=1,
        layout=LAYOUT,
        transports=[],
        host_key="h",
        slo=Slo(priority=priority),
    )
    return Waiter(Ask(request, 1, [], CHOICE), loop.create_future())


def names(queue: LeaseQueue) -> list[str]:
    """In the order in which they are granted, if nobody comes."""
    found = []
    while (head := queue.head) is not None:
        queue.granted(head)
        found.append(head.request.key.request_id)
    return found


def queue_of(*priorities: Priority, by_class: bool = True) -> LeaseQueue:
    loop = asyncio.new_event_loop()
    queue = LeaseQueue(by_class=by_class)
    for i, priority in enumerate(priorities):
        queue.add(waiter(f"{i}{priority[0]}", priority, loop))
    loop.close()
    return queue


def test_by_class_and_then_as_they_came() -> None:
    queue = queue_of("batch", "normal", "vip", "batch", "vip", "normal")
    assert names(queue) == ["2v", "4v", "1n", "5n", "0b", "3b"]


def test_first_come_first_served_knows_no_classes() -> None:
    assert names(queue_of("batch", "normal", "vip", by_class=False)) == ["0b", "1n", "2v"]


def test_one_that_gives_up_is_passed_over_by_nobody_any_more() -> None:
    queue = queue_of("batch", "vip")
    head = queue.head
    assert head is not None
    queue.remove(head)
    assert names(queue) == ["0b"]


@given(st.lists(st.sampled_from([*RANK, "grant", "give up"]), max_size=300))
def test_nobody_is_overtaken_more_often_than_is_said(events: list[Priority]) -> None:
    loop = asyncio.new_event_loop()
    queue = LeaseQueue(by_class=True)
    came: list[tuple[Waiter, int]] = []  # that still wait, with the grants to others that came later
    for i, event in enumerate(events):
        if event in RANK:
            new = waiter(str(i), event, loop)
            queue.add(new)
            came.append((new, 0))
            continue
        head = queue.head
        assert (head is None) == (not came)
        if head is None:
            continue
        at = next(i for i, (w, _) in enumerate(came) if w is head)
        if event == "give up":
            queue.remove(head)
        else:
            better = [w for w, _ in came if RANK[w.request.slo.priority] < RANK[head.request.slo.priority]]
            assert not better or came[at][1] == MAX_OVERTAKEN, "else the best class is granted"
            queue.granted(head)
            came[:at] = [(w, num + 1) for w, num in came[:at]]
        del came[at]
        assert all(num <= MAX_OVERTAKEN for _, num in came)
        assert len(queue) == len(came)
    loop.close()
