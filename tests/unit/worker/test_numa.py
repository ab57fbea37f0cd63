"""Memory of a NUMA node: which one is meant, on trees of files, and the kernel's own word that it is so."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from distserve.errors import ConfigError
from distserve.worker import numa


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    for node, cpus in enumerate(("0-3", "4-7")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "cpus", "node"),
    [
        ("auto", (4, 6), 1),
        ("auto", (3, 4), -1),  # of both
        ("auto", (), -1),
        ("-1", (4,), -1),
        ("0", (4,), 0),  # asked for by number: so be it
    ],
)
def test_the_node_that_a_setting_names(two_nodes: Path, wanted: str, cpus: tuple[int, ...], node: int) -> None:
    assert numa.node_for(wanted, cpus, "prefill.numa_node", two_nodes) == node


def test_auto_asks_for_nothing_on_a_machine_of_one_node(tmp_path: Path) -> None:
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    (tmp_path / "devices/system/node/node0/cpulist").write_text("0-7\n")
    assert numa.node_for("auto", (1,), "prefill.numa_node", tmp_path) == -1


def test_a_node_that_is_not_there_is_refused(two_nodes: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode\.numa_node is 2, must be auto, -1 or a node .*\(0, 1\)"):
        numa.node_for("2", (), "decode.numa_node", two_nodes)


needs_nodes = pytest.mark.skipif(
    not numa.online_nodes() or platform.machine() not in ("x86_64", "aarch64"), reason="a kernel without NUMA nodes"
)


def printed(code: str) -> str:
    begin = "import threading; from distserve.worker import numa;"
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_nodes
def test_a_thread_and_those_it_starts_take_their_memory_from_the_node() -> None:
    node = numa.online_nodes()[-1]
    code = (
        f"print(numa.preferred(), repr(numa.prefer({node})), numa.preferred());"
        "t = threading.Thread(target=lambda: print(numa.preferred())); t.start(); t.join();"
        "print('prefer' in open('/proc/self/numa_maps').read())"
    )
    assert printed(code).split("\n") == [f"-1 '' {node}", str(node), "True"]


@needs_nodes
def test_a_node_that_the_kernel_refuses_is_told_with_its_reason() -> None:
    assert printed("print(numa.prefer(1000), numa.preferred())").startswith("Invalid argument (the control group's")


def test_an_unknown_architecture_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert numa.prefer(0) == "the number of set_mempolicy on riscv64 is not known here"
    assert numa.preferred() == -1
