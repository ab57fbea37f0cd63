"""Time to the first token of a prompt of which nine tenths are known: to prefill's own pool, to the store's memory, to
its disk, or to nobody.

    python -m benchmarks.store_ttft [--model FOLDER] [--rounds 8] [--json FILE]

A cluster as `distserve up --kvstore 1` makes it: one prefill and one decode worker, a thread each, and a store node. A
prompt has 2,000 random tokens; another with the same first 1,808 (113 blocks, 90 %) was answered before it. Then what
is faster than the tier in question is emptied: as many other prompts go through the workers' pools as push all out;
for the disk, which is measured last, the node is started anew, and so has nothing in memory. Each round measures every
case once, the others in an order that is drawn.

A figure counts only if the answer's usage and the node's statistics say that all 113 blocks came from where they are
said to come from, and none otherwise; else the program ends with the reason. Decode does not prefill here
(decode.max_local_prefill_tokens is 0): it is prefill's TTFT. Ratios are made within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.load_cpu import Meter, conditions
from benchmarks.load_stats import Spread, ratios
from benchmarks.store_report import markdown
from distserve.bus import subjects
from distserve.bus.nats import NatsBus
from distserve.messages import StoreStats, StoreStatsRequest, decode_as, encode
from distserve.models import resolve
from tests.cluster import Cluster, wait_until

BLOCK = 16
PROMPT, KNOWN = 2_000, 1_808  # tokens; KNOWN in whole blocks
POOL_BLOCKS = 520  # of each worker: four prompts, since a quarter of a pool at most is on offer to the store
FLOOD = 5  # prompts that push all others out of the pools
TIERS = ("dram", "disk")  # of the node
CASES = ("none", "pool", *TIERS)
SHORT = 100  # tokens of the prompt before each measured one, after which no worker is rested
NODE = "kvstore-0"
STORED_S = 60.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One measured request. `others`: cores that processes beside the cluster used meanwhile."""

    case: str
    turn: int
    ttft_s: float
    others: float


class WrongTier(Exception):
    """The blocks did not come from where they were to come from."""


def check(case: str, cached_tokens: int, came: Mapping[str, int]) -> None:
    """Raises WrongTier. came: blocks by where they came from, as the node has counted them."""
    expected = {tier: KNOWN // BLOCK if tier == case else 0 for tier in TIERS}
    if came != expected or cached_tokens != (0 if case == "none" else KNOWN):
        raise WrongTier(
            f"{case}: {cached_tokens} tokens were cached and {dict(came)} blocks came from the node, must be "
            f"{0 if case == 'none' else KNOWN} and {expected}"
        )


class Measuring:
    """Requests to a cluster with one node, and what the node says of them."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)

    def round(self, turn: int) -> Iterator[Run]:
        """Every case once. Raises WrongTier, TimeoutError, RuntimeError."""
        known = {case: self._tokens(KNOWN) for case in CASES}
        had = {tier: self._held(tier) for tier in TIERS}
        for tier in TIERS:
            self._ask(self._prompt(known[tier]))
        for _ in range(FLOOD):
            self._ask(self._tokens(PROMPT))
        for tier in TIERS:
            here = had[tier] + len(TIERS) * KNOWN // BLOCK
            wait_until(lambda tier=tier, here=here: self._held(tier) >= here, STORED_S, f"all is in {tier}")  # type: ignore[misc]
        first = [case for case in CASES if case != "disk"]
        for case in [*self._rng.sample(first, len(first)), "disk"]:
            if case == "pool":
                self._ask(self._prompt(known[case]))
            self._settle()
            if case == "disk":
                self._restart_node()
            self._ask(self._tokens(SHORT))
            yield self._measured(case, turn, self._prompt(known[case]))

    def _measured(self, case: str, turn: int, prompt: list[int]) -> Run:
        before = self._hits()
        meter = Meter({"cluster": [s.pid for s in self._cluster.services if s.process.poll() is None]})
        ttft_s, cached = self._ask(prompt)
        others = meter.used().others
        check(case, cached, {tier: n - before[tier] for tier, n in self._hits().items()})
        return Run(case, turn, ttft_s, others)

    def _prompt(self, known: list[int]) -> list[int]:
        return known + self._tokens(PROMPT - len(known))

    def _tokens(self, n: int) -> list[int]:
        return [self._rng.randrange(1_000, 40_000) for _ in range(n)]

    def _ask(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token; cached tokens by the answer's usage."""
        address = urlsplit(self._cluster.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
        body = {
            "model": self._cluster.name,
            "prompt": list(prompt),
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        ttft_s, cached = 0.0, -1
        for event in events(connection.getresponse()):
            if event["choices"]:
                ttft_s = ttft_s or time.perf_counter() - began
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        connection.close()
        return ttft_s, cached

    def _settle(self) -> None:
        """Until nothing is offered or written any more."""
        seen: list[tuple[int, int]] = []

        def quiet() -> bool:
            seen.append((self._held("dram"), self._held("disk")))
            time.sleep(0.1)
            return len(seen) > 5 and len(set(seen[-5:])) == 1

        wait_until(quiet, STORED_S, "the node takes in nothing any more")

    def _restart_node(self) -> None:
        self._cluster[NODE].terminate()
        wait_until(lambda: NODE not in self._cluster.registry(), 20, "the node has left")
        self._cluster.start("kvstore", NODE)
        self._cluster.wait_for_workers({NODE})

    def _held(self, tier: str) -> int:
        found = self._stats().tiers
        return sum(found[name].num_blocks for name in found if name == tier)

    def _hits(self) -> dict[str, int]:
        found = self._stats().tiers
        return {tier: sum(found[name].num_hits for name in found if name == tier) for tier in TIERS}

    def _stats(self) -> StoreStats:
        async def ask() -> StoreStats:
            async with await NatsBus.connect(self._cluster.nats_url, name="bench") as bus:
                answer = await bus.request(subjects.worker("kvstore", NODE), encode(StoreStatsRequest()), timeout_s=10)
                return decode_as(StoreStats, answer)

        return asyncio.run(ask())


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read()!r}")
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield event


def table(runs: Sequence[Run]) -> str:
    def of(case: str) -> dict[int, float]:
        return {r.turn: 1e3 * r.ttft_s for r in runs if r.case == case}

    uncached = of("none")
    rows = [
        [case, Spread.of(of(case).values()).text(0), "" if case == "none" else ratios(of(case), uncached).text(3)]
        for case in CASES
    ]
    return markdown(["90 % known to", "TTFT ms", "of uncached"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    a = parser.parse_args()
    settings = {
        "kv.num_blocks": POOL_BLOCKS,
        "decode.max_local_prefill_tokens": 0,
        "kvstore.dram_bytes": 1024 * MIB,
        "kvstore.disk_bytes": 8192 * MIB,
        "kvstore.segment_bytes": 256 * MIB,
    }
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        with Cluster(Path(resolve(a.model)), Path(folder), kvstore=[{}], settings=settings) as cluster:
            measuring = Measuring(cluster, a.seed)
            for turn in range(-1, a.rounds):  # the first is not counted
                for run in measuring.round(turn):
                    print(f"{turn} {run.case}: {1e3 * run.ttft_s:.0f} ms, others {run.others:.2f} cores", flush=True)
                    runs += [run] if turn >= 0 else []
    print("\n" + ", ".join(f"{k} {v}" for k, v in conditions().items()))
    print(f"others kept {Spread.of(r.others for r in runs).text(2)} cores busy\n")
    print(table(runs))
    if a.json:
        a.json.write_text(json.dumps([asdict(run) for run in runs]))


if __name__ == "__main__":
    main()
