"""The workers' own schedulers in virtual time: promises kept, waits, fair shares, by load and by policy.

    python -m benchmarks.sim [--quick] [--machines 8b-gpu smollm2] [--loads 0.5 ... 1.2] [--seeds 1 2 3] [--plot FILE]

Prefill: prompts of 32 to 32,768 tokens (a power law), by a Poisson process or in bursts (3 times the mean rate for a
fifth of the time, half of it else). A fifth are `vip`, promised a first token within 10 times what a prompt of 512
takes alone and 3 times what their own does; two fifths `normal`, within 40 and 5; a fifth `normal` and a fifth `batch`,
promised nothing. The sides: `fcfs`, `slo` (earliest due first, with fair shares), and `slo, admission` (that would be
late, or make others late: refused). Load 1 is what passes as full as may be would just do.

Decode: answers of 200 tokens on average; a tenth `vip`, promised a token every 0.8 full steps (of as many sequences as
may run), three tenths `normal` every 1.2, as many every 2.5, the rest nothing.

Time is reckoned, from figures of passes; what decides is the code that serves. The same seeds give the same tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.sim import report
from benchmarks.sim.decode import Steps, steps
from benchmarks.sim.figures import Figures, figures
from benchmarks.sim.machines import MACHINES, Machine
from benchmarks.sim.prefill import SIDES, Worker
from benchmarks.sim.traces import answers, prompts

LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
BURST_LOADS = (0.7, 0.9)
DECODE_LOADS = (0.7, 0.9, 1.1)
SATURATED_TOKENS = 5_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=["8b-gpu", "smollm2"])
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS), help="of capacity")
    parser.add_argument("--chunk", type=int, help="tokens of one prompt in a pass; promises stay those of the default")
    parser.add_argument("--num", type=int, default=20_000, help="prompts in a trace; a fifth as many answers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="a trace of each; decode: the first")
    parser.add_argument("--quick", action="store_true", help="under half a minute: one machine, 2 loads, 2,000 prompts")
    parser.add_argument("--plot", type=Path, help="a file for the picture")
    parser.add_argument("--json", type=Path, help="write every figure there too")
    a = parser.parse_args()
    if a.quick:
        a.machines, a.loads, a.num, a.seeds = a.machines[:1], [0.8, 1.1], 2_000, a.seeds[:1]
    began = time.perf_counter()
    found: dict[str, list[Figures]] = {}
    written = {}
    for name in a.machines:
        machine = MACHINES[name]
        runs_as = replace(machine, chunk_tokens=a.chunk or machine.chunk_tokens)
        found[name] = prefill(machine, runs_as, a.loads, a.num, a.seeds, bursts=False)
        burst_loads = BURST_LOADS[1:] if a.quick else BURST_LOADS
        bursts = prefill(machine, runs_as, burst_loads, a.num, a.seeds, bursts=True)
        decoded = decode(machine, DECODE_LOADS[1:2] if a.quick else DECODE_LOADS, a.num // 5, a.seeds[0])
        print(f"## {name}\n\n{tables(found[name])}\n\nIn bursts:\n\n{tables(bursts)}\n")
        saturated = [Worker(runs_as, side, seed=a.seeds[0]).saturate(SATURATED_TOKENS) for side in SIDES[:2]]
        print(f"Every flow always has work:\n\n{report.shares_table(saturated)}\n")
        print(f"Decode:\n\n{report.steps_table(decoded)}\n")
        written[name] = {
            "prefill": [f.as_json() for f in found[name]],
            "bursts": [f.as_json() for f in bursts],
            "decode": [asdict(s) for s in decoded],
        }
    print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    if a.json:
        a.json.write_text(json.dumps(written, indent=1))
    if a.plot:
        from benchmarks.sim.plot import plot  # here: matplotlib is wanted for pictures alone

        plot(found, a.plot)


def prefill(
    machine: Machine, runs_as: Machine, loads: Sequence[float], num: int, seeds: Sequence[int], *, bursts: bool
) -> list[Figures]:
    """Of traces with the machine's promises, served by `runs_as`."""
    found = []
    for load in loads:
        traces = {seed: prompts(machine, load, num, seed, bursts=bursts) for seed in seeds}
        for side in SIDES:
            runs = [Worker(runs_as, side, seed=seed).play(trace) for seed, trace in traces.items()]
            found.append(figures(runs, machine, load))
        print(f"{machine.name}, load {load:g}{' in bursts' * bursts}", file=sys.stderr, flush=True)
    return found


def decode(machine: Machine, loads: Sequence[float], num: int, seed: int) -> list[Steps]:
    return [
        steps(machine, policy, load, trace, seed=seed)
        for load in loads
        for trace in (answers(machine, load, num, seed),)
        for policy in ("fcfs", "slo")
    ]


def tables(found: Sequence[Figures]) -> str:
    return "\n\n".join([report.kept_table(found), report.ttft_table(found), report.fairness_table(found)])


if __name__ == "__main__":
    main()
