"""Hand-overs and prompts of its own at once, of all classes, on a pool too small for them, with a store that comes and
goes: everybody ends, or is told that it can't be served, and nothing is left."""

import asyncio
import random

import pytest

from distserve.errors import Overloaded, SloUnattainable
from distserve.messages import Priority, SequenceKey, Slo
from tests.unit.decode.decode_world import World, ask_for, running
from tests.waiting import until

NUM = 40
CLASSES: tuple[Priority, ...] = "vip", "normal", "batch"


def slo_of(rng: random.Random) -> Slo:
    return Slo(priority=rng.choice(CLASSES), tpot_s=rng.choice([None, None, 1e-4, 0.05]))


async def hand_over(w: World, name: str, prompt: list[int], slo: Slo, max_tokens: int) -> None:
    """By a prefill worker that asks until it has room."""
    request = ask_for(name, prompt)
    fields = {f: getattr(request, f) for f in request.__struct_fields__}
    grant = await w.worker.lease(type(request)(**fields | {"slo": slo, "max_new_tokens": max_tokens, "wait_s": 60.0}))
    await asyncio.sleep(0)
    w.commit(name, grant, len(prompt), max_tokens, token_ids=[*prompt, 100], slo=slo)


async def store_works(w: World, rng: random.Random) -> None:
    """It takes its time with what it is given, and loses some."""
    while True:
        await asyncio.sleep(0.002)
        if w.store.held:
            w.store.let_go(rng.choice([0, 1 << 14]))
            w.worker.on_freed()


@pytest.mark.parametrize("seed", range(4))
async def test_everybody_ends_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    async with running(World(num_blocks=20, colocated=False, max_num_seqs=4, max_waiting=NUM, block_bytes=1024)) as w:
        w.worker.offering.speed.bytes_per_s = 1e12
        w.store.holds, w.store.num_blocks, w.store.brings = True, 4, 2
        for _ in range(16):
            w.scheduler.lengths.note(1)  # so that more begins than has room in the end
        store = asyncio.create_task(store_works(w, rng))
        handed: dict[str, asyncio.Task[None]] = {}
        given_up: set[str] = set()
        for i in range(NUM):
            name, prompt = str(i), [rng.randrange(4), *rng.choices(range(1000), k=rng.randrange(1, 120))]
            slo, max_tokens = slo_of(rng), rng.randrange(2, 200)
            if rng.random() < 0.6:
                handed[name] = asyncio.create_task(hand_over(w, name, prompt, slo, max_tokens))
            else:
                try:
                    w.submit(name, prompt, max_tokens=max_tokens, may_queue=True, slo=slo)
                except (Overloaded, SloUnattainable):
                    given_up.add(name)
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.005]))
            if rng.random() < 0.15:
                given_up.add(victim := str(rng.randrange(i + 1)))
                w.worker.cancel(SequenceKey(victim))
        await until(
            lambda: all(w.end(str(i)) is not None or str(i) in given_up for i in range(NUM)), 60, "everybody has ended"
        )
        done, _ = await asyncio.wait(handed.values(), timeout=10) if handed else (set(), set())
        assert len(done) == len(handed)
        for name, task in handed.items():
            assert task.exception() is None or name in given_up
        for i in range(NUM):
            end = w.end(str(i))
            if str(i) not in given_up:
                assert end is not None
                assert end.error is None
                assert w.tokens(str(i)) == [100 + n for n in range(len(w.tokens(str(i))))]
        assert w.scheduler.num_preemptions
        await until(lambda: not w.store.held)
        store.cancel()
        await w.idle()
        assert len(w.reservations) == w.scheduler.num_waiting == 0
