"""What a worker says of itself over HTTP, asked from another thread as Prometheus would."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from distserve.config import load_config
from distserve.errors import ConfigError
from distserve.messages import Load, WorkerInfo
from distserve.transport.meter import Flow, Meter
from distserve.transport.packets import PacketCounts, Packets
from distserve.worker import side_door as module
from distserve.worker.gpu import Gpu, GpuSample
from distserve.worker.report import Report
from distserve.worker.side_door import reachable, side_door

LABELS = ("role", "model", "device", "direction", "transport", "traffic_class", "peer")  # in this order below
INFO = WorkerInfo(
    worker_id="d0",
    role="decode",
    model="tiny",
    status="ok",
    version="1.2",
    transports=["shm", "tcp"],
    load=Load(num_running=3, num_waiting=2, num_waiting_tokens=70, free_blocks=5, total_blocks=9),
)


class SampledGpu(Gpu):
    """Which says what a test wants."""

    def __init__(self, sampled: GpuSample | None) -> None:
        super().__init__("cuda:0", "GPU-0")
        self.sampled = sampled
        self.asked_by: set[int] = set()

    def sample(self) -> GpuSample | None:
        self.asked_by.add(threading.get_ident())
        return self.sampled


class AskedPackets(PacketCounts):
    def __init__(self) -> None:
        super().__init__()
        self.asked_by: set[int] = set()

    def snapshot(self) -> Mapping[str, Packets]:
        self.asked_by.add(threading.get_ident())
        return {"rdma": Packets(9, 2)}


class Worker:
    """Whose report a test changes."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.info = INFO
        self.connected = True
        self.in_use: Mapping[str, Mapping[str, str]] = {"p0": {"shm": "same host"}}
        self.pool_access = {"rdma": "staged: use_dmabuf is off"}
        self.num_fallbacks = {("p0", "rdma"): 4}
        self.hit_rate: float | None = None
        self.gpu: SampledGpu | None = None
        self.packets: AskedPackets | None = None

    def report(self) -> Report:
        return Report(
            info=self.info,
            bus_connected=self.connected,
            in_use=self.in_use,
            pool_access=self.pool_access,
            flows=self.meter.snapshot(),
            num_fallbacks=self.num_fallbacks,
            isolation={"cores": "0-3", "scheduling": "fifo 10"},
            kv_cache_hit_rate=self.hit_rate,
            gpu=self.gpu,
            packets=self.packets,
        )


def get(url: str, path: str) -> tuple[int, str, str]:
    host, port = url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.getheader("content-type", ""), response.read().decode()
    finally:
        connection.close()


async def ask(url: str, path: str) -> tuple[int, Any]:
    status, content_type, body = await asyncio.to_thread(get, url, path)
    assert content_type == "application/json"
    return status, json.loads(body)


async def samples(url: str) -> dict[str, float]:
    status, content_type, body = await asyncio.to_thread(get, url, "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        f"{s.name}{{{','.join(s.labels[name] for name in LABELS if name in s.labels)}}}": s.value
        for family in text_string_to_metric_families(body)
        for s in family.samples
    }


async def test_health_says_what_the_worker_is_and_moves_kv_by() -> None:
    worker = Worker()
    async with side_door("127.0.0.1", 0, "decode.metrics_port", worker.report) as url:
        expected = {
            "status": "ok",
            "ready": True,
            "role": "decode",
            "worker": "d0",
            "model": "tiny",
            "version": "1.2",
            "gpu_util": None,
            "kv_cache_hit_rate": None,
            "transport": ["shm", "tcp"],
            "transports": {
                "usable": ["shm", "tcp"],
                "in_use": {"p0": {"shm": "same host"}},
                "pool_access": {"rdma": "staged: use_dmabuf is off"},
            },
            "isolation": {"cores": "0-3", "scheduling": "fifo 10"},
            "reasons": [],
        }
        assert await ask(url, "/health") == (200, expected)
        assert await ask(url, "/health/live") == (200, expected)
        why = "rdma cannot be used here: no device"
        worker.info = msgspec.structs.replace(INFO, status="degraded", reasons=[why])
        assert await ask(url, "/health/ready") == (200, expected | {"status": "degraded", "reasons": [why]})


@pytest.mark.parametrize("status", ["warming", "draining"])
async def test_a_worker_that_takes_nothing_is_alive_but_not_ready(status: Any) -> None:
    worker = Worker()
    worker.info = msgspec.structs.replace(INFO, status=status)
    async with side_door("127.0.0.1", 0, "decode.metrics_port", worker.report) as url:
        for path in ("/health", "/health/ready?verbose=1"):
            code, body = await ask(url, path)
            assert (code, body["status"], body["ready"]) == (503, status, False)
        code, body = await ask(url, "/health/live")
        assert (code, body["status"]) == (200, status)


@pytest.mark.parametrize(
    ("was", "now"), [("warming", "warming"), ("ok", "degraded"), ("degraded", "degraded"), ("draining", "draining")]
)
async def test_a_worker_cut_off_from_the_bus_is_not_ready_and_says_why(was: Any, now: str) -> None:
    worker = Worker()
    worker.connected = False
    worker.info = msgspec.structs.replace(INFO, status=was, reasons=["no device"])
    async with side_door("127.0.0.1", 0, "decode.metrics_port", worker.report) as url:
        code, body = await ask(url, "/health")
        assert (code, body["status"], body["ready"]) == (503, now, False)
        assert body["reasons"] == ["not connected to the bus", "no device"]
        assert (await ask(url, "/health/live"))[0] == 200


async def test_health_says_how_well_the_worker_fares() -> None:
    worker = Worker()
    worker.info = msgspec.structs.replace(INFO, transports_in_use=["tcp"])
    worker.hit_rate = 0.25
    worker.gpu = SampledGpu(GpuSample("cuda:0", 0.5, 7))
    async with side_door("127.0.0.1", 0, "decode.metrics_port", worker.report) as url:
        _, body = await ask(url, "/health")
        found = await samples(url)
    assert (body["transport"], body["kv_cache_hit_rate"], body["gpu_util"]) == (["tcp"], 0.25, 0.5)
    assert found["distserve_worker_gpu_utilization_ratio{decode,tiny,cuda:0}"] == 0.5
    assert found["distserve_worker_gpu_memory_used_bytes{decode,tiny,cuda:0}"] == 7


async def test_packets_are_shown_and_not_asked_for_on_the_event_loop() -> None:
    worker = Worker()
    async with side_door("127.0.0.1", 0, "decode.metrics_port", worker.report) as url:
        assert not [name for name in await samples(url) if "packets" in name]
        worker.packets = AskedPackets()
        found = await samples(url)
        assert found["distserve_transport_packets_total{rdma}"] == 9
        assert found["distserve_transport_retransmitted_packets_total{rdma}"] == 2
        assert worker.packets.asked_by - {threading.get_ident()} == worker.packets.asked_by != set()


async def test_a_gpu_shows_what_it_tells_and_is_not_asked_on_the_event_loop() -> None:
    worker = Worker()
    worker.gpu = SampledGpu(GpuSample("cuda:0", None, 7))
    async with side_door("127.0.0.1", 0, "decode.metrics_port", worker.report) as url:
        assert [name for name in await samples(url) if "_gpu_" in name] == [
            "distserve_worker_gpu_memory_used_bytes{decode,tiny,cuda:0}"
        ]
        assert worker.gpu.asked_by - {threading.get_ident()} == worker.gpu.asked_by != set()
        worker.gpu = SampledGpu(None)
        assert not [name for name in await samples(url) if "_gpu_" in name]
        assert (await ask(url, "/health"))[1]["gpu_util"] is None


async def test_metrics_count_transfers_by_direction_transport_class_and_peer() -> None:
    worker = Worker()
    async with side_door("127.0.0.1", 0, "decode.metrics_port", worker.report) as url:
        before = await samples(url)
        assert not any(name.startswith("distserve_transfer") for name in before)
        for num_bytes, seconds in ((100, 0.5), (50, 0.25)):
            worker.meter.add(Flow("received", "tcp", "prefill", "p0"), num_bytes, seconds)
        worker.meter.add(Flow("received", "tcp", "background", 'p"1\n'), 7, 1.0)
        found = await samples(url)
        assert found["distserve_transfers_total{received,tcp,prefill,p0}"] == 2
        assert found["distserve_transfer_bytes_total{received,tcp,prefill,p0}"] == 150
        assert found["distserve_transfer_seconds_total{received,tcp,prefill,p0}"] == 0.75
        assert found['distserve_transfer_bytes_total{received,tcp,background,p"1\n}'] == 7
        assert found["distserve_transport_fallbacks_total{rdma,p0}"] == 4
        assert {n: found[f"distserve_worker_{n}{{decode,tiny}}"] for n in ("running_sequences", "degraded")} == {
            "running_sequences": 3,
            "degraded": 0,
        }
        load = [found[f"distserve_worker_{n}{{decode,tiny}}"] for n in ("waiting_sequences", "waiting_tokens")]
        assert load == [2, 70]
        blocks = [found[f"distserve_worker_{n}_blocks{{decode,tiny}}"] for n in ("free", "total")]
        assert blocks == [5, 9]


async def test_an_unknown_path_is_told_what_there_is() -> None:
    async with side_door("127.0.0.1", 0, "decode.metrics_port", Worker().report) as url:
        code, body = await ask(url, "/metric")
    assert code == 404
    assert "/metrics" in body["error"]


async def test_an_event_loop_that_hangs_is_reported_by_the_side_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.1)
    async with side_door("127.0.0.1", 0, "decode.metrics_port", Worker().report) as url:
        asking = asyncio.ensure_future(asyncio.to_thread(get, url, "/health/live"))
        await asyncio.sleep(0)  # the thread is started
        time.sleep(0.5)  # noqa: ASYNC251
        status, _, body = await asking
        assert status == 503
        said = json.loads(body)
        assert (said["status"], said["ready"]) == ("degraded", False)
        assert "did not answer within 0.1 s" in said["reasons"][0]
        assert (await ask(url, "/health/live"))[0] == 200


async def test_an_address_that_is_taken_is_refused_with_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"prefill.metrics_port is {port} on 127.0.0.1") as caught:
            async with side_door("127.0.0.1", port, "prefill.metrics_port", Worker().report):
                pass
    assert caught.value.fields["key"] == "prefill.metrics_port"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])  # TEST-NET-1 (RFC 5737); RFC 6761
async def test_an_address_of_another_host_is_refused_by_the_setting_that_named_it(host: str) -> None:
    with pytest.raises(ConfigError, match=f"telemetry.metrics_host is '{host}'") as caught:
        async with side_door(host, 0, "prefill.metrics_port", Worker().report):
            pass
    assert caught.value.fields["key"] == "telemetry.metrics_host"


async def test_its_port_is_free_again_when_it_is_left() -> None:
    async with side_door("127.0.0.1", 0, "decode.metrics_port", Worker().report) as url:
        port = int(url.rsplit(":", 1)[1])
        assert (await ask(url, "/health/live"))[0] == 200
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(get, url, "/health/live")
    async with side_door("127.0.0.1", port, "decode.metrics_port", Worker().report) as again:
        assert again == url


@pytest.mark.parametrize(
    ("url", "host", "known_as"),
    [
        ("http://127.0.0.1:9", "10.0.0.5", "http://127.0.0.1:9"),
        ("http://0.0.0.0:9", "10.0.0.5", "http://10.0.0.5:9"),
        ("http://[::]:9", "fd00::5", "http://[fd00::5]:9"),
        ("http://[::1]:9", "fd00::5", "http://[::1]:9"),
    ],
)
def test_a_door_on_every_address_is_known_by_the_one_that_peers_reach(url: str, host: str, known_as: str) -> None:
    assert reachable(url, load_config(overrides={"transport.host": host})) == known_as
