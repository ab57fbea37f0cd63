"""NATS servers by their greeting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from distserve.bus.embedded import EmbeddedNats
from distserve.doctor.nats_server import addresses, check_server, check_servers


@asynccontextmanager
async def greets(line: bytes) -> AsyncIterator[int]:
    """A server that says one thing to whoever connects."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(line)
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def info(version: str, jetstream: bool) -> bytes:
    fields = {"server_id": "N", "version": version, "jetstream": jetstream, "max_payload": 1048576, "port": 4222}
    return b"INFO " + json.dumps(fields).encode() + b"\r\n"


async def test_a_real_server_is_ok(nats_server: EmbeddedNats) -> None:
    version, jetstream = await check_servers(nats_server.url)
    assert (version.status, jetstream.status) == ("ok", "ok")
    assert version.measures["max_payload_bytes"] == 1 << 20


async def test_jetstream_off_is_seen_on_a_real_server() -> None:
    async with EmbeddedNats(jetstream=False) as server:
        version, jetstream = await check_servers(server.url)
    assert (version.status, jetstream.status) == ("ok", "fail")
    assert "nats-server -js" in jetstream.mend


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.10.29", "fail"),
        ("2.9.0", "fail"),
        ("2.11.0", "ok"),
        ("2.11.0-RC.1", "ok"),
        ("2.12.1", "ok"),
        ("3.0.0", "ok"),
    ],
)
async def test_the_version_must_know_ttl_markers(version: str, status: str) -> None:
    async with greets(info(version, jetstream=True)) as port:
        first, second = await check_server("127.0.0.1", port)
    assert (first.check, first.status, second.status) == ("nats.server", status, "ok")


@pytest.mark.parametrize("line", [b"220 mail.example ESMTP\r\n", b"INFO nonsense\r\n", b"INFO {}\r\n", b""])
async def test_what_is_no_nats_server_is_told(line: bytes) -> None:
    async with greets(line) as port:
        if not line:
            (found,) = await check_server("127.0.0.1", port, timeout_s=0.05)
        else:
            (found,) = await check_server("127.0.0.1", port)
    assert (found.status, found.subject) == ("fail", f"127.0.0.1:{port}")


async def test_nobody_there() -> None:
    async with greets(b"") as port:
        pass
    (found,) = await check_server("127.0.0.1", port)
    assert (found.status, "Connection refused" in found.found) == ("fail", True)
    assert f"-p {port}" in found.mend


async def test_each_server_of_the_url_is_asked() -> None:
    async with greets(info("2.11.0", True)) as a, greets(info("2.10.0", False)) as b:
        found = await check_servers(f"nats://127.0.0.1:{a},nats://user:secret@127.0.0.1:{b}")
    assert [f.status for f in found] == ["ok", "ok", "fail", "fail"]
    assert "secret" not in repr(found)
    (empty,) = await check_servers("")
    assert (empty.status, empty.mend.startswith("distserve doctor --nats-url")) == ("skip", True)


def test_addresses() -> None:
    assert addresses("nats://u:p@h:1, tls://[::1]:2,bare") == [("h", 1), ("::1", 2), ("bare", 4222)]
    with pytest.raises(ValueError, match="has no host"):
        addresses("nats://")
