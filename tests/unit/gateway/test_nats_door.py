"""The front door on NATS, over a memory bus: the same answers and the same errors as over HTTP."""

import asyncio
from typing import Any, Self

import msgspec
import pytest

from distserve.api_keys import ApiKey, hashed
from distserve.bus import subjects
from distserve.bus.base import Bus, Delivery
from distserve_gateway.askers import Askers
from distserve_gateway.nats_door import NatsDoor
from distserve_gateway.output import Output
from tests.unit.gateway.scripted import TOKENIZER, Cluster, memory_cluster, says, serving
from tests.waiting import until

TEXT = "The capital of France is Paris. 你好"
SUBJECT = subjects.requests("tiny")
CANCEL = subjects.cancel("tiny")


async def ask(bus: Bus, body: Any) -> list[Any]:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return [msgspec.json.decode(m) async for m in bus.stream(SUBJECT, data, timeout_s=5)]


async def asker(cluster: Cluster) -> Bus:
    bus: Bus = await cluster._stack.enter_async_context(await cluster._connect("asker"))
    return bus


async def test_a_completion_streams_by_default_in_numbered_messages() -> None:
    async with serving(says(TEXT)) as cluster:
        messages = await ask(await asker(cluster), {"prompt": "a", "max_tokens": 99})
        assert [m["index"] for m in messages] == list(range(len(messages)))
        assert len(messages) > 3
        assert "".join(m["choices"][0]["text"] for m in messages) == TEXT
        assert messages[-1]["choices"][0]["finish_reason"] == "stop"


async def test_messages_make_it_a_chat_and_chunks_are_those_of_http() -> None:
    async with serving(says(TEXT)) as cluster:
        body = {"messages": [{"role": "user", "content": "q"}], "stream_options": {"include_usage": True}}
        messages = await ask(await asker(cluster), body)
        assert messages[0]["object"] == "chat.completion.chunk"
        assert messages[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        said = "".join(c["delta"].get("content", "") for m in messages for c in m["choices"])
        assert said == TEXT
        assert messages[-1]["usage"]["completion_tokens"] == len(TOKENIZER.encode(TEXT, add_special_tokens=False)) + 1


async def test_the_traffic_class_goes_to_the_worker() -> None:
    async with serving(says(TEXT)) as cluster:
        bus = await asker(cluster)
        for body in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "q"}]}):
            for given in ({}, {"traffic_class": "background"}, {"traffic_class": None}):
                await ask(bus, body | given)
        classes = [request.traffic_class for request in cluster.workers["p0"].submitted]
        assert classes == ["prefill", "background", "prefill"] * 2


async def test_stream_false_is_one_message_with_the_whole() -> None:
    async with serving(says(TEXT)) as cluster:
        [whole] = await ask(await asker(cluster), {"prompt": "a", "max_tokens": 99, "stream": False})
        assert whole["index"] == 0
        assert whole["choices"][0]["text"] == TEXT


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"prompt": "a", "temperature": True}, "invalid_request", "temperature"),
        ({"prompt": "a", "model": "other"}, "model_not_found", "model"),
        ({"messages": [], "model": "tiny"}, "invalid_request", "messages"),
        ({"prompt": [5] * 300}, "context_length_exceeded", "prompt"),
        ({"prompt": "a", "suffix": "b"}, "unsupported_feature", "suffix"),
        ({"prompt": "a", "traffic_class": "CS6"}, "invalid_request", "traffic_class"),
        (b"no json", "invalid_request", None),
        (b"[]", "invalid_request", None),
    ],
)
async def test_errors_are_those_of_http_and_then_the_end(body: Any, code: str, param: str | None) -> None:
    async with serving(says(TEXT)) as cluster:
        [message] = await ask(await asker(cluster), body)
        assert message["index"] == 0
        assert message["error"]["code"] == code
        assert message["error"]["param"] == param
        async with cluster.client() as client:
            path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
            data = body if isinstance(body, bytes) else msgspec.json.encode(body)
            response = await client.post(path, content=data, headers={"content-type": "application/json"})
        assert response.json()["error"] == message["error"]


async def test_no_worker_is_an_error_message() -> None:
    cluster = memory_cluster()
    try:
        await cluster.start_gateway()
        [message] = await ask(await asker(cluster), {"prompt": "a"})
        assert message["error"]["code"] == "no_worker"
    finally:
        await cluster.close()


async def test_an_error_in_mid_answer_is_a_message_after_the_tokens() -> None:
    async with serving(says(TEXT), silence_s=0.1) as cluster:
        cluster.workers["d0"].gate_at = 3
        task = asyncio.create_task(ask(await asker(cluster), {"prompt": "a", "max_tokens": 99}))
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        await cluster.workers["d0"].die()
        *tokens, last = await task
        assert tokens
        assert last["error"]["code"] == "worker_lost"
        assert last["index"] == len(tokens)


async def test_a_request_without_reply_subject_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(says(TEXT)) as cluster:
        bus = await asker(cluster)
        await bus.publish(SUBJECT, b'{"prompt": "a"}')
        await until(lambda: "no reply subject" in caplog.text)
        assert cluster.workers["p0"].submitted == []


async def test_an_answer_larger_than_a_message_may_be_is_an_error_message() -> None:
    cluster = memory_cluster(max_payload_bytes=12_000)
    try:
        await cluster.add("decode", "d0", says("x " * 60))
        await cluster.add("prefill", "p0", says("x " * 60))
        await cluster.start_gateway()
        await cluster.see("p0", "d0")
        body = {"prompt": [300], "max_tokens": 120, "logprobs": 20, "stream": False}
        [message] = await ask(await asker(cluster), body)
        assert message["error"]["code"] == "payload_too_large"
        assert "12000" in message["error"]["message"].replace(",", "").replace("_", "")
    finally:
        await cluster.close()


async def test_an_answer_past_the_limit_or_with_a_fault_of_our_own_ends_with_an_error_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(says(TEXT)) as cluster:
        bus = await asker(cluster)
        cluster.workers["d0"].gate_at = 3
        door = NatsDoor(bus, cluster.gateway.pipeline, Askers(bus, "gw"), limit_s=0.2)
        got: list[Delivery] = []

        async def callback(delivery: Delivery) -> None:
            got.append(delivery)

        async with await bus.subscribe("answers.here", callback):
            body = b'{"prompt": "a", "max_tokens": 99, "stream": true}'
            await door._on_request(Delivery(SUBJECT, body, "answers.here"))
            await until(lambda: bool(got) and not got[-1].data, what="the end")
            assert msgspec.json.decode(got[-2].data)["error"]["code"] == "deadline_exceeded"
            got.clear()
            monkeypatch.setattr(Output, "feed", broken)
            await door._on_request(Delivery(SUBJECT, body, "answers.here"))
            await until(lambda: bool(got) and not got[-1].data, what="the end")
        assert msgspec.json.decode(got[-2].data)["error"]["code"] == "internal_error"
        assert b"secret" not in got[-2].data
        assert "secret detail" in caplog.text
        await until(lambda: len(cluster.gateway.streams) == 0)


def broken(*args: Any) -> None:
    raise RuntimeError("secret detail")


async def test_a_draining_gateway_takes_nothing_from_nats() -> None:
    async with serving(says(TEXT)) as cluster:
        bus = await asker(cluster)
        await cluster.gateway.drain(1.0)
        with pytest.raises(Exception, match="requests"):
            await ask(bus, {"prompt": "a"})


# ---------------------------------------------------------------- ended before their time


class Asker:
    """Listens to one answer, and stops when it is told to."""

    def __init__(self, bus: Bus, subject: str = "answers.here") -> None:
        self.bus, self.subject = bus, subject
        self.got: list[Delivery] = []

    async def _take(self, delivery: Delivery) -> None:
        self.got.append(delivery)

    async def ask(self, body: Any, headers: dict[str, str] | None = None) -> Self:
        self.subscription = await self.bus.subscribe(self.subject, self._take)
        await self.bus.publish(SUBJECT, msgspec.json.encode(body), reply=self.subject, headers=headers)
        return self

    @property
    def messages(self) -> list[Any]:
        return [msgspec.json.decode(delivery.data) for delivery in self.got if delivery.data]

    @property
    def ended(self) -> bool:
        return bool(self.got) and not self.got[-1].data


async def cancel(bus: Bus, body: Any, headers: dict[str, str] | None = None) -> Any:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return msgspec.json.decode(await bus.request(CANCEL, data, timeout_s=5, headers=headers))


async def nothing_runs(cluster: Cluster) -> None:
    await until(lambda: len(cluster.gateway.running) == 0, what="no request is registered")
    assert len(cluster.gateway.streams) == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("by", ["answer's id", "own id"])
async def test_a_word_on_the_cancel_subject_ends_a_request(by: str, stream: bool) -> None:
    async with serving(says(TEXT)) as cluster:
        bus = await asker(cluster)
        cluster.workers["d0"].gate_at = 3
        one = await Asker(bus).ask({"prompt": "a", "max_tokens": 99, "stream": stream}, {"X-Request-Id": "mine"})
        await until(lambda: [r.num_output_tokens for r in cluster.gateway.running.of("")] == [3], what="tokens came")
        [run] = cluster.gateway.running.of("")
        name = run.call.request_id if by == "answer's id" else "mine"
        assert await cancel(bus, {"id": name}) == {
            "id": name,
            "object": "request",
            "cancelled": True,
            "num_outputs": 1,
            "num_output_tokens": 3,
        }
        await until(lambda: one.ended, what="the asker is told")
        assert one.messages[-1]["error"]["code"] == "cancelled"
        await until(lambda: len(cluster.workers["d0"].cancelled) == 1, what="decode told")
        await nothing_runs(cluster)
        assert (await cancel(bus, {"id": name}))["error"]["code"] == "request_not_found"


async def test_a_word_that_wants_no_answer_ends_a_request_too() -> None:
    async with serving(says(TEXT)) as cluster:
        bus = await asker(cluster)
        cluster.workers["d0"].gate_at = 3
        one = await Asker(bus).ask({"prompt": "a", "max_tokens": 99}, {"X-Request-Id": "mine"})
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        await bus.publish(CANCEL, b'{"id": "mine"}')
        await until(lambda: one.ended, what="the asker is told")
        await nothing_runs(cluster)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"id": 7}', b'"mine"'])
async def test_a_word_that_names_nothing_is_told_so(body: bytes) -> None:
    async with serving(says(TEXT)) as cluster:
        answer = await cancel(await asker(cluster), body)
        assert answer["error"]["code"] == "invalid_request"


async def test_with_keys_only_its_owner_ends_a_request() -> None:
    keys = tuple(ApiKey(name=name, sha256=hashed(name)) for name in ("ann", "bob"))
    async with serving(says(TEXT), keys=keys) as cluster:
        bus = await asker(cluster)
        cluster.workers["d0"].gate_at = 3
        given = {"X-Request-Id": "mine", "Authorization": "Bearer ann"}
        one = await Asker(bus).ask({"prompt": "a", "max_tokens": 99}, given)
        await until(lambda: len(cluster.workers["d0"].submitted) == 1)
        assert (await cancel(bus, {"id": "mine"}))["error"]["code"] == "invalid_api_key"
        bobs = await cancel(bus, {"id": "mine"}, {"Authorization": "Bearer bob"})
        assert bobs["error"]["code"] == "request_not_found"
        assert not one.ended
        assert (await cancel(bus, {"id": "mine"}, {"Authorization": "Bearer ann"}))["cancelled"]
        await until(lambda: one.ended, what="the asker is told")


async def test_an_asker_that_listens_no_more_is_noticed_with_the_next_message_to_it() -> None:
    async with serving(says(TEXT)) as cluster:
        bus, d0 = await asker(cluster), cluster.workers["d0"]
        d0.gate_at = 3
        gone = await Asker(bus).ask({"prompt": "a", "max_tokens": 99}, {"X-Request-Id": "gone"})
        stays = await Asker(bus, "answers.there").ask({"prompt": "a", "max_tokens": 99})
        await until(lambda: [r.num_output_tokens for r in cluster.gateway.running.of("")] == [3, 3], what="tokens came")
        [run] = [run for run in cluster.gateway.running.of("") if run.own_id == "gone"]
        await gone.subscription.close()
        d0.gate.set()
        d0.gate.clear()  # one token more, of each
        await until(lambda: [key.request_id for key in d0.cancelled] == [run.call.request_id], what="decode told")
        assert not stays.ended
        d0.gate.set()
        await until(lambda: stays.ended, what="the other's answer is complete")
        assert "".join(m["choices"][0]["text"] for m in stays.messages) == TEXT
        await nothing_runs(cluster)


async def test_a_deadline_in_a_header_ends_an_answer_whose_asker_can_not_be_noticed() -> None:
    async with serving(says(TEXT)) as cluster:
        bus = await asker(cluster)
        cluster.workers["p0"].gate_at = 0
        one = await Asker(bus).ask({"prompt": "a", "max_tokens": 99}, {"X-Deadline-Ms": "1000"})
        await until(lambda: len(cluster.workers["p0"].submitted) == 1)
        await one.subscription.close()
        await until(lambda: len(cluster.workers["p0"].cancelled) == 1, what="prefill told")
        await nothing_runs(cluster)
