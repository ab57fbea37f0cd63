"""A worker whose pool is in a device's memory: rdma moves its KV, or nothing does and it refuses to start."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.config import Config, load_config
from distserve.errors import ConfigError, TransportUnavailable
from distserve.transport import factory
from distserve.transport.base import PoolMemory
from distserve.transport.rdma.receiver import RdmaReceiver
from distserve.transport.rdma.sender import RdmaSender
from distserve.worker import data_plane
from distserve.worker.data_plane import check_forced, plan, receivers, senders
from tests.contracts.transport.fake_device import FakeDevice
from tests.contracts.transport.pools import pool
from tests.contracts.transport.soft_fabric import SoftFabric

NO_DEVICE = "there is no RDMA device"


@pytest.fixture
def hosted() -> Iterator[PoolMemory]:
    with pool(4) as memory:
        yield memory


@pytest.fixture
def memory(hosted: PoolMemory) -> PoolMemory:
    return on_device(hosted, exports=False)


def on_device(hosted: PoolMemory, *, exports: bool) -> PoolMemory:
    return PoolMemory(hosted.layout, blocks=None, on_device=FakeDevice(hosted, exports=exports))


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Whether this host has an RDMA device, whatever machine the test runs on: by parameter."""
    why = "" if getattr(request, "param", True) else NO_DEVICE
    monkeypatch.setattr(factory, "rdma_unusable", lambda options: why)
    monkeypatch.setattr(data_plane, "rdma_unusable", lambda options: why)


@pytest.fixture
async def bus(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MemoryBus]:
    """With it, what data_plane makes is rdma on devices of this process."""
    fabric = SoftFabric()

    def make_sender(kind: str, memory: PoolMemory, *, sender_id: str, rdma: Any, bus: Any, **_: Any) -> RdmaSender:
        assert kind == "rdma"
        return RdmaSender(memory, bus, sender_id=sender_id, options=rdma, open_nics=fabric.opener())

    def make_receiver(kind: str, memory: PoolMemory, *, rdma: Any, bus: Any, **_: Any) -> RdmaReceiver:
        assert kind == "rdma"
        return RdmaReceiver(memory, bus, options=rdma, open_nics=fabric.opener())

    monkeypatch.setattr(data_plane, "make_sender", make_sender)
    monkeypatch.setattr(data_plane, "make_receiver", make_receiver)
    try:
        async with MemoryBus(MemoryHub()) as bus:
            yield bus
    finally:
        fabric.close()


def config(device: str = "cuda:1", **transport: Any) -> Config:
    """As if read from a file in which everything else fits: what it refuses itself is not the subject here."""
    given = {f"transport.{key}": value for key, value in transport.items()}
    return load_config(overrides=given | {"model.device": device, "decode.colocated": True})


@pytest.mark.parametrize(
    ("given", "forced", "num_reasons"),
    [
        ({}, "auto", 0),
        ({"kind": "rdma"}, "rdma", 0),
        ({"kind": "rdma", "allow_fallback": True}, "rdma", 0),
        ({"kind": "tcp", "allow_fallback": True}, "auto", 1),
    ],
)
def test_rdma_is_all_there_is(
    usable: None, memory: PoolMemory, given: dict[str, Any], forced: str, num_reasons: int
) -> None:
    plane = plan(config(**given), memory)
    assert (plane.kinds, plane.forced, len(plane.reasons)) == (["rdma"], forced, num_reasons)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_kind_that_cannot_reach_the_device_is_refused(usable: None, memory: PoolMemory, kind: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"transport.kind is {kind}, .*the pool is on fake:0 \(model.device\)"
    ) as caught:
        plan(config(kind=kind), memory)
    assert caught.value.fields == {"key": "transport.kind", "value": kind, "expected": "one of auto, rdma"}


@pytest.mark.parametrize("usable", [False], indirect=True)
@pytest.mark.parametrize("given", [{}, {"kind": "rdma"}, {"kind": "tcp"}, {"kind": "rdma", "allow_fallback": True}])
def test_without_rdma_nothing_can_and_the_device_is_refused(
    usable: None, memory: PoolMemory, given: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"model.device is cuda:1, .*{NO_DEVICE}.*decode.colocated") as caught:
        plan(config(**given), memory)
    assert (caught.value.fields["key"], caught.value.fields["value"]) == ("model.device", "cuda:1")
    assert "cpu" in str(caught.value.fields["expected"])


def test_rdma_that_is_forced_and_not_there_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_plane, "rdma_unusable", lambda options: NO_DEVICE)
    with pytest.raises(ConfigError, match=f"transport.kind is rdma, .*{NO_DEVICE}"):
        check_forced(config(kind="rdma"))
    for given in ({}, {"kind": "rdma", "allow_fallback": True}):  # cuda_ipc may do: known with the pool
        check_forced(config(**given))
    check_forced(config("cpu"))


@pytest.mark.parametrize("usable", [True, False], indirect=True)
def test_a_pool_that_others_can_read_needs_no_rdma(
    usable: None, hosted: PoolMemory, request: pytest.FixtureRequest
) -> None:
    memory = PoolMemory(hosted.layout, blocks=None, on_device=FakeDevice(hosted, shares=True))
    with_rdma = ["rdma"] if request.node.callspec.params["usable"] else []
    assert plan(config(), memory).kinds == ["cuda_ipc", *with_rdma]
    assert plan(config(kind="cuda_ipc"), memory).kinds == ["cuda_ipc"]


def test_cuda_ipc_is_refused_by_name_for_a_pool_that_is_not_on_a_gpu(hosted: PoolMemory) -> None:
    with pytest.raises(ConfigError, match=r"transport.kind is cuda_ipc, .*the pool is in host memory"):
        plan(config("cuda", kind="cuda_ipc"), hosted)


def test_with_rdma_it_may_be_loaded(usable: None) -> None:
    for given in ({}, {"kind": "rdma"}):
        check_forced(config(**given))


async def test_an_rdma_device_that_fails_leaves_nothing_to_go_on_with(
    usable: None, memory: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*args: Any, **options: Any) -> Any:
        raise TransportUnavailable("cannot register: RLIMIT_MEMLOCK is 8 MiB")

    monkeypatch.setattr(data_plane, "make_sender", make)
    monkeypatch.setattr(data_plane, "make_receiver", make)
    bus = MemoryBus(MemoryHub())
    for given in ({}, {"kind": "rdma", "allow_fallback": True}):
        refused = pytest.raises(ConfigError, match=r"model.device is cuda:1, .*RLIMIT_MEMLOCK")
        with refused:
            senders(config(**given), plan(config(**given), memory), memory, "p0", bus)
        async with AsyncExitStack() as stack:
            with refused:
                await started(config(**given), memory, bus, stack)


@pytest.mark.parametrize(
    ("exports", "given", "said"),
    [
        (None, {}, "host: "),
        (False, {}, "staged: "),
        (True, {}, "dmabuf: "),
        (True, {"rdma.use_dmabuf": False}, "staged: use_dmabuf is off"),
    ],
)
async def test_how_rdma_gets_at_the_pool_is_known_once_it_has_started(
    usable: None, bus: MemoryBus, hosted: PoolMemory, exports: bool | None, given: dict[str, Any], said: str
) -> None:
    memory = hosted if exports is None else on_device(hosted, exports=exports)
    c = config(kind="rdma", **given)
    plane = plan(c, memory)
    assert plane.pool_access == {}
    async with AsyncExitStack() as stack:
        made = senders(c, plane, memory, "p0", bus)
        stack.push_async_callback(made["rdma"].stop)
        assert plane.pool_access == {"rdma": made["rdma"].pool_access}
        assert plane.pool_access["rdma"].startswith(said)
        theirs = await started(c, memory, bus, stack)
        assert theirs.pool_access.keys() == {"rdma"}
        assert theirs.pool_access["rdma"].startswith(said)


async def started(c: Config, memory: PoolMemory, bus: MemoryBus, stack: AsyncExitStack) -> data_plane.DataPlane:
    """The plane of a receiving worker that has started."""
    plane = plan(c, memory)
    ignored = {"on_commit": lambda commit: None, "on_lost": lambda *lost: None}
    await receivers(c, plane, memory, "d0", bus, stack=stack, **ignored)
    return plane
