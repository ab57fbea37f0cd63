"""One trace from the HTTP request to the last token, through every process of a cluster."""

import json
import random
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, wait_until
from tests.otlp import Received, Receiver
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROOT = "text_completion tiny"
CALLER = "b7ad6b7169203331"
NUM_TOKENS = 24
NUM_TURNS = 3
PARTS = {
    ROOT,
    "admission",
    "send prefill",
    "process prefill",
    "queue",
    "prefill chunk",
    "handoff",
    "lease",
    "process decode",
    "first step",
    "decode",
}
ALONE = {ROOT, "admission", "send decode", "process decode", "queue", "prefill chunk", "first step", "decode"}
INSIDE = {  # whose child each is
    "admission": ROOT,
    "send prefill": ROOT,
    "process prefill": "send prefill",
    "queue": "process prefill",
    "prefill chunk": "process prefill",
    "handoff": "process prefill",
    "lease": "handoff",
    "process decode": "handoff",
    "first step": "process decode",
    "decode": "process decode",
    "process lookup": "kvstore lookup",
    "process fetch": "kvstore fetch",
    "process offer": "kvstore offer",
}
SERVICE = {
    ROOT: "gateway",
    "send prefill": "gateway",
    "process prefill": "prefill",
    "prefill chunk": "prefill",
    "handoff": "prefill",
    "lease": "decode",
    "process decode": "decode",
    "decode": "decode",
}
KINDS = {ROOT: "server", "handoff": "client", "lease": "consumer", "decode": "internal"}


@dataclass
class Told:
    """All that a receiver got of a cluster whose ratio is 0, once every process has ended. Trace ids by what became of
    the request: `turns` of a conversation were sampled by their caller."""

    receiver: Receiver
    turns: list[str]
    answers: list[dict[str, Any]]
    missed: str
    good: str
    alone: str  # without a prefill worker
    log: list[dict[str, Any]]  # the gateway's lines


@pytest.fixture(scope="module")
def told(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    rng = random.Random(1)

    def tokens(num: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(num)]

    def ask(prompt: list[int], flags: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        trace_id = f"{rng.getrandbits(128):032x}"
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "session_id": "talk"} | fields
        headers = {"content-type": "application/json", "traceparent": f"00-{trace_id}-{CALLER}-{flags}"}
        request = urllib.request.Request(c.url + "/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return trace_id, json.load(response)

    with Receiver() as receiver:
        settings = {
            "telemetry.otlp_endpoint": receiver.url,
            "telemetry.trace_ratio": 0,
            "telemetry.log_format": "json",
            "telemetry.log_level": "debug",
            "kvstore.min_fetch_blocks": 1,
            "decode.max_local_prefill_tokens": 0,
        }
        with Cluster(tiny_llama, tmp_path_factory.mktemp("traces"), kvstore=[{}], settings=settings) as c:
            prompt, turns, answers = tokens(70), [], []
            for _ in range(NUM_TURNS):
                trace_id, answer = ask(prompt, "03")
                turns.append(trace_id)
                answers.append(answer)
                prompt = prompt + answer["choices"][0]["token_ids"] + tokens(40)
                receiver.wait_for(lambda r, id_=trace_id: {s.name for s in r.spans(id_)} >= PARTS, 30)  # type: ignore[misc]
            good, _ = ask(tokens(70), "00")
            missed, _ = ask(tokens(70), "00", tpot_slo_ms=0.001)
            receiver.wait_for(lambda r: {s.name for s in r.spans(missed)} >= PARTS, 30)
            c["prefill-0"].terminate()
            wait_until(lambda: "prefill-0" not in c.registry(), 10, "prefill has left")
            alone, _ = ask(tokens(70), "01")
            receiver.wait_for(lambda r: {s.name for s in r.spans(alone)} >= ALONE, 30)
            c.wait_until_idle()
        log = [json.loads(line) for line in c["gateway-0"].log.read_text().splitlines() if line.startswith("{")]
        yield Told(receiver, turns, answers, missed, good, alone, log)


def test_it_is_one_tree_without_orphans(told: Told) -> None:
    for trace_id in [*told.turns, told.missed]:
        root = told.receiver.tree(trace_id)
        assert (root.span.name, root.span.parent_id) == (ROOT, CALLER)
        for node in root:
            for child in node.children:
                expected = INSIDE.get(child.span.name, node.span.name)
                assert node.span.name == expected, f"{child.span.name} is inside {node.span.name}\n{root.picture()}"


def test_a_decode_worker_that_does_both_phases_has_them_in_its_stay(told: Told) -> None:
    root = told.receiver.tree(told.alone)
    assert root.one("process decode") in root.one("send decode").children
    stay = {child.span.name for child in root.one("process decode").children}
    assert stay >= {"queue", "prefill chunk", "first step", "decode"}
    assert root.one("send decode").span.attributes["distserve.route.kind"] == "alone"
    assert {node.span.service for node in root} >= {"gateway", "decode"}


def test_every_service_is_in_it_and_says_who_it_is(told: Told) -> None:
    spans = told.receiver.spans(told.turns[-1])
    assert {span.service for span in spans} == {"gateway", "prefill", "decode", "kvstore"}
    for span in spans:
        assert span.service == SERVICE.get(span.name, span.service)
        assert span.resource["service.instance.id"] == f"{span.service}-0"
        assert span.kind == KINDS.get(span.name, span.kind)


def test_parts_lie_within_what_they_are_parts_of(told: Told) -> None:
    """But for what goes on behind a message: it ends when it does."""
    for trace_id in told.turns:
        for node in told.receiver.tree(trace_id):
            for child in node.children:
                span, parent = child.span, node.span
                assert span.end >= span.start
                assert span.start >= parent.start - 0.01, f"{span.name} before {parent.name}"
                if span.service == parent.service and "kvstore" not in span.name:
                    assert span.end <= parent.end + 0.01, f"{span.name} after {parent.name}\n{node.picture()}"


def test_what_the_root_says_is_what_the_client_got(told: Told) -> None:
    for trace_id, answer in zip(told.turns, told.answers, strict=True):
        said = told.receiver.tree(trace_id).span.attributes
        usage = answer["usage"]
        assert said["gen_ai.response.id"] == answer["id"]
        assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == NUM_TOKENS
        assert said["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert said["gen_ai.response.finish_reasons"] == ["length"]
        assert (said["distserve.outcome"], said["http.response.status_code"]) == ("ok", 200)


def test_the_workers_say_what_they_did(told: Told) -> None:
    root = told.receiver.tree(told.turns[0])
    chunks = [node.span.attributes for node in root.all("prefill chunk")]
    assert sum(chunk["distserve.chunk.tokens"] for chunk in chunks) == 70
    assert chunks[0]["distserve.batch.sequences"] >= 1
    moved = root.one("handoff").span.attributes
    assert moved["distserve.transfer.bytes"] > 0
    assert moved["distserve.transfer.transport"] in ("shm", "tcp")
    assert moved["distserve.transfer.wait_s"] >= 0
    assert moved["distserve.transfer.wire_s"] > 0
    decoded = root.one("decode").span.attributes
    assert (
        NUM_TOKENS - 2 <= decoded["distserve.decode.tokens"] <= NUM_TOKENS
    )  # one may count from the first to the last
    assert decoded["distserve.decode.itl_p50_s"] <= decoded["distserve.decode.itl_p99_s"]


def test_a_later_turn_shows_where_its_prefix_came_from(told: Told) -> None:
    later = [node for trace_id in told.turns[1:] for node in told.receiver.tree(trace_id)]
    asked = [node for node in later if node.span.name in ("kvstore lookup", "kvstore fetch")]
    assert asked
    assert any(child.span.service == "kvstore" for node in asked for child in node.children)


def test_a_request_outside_the_ratio_is_dropped_unless_it_missed_a_promise(told: Told) -> None:
    assert told.receiver.spans(told.good) == []
    kept = told.receiver.tree(told.missed)
    assert {node.span.name for node in kept} >= PARTS
    assert kept.span.attributes["distserve.slo_attained"] == "no"
    assert {node.span.service for node in kept} >= {"gateway", "prefill", "decode"}


def test_nothing_that_was_written_is_in_a_span(told: Told) -> None:
    def texts(span: Received) -> Iterator[str]:
        yield from (str(value) for value in span.attributes.values())
        yield span.message

    prompts = [choice["text"] for answer in told.answers for choice in answer["choices"] if len(choice["text"]) > 8]
    found = [text for span in told.receiver.spans() for text in texts(span)]
    assert not [text for text in found if "talk" in text or any(prompt in text for prompt in prompts)]


def test_the_gateways_log_names_the_trace(told: Told) -> None:
    named = {line.get("trace_id") for line in told.log if line["logger"] == "distserve_gateway.dispatch"}
    assert named == {*told.turns, told.good, told.missed, told.alone}
