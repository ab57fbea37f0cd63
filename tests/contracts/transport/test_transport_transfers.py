"""What a healthy transfer does, on every transport."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import AsyncExitStack

import numpy as np
import pytest
import uvloop

from distserve.errors import KVError, TransportError
from distserve.messages import KVLayout
from distserve.transport.base import Commit, Span
from tests.contracts.transport.conftest import SLOW, Rig, everything
from tests.contracts.transport.pools import SMALL

TINY = KVLayout(weights="tiny", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, rope="{}")


async def test_blocks_and_state_arrive(rig: Rig) -> None:
    region = rig.grant([7, 8, 9, 20])
    transfer = await rig.open(region)
    transfer.write(everything([3, 30, 4, 5]))
    moved = await transfer.commit(b"the state", timeout_s=5)
    assert moved == 4 * 8192
    rig.assert_arrived([3, 30, 4, 5], [7, 8, 9, 20])
    [commit] = rig.commits
    assert (commit.lease_id, commit.epoch, commit.state, commit.num_bytes) == (1, 1, b"the state", moved)
    assert commit.seconds > 0
    assert not rig.losses
    untouched = np.setdiff1d(np.arange(64), [7, 8, 9, 20])
    assert not rig.target.blocks[untouched].any()


async def test_layer_by_layer_as_prefill_computes(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([5, 6, 7]))
    for layer in range(SMALL.num_layers):
        # The bytes of this layer come into being only now.
        rig.source.blocks[[1, 2, 3], layer] = layer + 1
        transfer.write([Span(layer, layer + 1, (1, 2, 3), (0, 1, 2))])
    await transfer.commit(b"", timeout_s=5)
    rig.assert_arrived([1, 2, 3], [5, 6, 7])
    assert rig.target.blocks[5, 2, 0] == 3


async def test_spans_in_any_order(rig: Rig) -> None:
    sources, targets = list(range(1, 41)), list(range(60, 20, -1))
    cells = [
        Span(layer, layer + 2, tuple(sources[i : i + 5]), tuple(range(i, i + 5)))
        for layer in (0, 2)
        for i in range(0, 40, 5)
    ]
    random.Random(3).shuffle(cells)
    transfer = await rig.open(rig.grant(targets))
    for cell in cells:
        transfer.write([cell])
    await transfer.commit(b"", timeout_s=5)
    rig.assert_arrived(sources, targets)


async def test_many_leases_interleaved_share_one_connection(rig: Rig) -> None:
    blocks = [[1 + 4 * i + k for k in range(4)] for i in range(15)]
    transfers = [await rig.open(rig.grant(ids)) for ids in blocks]
    for layer in range(SMALL.num_layers):
        for transfer, ids in zip(transfers, blocks, strict=True):
            transfer.write([Span(layer, layer + 1, tuple(ids), (0, 1, 2, 3))])
    name = "kv-receive-rdma" if rig.kind == "rdma" else f"kv-send-{rig.kind}"
    assert sum(t.name == name for t in threading.enumerate()) == 1  # a connection has one
    await asyncio.gather(*(t.commit(f"{i}".encode(), timeout_s=5) for i, t in enumerate(transfers)))
    assert sorted(int(c.state) for c in rig.commits) == list(range(15))
    for ids in blocks:
        rig.assert_arrived(ids, ids)


async def test_leases_may_be_written_in_another_order_than_they_were_granted(rig: Rig) -> None:
    regions = [rig.grant([10 * i + 1, 10 * i + 2]) for i in range(5)]
    for i in (4, 0, 3, 1, 2):
        transfer = await rig.open(regions[i])
        transfer.write(everything([i + 1, i + 20]))
        await transfer.commit(b"", timeout_s=5)
    assert [c.lease_id for c in rig.commits] == [5, 1, 4, 2, 3]
    for i in range(5):
        rig.assert_arrived([i + 1, i + 20], [10 * i + 1, 10 * i + 2])


async def test_several_senders_write_to_one_receiver(rig: Rig) -> None:
    pools = [rig.add_pool(seed=s) for s in range(10, 13)]
    senders = [rig.add_sender(memory, f"prefill-{i}") for i, memory in enumerate(pools)]
    regions = [rig.grant(list(range(1 + 20 * i, 21 + 20 * i))) for i in range(3)]

    async def send(i: int) -> None:
        transfer = await senders[i].open(regions[i], timeout_s=5)
        transfer.write(everything(list(range(1, 21))))
        await transfer.commit(b"", timeout_s=5)

    await asyncio.gather(*(send(i) for i in range(3)))
    for i, memory in enumerate(pools):
        assert np.array_equal(rig.target.blocks[1 + 20 * i : 21 + 20 * i], memory.blocks[1:21])


async def test_zero_blocks_carry_a_state(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([]))
    transfer.write([])
    assert await transfer.commit(b"only this", timeout_s=5) == 0
    assert rig.commits[0].state == b"only this"


@pytest.mark.parametrize("scattered", [False, True])
async def test_ten_thousand_blocks(bare_rig: Rig, scattered: bool) -> None:
    rig = await bare_rig.start(10_001, TINY)
    sources, targets = list(range(1, 10_001)), list(range(1, 10_001))
    if scattered:
        random.Random(1).shuffle(sources)
        random.Random(2).shuffle(targets)
    transfer = await rig.open(rig.grant(targets))
    transfer.write(everything(sources, TINY.num_layers))
    await transfer.commit(b"", timeout_s=20 * SLOW)
    rig.assert_arrived(sources, targets)


async def test_a_state_of_one_mebibyte(rig: Rig) -> None:
    state = random.Random(5).randbytes(1 << 20)
    transfer = await rig.open(rig.grant([1]))
    transfer.write(everything([1]))
    await transfer.commit(state, timeout_s=5)
    assert rig.commits[0].state == state


async def test_blocks_larger_than_a_frame_are_cut_between_layers(bare_rig: Rig) -> None:
    large = KVLayout(weights="l", dtype="float32", num_layers=6, num_kv_heads=8, head_dim=128, block_size=64, rope="")
    rig = await bare_rig.start(6, large)  # 3 MiB a block, 512 KiB a layer block
    transfer = await rig.open(rig.grant([2, 4, 5]))
    transfer.write([Span(0, 5, (1, 3, 2), (0, 1, 2)), Span(5, 6, (1, 3, 2), (0, 1, 2))])
    await transfer.commit(b"", timeout_s=10)
    rig.assert_arrived([1, 3, 2], [2, 4, 5])


async def test_commit_returns_after_the_owner_has_adopted(rig: Rig) -> None:
    adopted = []
    rig.on_commit = lambda commit: adopted.append((commit.lease_id, threading.current_thread()))
    transfer = await rig.open(rig.grant([1]))
    transfer.write(everything([1]))
    await transfer.commit(b"", timeout_s=5)
    assert adopted == [(1, threading.main_thread())]


async def test_an_owner_that_cannot_adopt_is_reported_to_the_sender(rig: Rig) -> None:
    def refuse(commit: Commit) -> None:
        raise KVError(f"no sequence waits for lease {commit.lease_id}", lease_id=commit.lease_id)

    rig.on_commit = refuse
    transfer = await rig.open(rig.grant([1]))
    transfer.write(everything([1]))
    with pytest.raises(KVError, match="no sequence waits for lease 1"):
        await transfer.commit(b"", timeout_s=5)
    assert [i for i, _ in rig.losses] == [1]


async def test_a_lease_commits_once(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1]))
    transfer.write(everything([1]))
    await transfer.commit(b"first", timeout_s=5)
    with pytest.raises(TransportError, match="committed or aborted before"):
        await transfer.commit(b"second", timeout_s=5)
    with pytest.raises(TransportError, match="nothing more may be written"):
        transfer.write(everything([2]))
    await transfer.abort("too late")
    assert [c.state for c in rig.commits] == [b"first"]
    assert transfer.failure is None
    assert not rig.losses


async def test_a_lease_id_is_used_again_under_a_higher_epoch(rig: Rig) -> None:
    for epoch in (1, 2, 3):
        transfer = await rig.open(rig.grant([4], lease_id=9, epoch=epoch))
        transfer.write(everything([epoch]))
        await transfer.commit(b"", timeout_s=5)
        rig.assert_arrived([epoch], [4])
    assert [c.epoch for c in rig.commits] == [1, 2, 3]


async def test_write_may_be_called_from_any_thread(rig: Rig) -> None:
    transfer = await rig.open(rig.grant(list(range(1, 41))))
    threads = [threading.Thread(target=lambda i=i: transfer.write([Span(0, 4, (i,), (i - 1,))])) for i in range(1, 41)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    await transfer.commit(b"", timeout_s=5)
    rig.assert_arrived(list(range(1, 41)), list(range(1, 41)))


@pytest.mark.parametrize(
    ("span", "said"),
    [
        (Span(0, 5, (1,), (0,)), r"layers \[0, 5\), must be within \[0, 4\)"),
        (Span(2, 2, (1,), (0,)), r"layers \[2, 2\)"),
        (Span(0, 1, (64,), (0,)), r"source block 64 .* must be within 0\.\.63"),
        (Span(0, 1, (1,), (3,)), r"target 3 .* must be within 0\.\.2"),
        (Span(0, 1, (1,), (-1,)), "target -1"),
        (Span(0, 1, (1, 2), (0,)), "2 source blocks and 1 targets"),
    ],
)
async def test_a_span_that_points_nowhere_is_refused_at_once(rig: Rig, span: Span, said: str) -> None:
    transfer = await rig.open(rig.grant([1, 2, 3]))
    with pytest.raises(KVError, match=said):
        transfer.write([span])
    await transfer.abort("done")


async def test_a_layer_that_was_forgotten_fails_the_commit_by_name(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1, 2]))
    transfer.write([Span(0, 4, (1,), (0,)), Span(0, 2, (2,), (1,)), Span(3, 4, (2,), (1,))])
    with pytest.raises(TransportError, match="layer 2 of its block 1 was never written"):
        await transfer.commit(b"", timeout_s=5)
    assert isinstance(await rig.lost(1), TransportError)
    assert not rig.commits


async def test_a_layer_that_was_written_twice_fails_the_commit(rig: Rig) -> None:
    transfer = await rig.open(rig.grant([1]))
    transfer.write([Span(0, 4, (1,), (0,)), Span(1, 2, (1,), (0,))])
    with pytest.raises(TransportError, match="5 layer blocks were written into 4"):
        await transfer.commit(b"", timeout_s=5)


def test_it_works_on_uvloop(kind: str) -> None:
    async def go() -> None:
        async with AsyncExitStack() as stack:
            rig = await Rig(kind, stack).start(16)
            for epoch in (1, 2):
                transfer = await rig.open(rig.grant([3, 4], lease_id=1, epoch=epoch))
                transfer.write(everything([7, 2]))
                await transfer.commit(b"", timeout_s=5 * SLOW)
            assert len(rig.commits) == 2
            rig.assert_arrived([7, 2], [3, 4])

    uvloop.run(go())
