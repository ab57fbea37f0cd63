"""Which way rdma gets at a pool: in host memory, staged or as a dma-buf, each side for itself. On network cards of this
process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from distserve.errors import TransportUnavailable
from distserve.messages import RailOffer
from distserve.transport.factory import make_receiver, make_sender, unusable
from distserve.transport.rdma.device import Nic
from distserve.transport.rdma.options import RdmaOptions
from distserve.transport.rdma.receiver import RdmaReceiver
from distserve.transport.rdma.sender import RdmaSender
from tests.contracts.transport.conftest import HAS_DEVICE, RDMA, Rig, commits_fine
from tests.contracts.transport.device_rig import all_is_back, started

pytestmark = pytest.mark.skipif(HAS_DEVICE, reason="for devices that this process makes up")


@pytest.fixture
async def rig(stack: AsyncExitStack) -> AsyncIterator[Rig]:
    rig = await Rig("rdma-staged", stack).start()
    yield rig
    await all_is_back(rig)


@pytest.mark.parametrize("registers", [False, (True, False)])
async def test_a_network_card_that_takes_no_dmabuf_has_the_pool_staged(
    stack: AsyncExitStack, registers: bool | tuple[bool, ...]
) -> None:
    rig = await started(stack, "rdma-dmabuf", num_nics=2, registers_dmabufs=registers)
    assert isinstance(rig.receiver, RdmaReceiver)
    for end in (rig.sender, rig.receiver):
        assert end.pool_access.startswith("staged: the pool could not be registered as a dma-buf:")
        assert "registers no dma-buf" in end.pool_access
    assert [nic.counts()["regions"] for nic in rig.receiver._devices.nics] == [1, 1]  # the landing; no dma-buf is left
    await commits_fine(rig, rig.grant(list(range(1, 31))), list(range(30, 0, -1)), list(range(1, 31)))
    assert rig.target.blocks[1:31].any()


async def test_how_the_pool_is_got_at_is_said_once_and_can_be_asked_for(
    stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "distserve")
    for kind, said in (("rdma", "host: "), ("rdma-staged", "staged: "), ("rdma-dmabuf", "dmabuf: ")):
        caplog.clear()
        async with AsyncExitStack() as inner:
            rig = await Rig(kind, inner).start()
            assert rig.sender.pool_access.startswith(said)
            assert rig.receiver.pool_access.startswith(said)
            for i in (1, 2):
                await commits_fine(rig, rig.grant([i]), [i], [i])
            lines = [r.getMessage() for r in caplog.records if said in r.getMessage()]
            assert len(lines) == 2  # the sender's and the receiver's
            assert all(rig.shown(rig.source).device in line for line in lines)


async def test_dmabufs_can_be_turned_off(stack: AsyncExitStack) -> None:
    rig = await started(stack, "rdma-dmabuf")
    assert rig.fabric is not None
    options = replace(RDMA, use_dmabuf=False)
    sender = RdmaSender(
        rig.shown(rig.source), rig.sender_bus, sender_id="s", options=options, open_nics=rig.fabric.opener()
    )
    stack.push_async_callback(sender.stop)
    assert sender.pool_access == "staged: use_dmabuf is off"


@pytest.mark.parametrize(("ours", "theirs"), [("rdma-staged", ""), ("", "staged"), ("rdma-dmabuf", "staged")])
async def test_each_side_has_its_own_way(stack: AsyncExitStack, ours: str, theirs: str) -> None:
    rig = Rig(ours or "rdma", stack)
    await rig.start()
    rig.path = theirs
    rig.target = rig.add_pool()
    rig.receiver = await rig.add_receiver(rig.target)
    assert rig.sender.pool_access.split(":")[0] == (ours.partition("-")[2] or "host")
    assert rig.receiver.pool_access.split(":")[0] == (theirs or "host")
    await commits_fine(rig, rig.grant([5, 6, 9, 1]), [1, 2, 3, 40], [5, 6, 9, 1])


async def test_no_other_transport_takes_a_pool_that_it_cannot_touch(rig: Rig) -> None:
    memory = rig.shown(rig.source)
    for kind in ("shm", "tcp"):
        for make in (lambda kind=kind: make_sender(kind, memory, sender_id="s"), lambda: make_receiver(kind, memory)):  # type: ignore[misc] # noqa: B023
            with pytest.raises(TransportUnavailable, match=r"the pool is on fake:0 \(model.device\)") as caught:
                make()
            assert caught.value.fields["key"] == "model.device"
    assert unusable(memory, RdmaOptions()).keys() >= {"shm", "tcp"}


@pytest.mark.parametrize(("kind", "centre"), [("rdma-staged", "0000:1b:00.0"), ("rdma", "")])
async def test_devices_are_looked_for_near_the_gpu(stack: AsyncExitStack, kind: str, centre: str) -> None:
    rig = await Rig(kind, stack).start()
    asked: list[str] = []

    def near_what(options: RdmaOptions) -> Sequence[tuple[Nic, RailOffer]]:
        asked.append(options.near_pci)
        return rig.open_nics(options)

    memory = rig.shown(rig.source)
    sender = RdmaSender(memory, rig.sender_bus, sender_id="s", options=RDMA, open_nics=near_what)
    stack.push_async_callback(sender.stop)
    assert asked == [centre]
