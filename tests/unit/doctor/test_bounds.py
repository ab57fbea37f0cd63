"""What the doctor says of cores, real-time priority and MPS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from distserve.config import Config, load_config
from distserve.doctor import bounds
from distserve.worker import realtime
from tests.unit.doctor.trees import host

MACHINE = {
    "sys/devices/system/cpu/online": "0-7",
    "sys/devices/system/node/node0/cpulist": "0-3",
    "sys/devices/system/node/node1/cpulist": "4-7",
}


def config(**settings: Any) -> Config:
    return load_config(overrides={key.replace("__", "."): value for key, value in settings.items()})


@pytest.mark.parametrize(
    ("prefill", "decode", "found"),
    [
        ("", "", [("skip", "workers float")]),
        ("0-3", "4-6", [("ok", "0-3, all on NUMA node 0"), ("ok", "4-6, all on NUMA node 1")]),
        ("2-5", "", [("warn", "2-5, spread over NUMA nodes")]),
        ("0-3", "3", [("ok", "0-3"), ("ok", "3"), ("warn", "core 3 is in prefill.cpus and decode.cpus")]),
        ("", "6-9", [("fail", "there is no core 8-9")]),
    ],
)
def test_cores(tmp_path: Path, prefill: str, decode: str, found: list[tuple[str, str]]) -> None:
    got = bounds.check_cores(host(tmp_path, MACHINE), config(prefill__cpus=prefill, decode__cpus=decode))
    assert [f.status for f in got] == [status for status, _ in found]
    assert all(words in f.found for f, (_, words) in zip(got, found, strict=True))


def test_nodes_of_a_spread_set_are_named(tmp_path: Path) -> None:
    (found,) = bounds.check_cores(host(tmp_path, MACHINE), config(prefill__cpus="2-5"))
    assert found.mend == "# node 0: 0-3\n# node 1: 4-7"


def test_real_time_that_nobody_asked_for_is_not_looked_at(tmp_path: Path) -> None:
    assert [f.status for f in bounds.check_realtime(host(tmp_path), config())] == ["skip"]


@pytest.mark.parametrize(("isolation", "status"), [("wanted", "warn"), ("required", "fail")])
def test_real_time_that_the_kernel_never_runs(tmp_path: Path, isolation: str, status: str) -> None:
    files = {"proc/sys/kernel/sched_rt_runtime_us": "0"}
    c = config(prefill__cpus="1", prefill__realtime="9", prefill__isolation=isolation)
    (found,) = bounds.check_realtime(host(tmp_path, files), c)
    assert (found.status, found.subject) == (status, "prefill")
    assert found.found.startswith("fifo 9 is not permitted: kernel.sched_rt_runtime_us is 0")


@pytest.mark.skipif(bool(realtime.refusal("decode", 9)), reason="no real-time priority for this process")
@pytest.mark.parametrize(("runtime", "status"), [("950000", "ok"), ("-1", "warn")])
def test_real_time_that_is_permitted(tmp_path: Path, runtime: str, status: str) -> None:
    files = {"proc/sys/kernel/sched_rt_runtime_us": runtime}
    c = config(decode__cpus="1", decode__realtime="9")
    (found,) = bounds.check_realtime(host(tmp_path, files), c)
    assert found.status == status
    assert found.found.startswith("rr 9 is permitted")
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_mps(tmp_path: Path) -> None:
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert [f.status for f in bounds.check_mps(config(), env)] == ["skip"]
    c = config(model__device="cuda", decode__colocated=True, decode__mps_percentage=30)
    (found,) = bounds.check_mps(c, env)
    assert (found.status, found.mend) == ("warn", "nvidia-cuda-mps-control -d")
    os.mkfifo(tmp_path / "control")
    daemon = os.open(tmp_path / "control", os.O_RDONLY | os.O_NONBLOCK)
    try:
        (found,) = bounds.check_mps(c, env)
    finally:
        os.close(daemon)
    assert (found.status, found.found) == ("ok", "the daemon listens; decode 30 %")
