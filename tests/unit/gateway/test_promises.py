"""Requests with a promised first token: what workers are told of it, who is asked, and how soon it is refused."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from distserve.bus import subjects
from distserve.errors import BusTimeout, DistServeError, Draining, NoWorker, Overloaded, SloUnattainable
from distserve.messages import Backlog, Load, PassSpeed, SubmitReply, SubmitRequest, WorkerInfo
from distserve_gateway import dispatch, tries
from distserve_gateway.calls import Terms
from distserve_gateway.route import Route
from tests.unit.gateway.scripted import LAYOUT, MODEL, Cluster, ScriptedWorker, memory_cluster, names, says, serving
from tests.unit.gateway.streamed import SilentWorker
from tests.unit.gateway.test_operations import samples
from tests.waiting import until

TEXT = "one two three"
NEVER_S = 3600.0
PROMPT = list(range(200, 320))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """p0, p1 and d0; of equals p0 is asked first."""
    async with serving(says(TEXT)) as cluster:
        await cluster.add("prefill", "p1", says(TEXT))
        await cluster.see("p1")
        yield cluster
        assert cluster.gateway.workers.in_flight == {}
        assert cluster.gateway.workers.prefilling == {}


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pauses doesn't come back within a test."""
    monkeypatch.setattr(dispatch, "PAUSE_S", NEVER_S)
    monkeypatch.setattr(tries, "PAUSE_S", 0.0)


async def ask(cluster: Cluster, ttft_ms: float | None = 5000, **fields: Any) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 20, "ttft_slo_ms": ttft_ms} | fields
    async with cluster.client() as client:
        return await client.post("/v1/completions", json=body)


def busy_for(wait_s: float, speed: PassSpeed = PassSpeed(token_s=0.001)) -> Load:
    steps = [Backlog(due_s, "normal", wait_s) for due_s in (0.001, math.inf)]
    return Load(free_blocks=100, total_blocks=100, speed=speed, pass_tokens=256, backlog=steps)


def late(retry_after_s: float | None) -> SloUnattainable:
    fields = {} if retry_after_s is None else {"retry_after_s": retry_after_s}
    return SloUnattainable(f"late, {retry_after_s}", ttft_s=9.0, slo_s=5.0, **fields)


def refuses(worker: ScriptedWorker, error: DistServeError) -> list[SubmitRequest]:
    """What it is asked."""
    asked: list[SubmitRequest] = []

    def submit(request: SubmitRequest) -> SubmitReply:
        asked.append(request)
        raise error

    worker.submit = submit  # type: ignore[method-assign]
    return asked


@asynccontextmanager
async def silent_prefill(load: Load, *, accepts: bool) -> AsyncIterator[tuple[Cluster, SilentWorker]]:
    """p0 never answers but for accepting, and has had one heartbeat; d0 is as ever."""
    cluster, silent = memory_cluster(registry_ttl_s=60.0), SilentWorker(accepts=accepts)
    try:
        await cluster.add("decode", "d0", says(TEXT))
        bus = await cluster._stack.enter_async_context(await cluster._connect("p0"))
        await cluster._stack.enter_async_context(await bus.serve(subjects.worker("prefill", "p0"), silent))
        info = WorkerInfo(worker_id="p0", role="prefill", model=MODEL, status="ok", layout=LAYOUT, load=load)
        await bus.registry().put(info)
        await cluster.start_gateway(
            submit_timeout_s=NEVER_S, reply_timeout_s=NEVER_S, silence_s=60.0, ttl_s=60.0, max_local_prefill_tokens=0
        )
        await cluster.see("p0", "d0")
        yield cluster, silent
    finally:
        await cluster.close()


async def test_workers_are_told_the_terms_and_what_is_left_of_them(cluster: Cluster) -> None:
    asked = refuses(cluster.workers["p0"], Overloaded("busy"))
    response = await ask(cluster, 5000, priority="batch", tpot_slo_ms=50, deadline_ms=2000)
    assert response.status_code == 200, response.text
    [first], [second] = asked, cluster.workers["p1"].submitted
    for request in (first, second):
        assert (request.slo.priority, request.slo.tpot_s) == ("batch", 0.05)
        assert request.deadline_s is not None
        assert 0 < request.deadline_s <= 2
        assert request.may_queue is False
    assert first.slo.ttft_s is not None
    assert second.slo.ttft_s is not None
    assert 0 < second.slo.ttft_s < first.slo.ttft_s < 5


async def test_without_terms_nothing_is_promised_and_the_gateways_limit_holds(cluster: Cluster) -> None:
    assert (await ask(cluster, None)).status_code == 200
    assert (await ask(cluster, None, deadline_ms=86_000_000)).status_code == 200
    for request in cluster.workers["p0"].submitted:
        assert (request.slo.ttft_s, request.slo.tpot_s, request.slo.priority) == (None, None, "normal")
        assert request.deadline_s is not None
        assert 590 < request.deadline_s <= 600


@pytest.mark.usefixtures("no_pauses")
async def test_one_that_would_be_late_is_passed_over_at_once(cluster: Cluster) -> None:
    asked = refuses(cluster.workers["p0"], late(2.0))
    response = await ask(cluster)
    assert response.json()["choices"][0]["text"] == TEXT
    assert len(asked) == 1
    [request] = cluster.workers["p1"].submitted
    assert request.key.attempt == 1
    assert cluster.workers["p0"].cancelled == []  # it has said that it did not take it


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("others", "retry_after_s"),
    [(late(0.25), 0.25), (late(None), 1.5), (late(7.0), 1.5), (Overloaded("busy", retry_after_s=0.1), 1.5)],
)
async def test_where_all_refuse_the_soonest_is_told_and_nobody_is_asked_twice(
    cluster: Cluster, others: DistServeError, retry_after_s: float
) -> None:
    asked = refuses(cluster.workers["p0"], late(1.5)), refuses(cluster.workers["p1"], others)
    response = await ask(cluster)
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "slo_unattainable"
    assert response.headers["retry-after"] == str(math.ceil(retry_after_s))
    assert response.headers["retry-after-ms"] == str(round(1000 * retry_after_s))
    assert [len(requests) for requests in asked] == [1, 1]
    assert len(cluster.gateway.streams) == 0
    found = await samples(cluster)
    assert found["distserve_gateway_slo_refusals_total{by=worker}"] == 1
    assert found["distserve_gateway_slo_refusals_total{by=gateway}"] == 0


async def test_of_several_outputs_one_refusal_refuses_all(cluster: Cluster) -> None:
    submit = cluster.workers["p0"].submit

    def all_but_one(request: SubmitRequest) -> SubmitReply:
        if request.key.output_index == 2:
            raise late(1.0)
        return submit(request)

    cluster.workers["p0"].gate_at = 0
    cluster.workers["p0"].submit = all_but_one  # type: ignore[method-assign]
    refuses(cluster.workers["p1"], late(1.0))
    assert (await ask(cluster, n=3)).status_code == 429
    assert len(cluster.gateway.streams) == 0
    taken = {request.key for request in cluster.workers["p0"].submitted}
    await until(lambda: taken <= set(cluster.workers["p0"].cancelled), what="those that were taken are let go of")


async def test_a_promised_request_waits_for_a_full_queue_no_longer_than_its_promise() -> None:
    async with serving(says(TEXT), submit_timeout_s=NEVER_S) as cluster:
        p0 = cluster.workers["p0"]
        p0.refusal = Overloaded("256 sequences wait here", retry_after_s=1.0)
        unpromised = asyncio.create_task(ask(cluster, None))
        response = await ask(cluster, 300)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "slo_unattainable"
        assert "256 sequences wait here" in response.json()["error"]["message"]
        assert response.headers["retry-after-ms"] == "1000"
        assert not unpromised.done()
        p0.refusal = None
        assert (await unpromised).status_code == 200


TERMS_S = 0.3
ROUTE = Route("prefill", "p0", "d0")


def tried(ttft_s: float = TERMS_S) -> tries.Tries:
    """From time 0 on."""
    return tries.Tries(MODEL, Terms(ttft_s=ttft_s), due=ttft_s, give_up=5.0)


@pytest.mark.parametrize(
    ("refusal", "ttft_s", "is_ours"),
    [
        (Overloaded("full"), TERMS_S, True),
        (Overloaded("full"), 0.01, True),
        (BusTimeout("silent"), TERMS_S, True),
        (BusTimeout("silent"), 0.01, False),
        (None, TERMS_S, False),
    ],
)
@pytest.mark.parametrize("also_late", [True, False])
def test_a_promise_whose_time_went_by_says_whether_workers_were_full_or_silent(
    refusal: DistServeError | None, ttft_s: float, is_ours: bool, also_late: bool
) -> None:
    """For the breaker: a 429 by prediction is no late first token, this is one."""
    under_way = tried(ttft_s)
    if refusal is not None:
        under_way.refused(ROUTE, refusal)
    if also_late:
        under_way.refused(ROUTE, late(2.0))
    with pytest.raises(SloUnattainable) as told:
        under_way.check(ttft_s)
    assert told.value.fields["overdue"] is is_ours


def test_what_was_full_until_it_was_too_late_is_overdue_too() -> None:
    under_way = tried()
    assert "overdue" not in under_way.soonest(late(1.0)).fields, "late from the start"
    under_way.refused(ROUTE, Overloaded("full"))
    under_way.again(NoWorker("all refused"), 0.0)
    assert under_way.soonest(late(1.0)).fields["overdue"] is True
    under_way.refused(ROUTE, late(1.0))
    with pytest.raises(SloUnattainable) as told:
        under_way.again(NoWorker("all refused"), 0.1)
    assert told.value.fields["overdue"] is True


def test_one_that_can_not_pause_any_more_is_overdue() -> None:
    under_way = tried()
    under_way.refused(ROUTE, Overloaded("full"))
    with pytest.raises(SloUnattainable, match="every worker has refused") as told:
        under_way.again(NoWorker("all refused"), TERMS_S - 0.01)
    assert told.value.fields["overdue"] is True


async def test_a_worker_that_does_not_answer_is_waited_for_no_longer_than_the_promise() -> None:
    async with silent_prefill(Load(), accepts=False) as (cluster, silent):
        response = await ask(cluster, 200)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "slo_unattainable")
        await until(lambda: silent.cancelled == silent.submitted != [], what="p0 told to forget it")
        assert cluster.gateway.workers.beats["p0"].sent == {}


async def test_what_is_plainly_late_is_refused_without_a_word_to_anybody() -> None:
    async with serving(says(TEXT), max_local_prefill_tokens=0) as cluster:
        p0 = cluster.workers["p0"]
        p0.load = busy_for(3.0)
        await cluster.gateway.watch.wait_for(lambda seen: bool(seen["p0"].load.backlog), 5.0)
        sent: list[str] = []
        request, publish = cluster.gateway_bus.request, cluster.gateway_bus.publish

        def noted(way: Any) -> Any:
            async def send(subject: str, data: bytes, **options: Any) -> Any:
                sent.append(subject)
                return await way(subject, data, **options)

            return send

        cluster.gateway_bus.request, cluster.gateway_bus.publish = noted(request), noted(publish)
        response = await ask(cluster, 1000)
        assert response.status_code == 429
        assert 500 < float(response.headers["retry-after-ms"]) <= 2100  # less what the beat is old
        assert "try again in" in response.json()["error"]["message"]
        assert {subjects.worker("prefill", "p0"), subjects.worker("decode", "d0")}.isdisjoint(sent)
        assert p0.submitted == []
        found = await samples(cluster)
        assert found["distserve_gateway_slo_refusals_total{by=gateway}"] == 1
        assert found["distserve_gateway_requests_total{kind=completion,outcome=slo_unattainable}"] == 1
        assert (await ask(cluster, 60_000)).status_code == 200
        assert (await ask(cluster, None)).status_code == 200


async def test_what_was_sent_since_the_beat_makes_the_next_one_late() -> None:
    """Each prompt takes 0.4 s of 0.9: the third in a row would be late, whatever the one beat says."""
    async with silent_prefill(busy_for(0.0, PassSpeed(token_s=0.4 / len(PROMPT))), accepts=True) as (cluster, silent):
        running = []
        for num in (1, 2):
            running.append(asyncio.create_task(ask(cluster, 900, prompt=PROMPT)))
            await until(lambda num=num: len(silent.submitted) == num)
        assert (await ask(cluster, 900, prompt=PROMPT)).status_code == 429
        assert len(silent.submitted) == 2
        cluster.gateway.streams.fail_all(Draining("gone"))  # what is let go of is not waited for
        assert [(await task).status_code for task in running] == [503, 503]
        running = [asyncio.create_task(ask(cluster, 900, prompt=PROMPT))]
        await until(lambda: len(silent.submitted) == 3)
        cluster.gateway.streams.fail_all(Draining("gone"))
        await asyncio.gather(*running)


async def test_a_favour_refused_for_the_promise_goes_to_prefill() -> None:
    async with serving(says(TEXT)) as cluster:
        d0, index = cluster.workers["d0"], cluster.gateway.kv.index
        await d0.blocks.store(*names(PROMPT))
        await until(lambda: index.holders.get("d0", {}) == d0.blocks.numbers, what="the events")
        asked = refuses(d0, late(1.0))
        response = await ask(cluster, prompt=PROMPT)
        assert response.json()["choices"][0]["text"] == TEXT
        assert [request.decode_worker for request in asked] == [None]
        assert [request.decode_worker for request in cluster.workers["p0"].submitted] == ["d0"]


async def test_decode_serves_alone_as_soon_as_nobody_is_there_for_prefill() -> None:
    """Before the registry knows of it, also."""
    cluster = memory_cluster(registry_ttl_s=60.0)
    try:
        await cluster.add("decode", "d0", says(TEXT))
        p0 = await cluster.add("prefill", "p0", says(TEXT))
        await cluster.start_gateway(max_local_prefill_tokens=0)
        await cluster.see("p0", "d0")
        await p0.die()
        for prompt in ("a", PROMPT):
            assert (await ask(cluster, None, prompt=prompt)).json()["choices"][0]["text"] == TEXT
            request = cluster.workers["d0"].submitted[-1]
            assert (request.decode_worker, request.may_queue) == (None, True)
        assert "p0" in cluster.gateway.watch.snapshot
        found = await samples(cluster)
        assert found["distserve_gateway_routes_total{kind=alone}"] == 2
        spare = await cluster.add("prefill", "p1", says(TEXT))
        await cluster.see("p1")
        assert (await ask(cluster, None)).status_code == 200
        assert [(request.decode_worker, request.may_queue) for request in spare.submitted] == [("d0", False)]
    finally:
        await cluster.close()


async def test_alone_and_refused_it_waits_for_room_as_ever() -> None:
    cluster = memory_cluster()
    try:
        d0 = await cluster.add("decode", "d0", says(TEXT), refusal=Overloaded("no room", retry_after_s=1.0))
        await cluster.start_gateway(submit_timeout_s=0.3)
        await cluster.see("d0")
        response = await ask(cluster, None)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert "no room" in response.json()["error"]["message"]
        d0.refusal = None
        assert (await ask(cluster, None)).status_code == 200
    finally:
        await cluster.close()
