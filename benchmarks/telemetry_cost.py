"""What traces cost: requests per second and CPU, with the null engine, off and on, side by side.

    python -m benchmarks.telemetry_cost [--rounds 3] [--only 16x64] [--json FILE]

Three clusters (nats-server, gateway, one prefill and one decode worker each; benchmarks/control_plane.py) take turns,
in a random order within a round: traces off; on with every trace exported (ratio 1); on with none exported but those
of requests that fail (ratio 0: recorded, held, dropped). Spans go to a process that reads and forgets them: its CPU is
nobody's. Nobody reads a figure of one side alone: each round gives a ratio to "off" of the same round.

What was expected before it was run: a request makes 11 spans here (3 in the gateway, 4 in prefill, 4 in decode), each
some 25 us to begin, fill and end, and 20 us more to encode and send in a batch. So ratio 1 costs 0.5 ms of CPU a
request in three processes, ratio 0 costs 0.28 ms, both whatever the number of tokens: for 64 tokens 8 and 4 us a
token, of some 38 that all processes together spend on one; for one token, where all of a request is 1 ms of CPU, a
third of the requests per second. Off costs nothing that can be seen: a falsy check for each call, some 20 a request.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.control_plane import quiet_measure, table
from benchmarks.control_plane_load import Load, Measured
from benchmarks.control_plane_sides import NullCluster, Side, free_port
from benchmarks.null_engine.model import make_model

OFF = "off"
LOADS = ((16, 1), (16, 64))
Rows = dict[tuple[str, Load], dict[int, Measured]]  # by round


def sides_of(endpoint: str) -> dict[str, Mapping[str, Any]]:
    """Settings of each side."""
    return {
        OFF: {},
        "ratio 1": {"telemetry.otlp_endpoint": endpoint},
        "ratio 0, failures kept": {"telemetry.otlp_endpoint": endpoint, "telemetry.trace_ratio": 0},
    }


def main() -> None:
    a = _arguments()
    if a.sink:
        serve_sink(a.sink)
        return
    rng = random.Random(1)
    points = [(c, n) for c, n in LOADS if not a.only or f"{c}x{n}" in a.only]
    loads = [Load(c, n, measure_s=a.seconds) for c, n in points]
    rows: Rows = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(folder / "model")
        sides: list[Side] = []
        for name, settings in sides_of(stack.enter_context(sink())).items():
            side = stack.enter_context(NullCluster(model, folder / name.replace(" ", "-"), settings=settings)).side
            side.name = name
            sides.append(side)
        for round_ in range(a.rounds):
            for load in loads:
                for side in rng.sample(sides, len(sides)):
                    found = quiet_measure(side, load, a.quiet, a.tries, seed=round_)
                    if found is not None:
                        rows.setdefault((side.name, load), {})[round_] = found
    print(table({key: list(many.values()) for key, many in rows.items()}))
    print(against_off(rows))
    if a.json:
        a.json.write_text(json.dumps([_plain(name, m) for (name, _), many in rows.items() for m in many.values()]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement")
    parser.add_argument("--quiet", type=float, default=0.3, help="cores that other processes may use, the sink too")
    parser.add_argument("--tries", type=int, default=2, help="for a quiet round")
    parser.add_argument("--only", nargs="*", metavar="CxN", help="e.g. 16x64")
    parser.add_argument("--json", type=Path, help="every measurement, for later")
    parser.add_argument("--sink", type=int, metavar="PORT", help=argparse.SUPPRESS)
    return parser.parse_args()


def against_off(rows: Rows) -> str:
    """Of each side: how its rounds compare with those of no traces, the median and the spread."""
    lines = []
    for (name, load), many in rows.items():
        off = rows.get((OFF, load), {})
        pairs = [(m, off[round_]) for round_, m in many.items() if round_ in off]
        if name == OFF or not pairs:
            continue
        speeds = [m.requests_per_s / o.requests_per_s for m, o in pairs]
        added = [m.cpu_us_per_request - o.cpu_us_per_request for m, o in pairs]
        lines.append(
            f"{load.num_clients} x {load.num_tokens}, {name}: {_spread(speeds, 2)} of the requests per second, "
            f"{_spread(added, 0)} us of CPU a request more, "
            f"{_spread([us / load.num_tokens for us in added], 1)} a token"
        )
    return "\n".join(lines)


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _plain(name: str, m: Measured) -> dict[str, Any]:
    return {
        "side": name,
        "clients": m.load.num_clients,
        "tokens": m.load.num_tokens,
        "requests_per_s": m.requests_per_s,
        "cpu_us_per_request": m.cpu_us_per_request,
        "cpu_s": m.cpu_s,
        "ttft_p50_ms": m.ttft_ms(0.5),
        "foreign_cores": m.foreign_cores,
        "failed": m.num_failed,
    }


# ---------------------------------------------------------------- where the spans go


@contextmanager
def sink() -> Iterator[str]:
    """A process that takes spans; its URL."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.telemetry_cost", "--sink", str(port)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def serve_sink(port: int) -> None:
    class Posts(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", port), Posts).serve_forever()


if __name__ == "__main__":
    main()
