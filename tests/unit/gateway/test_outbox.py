"""Word to the workers: a cancellation arrives, also at one that is not there for a moment; nobody waits for another."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from distserve.bus import subjects
from distserve.bus.base import Delivery
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.messages import CancelRequest, FinishedAck, SequenceKey, decode
from distserve_gateway import outbox as outbox_module
from distserve_gateway.outbox import Outbox
from tests.waiting import until

KEY, OTHER = SequenceKey("a"), SequenceKey("b")


class Worker:
    """Hears what it is told. It may take its time to answer."""

    def __init__(self) -> None:
        self.cancelled: list[SequenceKey] = []
        self.acknowledged: list[SequenceKey] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def __call__(self, delivery: Delivery) -> bytes:
        message = decode(delivery.data)
        if isinstance(message, CancelRequest):
            self.cancelled += message.keys
        if isinstance(message, FinishedAck):
            self.acknowledged += message.keys
        await self.answers.wait()
        return b""


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryHub()) as made:
        yield made


@pytest.fixture
async def outbox(bus: MemoryBus) -> AsyncIterator[Outbox]:
    made = Outbox(bus)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    async with asyncio.timeout(5.0):
        await made.close()


async def test_what_is_put_in_is_sent_in_one_message_a_worker(bus: MemoryBus, outbox: Outbox) -> None:
    worker = Worker()
    async with await bus.serve(subjects.worker("decode", "d0"), worker):
        for key in (KEY, OTHER):
            outbox.cancel("decode", "d0", key, "over")
            outbox.acknowledge("decode", "d0", key)
        await until(lambda: worker.cancelled == worker.acknowledged == [KEY, OTHER])


async def test_a_worker_that_is_not_there_for_a_moment_is_told_when_it_is_back(bus: MemoryBus, outbox: Outbox) -> None:
    outbox.cancel("decode", "d0", KEY, "over")
    await until(lambda: bool(outbox._cancelling), what="it is on its way")
    worker = Worker()
    async with await bus.serve(subjects.worker("decode", "d0"), worker):
        await until(lambda: worker.cancelled == [KEY])


async def test_a_worker_that_does_not_say_that_it_has_it_is_told_again(
    bus: MemoryBus, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "ANSWER_S", 0.02)
    silent, other = Worker(), Worker()
    silent.answers.clear()
    async with (
        await bus.serve(subjects.worker("decode", "d0"), silent),
        await bus.serve(subjects.worker("decode", "d1"), other),
    ):
        outbox.cancel("decode", "d0", KEY, "over")
        await until(lambda: silent.cancelled == [KEY])
        outbox.cancel("decode", "d1", OTHER, "over")
        await until(lambda: other.cancelled == [OTHER], what="nobody waits for the silent one")
        await until(lambda: silent.cancelled[:3] == [KEY] * 3)
        silent.answers.set()
        await until(lambda: not outbox._cancelling, what="it is told no more")


async def test_one_that_never_comes_back_is_given_up(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outbox_module, "RETRY_S", 0.001)
    outbox.cancel("decode", "d0", KEY, "over")
    await until(lambda: "could not tell decode worker d0 of 1 ended sequences" in caplog.text)
    await until(lambda: not outbox._cancelling)


async def test_the_end_waits_for_no_worker_that_is_not_there(bus: MemoryBus) -> None:
    outbox = Outbox(bus)
    outbox.cancel("decode", "d0", KEY, "over")
    await outbox.close()
    assert not outbox._cancelling
