"""Real workers on cores of their own: where each of their threads may run and how, seen from outside, after passes."""

import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from distserve.worker import numa, realtime
from distserve.worker.process import in_ranges
from tests.cluster import Cluster, Service, wait_until
from tests.e2e.test_up import READY_S, SMALL, Command
from tests.tiny_models import VOCAB_SIZE

CORES = sorted(os.sched_getaffinity(0))

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(len(CORES) < 2, reason="a core for each role"),
]

MIB = 1 << 20
LIMIT = 8 * 1024 * MIB
ON_OWN = {
    "prefill.cpus": CORES[0],
    "prefill.num_threads": 2,  # on one core: the team has a thread beside the engine's
    "decode.cpus": CORES[1],
    "decode.num_threads": 2,
}


@dataclass(frozen=True)
class Thread:
    name: str
    cpus: frozenset[int]
    policy: int
    priority: int


def threads(pid: int) -> list[Thread]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", (task / "status").read_text(), re.MULTILINE)
            assert allowed
            tid = int(task.name)
            found.append(
                Thread(
                    (task / "comm").read_text().strip(),
                    frozenset(_cpus(allowed[1])),
                    os.sched_getscheduler(tid),
                    os.sched_getparam(tid).sched_priority,
                )
            )
        except (FileNotFoundError, ProcessLookupError):
            continue  # one that ended meanwhile
    return found


def _cpus(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def health(c: Cluster, worker_id: str) -> dict[str, Any]:
    with urllib.request.urlopen(c.registry()[worker_id].http_url + "/health", timeout=10) as r:
        answer: dict[str, Any] = json.load(r)
        return answer


def answer_until_decided(c: Cluster, *workers: Service) -> None:
    """Requests until each worker has found out whether its passes run compiled: then both kinds have run in it."""
    rng, deadline = random.Random(7), time.monotonic() + 90

    def undecided() -> list[str]:
        return [w.id for w in workers if not re.search(r"passes of \S+ run ", w.log.read_text())]

    while True:
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(64)]
        status, said = c.post("/v1/completions", {"prompt": prompt, "max_tokens": 8, "ignore_eos": True})
        assert status == 200, said
        if not (left := undecided()):
            return
        assert time.monotonic() < deadline, f"{left} did not decide on compiled code"


def test_every_thread_of_a_worker_is_on_its_cores_and_none_spins(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_DISPLAY_ENV", "verbose")  # OpenMP says what it was told, on standard error
    prefill: dict[str, Any] = dict(ON_OWN)
    if numa.online_nodes():
        prefill["prefill.numa_node"] = numa.online_nodes()[0]
    with Cluster(tiny_llama, tmp_path, prefill=[prefill], decode=[ON_OWN | {"decode.memory_limit_bytes": LIMIT}]) as c:
        answer_until_decided(c, c["prefill-0"], c["decode-0"])
        for role, core in (("prefill", CORES[0]), ("decode", CORES[1])):
            worker = c[f"{role}-0"]
            assert {t.cpus for t in threads(worker.pid)} == {frozenset({core})}
            assert {t.policy for t in threads(worker.pid)} == {os.SCHED_OTHER}
            assert sum(t.name == f"engine-{role}" for t in threads(worker.pid)) >= 2
            said = worker.log.read_text()
            assert "OMP_WAIT_POLICY = 'PASSIVE'" in said
            assert "GOMP_SPINCOUNT = '0'" in said
            assert said.count(f"computes on cores {core}, 2 threads; scheduling normal") == 1
            got = health(c, f"{role}-0")
            assert (got["status"], got["reasons"]) == ("ok", [])
            assert got["isolation"].items() >= {"cores": str(core), "other_cores": str(core), "num_threads": 2}.items()
        if numa.online_nodes():
            assert health(c, "prefill-0")["isolation"]["numa_node"] == numa.online_nodes()[0]
            assert "prefer" in Path(f"/proc/{c['prefill-0'].pid}/numa_maps").read_text()
        assert health(c, "decode-0")["isolation"]["memory_limit_by"].startswith("rlimit")
        layout = c.registry()["decode-0"].layout
        assert layout is not None
        limits = Path(f"/proc/{c['decode-0'].pid}/limits").read_text()
        most = re.search(r"^Max data size\s+(\d+)", limits, re.MULTILINE)
        assert most
        assert 0 < int(most[1]) < LIMIT, "the limit less the pool"

        small = c.start("decode", "decode-small", {"decode.memory_limit_bytes": 96 * MIB})
        assert small.process.wait(60) == 78
        assert "decode.memory_limit_bytes is 100663296 (96.0 MiB), must be 0 or at least" in small.log.read_text()


# Workers of other tests, which float, are in the way of real-time ones on this machine: a world without them.
ALONE = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
INSIDE = "TEST_ISOLATION_ALONE"


def may_be_alone() -> bool:
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(INSIDE in os.environ, reason="this is the test inside")
@pytest.mark.skipif(bool(realtime.refusal("prefill", 10)), reason="no real-time priority for this process")
def test_real_time_workers_alone_on_a_machine() -> None:
    if not may_be_alone():
        pytest.skip("no process namespace for this process")
    inner = [sys.executable, "-m", "pytest", "-x", __file__, "-k", "test_inside"]
    env = os.environ | {INSIDE: "1", "PYTEST_ADDOPTS": ""}  # one after the other
    done = subprocess.run([*ALONE, *inner], capture_output=True, text=True, timeout=380, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout


inside = pytest.mark.skipif(INSIDE not in os.environ, reason="run by test_real_time_workers_alone_on_a_machine")


@inside
def test_inside_real_time_is_for_the_threads_that_compute_and_for_nobody_when_it_would_be_in_the_way(
    tiny_llama: Path, tmp_path: Path
) -> None:
    settings = ON_OWN | {"prefill.realtime": 10}
    with Cluster(tiny_llama, tmp_path, prefill=[settings], decode=[settings]) as c:
        worker = c["prefill-0"]
        answer_until_decided(c, worker)
        team = [t for t in threads(worker.pid) if t.policy != os.SCHED_OTHER]
        assert len(team) >= 2
        assert {(t.name, t.cpus, t.policy, t.priority) for t in team} == {
            ("engine-prefill", frozenset({CORES[0]}), os.SCHED_FIFO, 10)
        }
        others = [t for t in threads(worker.pid) if t.policy == os.SCHED_OTHER]
        assert len(others) >= 3  # the event loop, the metrics' door, a transport
        assert not any(CORES[0] in t.cpus for t in others if t.name != "engine-prefill")
        got = health(c, "prefill-0")
        assert (got["status"], got["isolation"]["scheduling"]) == ("ok", "fifo 10")
        assert {t.policy for t in threads(c["decode-0"].pid)} == {os.SCHED_OTHER}

        # Every other core for a second one: the machine would have none left.
        rest = {"decode.cpus": ",".join(map(str, CORES[1:])), "decode.realtime": 5, "decode.num_threads": 1}
        refused = c.start("decode", "decode-refused", rest)
        c.wait_for_workers({"decode-refused"})
        [why] = health(c, "decode-refused")["reasons"]
        assert why.startswith("decode.realtime 5 can't be had: ")
        assert health(c, "decode-refused")["status"] == "degraded"
        assert refused.log.read_text().count(why) == 1  # warned once
        assert {t.policy for t in threads(refused.pid)} == {os.SCHED_OTHER}
        assert {t.cpus for t in threads(refused.pid)} == {frozenset(CORES[1:])}

        # Cores of the other role, and it is required.
        shared = {"decode.cpus": CORES[0], "decode.realtime": 5, "decode.isolation": "required"}
        ended = c.start("decode", "decode-required", shared)
        assert ended.process.wait(60) == 78
        assert "the prefill worker of pid" in ended.log.read_text()

        def answers() -> bool:
            return c.post("/v1/completions", {"prompt": [9] * 40, "max_tokens": 4})[0] == 200

        wait_until(answers, 20, "the cluster still answers")


@inside
def test_inside_up_keeps_itself_and_all_else_off_real_time_cores(tiny_llama: Path) -> None:
    command = ("up", "--model", str(tiny_llama), "--port", "0", "--prefill-cpus", str(CORES[0]))
    up = Command(*command, "--decode-cpus", str(CORES[1]), "--set", "prefill.realtime=10", *SMALL)
    try:
        others = in_ranges(CORES[1:])
        up.wait_for(rf"cores +prefill-0 on {CORES[0]}; decode-0 on {CORES[1]}; all else floats on {others}$", READY_S)
        found = {p.pid: threads(p.pid) for p in up.children()} | {up.process.pid: threads(up.process.pid)}
        assert len(found) == 5  # with the gateway and NATS
        on_it = {t for ts in found.values() for t in ts if CORES[0] in t.cpus}
        assert {(t.name, t.policy) for t in on_it} == {("engine-prefill", os.SCHED_FIFO)}
    finally:
        up.process.terminate()
        assert up.end(40) == 0, "\n".join(up.lines)
