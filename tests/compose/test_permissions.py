"""Who may say what on the bus (deploy/compose/nats/users.conf), against a real server. No containers: plain pytest runs
these too."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from distserve.bus import subjects
from distserve.bus.embedded import EmbeddedNats, find_nats_server
from distserve.bus.nats import NatsBus
from distserve.bus.subjects import ROOT, worker
from distserve.errors import BusError
from distserve.messages import WorkerInfo
from distserve.transport.rdma import connect
from tests.waiting import until

DEPLOY = Path(__file__).parents[2] / "deploy"
NATS_FOLDER = DEPLOY / "compose" / "nats"
SERVICES = ("gateway", "prefill", "decode", "kvstore")
USERS = (*SERVICES, "operator", "client")
EVERYBODY = set(SERVICES)
WORKERS = EVERYBODY - {"gateway"}

# subject -> who may publish there, who may listen there
SUBJECTS = {
    subjects.requests("smollm2"): ({"client", "operator"}, {"gateway"}),
    subjects.cancel("smollm2"): ({"client", "operator"}, {"gateway"}),
    subjects.askers("gateway-1", "7"): (set[str](), {"gateway"}),  # NATS itself speaks there
    worker("prefill", "prefill-1"): ({"gateway", "operator"}, {"prefill"}),
    worker("decode", "decode-1"): ({"gateway", "prefill", "decode", "operator"}, {"decode"}),
    worker("kvstore", "kvstore-1"): (EVERYBODY | {"operator"}, {"kvstore"}),
    worker("gateway", "gateway-1"): ({"gateway", "operator"}, {"gateway"}),
    subjects.stream("gateway-1"): ({"prefill", "decode"}, {"gateway"}),
    subjects.kv_events(): ({"prefill", "decode"}, {"gateway", "operator"}),
    subjects.traces(): ({"gateway"}, EVERYBODY | {"operator"}),
    subjects.doctor("host-1"): ({"operator"}, {"operator"}),
    connect.subject("decode-1-abc"): (WORKERS, WORKERS),
    f"$KV.{subjects.REGISTRY_BUCKET}.prefill.prefill-1": ({"prefill"}, set[str]()),
    f"{ROOT}.{subjects.REGISTRY_BUCKET}.prefill.prefill-1": (set[str](), EVERYBODY | {"operator"}),
    "foreign.subject": (set[str](), set[str]()),
    "$SYS.REQ.SERVER.PING": (set[str](), set[str]()),
    f"$JS.API.STREAM.DELETE.KV_{subjects.REGISTRY_BUCKET}": (set[str](), set[str]()),
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    """With the users of users.conf, and their names as passwords."""
    with pytest.MonkeyPatch.context() as patch:
        for user in USERS:
            patch.setenv(f"NATS_{user.upper()}_PASSWORD", user)
        with EmbeddedNats(config=(NATS_FOLDER / "users.conf").read_text()) as server:
            yield server


def url(server: EmbeddedNats, user: str) -> str:
    return f"nats://{user}:{user}@127.0.0.1:{server.port}"


@asynccontextmanager
async def connected(server: EmbeddedNats, user: str) -> AsyncIterator[tuple[Client, list[str]]]:
    """A client, and what the server has refused it so far."""
    refused: list[str] = []

    async def on_error(e: Exception) -> None:
        refused.append(str(e))

    client = await nats.connect(url(server, user), error_cb=on_error, allow_reconnect=False)
    try:
        yield client, refused
    finally:
        await client.close()


def test_every_subject_of_the_bus_is_in_the_table() -> None:
    """So that a new one is thought of here."""
    made = {name for name, value in vars(subjects).items() if callable(value) and value.__module__ == subjects.__name__}
    assert made == {"slug", "requests", "cancel", "askers", "worker", "stream", "kv_events", "traces", "doctor"}


async def refused_of(client: Client, refused: list[str], kind: str) -> set[str]:
    """Subjects that the server has refused so far, in lower case as the client's library tells them. Complaints come in
    order, so one that is certain to come is the last."""
    await client.publish("the.last", b"")
    await client.flush()
    await until(lambda: any("the.last" in said for said in refused), 5.0, "the last complaint")
    return {found[1] for said in refused if (found := re.search(f'for {kind} to "([^"]+)"', said))} - {"the.last"}


@pytest.mark.parametrize("user", USERS)
async def test_a_role_may_publish_what_it_has_to_and_nothing_else(server: EmbeddedNats, user: str) -> None:
    async with connected(server, user) as (client, refused):
        for subject in SUBJECTS:
            await client.publish(subject, b"")
        expected = {subject.lower() for subject, (may, _) in SUBJECTS.items() if user not in may}
        assert await refused_of(client, refused, "publish") == expected


@pytest.mark.parametrize("user", USERS)
async def test_a_role_may_listen_where_it_has_to_and_nowhere_else(server: EmbeddedNats, user: str) -> None:
    async with connected(server, user) as (client, refused):
        for subject in SUBJECTS:
            await client.subscribe(subject)
        expected = {subject.lower() for subject, (_, may) in SUBJECTS.items() if user not in may}
        assert await refused_of(client, refused, "subscription") == expected


async def test_whoever_has_no_password_gets_in_nowhere(server: EmbeddedNats) -> None:
    for wrong in (server.url, f"nats://gateway:wrong@127.0.0.1:{server.port}"):
        with pytest.raises(BusError, match=r"[Aa]uthorization"):
            await NatsBus.connect(wrong, name="nobody", connect_timeout_s=1.0)


@pytest.mark.parametrize("role", SERVICES)
async def test_a_service_registers_itself_sees_the_others_and_is_nobody_else(server: EmbeddedNats, role: str) -> None:
    bus = await NatsBus.connect(url(server, role), name=role)
    async with bus, bus.registry().watch() as watch:
        info = WorkerInfo(worker_id=f"{role}-7", role=role, model="tiny", status="ok")  # type: ignore[arg-type]
        await bus.registry().put(info)
        await watch.wait_for(lambda infos: f"{role}-7" in infos, timeout_s=5.0)
        async with bus.registry().watch() as later:  # one that comes when the entry is there already
            assert f"{role}-7" in later.snapshot
        await bus.registry().delete(info)
        await watch.wait_for(lambda infos: f"{role}-7" not in infos, timeout_s=5.0)
        assert bus.stats.permission_denials == 0
        other = "decode" if role != "decode" else "gateway"
        with pytest.raises(BusError):
            await bus.request(f"$KV.{subjects.REGISTRY_BUCKET}.{other}.{other}-1", b"", timeout_s=0.3)
        assert bus.stats.permission_denials == 1


async def test_a_gateway_answers_its_askers_with_as_many_messages_as_it_likes(server: EmbeddedNats) -> None:
    async with connected(server, "gateway") as (gateway, refused), connected(server, "client") as (client, _):

        async def answer(message: nats.aio.msg.Msg) -> None:
            for i in range(50):
                await gateway.publish(message.reply, str(i).encode())
            await gateway.publish(message.reply, b"")

        await gateway.subscribe(subjects.requests("smollm2"), cb=answer)
        await gateway.flush()
        got: asyncio.Queue[bytes] = asyncio.Queue()

        async def take(message: nats.aio.msg.Msg) -> None:
            got.put_nowait(message.data)

        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=take)
        await client.publish(subjects.requests("smollm2"), b"{}", reply=inbox)
        async with asyncio.timeout(5):
            found = [await got.get() for _ in range(51)]
        assert found[-1] == b""
        assert found[:3] == [b"0", b"1", b"2"]
        assert not refused


def test_the_users_are_those_of_this_table() -> None:
    found = re.findall(r"user: (\w+)\n\s+password: \$NATS_(\w+)_PASSWORD", (NATS_FOLDER / "users.conf").read_text())
    assert found == [(user, user.upper()) for user in USERS]


@pytest.mark.parametrize("folder", ["compose/nats", "kubernetes/base/nats"])
def test_a_server_takes_its_configuration(folder: str) -> None:
    env = {f"NATS_{user.upper()}_PASSWORD": user for user in USERS} | {"POD_NAME": "nats-0"}
    command = [str(find_nats_server()), "--config", str(DEPLOY / folder / "nats.conf"), "-t"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    del env["NATS_DECODE_PASSWORD"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0, "a server without one of the passwords"
