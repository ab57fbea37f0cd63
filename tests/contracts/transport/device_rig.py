"""Rigs of pools in a device's memory, and a look at what only they have: staging slots, a landing, copies under way."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from distserve.transport.base import Transfer
from distserve.transport.landing import Landing
from distserve.transport.rdma.receiver import RdmaReceiver
from distserve.transport.rdma.sender import RdmaSender
from distserve.transport.staging_ring import StagingRing
from tests.contracts.transport.conftest import Rig
from tests.contracts.transport.fake_device import FakeDevice
from tests.waiting import until

FILL = 0xA5
BLOCK = 8192


async def started(stack: AsyncExitStack, kind: str, **settings: object) -> Rig:
    rig = Rig(kind, stack)
    for name, value in settings.items():
        setattr(rig, name, value)
    return await rig.start()


def ring_of(rig: Rig) -> StagingRing:
    assert isinstance(rig.sender, RdmaSender)
    ring = rig.sender._access.ring
    assert ring is not None
    return ring


def landing_of(rig: Rig) -> Landing:
    assert isinstance(rig.receiver, RdmaReceiver)
    landing = rig.receiver._devices.access.landing
    assert landing is not None
    return landing


def devices_of(rig: Rig) -> tuple[FakeDevice, FakeDevice]:
    """The sender's, the receiver's."""
    target, source = rig.devices[:2]
    return source, target


async def all_is_back(rig: Rig) -> None:
    """Every slot and every block of the landing is free again."""
    ring, landing = ring_of(rig), landing_of(rig)
    await until(lambda: ring.num_free == ring.num_slots, what="the slots")
    await until(lambda: landing.num_free == landing.num_blocks, what="the landing's blocks")
    ring.check()
    landing.check()


async def opened(rig: Rig, transfer: Transfer) -> None:
    await until(lambda: transfer.opened is not None, what="the keys")  # type: ignore[attr-defined]


async def stays(task: asyncio.Task[object]) -> None:
    """It has every chance to end, and does not."""
    for _ in range(20):
        await asyncio.sleep(0.002)
    assert not task.done()
