"""An object store that hangs, refuses or fails: within its time, by type, and nobody else notices."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from distserve.errors import ObjectStoreDown
from distserve_kvstore.objects import ObjectOptions, ObjectTier
from distserve_kvstore.objects.link import Link
from tests.unit.kvstore.stored_blocks import ALIGNED, rows
from tests.unit.kvstore.test_objects import run_of
from tests.waiting import until

TIMEOUT_S = 0.4
OPTIONS = ObjectOptions(timeout_s=TIMEOUT_S, backoff_s=(0.2, 0.8))

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def s3_at(
    port: int, monkeypatch: pytest.MonkeyPatch, options: ObjectOptions = OPTIONS
) -> AsyncIterator[ObjectTier]:
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    tier = ObjectTier.open("s3://bucket/prefix", ALIGNED, options)
    yield tier
    await tier.close()


@asynccontextmanager
async def listening(peer: Peer) -> AsyncIterator[int]:
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await peer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        pass


def answering(status: str, body: bytes = b"", *, length: int | None = None) -> Peer:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.split(b":")[1]))
            size = len(body) if length is None else length
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + body)
            await writer.drain()
            if size > len(body):
                writer.close()  # in the middle of its answer
                return

    return peer


def calls(tier: ObjectTier) -> dict[str, Callable[[], Awaitable[object]]]:
    run, into = run_of("a", 4), rows(4, ALIGNED)
    name = f"v1/{'00' * 8}/00/x"

    async def headers() -> None:
        async for _ in tier.headers():
            pass

    return {
        "put": lambda: tier.put(run),
        "head": lambda: tier.head(name),
        "get": lambda: tier.get(name, run.hashes, 0, [row.data for row in into]),
        "part": lambda: tier.get(name, run.hashes[1:2], 1, [into[0].data]),
        "names": tier.names,
        "headers": headers,
        "delete": lambda: tier.delete([name, f"{name}2"]),
    }


@pytest.mark.parametrize("what", ["put", "head", "get", "part", "names", "headers", "delete"])
async def test_a_store_that_never_answers_costs_one_wait_and_then_nothing(monkeypatch, tmp_path, what):
    elsewhere = ObjectTier.open(f"file://{tmp_path}", ALIGNED)
    async with listening(silent) as port, s3_at(port, monkeypatch) as tier:
        call = calls(tier)[what]
        began = time.monotonic()
        waiting = asyncio.create_task(call())
        name = await elsewhere.put(run_of("b", 4))
        assert (await elsewhere.head(name)).num_blocks == 4
        assert not waiting.done(), "others go on while it waits"
        with pytest.raises(ObjectStoreDown, match=r"within 0\.4 s|timed out|sending request") as down:
            await waiting
        assert TIMEOUT_S * 0.5 < time.monotonic() - began < TIMEOUT_S + 1.0
        assert tier.state.startswith("down: ")
        assert 0 < tier.down_for_s <= 0.2
        assert 0 < down.value.retry_after_s <= 0.2
        assert (down.value.url, down.value.http_status) == ("s3://bucket/prefix", 503)
        began = time.monotonic()
        for other in calls(tier).values():
            with pytest.raises(ObjectStoreDown):
                await other()
        assert time.monotonic() - began < 0.15, "while it is down they fail at once"


async def test_a_host_that_takes_no_connection_is_down_in_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            async with s3_at(port, monkeypatch) as tier:
                began = time.monotonic()
                with pytest.raises(ObjectStoreDown):
                    await tier.names()
                assert time.monotonic() - began < TIMEOUT_S + 1.0
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.parametrize(
    ("status", "says"),
    [("500 Internal Server Error", "500"), ("403 Forbidden", "403|Forbidden|permissions"), ("503 Slow Down", "503")],
)
@pytest.mark.parametrize("what", ["put", "get", "names", "delete"])
async def test_a_store_that_refuses_is_down_with_its_reason(monkeypatch, status, says, what):
    async with listening(answering(status)) as port, s3_at(port, monkeypatch) as tier:
        with pytest.raises(ObjectStoreDown, match=f"(?s){says}|within 0.4 s"):
            await calls(tier)[what]()
        assert tier.state != "ok"


async def test_a_store_that_is_not_running_is_down_at_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with s3_at(port, monkeypatch) as tier:
        began = time.monotonic()
        with pytest.raises(ObjectStoreDown):
            await tier.put(run_of("a", 1))
        assert time.monotonic() - began < TIMEOUT_S + 1.0


async def test_an_answer_that_breaks_off_is_not_served(monkeypatch):
    broken = answering("206 Partial Content\r\nContent-Range: bytes 0-36863/36864", b"x" * 100, length=36864)
    async with listening(broken) as port, s3_at(port, monkeypatch) as tier:
        with pytest.raises(ObjectStoreDown):
            await calls(tier)["get"]()


async def test_it_is_used_again_when_it_answers_again(monkeypatch):
    answers = [silent, answering("404 Not Found")]

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answers[0](reader, writer)

    async with listening(peer) as port, s3_at(port, monkeypatch) as tier:
        with pytest.raises(ObjectStoreDown):
            await tier.delete(["v1/a"])
        answers.pop(0)
        await until(lambda: not tier.down_for_s)
        assert tier.state != "ok"
        await tier.delete(["v1/a"])
        assert tier.state == "ok"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def link_to(fails: list[bool], clock: Clock, options: ObjectOptions) -> tuple[Link, Callable[[], Awaitable[str]]]:
    link = Link(None, "s3://b", options, clock)  # type: ignore[arg-type]  # the calls below use no store

    async def use(_: object) -> str:
        if fails[0]:
            raise OSError("broken")
        return "fine"

    return link, lambda: link.call("a try", use)


async def test_pauses_double_up_to_the_longest_and_one_success_ends_them():
    clock, fails = Clock(), [True]
    link, call = link_to(fails, clock, ObjectOptions(backoff_s=(1.0, 5.0)))
    pauses = []
    for _ in range(5):
        with pytest.raises(ObjectStoreDown, match="a try fails: broken"):
            await call()
        pauses.append(link.down_for_s)
        clock.now += link.down_for_s
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    fails[0] = False
    assert await call() == "fine"
    assert (link.state, link.down_for_s) == ("ok", 0.0)
    fails[0] = True
    with pytest.raises(ObjectStoreDown):
        await call()
    assert link.down_for_s == 1.0


async def test_after_the_pause_one_call_tries_and_the_others_still_fail_at_once():
    clock, gate = Clock(), asyncio.Event()
    link, call = link_to([True], clock, ObjectOptions(backoff_s=(1.0, 5.0)))
    with pytest.raises(ObjectStoreDown):
        await call()
    clock.now += 1.0

    async def slow(_: object) -> str:
        await gate.wait()
        return "fine"

    trial = asyncio.create_task(link.call("a try", slow))
    await asyncio.sleep(0)
    for _ in range(3):
        with pytest.raises(ObjectStoreDown):
            await call()
    gate.set()
    assert await trial == "fine"
    assert link.state == "ok"


async def test_a_trial_that_is_given_up_lets_another_one_try():
    clock = Clock()
    fails = [True]
    link, call = link_to(fails, clock, ObjectOptions(backoff_s=(1.0, 5.0)))
    with pytest.raises(ObjectStoreDown):
        await call()
    clock.now += 1.0

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    trial = asyncio.create_task(link.call("a try", never))
    await asyncio.sleep(0)
    trial.cancel()
    await asyncio.wait([trial])
    fails[0] = False
    assert await call() == "fine"


async def test_calls_that_were_under_way_together_are_one_failure():
    link, call = link_to([True], Clock(), ObjectOptions(backoff_s=(1.0, 5.0), max_concurrent=4))
    results = await asyncio.gather(*(call() for _ in range(10)), return_exceptions=True)
    assert all(isinstance(r, ObjectStoreDown) for r in results)
    assert link.down_for_s == 1.0


async def test_a_call_whose_turn_does_not_come_is_told_so_and_the_store_is_not_blamed():
    link, call = link_to([False], Clock(), ObjectOptions(timeout_s=0.05, max_concurrent=1))
    async with link._slots:  # somebody else's turn
        with pytest.raises(ObjectStoreDown, match="too many calls are under way"):
            await call()
    assert link.state == "ok"
    assert await call() == "fine"
