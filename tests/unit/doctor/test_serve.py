"""The side that is measured: what it grants, to whom, and that nothing granted before is written any more."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from distserve.bus import subjects
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.config import Config
from distserve.doctor import serve
from distserve.doctor.command import parse_bind
from distserve.doctor.peer import find
from distserve.doctor.scratch import POOLS, scratch_pool
from distserve.doctor.serve import serving
from distserve.errors import (
    ConfigError,
    MalformedMessage,
    NoResponders,
    Overloaded,
    TransportError,
    TransportUnavailable,
)
from distserve.messages import (
    ClockReply,
    ClockRequest,
    Message,
    ProbeGrantRequest,
    ProbeGrants,
    ProbeHello,
    ProbeHost,
    RemoteRegion,
    decode_as,
    encode,
)
from distserve.transport.base import Sender, Span
from distserve.transport.factory import make_sender


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryHub(), name="test", registry_ttl_s=1.0) as made:
        yield made


async def ask(bus: MemoryBus, name: str, message: Message) -> bytes:
    return await bus.request(subjects.doctor(name), encode(message), timeout_s=5)


def wish(
    asker: str = "a", kind: str = "tcp", pool: str = "small", leases: int = 4, blocks: int = 1
) -> ProbeGrantRequest:
    return ProbeGrantRequest(asker=asker, kind=kind, pool=pool, num_leases=leases, num_blocks=blocks)


async def test_it_answers_by_every_name_and_says_what_it_can(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Node-7.example.org")
    async with serving(bus, Config(), "127.0.0.1") as service:
        names = ("node-7.example.org", "node-7", "127.0.0.1", service.serve_id)
        hosts = [decode_as(ProbeHost, await ask(bus, name, ProbeHello())) for name in names]
        assert {h.serve_id for h in hosts} == {service.serve_id}
        assert {"shm", "tcp"} <= set(hosts[0].kinds)
        assert set(hosts[0].kinds) | set(hosts[0].unusable) == {"cuda_ipc", "shm", "rdma", "tcp"}
        assert (await find(bus, "localhost")).serve_id == service.serve_id, "by what the name resolves to"
        assert isinstance(decode_as(ClockReply, await ask(bus, "node-7", ClockRequest())), ClockReply)
        with pytest.raises(NoResponders):
            await find(bus, "192.0.2.7")
        with pytest.raises(MalformedMessage):
            decode_as(ProbeGrants, await ask(bus, "node-7", ProbeGrants(regions=[])))
    with pytest.raises(NoResponders):
        await find(bus, "localhost")


async def test_leases_of_one_grant_share_no_block_and_leave_block_0_alone(bus: MemoryBus) -> None:
    async with serving(bus, Config(), "127.0.0.1") as service:
        for pool, blocks in (("small", 1), ("large", 64)):
            answer = await ask(bus, service.serve_id, wish(pool=pool, leases=200, blocks=blocks))
            regions = decode_as(ProbeGrants, answer).regions
            ids = [i for region in regions for i in region.block_ids]
            assert len(regions) == (POOLS[pool].num_blocks - 1) // blocks
            assert len(set(ids)) == len(ids) == len(regions) * blocks
            assert min(ids) > 0
            assert max(ids) < POOLS[pool].num_blocks


async def send(sender: Sender, region: RemoteRegion) -> int:
    transfer = await sender.open(region, timeout_s=5)
    transfer.write([Span(0, 1, (1,), (0,))])
    return await transfer.commit(b"", timeout_s=5)


async def test_what_was_granted_before_can_be_written_no_more(bus: MemoryBus) -> None:
    async with serving(bus, Config(), "127.0.0.1") as service:
        (old,) = decode_as(ProbeGrants, await ask(bus, service.serve_id, wish(leases=1))).regions
        (new,) = decode_as(ProbeGrants, await ask(bus, service.serve_id, wish(leases=1))).regions
        assert old.block_ids == new.block_ids
        with scratch_pool("small") as memory:
            sender = make_sender("tcp", memory, sender_id="a")
            try:
                with pytest.raises(TransportError):
                    await send(sender, old)
                assert await send(sender, new) == POOLS["small"].block_bytes
            finally:
                await sender.stop()


async def test_one_asker_at_a_time(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(bus, Config(), "127.0.0.1") as service:
        decode_as(ProbeGrants, await ask(bus, service.serve_id, wish("a")))
        with pytest.raises(Overloaded, match="measuring with a"):
            decode_as(ProbeGrants, await ask(bus, service.serve_id, wish("b")))
        monkeypatch.setattr(serve, "BUSY_S", 0.0)  # as if a had been silent for so long
        decode_as(ProbeGrants, await ask(bus, service.serve_id, wish("b")))


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (wish(kind="carrier-pigeon"), TransportUnavailable),
        (wish(pool="huge"), TransportUnavailable),
        (wish(blocks=128), MalformedMessage),
        (wish(leases=257), MalformedMessage),
    ],
)
async def test_what_cannot_be_granted_is_refused(
    bus: MemoryBus, request_: ProbeGrantRequest, error: type[Exception]
) -> None:
    async with serving(bus, Config(), "127.0.0.1") as service:
        with pytest.raises(error):
            decode_as(ProbeGrants, await ask(bus, service.serve_id, request_))


@pytest.mark.parametrize(
    ("text", "found"),
    [("", ("", 0)), ("10.0.0.1", ("10.0.0.1", 0)), ("h:70", ("h", 70)), ("[::1]:70", ("::1", 70)), ("::1", ("::1", 0))],
)
def test_bind(text: str, found: tuple[str, int]) -> None:
    assert parse_bind(text) == found


@pytest.mark.parametrize("text", [":70", "h:port", "h:65535", "h:70000", "h/x"])
def test_a_bad_bind_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--bind is"):
        parse_bind(text)
