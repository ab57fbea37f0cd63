"""What transports have in common whose leases take turns on one connection."""

from __future__ import annotations

import asyncio
import time

import pytest

from distserve.transport.base import Span
from distserve.transport.outbound_queue import OutboundQueue
from tests.contracts.transport.conftest import Rig, commits_fine
from tests.waiting import until


@pytest.fixture(params=("shm", "tcp", "cuda_ipc"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_lease_that_waits_behind_others_on_its_connection_is_not_silent(rig: Rig) -> None:
    """Else a slow network would have leases expire whose sender is at work."""
    busy, waiting = rig.grant([1]), rig.grant([2])
    other = await rig.open(waiting)
    transfer = await rig.open(busy)
    began = time.monotonic()
    while time.monotonic() < began + 0.6:
        transfer.write([Span(0, 1, (1,), (0,))])
        await until(lambda: (rig.receiver.idle_s(busy.lease_id) or 9) < 0.1, what="a sign of life")
        await asyncio.sleep(0.02)
    assert (rig.receiver.idle_s(waiting.lease_id) or 9) < 0.3
    await transfer.abort("enough")
    await until(lambda: (rig.receiver.idle_s(waiting.lease_id) or 0) > 0.4, what="silence")
    await other.abort("enough")


async def test_nothing_that_opens_a_lease_comes_after_what_ends_it(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await commits_fine(rig, rig.grant([1]), [1], [1])  # the connection is there
    sent: list[bytes] = []
    monkeypatch.setattr(OutboundQueue, "busy", True)  # with others' bytes, at every moment
    monkeypatch.setattr(OutboundQueue, "put_first", lambda queue, frame: sent.append(frame))
    await commits_fine(rig, rig.grant([2]), [2], [2])  # open() gives the loop no turn, nor does commit() at once
    assert not sent
    transfer = await rig.open(rig.grant([3]))
    await until(lambda: len(sent) == 1, what="OPEN, past the others")
    await transfer.abort("enough")
