"""Which transports a worker has, and what a configured one that cannot be used leads to."""

import errno
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.config import Config, load_config
from distserve.errors import ConfigError, TransportUnavailable
from distserve.messages import WorkerInfo
from distserve.transport import factory
from distserve.transport.base import PoolMemory
from distserve.transport.rdma.options import RdmaOptions
from distserve.worker import data_plane
from distserve.worker.data_plane import DataPlane, plan, rdma_options, receivers, senders, stream_options
from distserve.worker.in_use import InUse
from tests.contracts.transport.pools import pool

NO_DEVICE = "there is no RDMA device"


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    with pool(2) as memory:
        yield memory


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Whether this host has an RDMA device, whatever machine the test runs on: by parameter."""
    why = "" if getattr(request, "param", False) else NO_DEVICE
    monkeypatch.setattr(factory, "rdma_unusable", lambda options: why)


def config(**transport: Any) -> Config:
    return load_config(overrides={f"transport.{key}": value for key, value in transport.items()})


@pytest.mark.parametrize(
    ("device", "given", "kinds", "forced"),
    [
        (False, {}, ["shm", "tcp"], "auto"),
        (True, {}, ["shm", "rdma", "tcp"], "auto"),
        (True, {"kind": "rdma"}, ["rdma"], "rdma"),
        (True, {"kind": "rdma", "allow_fallback": True}, ["rdma", "shm", "tcp"], "rdma"),
        (True, {"kind": "tcp"}, ["tcp"], "tcp"),
        (False, {"kind": "tcp", "allow_fallback": True}, ["tcp", "shm"], "tcp"),
    ],
    indirect=["device"],
)
def test_what_there_is(device: None, memory: PoolMemory, given: dict[str, Any], kinds: list[str], forced: str) -> None:
    plane = plan(config(**given), memory)
    assert (plane.kinds, plane.forced, plane.reasons) == (kinds, forced, [])


def test_a_forced_transport_that_this_host_cannot_do_is_an_error_that_says_why(
    device: None, memory: PoolMemory
) -> None:
    with pytest.raises(ConfigError, match=f"transport.kind is rdma.*{NO_DEVICE}.*allow_fallback") as caught:
        plan(config(kind="rdma"), memory)
    assert caught.value.fields["key"] == "transport.kind"
    memory.fd = None
    with pytest.raises(ConfigError, match=r"transport.kind is shm.*no file descriptor"):
        plan(config(kind="shm"), memory)


def test_rdma_that_cannot_be_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "rdma_unusable", lambda options: NO_DEVICE)
    for given in ({}, {"kind": "tcp"}, {"kind": "rdma", "allow_fallback": True}):
        data_plane.check_forced(config(**given))
    with pytest.raises(ConfigError, match=NO_DEVICE):
        data_plane.check_forced(config(kind="rdma"))


def test_with_fallback_allowed_it_is_autos_choice_and_a_reason_to_be_degraded(
    device: None, memory: PoolMemory, caplog: pytest.LogCaptureFixture
) -> None:
    plane = plan(config(kind="rdma", allow_fallback=True), memory)
    assert (plane.kinds, plane.forced) == (["shm", "tcp"], "auto")
    assert plane.reasons == [f"rdma cannot be used here: {NO_DEVICE}"]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_devices_that_are_configured_and_missing_are_told_even_in_auto(device: None, memory: PoolMemory) -> None:
    assert plan(config(), memory).reasons == []
    assert plan(config(**{"rdma.devices": "mlx5_7"}), memory).reasons == [f"rdma cannot be used here: {NO_DEVICE}"]


@pytest.mark.parametrize("device", [True], indirect=True)
async def test_an_rdma_device_that_fails_at_start_is_done_without_unless_forced(
    device: None, memory: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_sender, real_receiver = data_plane.make_sender, data_plane.make_receiver

    def failing(real: Any) -> Any:
        def make(kind: str, *args: Any, **options: Any) -> Any:
            if kind == "rdma":
                raise TransportUnavailable("cannot register 2 GiB: RLIMIT_MEMLOCK is 8 MiB")
            return real(kind, *args, **options)

        return make

    monkeypatch.setattr(data_plane, "make_sender", failing(real_sender))
    monkeypatch.setattr(data_plane, "make_receiver", failing(real_receiver))
    bus = MemoryBus(MemoryHub())
    for given in ({}, {"kind": "rdma", "allow_fallback": True}):
        plane = plan(config(**given), memory)
        made = senders(config(**given), plane, memory, "p0", bus)
        assert list(made) == plane.kinds == ["shm", "tcp"]
        assert plane.forced == "auto"
        assert "RLIMIT_MEMLOCK" in plane.reasons[0]
        for sender in made.values():
            await sender.stop()
        async with AsyncExitStack() as stack:
            plane = plan(config(**given), memory)
            started = await receivers(
                config(**given),
                plane,
                memory,
                "d0",
                bus,
                on_commit=lambda commit: None,
                on_lost=lambda *lost: None,
                stack=stack,
            )
            assert list(started) == plane.kinds == ["shm", "tcp"]
            assert [r.endpoint.kind for r in started.values()] == ["shm", "tcp"]
    with pytest.raises(ConfigError, match=r"transport.kind is rdma.*RLIMIT_MEMLOCK"):
        senders(config(kind="rdma"), plan(config(kind="rdma"), memory), memory, "p0", bus)


NO_MEMORY = OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize("device", [True], indirect=True)
@pytest.mark.parametrize("error", [NO_MEMORY, ConfigError("rxe7 has no address in 10.0.0.0/8")], ids=type)
@pytest.mark.parametrize("when", ["made", "started"])
async def test_whatever_a_device_fails_with_it_is_done_without(
    device: None, memory: PoolMemory, monkeypatch: pytest.MonkeyPatch, when: str, error: Exception
) -> None:
    """Registering a pool beyond RLIMIT_MEMLOCK is an OSError of the verbs library."""
    real_receiver, real_sender = data_plane.make_receiver, data_plane.make_sender

    class Failing:
        async def start(self, on_commit: object, on_lost: object) -> None:
            raise error

    def make(kind: str, *args: Any, **options: Any) -> Any:
        if kind != "rdma":
            return real_receiver(kind, *args, **options)
        if when == "made":
            raise error
        return Failing()

    def send(kind: str, *args: Any, **options: Any) -> Any:
        if kind == "rdma":
            raise error
        return real_sender(kind, *args, **options)

    monkeypatch.setattr(data_plane, "make_receiver", make)
    monkeypatch.setattr(data_plane, "make_sender", send)
    bus = MemoryBus(MemoryHub())

    async def start(stack: AsyncExitStack, **given: Any) -> tuple[list[str], list[str]]:
        plane = plan(config(**given), memory)
        started = await receivers(
            config(**given),
            plane,
            memory,
            "d0",
            bus,
            on_commit=lambda commit: None,
            on_lost=lambda *lost: None,
            stack=stack,
        )
        return list(started), plane.reasons

    async with AsyncExitStack() as stack:
        assert await start(stack) == (["shm", "tcp"], [f"rdma cannot be used here: {error}"])
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"transport.kind is rdma") as caught:
            await start(stack, kind="rdma")
        assert str(error) in str(caught.value)
    plane = plan(config(), memory)
    assert list(senders(config(), plane, memory, "p0", bus)) == ["shm", "tcp"]
    assert plane.reasons == [f"rdma cannot be used here: {error}"]


async def test_a_host_error_of_another_kind_is_not_taken_for_a_transport_to_do_without(
    memory: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(kind: str, *args: Any, **options: Any) -> Any:
        raise NO_MEMORY

    monkeypatch.setattr(data_plane, "make_sender", make)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        senders(config(), DataPlane(["shm", "tcp"], "auto", may_fall_back=False), memory, "p0", MemoryBus(MemoryHub()))


def test_another_kind_that_fails_is_an_error() -> None:
    with pytest.raises(TransportUnavailable, match="taken"):
        DataPlane(["shm", "tcp"], "auto", may_fall_back=True).do_without("tcp", TransportUnavailable("port is taken"))


def test_the_classes_table_marks_both_tcp_and_rdma() -> None:
    c = config(
        **{
            "classes.decode.dscp": 46,
            "classes.background.dscp": 8,
            "classes.prefill.service_level": 3,
            "rdma.devices": "rxe0,mlx5_0:2",
            "rdma.subnet": "10.0.0.0/16",
            "rdma.poll_cpu": 5,
            "rdma.ping_s": 2,
            "connect_timeout_s": 7,
        }
    )
    assert stream_options(c).dscp == {"decode": 46, "prefill": 34, "background": 8}
    rdma = rdma_options(c)
    assert {n: (m.dscp, m.service_level) for n, m in rdma.classes.items()} == {
        "decode": (46, 0),
        "prefill": (34, 3),
        "background": (8, 0),
    }
    assert (rdma.devices, rdma.subnet, rdma.poll_cpu, rdma.ping_s) == (("rxe0", "mlx5_0:2"), "10.0.0.0/16", 5, 2)
    assert rdma.common.connect_timeout_s == 7
    assert rdma_options(Config()).poll_cpu is None


def test_what_stages_a_gpus_pool_can_be_set_and_has_the_transports_own_defaults() -> None:
    given = {
        "use_dmabuf": False,
        "stage_slots": 8,
        "stage_slot_bytes": 1 << 25,
        "landing_bytes": 3 << 30,
        "store_timeout_s": 2.5,
    }
    defaults, made = rdma_options(Config()), rdma_options(config(**{f"rdma.{k}": v for k, v in given.items()}))
    assert {key: getattr(made, key) for key in given} == given
    assert {key: getattr(defaults, key) for key in given} == {key: getattr(RdmaOptions(), key) for key in given}


def test_a_peers_transport_is_logged_when_it_is_first_used_and_not_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    in_use = InUse()
    for _ in range(3):
        in_use.note("p0", "shm", "same host")
        in_use.note("p0", "rdma", "large")
        in_use.note("p1", "tcp", "far")
    assert len(caplog.records) == 3
    assert in_use.kinds == ["rdma", "shm", "tcp"]
    in_use.drop("p0", "rdma")
    in_use.drop("p1", "shm")  # it never went by that
    assert in_use.snapshot() == {"p0": {"shm": "same host"}, "p1": {"tcp": "far"}}
    in_use.forget("p0")
    assert in_use.snapshot() == {"p1": {"tcp": "far"}}
    in_use.drop("p1", "tcp")
    assert in_use.snapshot() == {}


async def test_of_who_has_left_the_registry_no_transport_is_kept_however_late_it_is_noted() -> None:
    bus = MemoryBus(MemoryHub())
    here = WorkerInfo(worker_id="p0", role="prefill", model="m", status="ok", host_key="h")
    await bus.registry().put(here)
    async with bus.registry().watch() as watch:
        in_use = InUse()
        in_use.follow(watch)
        in_use.note("p0", "shm", "same host")
        in_use.note("p1", "shm", "same host")
        assert in_use.snapshot() == {"p0": {"shm": "same host"}}
        await bus.registry().delete(here)
        await watch.wait_for(lambda snapshot: not snapshot, 5)
        assert in_use.snapshot() == {}
        in_use.note("p0", "shm", "same host")
        assert in_use.snapshot() == {}
