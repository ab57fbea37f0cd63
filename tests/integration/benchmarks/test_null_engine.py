"""The null engine serves real requests: real bus, real gateways, real workers without a model."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.control_plane_load import Load, measure
from benchmarks.control_plane_sides import MODEL_NAME, NullCluster, Side
from benchmarks.null_engine.model import FIRST_TOKEN, make_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("null")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_model(folder / "model")


@pytest.fixture(scope="module")
def side(model: Path, folder: Path) -> Iterator[Side]:
    with NullCluster(model, folder / "logs", num_gateways=2, settings={"kv.num_blocks": 512}) as cluster:
        yield cluster.side


def stream(port: int, **body: Any) -> list[dict[str, Any]]:
    """The events of one completion."""
    asked = json.dumps({"model": MODEL_NAME, "stream": True, "ignore_eos": True} | body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", asked, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        lines = response.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize("gateway", [0, 1])
def test_each_token_is_an_event_with_its_text(side: Side, model: Path, gateway: int) -> None:
    """40 tokens: the first from prefill, the rest from decode, past a block's end."""
    events = stream(side.ports[gateway], prompt="import os, sys", max_tokens=40, timings=True)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [event["choices"][0]["text"] for event in events if event["choices"]]
    assert texts == [tokenizer.decode([FIRST_TOKEN + i]) for i in range(40)]
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]] == [None] * 39 + ["length"]
    assert events[-1]["timings"]["transport"] == "shm"  # by that name: a hand-over took place


def test_a_load_counts_every_token_of_every_gateway(side: Side) -> None:
    load = Load(num_clients=4, num_tokens=8, num_words=20, warm_s=0.0, measure_s=1.0)
    measured = asyncio.run(measure("127.0.0.1", side.ports, MODEL_NAME, load, side.pids))
    assert measured.num_failed == 0
    assert measured.answers
    assert {answer.num_events for answer in measured.answers} == {8}
    assert all(0 < answer.ttft_s <= answer.whole_s for answer in measured.answers)
    assert set(measured.cpu_s) == {"nats", "prefill-0", "decode-0", "gateway-0", "gateway-1"}
