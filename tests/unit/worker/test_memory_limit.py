"""A worker's memory limit: what is counted, what is refused at start, and what happens to who asks for more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distserve.errors import ConfigError
from distserve.worker import memory_limit

MIB = 1 << 20


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_who_asks_for_more_is_told_so_and_lives() -> None:
    code = f"""
import numpy as np
from distserve.worker import memory_limit
used = memory_limit.private_bytes()
print(memory_limit.bind(used + 96 * {MIB}, 32 * {MIB}))
np.ones(32 * {MIB}, np.uint8)
try:
    np.ones(80 * {MIB}, np.uint8)
except MemoryError:
    print("refused")
np.ones(32 * {MIB}, np.uint8)
print("lives")
"""
    assert run(code).split("\n") == ["('rlimit', '')", "refused", "lives"]


def test_torch_tells_it_as_an_error_that_a_pass_can_fail_by() -> None:
    code = f"""
import torch
from distserve.worker import memory_limit
memory_limit.bind(memory_limit.private_bytes() + 64 * {MIB}, 0)
try:
    torch.ones(512 * {MIB}, dtype=torch.uint8)
except RuntimeError as e:
    print("can't allocate" in str(e) or "not enough memory" in str(e).lower(), int(torch.ones(3).sum()))
"""
    assert run(code) == "True 3"


def test_a_pool_is_counted_by_its_size_and_not_by_the_kernel() -> None:
    """Else it would be counted twice: a limit of all that is used and the pool could not map it."""
    code = f"""
from distserve.kv.memory import map_memory
from distserve.worker import memory_limit
before = memory_limit.private_bytes()
fd, memory = map_memory(256 * {MIB}, what="a pool", key="kv.num_blocks")
memory[:] = bytes(256 * {MIB})
print(memory_limit.private_bytes() - before < 16 * {MIB})
"""
    assert run(code) == "True"


def test_what_does_not_fit_is_refused_with_each_part() -> None:
    needed = {"the_KV_pool": 600 * MIB, "weights_and_all_else": 500 * MIB}
    with pytest.raises(ConfigError) as caught:
        memory_limit.require_room(1024 * MIB, "decode.memory_limit_bytes", needed)
    said = caught.value.message
    assert "decode.memory_limit_bytes is 1073741824 (1.0 GiB), must be 0 or at least 1.1 GiB" in said
    assert "the KV pool 600.0 MiB, weights and all else 500.0 MiB" in said
    memory_limit.require_room(1100 * MIB, "decode.memory_limit_bytes", needed)
    memory_limit.require_room(0, "decode.memory_limit_bytes", needed)


def test_a_model_s_weights_are_its_files(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 3000), ("b.safetensors", 500), ("tokenizer.json", 9000)):
        (tmp_path / name).write_bytes(bytes(size))
    assert memory_limit.weight_bytes(tmp_path) == 3500
    assert memory_limit.weight_bytes(Path("some/hub-id")) == 0


def group(root: Path, procs: str, limit: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/worker\n")
    folder = root / "sys/fs/cgroup/worker"
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text(procs)
    (folder / "memory.max").write_text(limit)
    return folder / "memory.max"


@pytest.mark.parametrize(
    ("alone", "before", "after", "bound"),
    [
        (True, "max\n", "4096000", True),
        (True, "9999999\n", "4096000", True),
        (True, "5000\n", "5000\n", False),  # a lower one stays
        (False, "max\n", "max\n", False),  # others' limit is not ours to set
    ],
)
def test_a_control_group_of_its_own_is_bound_too(
    tmp_path: Path, alone: bool, before: str, after: str, bound: bool
) -> None:
    """Of files: the real one needs a group that this process is alone in."""
    file = group(tmp_path, f"{os.getpid()}\n" if alone else f"{os.getpid()}\n1\n", before)
    assert memory_limit.bind_group(4096000, tmp_path) is bound
    assert file.read_text() == after
