"""All checks together, on a host made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from distserve.config import Config, load_config
from distserve.doctor.examine import look_around, look_further
from distserve.doctor.finding import Finding
from distserve.doctor.host import Host
from tests.unit.doctor.trees import host, mlnx_qos, rdma_files

CHECKS = [
    "rdma.devices",
    "rdma.access",
    "rdma.pyverbs",
    "rdma.chosen",
    "rdma.gid",
    "rdma.mtu",
    "rdma.memlock",
    "network.trust",
    "network.pfc",
    "network.ecn",
    "network.override",
    "network.cma_tos",
    "host.kernel",
    "host.governor",
    "host.aspm",
    "host.numa",
    "host.shm",
    "host.cores",
    "host.realtime",
    "host.mps",
    "ports.gateway",
    "ports.transport",
    "ports.prefill",
    "ports.decode",
    "ports.roce",
]


def config(kind: str = "auto") -> Config:
    return load_config(overrides={"transport.kind": kind, "gateway.port": 0})


def full(root: Path) -> Host:
    files = rdma_files() | {
        "dev/infiniband/uverbs0": "",
        "proc/sys/kernel/osrelease": "6.1.0",
        "proc/self/status": "CapEff:\tffffffffffffffff\n",
        "sys/devices/system/node/node0/cpulist": "0-7",
    }
    return host(root, files, {"mlnx_qos -i eth2": mlnx_qos()})


def by_check(findings: list[Finding]) -> dict[str, str]:
    return {f.check: f.status for f in findings}


@pytest.mark.parametrize("kind", ["auto", "rdma"])
def test_a_host_that_is_ready_has_nothing_to_mend(tmp_path: Path, kind: str) -> None:
    findings = look_around(config(kind), full(tmp_path), lambda: "", lambda path: True)
    assert [f.check for f in findings] == CHECKS
    assert {f.status for f in findings} == {"ok", "skip"}
    assert {f.check for f in findings if f.status == "skip"} == {
        "network.ecn",
        "network.cma_tos",
        "host.governor",
        "host.aspm",
        "host.cores",
        "host.realtime",
        "host.mps",
    }


@pytest.mark.parametrize(("kind", "status"), [("auto", "warn"), ("rdma", "fail"), ("tcp", "skip"), ("shm", "skip")])
def test_without_a_device_one_row_says_so_and_the_rest_is_left_out(tmp_path: Path, kind: str, status: str) -> None:
    findings = look_around(config(kind), host(tmp_path), lambda: "", lambda path: True)
    assert [f.check for f in findings] == CHECKS
    found = by_check(findings)
    assert found["rdma.devices"] == status
    assert {found[c] for c in CHECKS[1:12]} == {"skip"}


def test_a_port_that_is_down_leaves_out_what_needs_one(tmp_path: Path) -> None:
    tree = host(tmp_path, rdma_files(state="1: DOWN") | {"dev/infiniband/uverbs0": ""})
    findings = look_around(config("rdma"), tree, lambda: "", lambda path: True)
    assert [f.check for f in findings] == CHECKS
    found = by_check(findings)
    assert (found["rdma.chosen"], found["rdma.gid"], found["network.pfc"]) == ("fail", "skip", "skip")


def test_a_check_that_breaks_costs_the_others_nothing(tmp_path: Path) -> None:
    def broken() -> str:
        raise RuntimeError("no such thing")

    findings = look_around(config(), full(tmp_path), broken, lambda path: True)
    assert [f.check for f in findings] == CHECKS
    (pyverbs,) = (f for f in findings if f.check == "rdma.pyverbs")
    assert (pyverbs.status, pyverbs.found) == ("skip", "could not be looked at: RuntimeError: no such thing")


async def test_without_a_bus_the_rest_is_left_out_but_a_peer_that_was_asked_for_fails() -> None:
    found = by_check(await look_further(config(), ""))
    assert found == {"nats.server": "skip", "nats.registry": "skip", "clock.offset": "skip"}
    found = by_check(await look_further(config(), "h1"))
    assert found["peer.reach"] == "fail"
