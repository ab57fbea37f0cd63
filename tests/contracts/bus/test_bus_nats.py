"""What only a real nats-server can show."""

import asyncio
import json
import logging
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest

from distserve.bus.base import Delivery
from distserve.bus.embedded import EmbeddedNats
from distserve.bus.nats import NatsBus
from distserve.errors import BusError, BusTimeout, NoResponders, PayloadTooLarge, VersionMismatch
from distserve.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, SubmitReply, WorkerInfo, decode_as, encode
from tests.waiting import until


@pytest.fixture
async def bus(nats_server: EmbeddedNats) -> AsyncIterator[NatsBus]:
    async with await NatsBus.connect(nats_server.url, name="tested", registry_ttl_s=1.0) as connected:
        yield connected


async def discard(delivery: Delivery) -> None:
    pass


def monitor(server: EmbeddedNats, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.monitor_url}/{path}", timeout=5) as answer:
        got: dict[str, Any] = json.load(answer)
        return got


# ---------------------------------------------------------------- connecting


async def test_connecting_to_nobody_ends_in_time_naming_the_url_without_its_password() -> None:
    before = asyncio.all_tasks()
    began = time.monotonic()
    with pytest.raises(BusError, match=r"nats://127\.0\.0\.1:1 within 0\.5 s") as caught:
        await NatsBus.connect("nats://user:secret@127.0.0.1:1", name="t", connect_timeout_s=0.5)
    assert 0.4 < time.monotonic() - began < 10
    assert "refused" in str(caught.value).lower()
    assert "secret" not in str(caught.value)
    await until(lambda: asyncio.all_tasks() <= before)  # nothing goes on trying


async def test_connecting_waits_for_a_server_that_is_only_starting(nats_server: EmbeddedNats) -> None:
    port = nats_server.port
    nats_server.stop()
    connecting = asyncio.create_task(NatsBus.connect(f"nats://127.0.0.1:{port}", name="t", connect_timeout_s=20))
    await asyncio.sleep(0.2)  # let it fail some attempts first
    assert not connecting.done()
    with EmbeddedNats(port=port):
        async with await connecting as bus:
            assert bus.connected


async def test_a_wrong_password_is_named() -> None:
    with EmbeddedNats(config='authorization { user: "u", password: "right" }') as server:
        url = server.url.replace("//", "//u:wrong@")
        with pytest.raises(BusError, match="Authorization Violation") as caught:
            await NatsBus.connect(url, name="t", connect_timeout_s=3)
        assert "wrong@" not in str(caught.value)
        async with await NatsBus.connect(server.url.replace("//", "//u:right@"), name="t") as bus:
            await bus.flush()


async def test_the_connection_shows_its_name_in_the_monitoring(nats_server: EmbeddedNats, bus: NatsBus) -> None:
    assert [c["name"] for c in monitor(nats_server, "connz")["connections"]] == ["tested"]


# ---------------------------------------------------------------- limits, faults, versions


async def test_the_payload_limit_is_the_servers_own() -> None:
    with EmbeddedNats(config="max_payload: 4096") as server:
        async with await NatsBus.connect(server.url, name="t") as bus:
            assert bus.max_payload_bytes == 4096
            with pytest.raises(PayloadTooLarge, match=r"5000 bytes.*4096"):
                await bus.publish("x", bytes(5000))


async def test_a_message_of_another_major_is_refused_with_both_versions_named(bus: NatsBus) -> None:
    foreign = bytes([PROTOCOL_MAJOR + 1, 3]) + encode(SubmitReply())[2:]

    async def from_the_future(delivery: Delivery) -> bytes:
        return foreign

    async with await bus.serve("future.x", from_the_future):
        with pytest.raises(VersionMismatch) as caught:
            decode_as(SubmitReply, await bus.request("future.x", b"", timeout_s=5))
    theirs, ours = f"{PROTOCOL_MAJOR + 1}.3", f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    assert caught.value.fields == {"theirs": theirs, "ours": ours}
    assert theirs in str(caught.value)
    assert ours in str(caught.value)


async def test_a_registry_entry_of_another_major_is_left_out_and_counted(
    bus: NatsBus, caplog: pytest.LogCaptureFixture
) -> None:
    await bus.registry().put(WorkerInfo(worker_id="known", role="decode"))
    entry = bytes([PROTOCOL_MAJOR + 1, 0]) + b"whatever they say"
    await bus.request("$KV.distserve_v1_registry.decode.foreign", entry, timeout_s=5)
    async with bus.registry().watch() as watch:
        assert set(watch.snapshot) == {"known"}
    assert bus.stats.undecodable_entries >= 1
    assert "decode.foreign" in caplog.text


async def test_a_slow_consumer_is_counted_and_logged(
    nats_server: EmbeddedNats, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()
    got: list[bytes] = []

    async def slow(delivery: Delivery) -> None:
        await gate.wait()
        got.append(delivery.data)

    async with (
        await NatsBus.connect(nats_server.url, name="slow", pending_messages=10) as consumer,
        await NatsBus.connect(nats_server.url, name="fast") as producer,
        await consumer.subscribe("flood.x", slow, inline=True),
    ):
        for i in range(100):
            await producer.publish("flood.x", b"%d" % i)
        await until(lambda: consumer.stats.slow_consumer_drops >= 80)
        dropped = consumer.stats.slow_consumer_drops
        gate.set()
        await until(lambda: len(got) == 100 - dropped)
        assert got[:5] == [b"0", b"1", b"2", b"3", b"4"]  # the newest are dropped, never the order
    assert "flood.x" in caplog.text


async def test_permission_denials_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = 'authorization { users: [{user: "u", password: "p", permissions: {publish: ["ok.>", "_INBOX.>"]}}] }'
    with EmbeddedNats(config=config) as server:
        async with await NatsBus.connect(server.url.replace("//", "//u:p@"), name="t") as bus:
            await bus.publish("forbidden.x", b"")
            await until(lambda: bus.stats.permission_denials == 1)
            with pytest.raises(NoResponders):
                await bus.request("ok.x", b"", timeout_s=5)
            assert bus.connected
    assert "forbidden.x" in caplog.text


async def test_a_server_without_jetstream_is_named_with_the_remedy() -> None:
    with EmbeddedNats(jetstream=False) as server:
        async with await NatsBus.connect(server.url, name="t") as bus:
            info = WorkerInfo(worker_id="p1", role="prefill")
            with pytest.raises(BusError, match=r"JetStream is off.*nats-server -js"):
                await bus.registry().put(info)
            with pytest.raises(BusError, match=server.url):
                async with bus.registry().watch():
                    pass


async def test_services_with_different_registry_ttls_are_told_so(nats_server: EmbeddedNats, bus: NatsBus) -> None:
    await bus.registry().put(WorkerInfo(worker_id="p1", role="prefill"))
    async with await NatsBus.connect(nats_server.url, name="other", registry_ttl_s=7) as other:
        with pytest.raises(BusError, match="TTL of 7 s"):
            await other.registry().put(WorkerInfo(worker_id="p2", role="prefill"))


async def test_a_bucket_that_was_removed_is_made_again_by_the_next_put_and_the_watch_goes_on(bus: NatsBus) -> None:
    info = WorkerInfo(worker_id="p1", role="prefill")
    await bus.registry().put(info)
    async with bus.registry().watch() as watch:
        await bus.request("$JS.API.STREAM.DELETE.KV_distserve_v1_registry", b"", timeout_s=5)
        await bus.registry().put(WorkerInfo(worker_id="p2", role="prefill"))
        await watch.wait_for(lambda s: set(s) == {"p1", "p2"}, timeout_s=5)
        await watch.wait_for(lambda s: not s, timeout_s=10)  # nobody beats: both expire


async def test_an_entry_expires_even_if_the_whole_bucket_is_gone_for_good(bus: NatsBus) -> None:
    await bus.registry().put(WorkerInfo(worker_id="p1", role="prefill"))
    async with bus.registry().watch() as watch:
        await bus.request("$JS.API.STREAM.DELETE.KV_distserve_v1_registry", b"", timeout_s=5)
        await watch.wait_for(lambda s: not s, timeout_s=10)


async def test_other_tools_see_expiries_in_the_bucket_as_markers(bus: NatsBus) -> None:
    """Limit markers are on: the stream itself tells of an expiry, whoever consumes it."""
    reasons: list[str] = []

    async def see(delivery: Delivery) -> None:
        reasons.append(delivery.headers.get("Nats-Marker-Reason", "put"))

    await bus.registry().put(WorkerInfo(worker_id="p1", role="prefill"))
    consumer = {
        "stream_name": "KV_distserve_v1_registry",
        "config": {"deliver_subject": "seen.markers", "ack_policy": "none"},
    }
    async with await bus.subscribe("seen.markers", see):
        subject = "$JS.API.CONSUMER.CREATE.KV_distserve_v1_registry"
        assert "error" not in json.loads(await bus.request(subject, json.dumps(consumer).encode(), timeout_s=5))
        await until(lambda: reasons == ["put", "MaxAge"])


# ---------------------------------------------------------------- reconnecting


async def test_a_server_restart_is_survived_with_every_subscription(nats_server: EmbeddedNats, bus: NatsBus) -> None:
    async def echo(delivery: Delivery) -> bytes:
        return delivery.data

    port = nats_server.port
    await bus.serve("echo.x", echo)
    for round_number in (1, 2):
        nats_server.kill()
        await until(lambda: not bus.connected)
        nats_server = EmbeddedNats(port=port)
        with nats_server:
            await until(lambda: bus.connected)
            assert bus.stats.reconnects == round_number
            assert await bus.request("echo.x", b"again", timeout_s=5) == b"again"


async def test_a_connection_that_the_client_gave_up_for_good_is_replaced(
    nats_server: EmbeddedNats, bus: NatsBus, caplog: pytest.LogCaptureFixture
) -> None:
    """A protocol error closes the client library's connection without any attempt to reconnect."""
    got: list[bytes] = []

    async def callback(delivery: Delivery) -> None:
        got.append(delivery.data)

    await bus.subscribe("revived.x", callback)
    old = bus._client
    await old._send_publish("revived.x", "", bytes(old.max_payload + 1), old.max_payload + 1, None)
    await until(lambda: bus.stats.reconnects == 1)
    assert bus._client is not old
    await bus.publish("revived.x", b"after")
    await until(lambda: got == [b"after"])
    assert "maximum payload violation" in caplog.text


async def test_a_client_whose_own_attempts_have_ended_is_replaced(
    nats_server: EmbeddedNats, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def echo(delivery: Delivery) -> bytes:
        return delivery.data

    monkeypatch.setattr("distserve.bus.nats._GIVE_UP_S", 0.5)
    await bus.serve("echo.x", echo)
    port, old = nats_server.port, bus._client
    nats_server.kill()
    await until(lambda: not bus.connected)
    old._reconnection_task.cancel()  # the library's reconnect loop ends, and nothing says so
    await until(lambda: old._reconnection_task.done())
    with EmbeddedNats(port=port):
        await until(lambda: bus.connected)
        assert bus._client is not old
        assert await bus.request("echo.x", b"again", timeout_s=5) == b"again"


async def test_a_server_that_freezes_is_noticed_and_expires_nobody(nats_server: EmbeddedNats, bus: NatsBus) -> None:
    """SIGSTOP: the sockets stay open and nothing answers. Thawed, everybody is still there."""
    info = WorkerInfo(worker_id="p1", role="prefill")
    stop = asyncio.Event()

    async def beat() -> None:
        while not stop.is_set():
            try:
                await bus.registry().put(info)
            except BusError:
                continue
            await asyncio.sleep(0.2)

    async with bus.registry().watch() as watch:
        gone: list[str] = []
        watch.on_event(lambda event: gone.append(event.worker_id) if event.kind == "gone" else None)
        beating = asyncio.create_task(beat())
        try:
            await watch.wait_for(lambda s: "p1" in s, timeout_s=5)
            os.kill(nats_server.pid, signal.SIGSTOP)
            try:
                with pytest.raises(BusTimeout):
                    await bus.flush(timeout_s=0.2)
                await until(lambda: not bus.connected, timeout_s=20)
                assert set(watch.snapshot) == {"p1"}
            finally:
                os.kill(nats_server.pid, signal.SIGCONT)
            await until(lambda: bus.connected, timeout_s=20)
            back = time.monotonic()
            await until(lambda: time.monotonic() - back > 2.5)  # over two TTLs of trust
            assert set(watch.snapshot) == {"p1"}
            assert gone == []
        finally:
            stop.set()
            await asyncio.wait_for(beating, 10)


async def test_a_flush_that_timed_out_does_not_break_the_connection(nats_server: EmbeddedNats, bus: NatsBus) -> None:
    os.kill(nats_server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BusTimeout):
            await bus.flush(timeout_s=0.1)
    finally:
        os.kill(nats_server.pid, signal.SIGCONT)
    await bus.flush()
    with pytest.raises(NoResponders):
        await bus.request("nobody.x", b"", timeout_s=5)
    assert bus.stats.reconnects == 0


async def test_flush_returns_when_the_server_has_everything(nats_server: EmbeddedNats, bus: NatsBus) -> None:
    before = monitor(nats_server, "varz")["in_msgs"]
    for i in range(1, 101):
        await bus.publish("flushed.x", bytes(10_000))
        await bus.flush()
        assert monitor(nats_server, "varz")["in_msgs"] == before + i


async def test_on_the_wire_a_ping_follows_every_subscribe_before_it_is_called_done(nats_server: EmbeddedNats) -> None:
    """Only the answer to a ping that came after it shows that the server knows of a subscription."""
    sent = bytearray()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray | None) -> None:
        while data := await reader.read(65536):
            if record is not None:
                record += data
            writer.write(data)
        writer.close()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", nats_server.port)
        await asyncio.gather(pipe(reader, to_server[1], sent), pipe(to_server[0], writer, None))

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with await NatsBus.connect(f"nats://127.0.0.1:{port}", name="t") as bus:
            for i in range(5):
                subscription = await bus.subscribe(f"wire.{i}", discard)
                assert 0 < sent.find(b"SUB wire.%d " % i) < sent.rfind(b"PING")
                before = len(sent)
                await subscription.close()
                assert before <= sent.find(b"UNSUB", before) < sent.rfind(b"PING")


async def test_closing_leaves_no_connection_and_no_task(
    nats_server: EmbeddedNats, caplog: pytest.LogCaptureFixture
) -> None:
    before = asyncio.all_tasks()
    with caplog.at_level(logging.WARNING):
        for i in range(3):
            async with await NatsBus.connect(nats_server.url, name=f"t{i}", registry_ttl_s=1.0) as bus:
                await bus.subscribe("x", discard)
                await bus.registry().put(WorkerInfo(worker_id=f"w{i}", role="decode"))
                async with bus.registry().watch() as watch:
                    assert f"w{i}" in watch.snapshot
        await until(lambda: asyncio.all_tasks() <= before)
        await until(lambda: monitor(nats_server, "connz")["num_connections"] == 0)
    assert not caplog.records
