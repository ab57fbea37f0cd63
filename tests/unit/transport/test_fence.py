import asyncio
import threading

from distserve.transport.fence import Fence, post
from tests.waiting import until


async def test_shut_waits_for_those_inside_and_lets_nobody_in():
    fence, inside, leave = Fence(), threading.Event(), threading.Event()

    def work() -> None:
        assert fence.enter()
        inside.set()
        leave.wait(10)
        fence.leave()

    thread = threading.Thread(target=work)
    thread.start()
    assert await asyncio.to_thread(inside.wait, 10)
    shut = [asyncio.create_task(fence.shut()) for _ in range(3)]
    await until(lambda: fence.closed, what="the closing")
    assert not fence.enter()
    assert not any(task.done() for task in shut)
    leave.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*shut)
    thread.join(10)
    async with asyncio.timeout(1):
        await fence.shut()


async def test_no_work_is_done_after_shut_in_a_race():
    for _ in range(50):
        fence, done = Fence(), []

        def work(fence: Fence = fence, done: list[int] = done) -> None:
            while fence.enter():
                done.append(1)
                fence.leave()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        await until(lambda done=done: bool(done), what="work")  # type: ignore[misc]
        await fence.shut()
        count = len(done)
        for thread in threads:
            thread.join(10)
        assert len(done) == count


async def test_a_waiter_that_was_cancelled_does_not_disturb_the_thread():
    fence = Fence()
    assert fence.enter()
    task = asyncio.create_task(fence.shut())
    await until(lambda: fence.closed, what="the closing")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    fence.leave()
    async with asyncio.timeout(1):
        await fence.shut()


def test_post_to_a_closed_loop_says_so():
    loop = asyncio.new_event_loop()
    called: list[int] = []
    assert post(loop, called.append, 1)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert called == [1]
    assert not post(loop, called.append, 2)
