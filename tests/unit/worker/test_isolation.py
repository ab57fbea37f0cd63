"""What a worker says it got, of what it was to get."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distserve.config import Config, load_config
from distserve.errors import ConfigError
from distserve.worker import numa, realtime
from distserve.worker.isolation import EngineBounds, Isolation
from distserve.worker.memory_limit import private_bytes

MIB = 1 << 20


def config(**settings: Any) -> Config:
    return load_config(overrides={key.replace("__", "."): value for key, value in settings.items()})


def test_one_line_says_all_that_there_is() -> None:
    assert str(Isolation(cores="0-7", other_cores="0-7", num_threads=8)) == (
        "computes on cores 0-7, 8 threads; scheduling normal"
    )
    full = Isolation(
        cores="4-5",
        other_cores="0",
        num_threads=1,
        scheduling="rr 5",
        numa_node=1,
        memory_limit_bytes=512 * MIB,
        memory_limit_by="rlimit",
        mps_percentage=40,
    )
    assert str(full) == (
        "computes on cores 4-5, 1 thread; all else on 0; scheduling rr 5; memory of NUMA node 1; "
        "at most 512.0 MiB (by rlimit); 40 % of the GPU"
    )
    assert "reasons" not in full.as_dict()


# As an ordinary user who may not have real-time threads, wherever the test runs. Imports come before, for the files
# may be out of that user's sight.
ORDINARY = """
import os, resource
from distserve.config import load_config
from distserve.errors import ConfigError
from distserve.worker import process
from distserve.worker.isolation import EngineBounds
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
config = load_config(overrides={settings})
process.enter("prefill", config)
bounds = EngineBounds("prefill", config)
bounds.enter()
try:
    got = bounds.close(0)
    print(got)
    print(*got.reasons)
except ConfigError as e:
    print(e.fields["key"], e)
"""


def as_ordinary(**settings: Any) -> list[str]:
    code = ORDINARY.format(settings={key.replace("__", "."): value for key, value in settings.items()})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("\n")


def test_a_worker_that_may_not_be_real_time_stays_whole_on_its_cores_and_says_why() -> None:
    core = str(max(os.sched_getaffinity(0)))
    got, why = as_ordinary(prefill__cpus=core, prefill__realtime="10")
    assert got == f"computes on cores {core}, 1 thread; scheduling normal"
    assert why.startswith("prefill.realtime 10 can't be had: Operation not permitted: it takes CAP_SYS_NICE")


def test_what_is_required_and_cannot_be_had_is_refused() -> None:
    core = str(max(os.sched_getaffinity(0)))
    [said] = as_ordinary(prefill__cpus=core, prefill__realtime="10", prefill__isolation="required")
    assert said.startswith("prefill.isolation prefill.realtime 10 can't be had: ")
    assert said.endswith("prefill.isolation is required: with wanted it starts without")


def test_nothing_asked_for_is_nothing_missed() -> None:
    [got] = as_ordinary()
    assert got.endswith("scheduling normal")


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of two nodes, in a container whose seccomp profile forbids set_mempolicy."""
    monkeypatch.setattr(numa, "node_for", lambda wanted, cpus, key: 1)
    monkeypatch.setattr(numa, "prefer", lambda node: "Operation not permitted")
    monkeypatch.setattr(realtime, "name_this_thread", lambda role: None)


@pytest.mark.usefixtures("refuses")
def test_a_node_that_nobody_asked_for_and_a_container_forbids_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bounds = EngineBounds("decode", config(decode__isolation="required"))
    with caplog.at_level("INFO"):
        bounds.enter()
        got = bounds.close(0)
    assert (got.numa_node, got.reasons) == (-1, ())
    assert "memory of NUMA node 1 can't be had, the kernel takes the nearest: Operation not permitted" in caplog.text


@pytest.mark.usefixtures("refuses")
def test_a_node_that_was_asked_for_and_cannot_be_had_is_a_reason() -> None:
    bounds = EngineBounds("decode", config(decode__numa_node="1"))
    bounds.enter()
    assert bounds.close(0).reasons == ("decode.numa_node 1 can't be had: Operation not permitted",)


def test_a_pool_counts_on_what_the_limit_leaves_of_what_is_free() -> None:
    used = private_bytes()
    bounds = EngineBounds("decode", config(decode__memory_limit_bytes=used + 512 * MIB, kv__workers_per_host=2))
    assert bounds.left_bytes(100 * MIB) == 100 * MIB
    assert 900 * MIB < bounds.left_bytes(1 << 40) <= 1024 * MIB, "that of two, since a pool takes half of it"
    assert EngineBounds("decode", config()).left_bytes(1 << 40) == 1 << 40
    too_low = EngineBounds("decode", config(decode__memory_limit_bytes=1))
    assert too_low.left_bytes(1 << 40) == 0


def test_weights_and_pools_that_do_not_fit_are_refused_before_they_are_there(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(2 * MIB))
    with pytest.raises(ConfigError, match=r"prefill\.memory_limit_bytes is 1048576 .*\(the weights 2\.0 MiB\)"):
        EngineBounds("prefill", config(prefill__memory_limit_bytes=MIB)).require_room_for_model(tmp_path)
    roomy = EngineBounds("prefill", config(prefill__memory_limit_bytes=private_bytes() + 64 * MIB))
    roomy.require_room_for_model(tmp_path)
    roomy.require_room_for_pool(16 * MIB)
    with pytest.raises(ConfigError, match=r"the KV pool 128\.0 MiB, weights and all else"):
        roomy.require_room_for_pool(128 * MIB)
    EngineBounds("prefill", config()).require_room_for_pool(1 << 50)
