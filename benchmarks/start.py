"""How long `distserve up` takes to the first answer, with the model in the cache, and where the time goes.

    python -m benchmarks.start [--runs 5] [--apart] [--json FILE]

The log is read as it grows: the phases are between lines of it. `start` is the command's own: Python, the settings, a
NATS server, the registry. `imports`: from there until the last worker begins to load, mostly torch and transformers.
`load` (with the probe of its arithmetic) and `warm up`: as the workers say. `register`: until they are in the
registry. `known`: until the gateway knows that the workers are ready and the command says so. `first answer`: one
token of a prompt of 16, asked as soon as the command says that it is ready. What the gateway did meanwhile is beside
it: `gateway serves` is counted from the beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import ask, request
from benchmarks.load_cpu import Meter, conditions
from benchmarks.load_server import Server, distserve_up, orderly_end
from benchmarks.load_sse import tokens
from benchmarks.load_stats import Spread
from benchmarks.load_turns import Turns
from distserve.models import resolve

READY_S = 120.0
PROMPT = list(range(100, 116))
_POLL_S = 0.005

Line = tuple[float, str]  # seconds since the start, text


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds. All but `gateway_serves` add up to `total`; `cpu` is the CPU time of all processes until then."""

    start: float
    imports: float
    load: float
    warm_up: float
    register: float
    known: float
    first_answer: float
    total: float
    gateway_serves: float
    cpu: float


_STARTING = re.compile(r"^starting ")
_SERVING = re.compile(r"^gateway\s.*: serving ")
_LOADED = re.compile(r"^(?:decode|prefill)-\d+\s.*, loaded in ([\d.]+) s")
_WARM = re.compile(r"^(?:decode|prefill)-\d+\s.*: warmed up in ([\d.]+) s")
_WORKER = re.compile(r"^(?:decode|prefill)-\d+\s.*: ready$")
_READY = re.compile(r"^ready in ")


def phases(lines: Sequence[Line], answered_s: float, cpu_s: float) -> Phases:
    """From the log's lines, each with when it came. Of several workers, the slowest. Raises LookupError for a line
    that never came."""
    starting = _last(lines, _STARTING)
    loaded = _last(lines, _LOADED)
    load_s = float(_match(_LOADED, loaded[1]).group(1))
    warm = _last(lines, _WARM)
    worker, ready = _last(lines, _WORKER), _last(lines, _READY)
    return Phases(
        start=starting[0],
        imports=loaded[0] - load_s - starting[0],
        load=load_s,
        warm_up=warm[0] - loaded[0],
        register=worker[0] - warm[0],
        known=ready[0] - worker[0],
        first_answer=answered_s - ready[0],
        total=answered_s,
        gateway_serves=_last(lines, _SERVING)[0],
        cpu=cpu_s,
    )


def _last(lines: Sequence[Line], pattern: re.Pattern[str]) -> Line:
    for line in reversed(lines):
        if pattern.search(line[1]):
            return line
    raise LookupError(f"no line of the log matches {pattern.pattern!r}")


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.search(text)
    assert found is not None
    return found


class Follower:
    """The lines of a file that grows, each with when it was seen (seconds since `began`, of time.perf_counter)."""

    def __init__(self, path: Path, began: float) -> None:
        self.lines: list[Line] = []
        self._path, self._began = path, began
        self._offset = 0

    def read(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        now = time.perf_counter() - self._began
        self.lines += [(now, line) for line in whole.decode(errors="replace").splitlines()]

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float) -> None:
        """Raises TimeoutError with the end of the file."""
        while not any(pattern.search(text) for _, text in self.lines):
            if time.perf_counter() - self._began > timeout_s:
                tail = "\n".join(text for _, text in self.lines[-30:])
                raise TimeoutError(f"not within {timeout_s:g} s: {pattern.pattern!r}\n{tail}")
            time.sleep(_POLL_S)
            self.read()


def one_start(server: Server) -> Phases:
    """Start it, ask, stop it."""
    began = time.perf_counter()
    with server:
        log = Follower(server.log, began)
        log.wait_for(_READY, READY_S)
        tokens(asyncio.run(ask(server.port, request(PROMPT, 1))))
        answered_s = time.perf_counter() - began
        cpu_s = Meter({"server": [server.pid]}).total_s("server")
        log.read()
        return phases(log.lines, answered_s, cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="catalogue name or folder")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--apart", action="store_true", help="a prefill and a decode worker, not one that does both")
    parser.add_argument("--lock", type=Path, help="a file to hold (flock) while something is measured")
    parser.add_argument("--json", type=Path, help="write every run there too")
    a = parser.parse_args()
    with orderly_end():
        runs = measure_starts(Path(resolve(a.model)), a.runs, apart=a.apart, turns=Turns(a.lock))
    print(report(runs))
    if a.json:
        found: dict[str, Any] = {"conditions": conditions(), "apart": a.apart, "runs": [asdict(r) for r in runs]}
        a.json.write_text(json.dumps(found, indent=1))


def measure_starts(model: Path, num_runs: int, *, apart: bool, turns: Turns) -> list[Phases]:
    """The first run, which reads files that the others find in memory, is left out."""
    runs = []
    options = [] if apart else ["--colocated"]
    with tempfile.TemporaryDirectory() as scratch, turns.alone() as breathe:
        for number in range(num_runs + 1):
            breathe()
            found = one_start(distserve_up("up", model, Path(scratch) / f"{number}.log", options=options))
            if number:
                runs.append(found)
    return runs


def report(runs: Sequence[Phases]) -> str:
    lines = ["| phase | s |", "|---|---|"]
    for name in Phases.__dataclass_fields__:
        lines.append(f"| {name.replace('_', ' ')} | {Spread.of(getattr(run, name) for run in runs).text(2)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
