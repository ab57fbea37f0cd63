"""How much of a prompt each worker seems to hold."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from distserve.kv import hashing
from distserve.kv.hashing import block_hashes
from distserve.kv.layout import fingerprint
from distserve.messages import KVLayout, KVSnapshot, WorkerInfo
from distserve_gateway.kv_index import KVIndex
from distserve_gateway.prefixes import SLICE_BLOCKS, Prefixes
from distserve_gateway.workers import Workers
from tests.unit.gateway.scripted import LAYOUT, MODEL, names

BLOCK = LAYOUT.block_size
PROMPT = list(range(1000, 1000 + 300 * BLOCK))


class Scene:
    def __init__(self) -> None:
        self.snapshot: dict[str, WorkerInfo] = {}
        watch = SimpleNamespace(snapshot=self.snapshot, on_event=lambda callback: None)
        self.index = KVIndex()
        self.prefixes = Prefixes(self.index, Workers(watch, MODEL))  # type: ignore[arg-type]

    def holds(self, worker: str, stored: list[bytes], layout: KVLayout = LAYOUT) -> None:
        self.snapshot[worker] = WorkerInfo(worker_id=worker, role="decode", model=MODEL, layout=layout)
        page = KVSnapshot(worker=worker, serial=0, total=len(stored), stored=b"".join(stored))
        assert self.index.restore(worker, self.index.join(worker), [page])


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_each_worker_s_unbroken_beginning_in_tokens(scene: Scene) -> None:
    all_names = names(PROMPT)
    for worker, num_blocks in (("d0", 3), ("d1", SLICE_BLOCKS), ("d2", SLICE_BLOCKS + 1), ("d3", 299), ("d4", 0)):
        scene.holds(worker, all_names[:num_blocks])
    scene.holds("d5", all_names[:5] + all_names[6:])
    assert await scene.prefixes.held(PROMPT, "") == {
        "d0": 3 * BLOCK,
        "d1": SLICE_BLOCKS * BLOCK,
        "d2": (SLICE_BLOCKS + 1) * BLOCK,
        "d3": 299 * BLOCK,
        "d5": 5 * BLOCK,
    }


@pytest.mark.parametrize(("num_tokens", "num_held"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (1024, 1008)])
async def test_at_least_one_token_is_left_to_compute(scene: Scene, num_tokens: int, num_held: int) -> None:
    scene.holds("d0", names(PROMPT))
    assert await scene.prefixes.held(PROMPT[:num_tokens], "") == ({"d0": num_held} if num_held else {})


async def test_equal_tokens_of_another_salt_are_another_prefix(scene: Scene) -> None:
    scene.holds("d0", names(PROMPT, "tenant"))
    assert await scene.prefixes.held(PROMPT, "") == {}
    assert await scene.prefixes.held(PROMPT, "tenant") == {"d0": 299 * BLOCK}


async def test_workers_of_another_layout_have_hashes_of_their_own(scene: Scene) -> None:
    other = msgspec.structs.replace(LAYOUT, weights="v", block_size=32)
    scene.holds("d0", names(PROMPT)[:4])
    scene.holds("d1", names(PROMPT), layout=other)
    hashes = block_hashes(PROMPT, 32, fingerprint(other))
    scene.holds("d2", [name[:8] for name in hashes[:5]], layout=other)
    assert await scene.prefixes.held(PROMPT, "") == {"d0": 4 * BLOCK, "d2": 5 * 32}


async def test_a_worker_that_is_not_in_the_registry_attracts_nobody(scene: Scene) -> None:
    scene.holds("d0", names(PROMPT))
    del scene.snapshot["d0"]
    assert await scene.prefixes.held(PROMPT, "") == {}


async def test_hashing_stops_where_nobody_follows_and_lets_others_run_between(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_hashed = num_turns = 0
    block_hash = hashing.block_hash

    def counted(parent: bytes, token_ids: list[int]) -> bytes:
        nonlocal num_hashed
        num_hashed += 1
        return block_hash(parent, token_ids)

    monkeypatch.setattr(hashing, "block_hash", counted)
    assert not scene.prefixes
    await scene.prefixes.held(PROMPT, "")
    assert num_hashed == 0
    scene.holds("d0", names(list(range(160))))
    assert scene.prefixes
    num_hashed = 0
    await scene.prefixes.held(PROMPT, "")
    assert num_hashed == SLICE_BLOCKS

    async def turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    scene.holds("d1", names(PROMPT))
    num_hashed, other = 0, asyncio.create_task(turns())
    await scene.prefixes.held(PROMPT, "")
    other.cancel()
    assert num_hashed == 299
    assert num_turns == 299 // SLICE_BLOCKS
