"""RDMA's checks on trees of files: each ok, and each way not to be."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import pytest

from distserve.config import load_config
from distserve.doctor import rdma
from distserve.doctor.host import Host
from distserve.doctor.wanted import Wanted
from distserve.transport.rdma.ports import Port, discover
from tests.unit.doctor.trees import host, rdma_files

AUTO, FORCED, TCP = Wanted(), Wanted(kind="rdma"), Wanted(kind="tcp")
GIB = 1 << 30


def ports(tree: Host) -> list[Port]:
    return discover(tree.root / "sys", prefixes={})


def port(root: Path, **settings: object) -> tuple[Host, Port]:
    tree = host(root, rdma_files(**settings))  # type: ignore[arg-type]
    return tree, ports(tree)[0]


@pytest.mark.parametrize(("wanted", "status"), [(AUTO, "warn"), (FORCED, "fail"), (TCP, "skip")])
def test_no_device_is_as_bad_as_the_configuration_makes_it(tmp_path: Path, wanted: Wanted, status: str) -> None:
    route = "Iface\tDestination\tGateway\nens5\t00000000\t0100000A\n"
    (found,) = rdma.check_devices(host(tmp_path, {"proc/net/route": route}), [], wanted)
    assert found.status == status
    assert ("rdma link add rxe0 type rxe netdev ens5" in found.mend) == (status != "skip")


def test_a_forced_transport_that_may_fall_back_only_warns(tmp_path: Path) -> None:
    (found,) = rdma.check_devices(host(tmp_path), [], Wanted(kind="rdma", may_fall_back=True))
    assert found.status == "warn"


def test_each_port_has_a_row(tmp_path: Path) -> None:
    files = rdma_files("mlx5_0") | rdma_files("mlx5_1", state="1: DOWN", netdev="eth3")
    tree = host(tmp_path, files | rdma_files("mlx5_2", link_layer="InfiniBand", netdev="ib0"))
    up, down, foreign = rdma.check_devices(tree, ports(tree), AUTO)
    assert (up.status, up.subject, up.measures["netdev"]) == ("ok", "mlx5_0:1", "eth2")
    assert (down.status, "ip link set eth3 up" in down.mend) == ("warn", True)
    assert (foreign.status, "not RoCE" in foreign.found) == ("skip", True)


def test_the_choice_is_that_of_a_worker(tmp_path: Path) -> None:
    tree = host(tmp_path, rdma_files("mlx5_0", state="1: DOWN") | rdma_files("mlx5_1", netdev="eth3"))
    chosen, said = rdma.choose(tree, ports(tree), AUTO)
    assert ([p.name for p in chosen], said.status) == (["mlx5_1:1"], "ok")
    chosen, said = rdma.choose(tree, ports(tree), Wanted(kind="rdma", devices=("mlx5_9",)))
    assert (chosen, said.status) == ([], "fail")
    assert "mlx5_9" in said.found
    assert "mlx5_1:1" in said.found
    chosen, said = rdma.choose(tree, ports(tree), Wanted(subnet="192.168.0.0/16"))
    assert (chosen, said.status) == ([], "warn")


def two_nodes(root: Path, distance: str = "10 21") -> Host:
    files = rdma_files("mlx5_0", numa_node=0) | rdma_files("mlx5_1", netdev="eth3", numa_node=1)
    nodes = "sys/devices/system/node"
    files |= {f"{nodes}/node{n}/cpulist": f"{8 * n}-{8 * n + 7}" for n in range(3)}
    return host(root, files | {f"{nodes}/node2/distance": "31 12 10"})


@pytest.mark.parametrize(
    ("prefill", "decode", "chosen", "said"),
    [
        ("0-3", "4-7", ["mlx5_0:1"], "mlx5_0:1 (nearest of the usable ones)"),
        ("8-11", "12-15", ["mlx5_1:1"], "mlx5_1:1 (nearest of the usable ones)"),
        ("0-7", "8-15", ["mlx5_0:1", "mlx5_1:1"], "prefill: mlx5_0:1, decode: mlx5_1:1 (nearest to prefill.cpus and "),
        ("16-17", "16-17", ["mlx5_1:1"], "mlx5_1:1 (nearest"),  # no device on that node: by distance
    ],
)
def test_the_nearest_port_is_that_of_the_cores_that_workers_stay_on(
    tmp_path: Path, prefill: str, decode: str, chosen: list[str], said: str
) -> None:
    tree = two_nodes(tmp_path)
    wanted = Wanted.of(load_config(overrides={"prefill.cpus": prefill, "decode.cpus": decode}), GIB)
    found, finding = rdma.choose(tree, ports(tree), wanted)
    assert [p.name for p in found] == chosen
    assert (finding.status, said in finding.found) == ("ok", True)


def test_access(tmp_path: Path) -> None:
    tree, p = port(tmp_path)
    bare = rdma.check_access(tree, [p], FORCED, lambda path: True)
    assert (bare.status, bare.mend) == ("fail", "modprobe ib_uverbs")
    (tmp_path / ".dockerenv").write_text("")
    mapped = rdma.check_access(tree, [p], AUTO, lambda path: True)
    assert (mapped.status, "docker run --device /dev/infiniband" in mapped.mend) == ("warn", True)
    host(tmp_path, {"dev/infiniband/uverbs0": "", "dev/infiniband/rdma_cm": ""})
    closed = rdma.check_access(tree, [p], AUTO, lambda path: False)
    assert (closed.status, "/dev/infiniband/uverbs0" in closed.found) == ("warn", True)
    assert rdma.check_access(tree, [p], AUTO, lambda path: path.endswith("uverbs0")).status == "ok"


@pytest.mark.parametrize("groups", ["0::/kubepods/burstable/pod1", "12:cpu:/docker/0123"])
def test_a_container_is_known_by_its_control_group_too(tmp_path: Path, groups: str) -> None:
    assert rdma.in_container(host(tmp_path, {"proc/self/cgroup": groups}))
    assert not rdma.in_container(host(tmp_path, {"proc/self/cgroup": "0::/user.slice"}))


def test_pyverbs() -> None:
    assert rdma.check_pyverbs("", FORCED).status == "ok"
    missing = rdma.check_pyverbs("pyverbs can't be imported", FORCED)
    assert (missing.status, missing.mend) == ("fail", "apt-get install python3-pyverbs")
    assert "access" in rdma.check_pyverbs("rxe0 can't be opened: EACCES", AUTO).mend


def test_gid(tmp_path: Path) -> None:
    _, p = port(tmp_path)
    found = rdma.check_gid(p, AUTO)
    assert (found.status, found.measures["index"]) == ("ok", 2)
    assert "10.77.0.1" in found.found
    local = rdma.check_gid(dataclasses.replace(p, gids=p.gids[:2]), AUTO)
    assert (local.status, "ip -4 address add" in local.mend) == ("warn", True)
    old = rdma.check_gid(dataclasses.replace(p, gids=p.gids[:1]), FORCED)
    assert (old.status, "no RoCE v2 GID" in old.found) == ("fail", True)
    elsewhere = tuple(dataclasses.replace(g, netdev="") for g in p.gids)
    assert rdma.check_gid(dataclasses.replace(p, gids=elsewhere), AUTO).status == "warn"


@pytest.mark.parametrize(
    ("mtu", "status", "rdma_mtu"), [(1500, "warn", 1024), (4191, "warn", 2048), (4192, "ok", 4096), (9000, "ok", 4096)]
)
def test_mtu(tmp_path: Path, mtu: int, status: str, rdma_mtu: int) -> None:
    tree, p = port(tmp_path, mtu=mtu)
    found = rdma.check_mtu(tree, p, FORCED)
    assert (found.status, found.measures["rdma_mtu_bytes"]) == (status, rdma_mtu)
    assert ("ip link set eth2 mtu 4200" in found.mend) == (status == "warn")


def test_an_mtu_that_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    _, p = port(tmp_path / "full")
    assert rdma.check_mtu(host(tmp_path / "empty"), p, AUTO).status == "skip"


@pytest.mark.parametrize(
    ("limit", "pool", "capabilities", "status"),
    [
        (resource.RLIM_INFINITY, None, "0", "ok"),
        (64 * 1024, GIB, "0000000000004000", "ok"),  # CAP_IPC_LOCK alone
        (64 * 1024, GIB, "ffffffffffffbfff", "fail"),  # everything but it
        (2 * GIB, GIB, "0", "ok"),
        (GIB - 1, GIB, "0", "fail"),
        (2 * GIB, None, "0", "fail"),
    ],
)
def test_memlock(tmp_path: Path, limit: int, pool: int | None, capabilities: str, status: str) -> None:
    tree = host(tmp_path, {"proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities}\n"})
    found = rdma.check_memlock(tree, Wanted(kind="rdma", pool_bytes=pool), limit)
    assert found.status == status
    assert ("ulimit -l unlimited" in found.mend) == (status == "fail")
