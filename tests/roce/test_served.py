"""DistServe across two hosts: the answers are those of transformers, and the wire shows how the KV travelled."""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from roce_lab.lab import Lab
from roce_lab.serving import MODEL_NAME, NATS_PORT, Serving

from tests.reference import Reference
from tests.roce.capture import READS, TCP, UDP, Opcode, Packet, read
from tests.tiny_models import VOCAB_SIZE

READY_TIMEOUT_S = 600.0
pytestmark = [pytest.mark.roce, pytest.mark.timeout(READY_TIMEOUT_S + 200)]

LENGTHS = (1, 17, 100, 128, 129, 300, 513, 700)  # one token, block and chunk (128) edges, and several chunks
NUM_TOKENS = 8
DECODE, PREFILL, BACKGROUND = 48, 34, 0  # DSCPs: CS6, AF41, best effort


@dataclass(frozen=True)
class Observed:
    """What was asked in one go, what came back, and what passed between the hosts meanwhile."""

    prompts: list[list[int]]
    answers: list[dict[str, Any]]
    packets: list[Packet]

    @property
    def kv_bytes(self) -> int:
        return sum(answer["timings"]["kv_bytes"] for answer in self.answers)

    def writes(self) -> list[Packet]:
        """Packets of RDMA writes, each once however often it was sent again."""
        by_place = {
            (p.target, p.roce.queue_pair, p.roce.psn): p for p in self.packets if p.roce is not None and p.roce.is_write
        }
        return list(by_place.values())

    def written(self) -> dict[int, int]:
        """DSCP -> bytes that RDMA writes carried."""
        num_bytes: defaultdict[int, int] = defaultdict(int)
        for packet in self.writes():
            assert packet.roce is not None
            num_bytes[packet.dscp] += len(packet.roce.data)
        return {dscp: n for dscp, n in num_bytes.items() if n}


def observe(lab: Lab, serving: Serving, name: str, lengths: tuple[int, ...], **fields: Any) -> Observed:
    rng = random.Random(name)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in lengths]
    common = {"model": MODEL_NAME, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    common |= {"return_token_ids": True, "timings": True, **fields}
    with lab.capture(name) as capture, ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(lambda p: serving.post("/v1/completions", common | {"prompt": p}, 180), prompts))
    return Observed(prompts, answers, list(read(capture.path)))


@pytest.fixture(scope="module")
def served(serving: Serving) -> Iterator[Serving]:
    """Ready; ended with this file, so that what comes after has the hosts for itself."""
    serving.wait_ready(READY_TIMEOUT_S)
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def ordinary(lab: Lab, served: Serving) -> Observed:
    """Prompts of every length at once, as any client sends them."""
    return observe(lab, served, "ordinary", LENGTHS)


@pytest.fixture(scope="module")
def background(lab: Lab, served: Serving, ordinary: Observed) -> Observed:
    """Two in the background class, once the others are done."""
    return observe(lab, served, "background", (200, 400), traffic_class="background")


@pytest.fixture(scope="module", params=["ordinary", "background"])
def observed(request: pytest.FixtureRequest) -> Observed:
    which: Observed = request.getfixturevalue(request.param)
    return which


def test_greedy_answers_equal_generate(observed: Observed, serving: Serving) -> None:
    reference = Reference(serving.model_folder)
    for prompt, answer in zip(observed.prompts, observed.answers, strict=True):
        expected, got = reference.greedy(prompt, NUM_TOKENS), answer["choices"][0]["token_ids"]
        assert got == expected, reference.explain(prompt, expected, got)
        assert answer["timings"]["transport"] == "rdma"
        assert answer["timings"]["kv_bytes"] > 0


def test_all_kv_goes_by_rdma_writes_from_prefill_to_decode(observed: Observed, lab: Lab) -> None:
    assert {p.target for p in observed.writes() if p.roce and p.roce.data} == {lab.host2.address}
    assert not [p for p in observed.packets if p.roce is not None and p.roce.opcode in READS]
    assert sum(observed.written().values()) >= observed.kv_bytes > 0


def test_kv_that_hides_behind_arithmetic_is_af41_and_what_decode_waits_for_is_cs6(ordinary: Observed) -> None:
    written = ordinary.written()
    assert set(written) == {PREFILL, DECODE}
    # The prompt of 700 in chunks of 128 has most of its KV written while there is more to compute.
    assert min(written.values()) > ordinary.kv_bytes / 20, written


def test_background_kv_is_best_effort(background: Observed) -> None:
    assert background.written().get(BACKGROUND, 0) >= background.kv_bytes
    assert PREFILL not in background.written()


def test_a_queue_pair_keeps_to_one_class_and_is_acknowledged_in_it(ordinary: Observed, background: Observed) -> None:
    marks: defaultdict[tuple[str, int], set[int]] = defaultdict(set)  # (receiving host, its queue pair) -> DSCPs
    writing: defaultdict[int, set[int]] = defaultdict(set)  # DSCP -> queue pairs of decode that were written by
    acknowledging: defaultdict[int, set[int]] = defaultdict(set)  # DSCP -> queue pairs of prefill that were answered
    for packet in ordinary.packets + background.packets:
        if packet.roce is None:
            continue
        marks[packet.target, packet.roce.queue_pair].add(packet.dscp)
        if packet.roce.is_write:
            writing[packet.dscp].add(packet.roce.queue_pair)
        elif packet.roce.opcode == Opcode.ACKNOWLEDGE and packet.target.endswith(".1"):
            acknowledging[packet.dscp].add(packet.roce.queue_pair)
    assert {dscp for pair in marks.values() for dscp in pair} == {DECODE, PREFILL, BACKGROUND}
    assert all(len(dscps) == 1 for dscps in marks.values()), dict(marks)
    assert set(writing) == {DECODE, PREFILL, BACKGROUND}
    counted = {dscp: len(pairs) for dscp, pairs in writing.items()}
    # Both ends of a pair have numbers of their own, so only how many there are can be compared.
    assert {dscp: len(pairs) for dscp, pairs in acknowledging.items() if dscp in writing} == counted


def test_not_one_kv_byte_goes_by_tcp(observed: Observed) -> None:
    between = [p for p in observed.packets if p.source.startswith("10.77.") and p.roce is None]
    assert {p.protocol for p in between} <= {TCP, UDP, 1, 2}, "1 is ICMP, 2 is IGMP"
    tcp = [p for p in between if p.protocol == TCP]
    assert {NATS_PORT} == {port for p in tcp for port in (p.source_port, p.target_port) if port < 32768}
    assert all(NATS_PORT in (p.source_port, p.target_port) for p in tcp)
    not_roce = b"".join(p.payload for p in between)
    assert len(not_roce) < observed.kv_bytes / 10, f"{len(not_roce)} bytes beside RoCE for {observed.kv_bytes} of KV"
    pieces = [piece for p in observed.writes() if p.roce is not None for piece in floats_in(p.roce.data)]
    assert len(pieces) > observed.kv_bytes / 8192
    assert not [piece for piece in pieces if piece in not_roce]


def floats_in(data: bytes) -> Iterator[bytes]:
    """Some pieces of 64 bytes that hold KV: 16 different float32 of its size. (Token ids, which do go by NATS too, look
    otherwise.)"""
    for at in range(0, len(data) - 63, 1024):
        piece = data[at : at + 64]
        values = struct.unpack("<16f", piece)
        if len(set(values)) == 16 and all(1e-6 < abs(v) < 1e3 for v in values):
            yield piece
