"""Requests that are ended before their time: by name, by their deadline, by their client's leaving; at every stage that
the gateway sees, and by nobody but their owner."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from distserve.api_keys import ApiKey, hashed
from distserve.bus import subjects
from distserve.errors import Cancelled
from distserve.messages import StopReply, StopRequest, WorkerInfo, decode_as, encode
from distserve_gateway.calls import Call, Terms
from distserve_gateway.running import Running
from tests.unit.gateway.scripted import LAYOUT, MODEL, Cluster, memory_cluster, says, serving
from tests.unit.gateway.streamed import SilentWorker
from tests.waiting import until

TEXT = "The capital of France is Paris, and the rest of this answer is here too."
PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 99}
STREAM = BODY | {"stream": True}
KEYS = tuple(ApiKey(name=name, sha256=hashed(f"key-of-{name}")) for name in ("ann", "bob"))


@asynccontextmanager
async def halted(**options: Any) -> AsyncIterator[Cluster]:
    """Every answer stands still after three tokens. Nothing may be left of any in the end."""
    async with serving(says(TEXT), **options) as cluster:
        cluster.workers["d0"].gate_at = 3
        yield cluster
        await nothing_left(cluster)


@asynccontextmanager
async def unanswered(**options: Any) -> AsyncIterator[tuple[Cluster, SilentWorker]]:
    """A prefill worker that never says whether it takes a submission."""
    cluster = memory_cluster()
    try:
        await cluster.add("decode", "d0", says(TEXT))
        silent = SilentWorker(accepts=False)
        bus = await cluster._stack.enter_async_context(await cluster._connect("p0"))
        await cluster._stack.enter_async_context(await bus.serve(subjects.worker("prefill", "p0"), silent))
        await bus.registry().put(WorkerInfo(worker_id="p0", role="prefill", model=MODEL, status="ok", layout=LAYOUT))
        await cluster.start_gateway(submit_timeout_s=60.0, reply_timeout_s=60.0, ttl_s=60.0, **options)
        await cluster.see("p0", "d0")
        yield cluster, silent
        await until(lambda: silent.cancelled == silent.submitted, what="prefill told")
        await nothing_left(cluster)
    finally:
        await cluster.close()


async def nothing_left(cluster: Cluster) -> None:
    gateway = cluster.gateway
    await until(lambda: len(gateway.running) == 0, what="no request is registered")
    assert len(gateway.streams) == 0
    assert gateway.workers.in_flight == {}
    for key in gateway.options.keys:
        assert gateway.permits.num_open(key.name) == 0


def headers(own_id: str = "", tenant: str = "", deadline_ms: int = 0) -> dict[str, str]:
    given = {
        "x-request-id": own_id,
        "authorization": f"Bearer key-of-{tenant}" if tenant else "",
        "x-deadline-ms": str(deadline_ms) if deadline_ms else "",
    }
    return {name: value for name, value in given.items() if value}


@asynccontextmanager
async def asking(
    cluster: Cluster, body: dict[str, Any], given: dict[str, str]
) -> AsyncIterator["asyncio.Task[httpx.Response]"]:
    """A request under way, which must have ended by the time that this is left."""
    num_before = len(cluster.gateway.running)
    async with cluster.client() as client:
        task = asyncio.create_task(client.post(PATH, json=body, headers=given))
        await until(lambda: len(cluster.gateway.running) > num_before or task.done(), what="it runs")
        yield task
        async with asyncio.timeout(10.0):
            await task


async def begun(cluster: Cluster, num_requests: int = 1) -> None:
    """Workers have taken them: streams have their status 200."""
    runs = cluster.gateway.running
    await until(lambda: [r.state for r in runs.of("")] == ["running"] * num_requests, what="workers have taken all")


async def delete(cluster: Cluster, name: str, tenant: str = "") -> httpx.Response:
    async with cluster.client() as client:
        return await client.delete(f"/v1/requests/{name}", headers=headers(tenant=tenant))


async def tokens_came(cluster: Cluster, tenant: str = "", num_requests: int = 1) -> None:
    def came() -> bool:
        return [r.num_output_tokens for r in cluster.gateway.running.of(tenant)] == [3] * num_requests

    await until(came, what="three tokens of each came")


def last_error(response: httpx.Response) -> str:
    """Of a stream that has begun; nothing comes after its error."""
    assert response.status_code == 200
    assert response.text.endswith("\n\n")
    code: str = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"]
    return code


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


# ---------------------------------------------------------------- by name


@pytest.mark.parametrize("by", ["answer's id", "own id"])
async def test_a_stream_is_ended_by_name_and_its_reader_is_told(by: str) -> None:
    async with halted() as cluster, asking(cluster, STREAM, headers("mine")) as answer:
        await tokens_came(cluster)
        [run] = cluster.gateway.running.of("")
        name = run.call.request_id if by == "answer's id" else "mine"
        response = await delete(cluster, name)
        assert response.status_code == 200
        assert response.json() == {
            "id": name,
            "object": "request",
            "cancelled": True,
            "num_outputs": 1,
            "num_output_tokens": 3,
        }
        assert last_error(await answer) == "cancelled"
        p0, d0 = cluster.workers["p0"], cluster.workers["d0"]
        await until(lambda: p0.cancelled == d0.cancelled == [d0.submitted[0].key], what="both told")
        assert error_of(await delete(cluster, name)) == (404, "request_not_found")


async def test_a_whole_answer_that_is_ended_is_499() -> None:
    async with halted() as cluster, asking(cluster, BODY | {"n": 2}, headers("mine")) as answer:
        await until(lambda: len(cluster.workers["d0"].submitted) == 2)
        assert (await delete(cluster, "mine")).json()["num_outputs"] == 2
        assert error_of(await answer) == (499, "cancelled")
        assert (await answer).headers["x-request-id"] == "mine"


async def test_a_decode_worker_that_only_prefill_knew_of_is_told_with_its_first_token() -> None:
    async with halted() as cluster:
        d1 = await cluster.add("decode", "d1", says(TEXT), status="draining", gate_at=0)
        await cluster.see("d1")
        cluster.workers["p0"].redirect = "d1"
        async with asking(cluster, STREAM, headers("mine")) as answer:
            await begun(cluster)
            await until(lambda: len(d1.submitted) == 1, what="it was handed over")
            assert (await delete(cluster, "mine")).status_code == 200
            assert last_error(await answer) == "cancelled"
        d1.gate.set()
        d1.gate.clear()  # one token
        await until(lambda: d1.cancelled == [d1.submitted[0].key], what="it is told")


async def test_the_id_that_a_client_without_one_is_given_names_its_request_too() -> None:
    async with halted() as cluster, asking(cluster, STREAM, headers("no good id")) as answer:
        await begun(cluster)
        [run] = cluster.gateway.running.of("")
        assert (await delete(cluster, run.own_id)).status_code == 200
        assert (await answer).headers["x-request-id"] == run.own_id
        assert run.own_id.startswith("req-")


async def test_one_that_no_worker_has_taken_yet_is_ended_at_once() -> None:
    async with unanswered() as (cluster, silent), asking(cluster, STREAM, headers("mine")) as answer:
        await until(lambda: len(silent.submitted) == 1)
        assert [run.state for run in cluster.gateway.running.of("")] == ["starting"]
        assert (await delete(cluster, "mine")).json()["num_output_tokens"] == 0
        assert error_of(await answer) == (499, "cancelled")


async def test_a_name_with_slashes_is_a_name() -> None:
    async with halted() as cluster, asking(cluster, STREAM, headers("a/b//c?d")) as answer:
        await begun(cluster)
        assert (await delete(cluster, "a/b//c%3Fd")).json()["id"] == "a/b//c?d"
        assert last_error(await answer) == "cancelled"


@pytest.mark.parametrize("name", ["nobody's", "x" * 200, "%00", "%C3%A4"])
async def test_what_nobody_has_is_404(name: str) -> None:
    async with halted() as cluster:
        assert error_of(await delete(cluster, name)) == (404, "request_not_found")


# ---------------------------------------------------------------- whose


async def test_a_name_ends_all_of_its_owner_and_none_of_another() -> None:
    async with halted(keys=KEYS) as cluster:
        async with (
            asking(cluster, STREAM, headers("same", "ann")) as first,
            asking(cluster, STREAM, headers("same", "ann")) as second,
            asking(cluster, STREAM, headers("same", "bob")) as another,
        ):
            await tokens_came(cluster, "ann", 2)
            await tokens_came(cluster, "bob")
            [of_bob] = cluster.gateway.running.of("bob")
            stolen = await delete(cluster, of_bob.call.request_id, "ann")
            unknown = await delete(cluster, "cmpl-unknown", "ann")
            assert error_of(stolen) == error_of(unknown) == (404, "request_not_found")
            assert stolen.text.replace(of_bob.call.request_id, "cmpl-unknown") == unknown.text
            ended = await delete(cluster, "same", "ann")
            assert (ended.json()["num_outputs"], ended.json()["num_output_tokens"]) == (2, 6)
            assert last_error(await first) == last_error(await second) == "cancelled"
            assert not another.done()
            assert error_of(await delete(cluster, "same")) == (401, "invalid_api_key")
            assert (await delete(cluster, "same", "bob")).status_code == 200
            assert last_error(await another) == "cancelled"


async def test_the_list_of_what_runs_is_of_the_callers_own() -> None:
    async with halted(keys=KEYS) as cluster, cluster.client() as client:

        async def listed(tenant: str) -> Any:
            return (await client.get("/v1/requests", headers=headers(tenant=tenant))).json()

        async with asking(cluster, STREAM | {"n": 2}, headers("mine", "ann")) as answer:
            [run] = cluster.gateway.running.of("ann")
            await until(lambda: run.num_output_tokens == 6)
            assert (await listed("ann"))["data"] == [
                {
                    "id": run.call.request_id,
                    "object": "request",
                    "request_id": "mine",
                    "created": run.call.created,
                    "state": "running",
                    "num_outputs": 2,
                    "num_output_tokens": 6,
                }
            ]
            assert await listed("bob") == {"object": "list", "data": []}
            assert (await delete(cluster, "mine", "ann")).status_code == 200
            await answer
        assert (await listed("ann"))["data"] == []


# ---------------------------------------------------------------- on which gateway


@asynccontextmanager
async def second_gateway(cluster: Cluster) -> AsyncIterator[Cluster]:
    other = Cluster(cluster._connect)
    try:
        await other.start_gateway(gateway_id="gw2")
        await other.see("p0", "d0", "gw")
        await cluster.see("gw2")
        yield other
        await nothing_left(other)
    finally:
        await other.close()


async def test_any_gateway_ends_it_wherever_it_runs() -> None:
    async with halted() as cluster, second_gateway(cluster) as other:
        async with (
            asking(cluster, STREAM, headers("mine")) as here,
            asking(other, STREAM, headers("mine")) as there,
            asking(other, STREAM, headers("another")) as third,
        ):
            await begun(cluster)
            await begun(other, 2)
            assert (await delete(cluster, "mine")).json()["num_outputs"] == 2
            assert last_error(await here) == last_error(await there) == "cancelled"
            [run] = other.gateway.running.of("")
            assert (await delete(cluster, run.call.request_id)).status_code == 200
            assert last_error(await third) == "cancelled"
            assert error_of(await delete(cluster, "mine")) == (404, "request_not_found")


async def test_while_a_gateway_does_not_answer_nothing_is_said_of_what_may_run_there() -> None:
    async with halted() as cluster:
        bus = await cluster._stack.enter_async_context(await cluster._connect("gw9"))
        silent = SilentWorker(accepts=False)
        async with await bus.serve(subjects.worker("gateway", "gw9"), silent):
            await bus.registry().put(WorkerInfo(worker_id="gw9", role="gateway", model=MODEL, status="ok"))
            await cluster.see("gw9")
            response = await delete(cluster, "mine")
        assert error_of(response) == (503, "unavailable")
        assert "gw9" in response.json()["error"]["message"]


async def test_a_gateway_that_is_gone_has_nothing() -> None:
    async with halted() as cluster:
        bus = await cluster._stack.enter_async_context(await cluster._connect("gw9"))
        await bus.registry().put(WorkerInfo(worker_id="gw9", role="gateway", model=MODEL, status="ok"))
        await cluster.see("gw9")
        assert error_of(await delete(cluster, "mine")) == (404, "request_not_found")


async def test_a_gateway_asked_by_another_tells_what_it_ended_and_its_time() -> None:
    async with halted() as cluster, asking(cluster, STREAM, headers("mine")) as answer:
        await tokens_came(cluster)
        bus = await cluster._stack.enter_async_context(await cluster._connect("gw9"))
        ask = encode(StopRequest(tenant="", name="mine"))
        subject = subjects.worker("gateway", "gw")
        first = decode_as(StopReply, await bus.request(subject, ask, timeout_s=5))
        assert first == StopReply(num_requests=1, num_outputs=1, num_output_tokens=3)
        assert decode_as(StopReply, await bus.request(subject, ask, timeout_s=5)) == StopReply()
        assert last_error(await answer) == "cancelled"


# ---------------------------------------------------------------- deadlines


async def test_a_deadline_ends_a_stream_with_an_error_event() -> None:
    async with halted() as cluster, asking(cluster, STREAM, headers(deadline_ms=1000)) as answer:
        await tokens_came(cluster)
        assert last_error(await answer) == "deadline_exceeded"
        await until(lambda: len(cluster.workers["d0"].cancelled) == 1, what="decode told")


async def test_a_deadline_ends_a_whole_answer_with_504() -> None:
    async with halted() as cluster, asking(cluster, BODY, headers(deadline_ms=1000)) as answer:
        assert error_of(await answer) == (504, "deadline_exceeded")


async def test_a_deadline_ends_one_that_no_worker_has_taken() -> None:
    async with unanswered() as (cluster, silent), asking(cluster, STREAM, headers(deadline_ms=1000)) as answer:
        await until(lambda: len(silent.submitted) == 1)
        assert error_of(await answer) == (504, "deadline_exceeded")


async def test_an_answer_within_its_deadline_is_as_without_one() -> None:
    async with serving(says(TEXT)) as cluster, asking(cluster, BODY, headers(deadline_ms=60_000)) as answer:
        assert (await answer).json()["choices"][0]["text"] == TEXT


async def test_the_deadline_of_one_that_has_ended_keeps_nothing_of_it() -> None:
    run = Running().open(Call("cmpl-1", "completion", MODEL, 0, [], terms=Terms(deadline_s=3600.0)))
    assert run._timer is not None
    run.close()
    assert run._timer.cancelled()
    assert not run.cancel(Cancelled("too late"))


# ---------------------------------------------------------------- clients that leave, or don't read


class RawClient:
    """Calls the application as a server does: leaves when it is told to, and reads only while it `reads`."""

    def __init__(self, cluster: Cluster, body: dict[str, Any], given: dict[str, str]) -> None:
        self.left, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.sent: list[Any] = []
        self._body: bytes | None = json.dumps(body).encode()
        fields = {"content-type": "application/json"} | given
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": PATH,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
        }
        self.task = asyncio.create_task(cluster.app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message.get("body"):
            await self.reads.wait()
        self.sent.append(message)


async def test_a_client_that_leaves_before_a_worker_has_taken_its_request_ends_it_at_once() -> None:
    async with unanswered() as (cluster, silent):
        client = RawClient(cluster, STREAM, {})
        await until(lambda: len(silent.submitted) == 1)
        client.left.set()
        await asyncio.wait_for(client.task, 5.0)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_in_mid_answer_ends_it(streamed: bool) -> None:
    async with halted() as cluster:
        client = RawClient(cluster, BODY | {"stream": streamed}, {})
        await tokens_came(cluster)
        client.left.set()
        await asyncio.wait_for(client.task, 5.0)
        await until(lambda: len(cluster.workers["d0"].cancelled) == 1, what="decode told")


@pytest.mark.parametrize("how", ["delete", "deadline"])
async def test_what_a_client_that_does_not_read_holds_is_free_when_its_request_is_ended(how: str) -> None:
    async with halted(keys=KEYS) as cluster:
        client = RawClient(cluster, STREAM, headers("mine", "ann", 1000 if how == "deadline" else 0))
        client.reads.clear()
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        if how == "delete":
            assert (await delete(cluster, "mine", "ann")).status_code == 200
        await nothing_left(cluster)
        await until(lambda: len(cluster.workers["d0"].cancelled) == 1, what="decode told")
        assert not client.task.done(), "its connection stands yet"
        client.reads.set()
        await asyncio.wait_for(client.task, 5.0)
        code = {"delete": "cancelled", "deadline": "deadline_exceeded"}[how]
        assert json.loads(client.sent[-1]["body"].removeprefix(b"data: "))["error"]["code"] == code
