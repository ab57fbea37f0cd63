"""What the hand-over costs: time to the first token, and from the first to the second, against a single process.

    python -m benchmarks.handover [--model FOLDER] [--rounds 6] [--json FILE]

Clusters stand side by side on one machine, one thread a worker: a single process that does both phases (colocated),
prefill and decode apart over shm, and over tcp. They take turns, one request at a time, while the others rest, so each
is measured on the same machine in the same state; the first request of a turn, which finds another cluster's weights
in the caches, is left out. The hand-over's cost is the difference of the gaps between first and second token; of it,
`transfer` is what the workers say: token 0 drawn -> adopted by decode. Prefill has core 0 and decode core 1; the
single process has core 1.
"""

import argparse
import http.client
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distserve.models import resolve
from tests.cluster import Cluster

LENGTHS = (128, 512, 2048)
NUM_TOKENS = 8
A_TURN = 3  # measured requests in a turn


@dataclass(frozen=True, slots=True)
class Run:
    """One request: seconds from sending it to each token, and the workers' own figure of the transfer."""

    token_times_s: list[float]
    transfer_s: float


def ask(url: str, prompt: list[int]) -> Run:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "timings": True,
    }
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    times: list[float] = []
    transfer_s = 0.0
    for event in events(connection.getresponse()):
        for choice in event["choices"]:
            times += [time.perf_counter() - began] * len(choice["token_ids"])
        transfer_s = event.get("timings", {}).get("transfer_s", transfer_s)
    connection.close()
    if len(times) != NUM_TOKENS:
        raise RuntimeError(f"{len(times)} tokens came instead of {NUM_TOKENS}")
    return Run(times, transfer_s)


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read()!r}")
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield event


def clusters(stack: ExitStack, model: Path, folder: Path) -> dict[str, Cluster]:
    common = {"kv.num_blocks": 1024, "model.max_model_len": 4096, "decode.max_num_seqs": 16}
    prefill = {"prefill.cpus": "0"}
    decode = {"decode.cpus": "1"}
    together = {"decode.colocated": True, "decode.chunk_tokens": 512}

    def start(name: str, **parts: Any) -> Cluster:
        return stack.enter_context(Cluster(model, folder / name, name="bench", settings=common, **parts))

    return {
        "single process": start("single", prefill=[], decode=[decode | together]),
        "shm": start("shm", prefill=[prefill | {"transport.kind": "shm"}], decode=[decode]),
        "tcp": start("tcp", prefill=[prefill | {"transport.kind": "tcp"}], decode=[decode]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="catalogue name or folder")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="every measurement, for later")
    a = parser.parse_args()
    rng = random.Random(1)
    found: dict[tuple[str, int], list[Run]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = clusters(stack, Path(resolve(a.model)), folder)
        for _ in range(a.rounds):
            for length in LENGTHS:
                prompts = [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(1 + A_TURN)]
                names = list(running)
                rng.shuffle(names)
                for name in names:
                    runs = [ask(running[name].url, prompt) for prompt in prompts]
                    found.setdefault((name, length), []).extend(runs[1:])
    report(found)
    if a.json:
        rows = [{"cluster": n, "prompt_tokens": p, **asdict(run)} for (n, p), runs in found.items() for run in runs]
        a.json.write_text(json.dumps(rows))


def report(found: dict[tuple[str, int], list[Run]]) -> None:
    print("| prompt | cluster | TTFT ms | 1st to 2nd token ms | later gaps ms | transfer ms | added ms |")
    print("|---|---|---|---|---|---|---|")
    for length in LENGTHS:
        base = 0.0
        for name in ("single process", "shm", "tcp"):
            runs = [r.token_times_s for r in found[name, length]]
            gap = [t[1] - t[0] for t in runs]
            later = [(t[-1] - t[1]) / (len(t) - 2) for t in runs]
            transfer = [r.transfer_s for r in found[name, length]]
            base = base or statistics.median(gap)
            added = 1e3 * (statistics.median(gap) - base)
            print(
                f"| {length} | {name} | {ms([t[0] for t in runs])} | {ms(gap)} | {ms(later)} "
                f"| {ms(transfer) if name != 'single process' else '-'} | {added:+.1f} |"
            )
    print("median (10th to 90th percentile); added: to the second token, against the single process")


def ms(values: list[float]) -> str:
    ordered = sorted(values)
    low, high = (1e3 * ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
    return f"{1e3 * statistics.median(ordered):.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
