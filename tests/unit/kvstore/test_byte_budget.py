"""Work that shares so many bytes."""

import asyncio
from contextlib import suppress

from distserve_kvstore.byte_budget import ByteBudget


class Work:
    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.running: list[str] = []

    def start(self, name: str, num_bytes: int) -> tuple[asyncio.Task[None], asyncio.Event]:
        done = asyncio.Event()

        async def work() -> None:
            async with self.budget.taken(num_bytes):
                self.running.append(name)
                try:
                    await done.wait()
                finally:
                    self.running.remove(name)

        return asyncio.create_task(work()), done


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_no_more_runs_than_fits_and_nobody_is_overtaken():
    work = Work(ByteBudget(10))
    a, a_done = work.start("a", 6)
    b, b_done = work.start("b", 6)
    c, c_done = work.start("c", 1)
    await settle()
    assert work.running == ["a"], "c would fit, but b was first"
    a_done.set()
    await settle()
    assert work.running == ["b", "c"]
    b_done.set()
    c_done.set()
    await asyncio.gather(a, b, c)
    assert work.budget.num_used == 0


async def test_what_is_larger_than_the_whole_goes_alone():
    work = Work(ByteBudget(10))
    a, a_done = work.start("a", 1000)
    b, b_done = work.start("b", 1)
    await settle()
    assert work.running == ["a"]
    a_done.set()
    await settle()
    assert work.running == ["b"]
    b_done.set()
    await asyncio.gather(a, b)
    assert work.budget.num_used == 0


async def test_who_stops_waiting_holds_nobody_up_and_keeps_nothing():
    work = Work(ByteBudget(10))
    a, a_done = work.start("a", 6)
    b, _ = work.start("b", 6)
    c, c_done = work.start("c", 4)
    await settle()
    b.cancel()
    await settle()
    assert work.running == ["a", "c"]
    d, _ = work.start("d", 10)
    await settle()
    a_done.set()
    c_done.set()
    await asyncio.gather(a, c)
    d.cancel()  # with its turn given, and not yet taken
    with suppress(asyncio.CancelledError):
        await d
    assert work.budget.num_used == 0
