"""How much may be live and on its way in, and what is refused before any work is done for it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from distserve_gateway.tokenizing import ModelTokenizer
from tests.unit.gateway.posting import CHAT, COMPLETIONS, USER, post
from tests.unit.gateway.scripted import Cluster, says, serving
from tests.unit.gateway.test_refusals import error
from tests.waiting import until


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with serving(says("x"), max_concurrent=8) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": ["a"] * 9}, COMPLETIONS),
        ({"prompt": ["a"] * 4, "n": 3}, COMPLETIONS),
        ({"prompt": "a", "n": 9}, COMPLETIONS),
        ({"messages": USER, "n": 9}, CHAT),
    ],
)
async def test_what_could_never_be_admitted_is_refused_before_it_is_tokenised(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], path: str
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(ModelTokenizer, "encode", never)
    assert "at most 8 in one request" in error(await post(cluster, path, body), 400)["message"]


async def test_more_than_may_be_live_is_503() -> None:
    async with serving(says("x y z w"), max_concurrent=2) as cluster:
        cluster.workers["d0"].gate_at = 2
        first = asyncio.create_task(post(cluster, COMPLETIONS, {"prompt": "a", "n": 2}))
        await until(lambda: len(cluster.gateway.streams) == 2)
        assert error(await post(cluster, COMPLETIONS, {"prompt": "a"}), 503)["code"] == "overloaded"
        cluster.workers["d0"].gate.set()
        assert (await first).status_code == 200
        assert (await post(cluster, COMPLETIONS, {"prompt": "a"})).status_code == 200


async def test_no_more_requests_are_on_their_way_in_than_may_be_live(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(says("x"), max_concurrent=2) as cluster:
        go_on, num_waiting = asyncio.Event(), 0
        encode = ModelTokenizer.encode_off_loop

        async def held_up(self: ModelTokenizer, *args: Any, **options: Any) -> list[list[int]]:
            nonlocal num_waiting
            num_waiting += 1
            await go_on.wait()
            return await encode(self, *args, **options)

        monkeypatch.setattr(ModelTokenizer, "encode_off_loop", held_up)
        first = [asyncio.create_task(post(cluster, COMPLETIONS, {"prompt": "a"})) for _ in range(2)]
        await until(lambda: num_waiting == 2)
        found = error(await post(cluster, COMPLETIONS, {"prompt": "a"}), 503)
        assert "2 requests are on their way in" in found["message"]
        go_on.set()
        assert [(await task).status_code for task in first] == [200, 200]
        assert error(await post(cluster, COMPLETIONS, {"prompt": ""}), 400)["param"] == "prompt"
        assert (await post(cluster, COMPLETIONS, {"prompt": "a"})).status_code == 200  # none is counted still
