"""Spans that wait to be told: each once, in order, and the event loop in between."""

import asyncio
from functools import partial
from itertools import pairwise

from distserve.worker.untold import Untold


def filled(num: int) -> tuple[Untold, list[int]]:
    told: list[int] = []
    untold = Untold()
    for i in range(num):
        untold.add(partial(told.append, i))
    return untold, told


async def test_between_any_two_the_loop_does_what_else_there_is() -> None:
    untold, told = filled(50)
    seen: list[int] = []
    telling = asyncio.create_task(untold.tell())
    while not telling.done():
        seen.append(len(told))
        await asyncio.sleep(0)
    assert told == list(range(50))
    assert all(later - sooner <= 1 for sooner, later in pairwise(seen))


async def test_it_stops_as_soon_as_it_is_to_and_goes_on_where_it_was() -> None:
    untold, told = filled(10)
    await untold.tell(lambda: len(told) == 4)
    assert told == list(range(4))
    assert len(untold) == 6
    await untold.tell(lambda: True)
    assert len(untold) == 6
    await untold.tell()
    assert told == list(range(10))
    assert not untold


async def test_two_that_tell_at_once_keep_the_order_and_tell_nothing_twice() -> None:
    untold, told = filled(30)
    await asyncio.gather(untold.tell(), untold.tell(lambda: len(told) > 20))
    assert told == list(range(30))


async def test_what_comes_meanwhile_waits_for_the_next_time() -> None:
    untold, told = filled(0)

    def again() -> None:
        told.append(len(told))
        untold.add(again)

    untold.add(again)
    await untold.tell()
    assert told == [0]
    assert len(untold) == 1


def test_at_the_end_all_are_told() -> None:
    untold, told = filled(10)
    untold.tell_all()
    assert told == list(range(10))
    assert not untold
