"""What a gateway does with its predictions, and with those of the workers."""

import asyncio
from typing import Any

import pytest

from distserve.messages import SubmitReply, SubmitRequest
from distserve_gateway import dispatch
from distserve_gateway.predicting import Sent
from tests.unit.gateway.scripted import says, serving
from tests.unit.gateway.test_promises import TEXT, ask, busy_for
from tests.waiting import until


async def test_of_several_outputs_the_first_ones_plain_no_is_everyones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[float] = []
    choose = dispatch.choose

    def counted(*rest: Any) -> Any:
        asked_for.append(rest[-1])
        return choose(*rest)

    monkeypatch.setattr(dispatch, "choose", counted)
    async with serving(says(TEXT), max_local_prefill_tokens=0) as cluster:
        cluster.workers["p0"].load = busy_for(3.0)
        await cluster.gateway.watch.wait_for(lambda seen: bool(seen["p0"].load.backlog), 5.0)
        for num in (1, 2):
            response = await ask(cluster, 1000, n=64)
            assert (response.status_code, len(asked_for)) == (429, num)
            assert "try again in" in response.json()["error"]["message"]
        assert (await ask(cluster, 60_000, n=3)).status_code == 200
        assert len(asked_for) == 5
        assert cluster.workers["p0"].submitted[0].key.output_index == 0


async def test_what_a_worker_says_of_a_promised_prompt_counts_for_those_due_after_it() -> None:
    """Others have sent it work since its beat, by which it is idle."""
    async with serving(says(TEXT), max_local_prefill_tokens=0) as cluster:
        p0 = cluster.workers["p0"]
        p0.load = busy_for(0.0)
        await cluster.gateway.watch.wait_for(lambda seen: bool(seen["p0"].load.backlog), 5.0)
        submit, p0.gate_at = p0.submit, 0

        def knows(request: SubmitRequest) -> SubmitReply:
            submit(request)
            return SubmitReply(ttft_s=0.0 if request.slo.ttft_s is None else 60.0)

        p0.submit = knows  # type: ignore[method-assign]
        workers, made = cluster.gateway.workers, list[Sent]()
        prompt_sent = workers.prompt_sent

        def noted(*rest: Any) -> Sent | None:
            if (sent := prompt_sent(*rest)) is not None:
                made.append(sent)
            return sent

        workers.prompt_sent = noted  # type: ignore[method-assign]
        running = [asyncio.create_task(ask(cluster, ttft_ms)) for ttft_ms in (None, 61_000)]
        await until(lambda: any(sent.ready_at > 0 for sent in made), what="told")
        await until(lambda: len(cluster.workers["p0"].submitted) == 2)
        [told] = [sent for sent in made if sent.ready_at > 0]
        assert 0 < told.due - told.ready_at <= 1.0
        p0.gate.set()
        assert [(await task).status_code for task in running] == [200, 200]
        assert told.done
