"""Servers that are away, refuse, break off, or answer in ways of their own."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from distserve.bench.answers import THROTTLED
from distserve.bench.errors import BadOption
from distserve.errors import InvalidRequest, Unavailable
from tests.integration.bench.scripted import Asked, Reply, Script, Scripted, chunk, measured, serving, streaming


def after_the_probe(script: Script) -> Script:
    """The first streamed answer, which is the probe's, and those that don't stream are as they should be."""
    seen = 0

    async def answer(asked: Asked, reply: Reply) -> None:
        nonlocal seen
        seen += bool(asked.body.get("stream"))
        await (script if asked.body.get("stream") and seen > 1 else streaming())(asked, reply)

    return answer


@pytest.fixture
def nobody() -> Iterator[str]:
    """The URL of a port on which nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{s.getsockname()[1]}"


async def test_a_server_that_is_away_is_told_at_once(nobody: str) -> None:
    with pytest.raises(Unavailable, match=r"does not answer GET /v1/models: connection refused"):
        await measured(Scripted(streaming(), url=nobody))


async def test_a_name_that_nobody_has() -> None:
    with pytest.raises(Unavailable, match="unknown host"):
        await measured(Scripted(streaming(), url="http://no-such-host.invalid:8000"))


async def test_what_is_no_http_server() -> None:
    async def mail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail ready\r\n\r\n")
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(mail, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(Unavailable, match="not HTTP"):
            await measured(Scripted(streaming(), url=url))


@pytest.mark.parametrize(
    ("status", "hint"), [(401, "give --api-key"), (404, "see --model and --endpoint"), (503, "busy")]
)
async def test_a_first_request_that_is_refused_says_why_and_what_to_do(status: int, hint: str) -> None:
    async def refuse(asked: Asked, reply: Reply) -> None:
        await reply.document({"error": {"message": "busy"}}, status)

    async with serving(Scripted(refuse)) as server:
        with pytest.raises(Unavailable, match=hint):
            await measured(server)
        assert len([a for a in server.asked if a.method == "POST"]) == 1  # not tried with other fields


async def test_a_server_without_a_list_of_models_wants_one_named() -> None:
    async with serving(Scripted(streaming(), model="")) as server:
        with pytest.raises(BadOption, match=r"--model .*: name one"):
            await measured(server)
        assert (await measured(server, model="mine", requests=1)).sides[0].summary.num_ok == 1
        assert server.answers[-1].body["model"] == "mine"


@pytest.mark.parametrize(
    ("unknown", "dropped"),
    [
        (("continuous_usage_stats",), ["continuous_usage_stats"]),
        (("ignore_eos",), ["ignore_eos"]),
        (("max_tokens",), ["max_tokens"]),
        (("stream_options",), ["stream_options"]),
        (("temperature",), ["temperature"]),
        (("continuous_usage_stats", "temperature"), ["continuous_usage_stats", "temperature"]),
        (("ignore_eos", "max_tokens", "stream_options"), ["ignore_eos", "max_tokens", "stream_options"]),
    ],
)
async def test_fields_that_a_server_refuses_are_left_out_and_named(
    unknown: tuple[str, ...], dropped: list[str]
) -> None:
    async def strict(asked: Asked, reply: Reply) -> None:
        named = {*asked.body, *asked.body.get("stream_options", {})}
        if named & set(unknown):
            await reply.document({"error": {"message": f"unknown: {unknown}"}}, 400)
        else:
            await streaming(usage="end")(asked, reply)

    async with serving(Scripted(strict)) as server:
        document = await measured(server, concurrency=1, requests=3)
        fields = {"continuous_usage_stats", "ignore_eos", "max_tokens", "stream_options", "temperature"}
        last = server.answers[-1].body
        sent = fields & {*last, *last.get("stream_options", {})}
        assert sent | {"continuous_usage_stats"} == (fields - set(unknown)) | {"continuous_usage_stats"}
        assert ("continuous_usage_stats" in sent) == (not {"continuous_usage_stats", "stream_options"} & set(unknown))
    side = document.sides[0]
    assert side.server.dropped == dropped
    assert side.summary.num_ok == 3


@pytest.mark.parametrize(("status", "hint"), [(401, "; give --api-key"), (403, "; give another --api-key")])
async def test_a_list_of_models_that_wants_a_key_says_so(status: int, hint: str) -> None:
    async with serving(Scripted(streaming(), refuses={"/v1/models": status})) as server:
        with pytest.raises(Unavailable, match=rf"GET /v1/models with {status}: who are you{hint}"):
            await measured(server)
        assert (await measured(server, model="mine", requests=1)).sides[0].summary.num_ok == 1  # if no more is shut


async def test_a_server_that_refuses_whatever_is_left_out() -> None:
    async def refuse(asked: Asked, reply: Reply) -> None:
        await reply.document({"error": {"message": "no such thing"}}, 400)

    async with serving(Scripted(refuse)) as server:
        with pytest.raises(InvalidRequest, match="no such thing"):
            await measured(server)


# ---------------------------------------------------------------- in mid-measurement


async def test_every_way_to_fail_is_counted_by_its_kind() -> None:
    turns = iter(range(1000))

    async def script(asked: Asked, reply: Reply) -> None:
        match next(turns) % 6:
            case 0:
                await streaming()(asked, reply)
            case 1:
                await reply.begin()
                await reply.event(chunk(asked, "x", 1, 5))
                await reply.event({"error": {"message": "worker lost", "code": "worker_lost"}})
                await reply.done(said=False)
            case 2:
                await reply.begin()
                await reply.event(chunk(asked, "x", 1, 5))
                reply.cut()
            case 3:
                await reply.document({"error": {"message": "later"}}, 429, {"Retry-After": "2"})
            case 4:
                await reply.document({"error": {"message": "broken"}}, 500)
            case 5:
                await reply.begin()
                await reply.event(chunk(asked, "x", 1, 5))
                await reply.done(said=False)

    async with serving(Scripted(after_the_probe(script))) as server:
        document = await measured(server, concurrency=1, requests=30)
    summary = document.sides[0].summary
    kinds = {kind: failure.num for kind, failure in summary.failures.items()}
    lost = {kind for kind in kinds if kind in ("cut off", "connection lost")}
    assert lost, kinds
    assert sum(kinds.pop(kind) for kind in lost) == 5
    assert kinds == {"error event": 5, THROTTLED: 5, "HTTP 500": 5, "no [DONE]": 5}
    assert (summary.num_ok, summary.num_throttled, summary.num_retry_after) == (5, 5, 5)
    assert summary.failures["error event"].example == "worker lost"
    assert any("25 of 30 requests failed" in w for w in document.warnings)
    assert summary.latencies["ttft"].num == 5


async def test_an_answer_that_does_not_end_is_given_up_at_its_deadline() -> None:
    async def stall(asked: Asked, reply: Reply) -> None:
        await reply.begin()
        await reply.event(chunk(asked, "x", 1, 5))
        await asyncio.sleep(30)

    async with serving(Scripted(after_the_probe(stall))) as server:
        document = await measured(server, concurrency=2, requests=4, deadline="200ms")
    summary = document.sides[0].summary
    assert {kind: f.num for kind, f in summary.failures.items()} == {"deadline": 4}
    assert all(r.done_s - r.due_s < 1.0 for r in document.results)


async def test_a_server_that_dies_in_mid_measurement() -> None:
    server = Scripted(streaming(ttft_s=0.02))
    async with serving(server):
        task = asyncio.create_task(measured(server, rate=50.0, constant=True, requests=60, fresh=True))
        while len(server.answers) < 20:
            assert not task.done()
            await asyncio.sleep(0.005)
    document = await task
    summary = document.sides[0].summary
    assert 15 < summary.num_ok < 60
    assert summary.num_ok + sum(f.num for f in summary.failures.values()) == 60
    assert "connection refused" in summary.failures


async def test_a_connection_closed_while_it_was_idle_is_no_failure() -> None:
    """Servers close what waits too long; the request then goes over a new one."""

    async def answer_and_leave(asked: Asked, reply: Reply) -> None:
        await streaming()(asked, reply)
        reply.cut()

    async with serving(Scripted(answer_and_leave)) as server:
        document = await measured(server, rate=20.0, constant=True, requests=10)
    assert document.sides[0].summary.num_ok == 10


async def test_a_connection_closed_as_a_request_comes_is_tried_once_more_on_a_new_one() -> None:
    async with serving(Scripted(streaming(), per_connection=1)) as server:
        document = await measured(server, concurrency=1, requests=6)
    assert document.sides[0].summary.num_ok == 6
    assert len(server.answers) == 6
    assert server.num_connections == len(server.asked)


async def test_several_tokens_in_an_event_share_the_pause_before_them() -> None:
    async with serving(Scripted(streaming(gap_s=0.04, per_event=4))) as server:
        document = await measured(server, concurrency=1, requests=5, output="12")
    side = document.sides[0]
    assert side.summary.tokens_per_event == pytest.approx(4.0)
    assert side.summary.latencies["itl"].num == 5 * 8
    p50 = side.summary.latencies["itl"].quantiles["p50"].value_s
    assert p50 is not None
    assert 0.01 <= p50 < 0.02
    assert any("4.00 tokens on average; tokens that come together share" in w for w in document.warnings)


async def test_several_tokens_in_an_event_that_does_not_say_so() -> None:
    """Only the end tells how many there were: TPOT is right, ITL is between events, and the report says so."""
    async with serving(Scripted(streaming(gap_s=0.04, per_event=4, usage="end"))) as server:
        document = await measured(server, concurrency=1, requests=20, output="12")
    summary = document.sides[0].summary
    assert (summary.output_mean, summary.counted) == (12, {"events": 20})
    itl, tpot = (summary.latencies[name].quantiles["p50"].value_s for name in ("itl", "tpot"))
    assert itl is not None
    assert tpot is not None
    assert itl >= 0.04 * 0.97
    assert tpot == pytest.approx(2 * itl / 11, rel=0.3)
    assert any("ITL is between events" in w for w in document.warnings)


async def test_a_server_that_answers_all_at_once() -> None:
    async with serving(Scripted(streaming(per_event=100))) as server:
        document = await measured(server, concurrency=1, requests=5, output="12")
    summary = document.sides[0].summary
    assert (summary.num_ok, summary.output_mean, summary.latencies["itl"].num, summary.latencies["tpot"].num) == (
        5,
        12,
        0,
        0,
    )
    assert any("all tokens of an answer came at once" in w for w in document.warnings)
