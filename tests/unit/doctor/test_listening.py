"""Ports: free, ours, or somebody else's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distserve.config import load_config
from distserve.doctor.host import Host
from distserve.doctor.listening import ROCE_PORT, check_listening, check_roce_port, check_tcp_port, owners
from tests.unit.doctor.trees import host

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def row(port: int, inode: int, state: str = "07") -> str:
    where = f"00000000:{port:04X} 00000000:0000"
    return f"   1: {where} {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 2 0000000000000000 0\n"


def process(root: Path, pid: int, inode: int, command: str) -> None:
    host(root, {f"proc/{pid}/cmdline": command.replace(" ", "\0"), f"proc/{pid}/comm": command.split()[0]})
    (root / f"proc/{pid}/fd").mkdir()
    os.symlink(f"socket:[{inode}]", root / f"proc/{pid}/fd/3")


def test_any_free_port_is_ok() -> None:
    assert check_tcp_port(Host(), "transport.port", "", 0, "transport.host").status == "ok"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert check_tcp_port(Host(), "gateway.port", "127.0.0.1", port, "gateway.host").status == "ok"


@pytest.mark.parametrize(("key", "status"), [("gateway.port", "warn"), ("transport.port", "fail")])
def test_a_port_that_somebody_holds_is_told_with_who_it_is(key: str, status: str) -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        port = int(other.stdout.readline())
        found = check_tcp_port(Host(), key, "127.0.0.1", port, "x.host")
        other.stdin.close()
    assert found.status == status
    assert f"pid {other.pid}" in found.found
    assert found.mend.startswith(f"kill {other.pid}  # or another {key}")


def test_an_address_of_another_host_is_refused() -> None:
    found = check_tcp_port(Host(), "gateway.port", "192.0.2.1", 8000, "gateway.host")  # TEST-NET-1 (RFC 5737)
    assert (found.status, "gateway.host must be an address of this host" in found.mend) == ("fail", True)


def test_owners_by_proc(tmp_path: Path) -> None:
    tree = host(tmp_path, {"proc/net/udp": HEAD + row(53, 1), "proc/net/udp6": HEAD + row(ROCE_PORT, 77)})
    process(tmp_path, 12, 1, "named -f")
    assert list(owners(tree, "udp", ROCE_PORT)) == [(None, "")]
    process(tmp_path, 13, 77, "nc -ul 4791")
    assert list(owners(tree, "udp", ROCE_PORT)) == [(13, "nc -ul 4791")]
    tree = host(tmp_path, {"proc/net/tcp": HEAD + row(80, 1, "01") + row(81, 1, "0A")})
    assert list(owners(tree, "tcp", 80)) == []  # a connection, not a listener
    assert list(owners(tree, "tcp", 81)) == [(12, "named -f")]


def test_the_port_of_roce(tmp_path: Path) -> None:
    assert check_roce_port(host(tmp_path)).status == "ok"
    tree = host(tmp_path, {"proc/net/udp": HEAD + row(ROCE_PORT, 5)})
    kernel = check_roce_port(tree)
    assert (kernel.status, "rdma_rxe" in kernel.found) == ("ok", True)
    process(tmp_path, 99, 5, "socat -")
    other = check_roce_port(tree)
    assert (other.status, "socat -" in other.found) == ("warn", True)


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("/venv/bin/python /venv/bin/distserve decode", "ok"),
        ("/usr/bin/python3 -m distserve.cli decode", "ok"),
        ("/home/me/distserve/.venv/bin/python -m http.server", "warn"),
    ],
)
def test_a_service_of_ours_may_hold_its_port(tmp_path: Path, command: str, status: str) -> None:
    tree = host(tmp_path, {"proc/net/udp": HEAD + row(ROCE_PORT, 5)})
    process(tmp_path, 99, 5, command)
    assert check_roce_port(tree).status == status


def test_without_rdma_its_port_does_not_matter(tmp_path: Path) -> None:
    found = check_listening(host(tmp_path), load_config(overrides={"gateway.port": 0}), rdma=False)
    assert [(f.check, f.status) for f in found] == [
        ("ports.gateway", "ok"),
        ("ports.transport", "ok"),
        ("ports.prefill", "ok"),
        ("ports.decode", "ok"),
        ("ports.roce", "skip"),
    ]


def test_ports_of_workers_are_tried_where_workers_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as metrics, socket.create_server(("127.0.0.1", 0)) as data:
        taken, also_taken = metrics.getsockname()[1], data.getsockname()[1]
        settings = {"gateway.port": 0, "decode.metrics_port": taken, "transport.port": also_taken}
        here = check_listening(Host(), load_config(overrides=settings), rdma=False)
        held = {f.check: f.subject for f in here if "is held by" in f.found}
        assert held == {"ports.decode": f"127.0.0.1:{taken}", "ports.transport": f"127.0.0.1:{also_taken}"}
        # Not on the address that they would listen on: a socket of 127.0.0.1 is no hindrance to one of 127.0.0.2.
        settings |= {"telemetry.metrics_host": "127.0.0.2", "transport.host": "127.0.0.2"}
        elsewhere = check_listening(Host(), load_config(overrides=settings), rdma=False)
    assert {f.status for f in elsewhere} == {"ok", "skip"}


def test_an_address_that_workers_cannot_listen_on_is_told_by_its_setting() -> None:
    settings = {"prefill.metrics_port": 9, "telemetry.metrics_host": "192.0.2.1", "gateway.port": 0}
    (found,) = (
        f for f in check_listening(Host(), load_config(overrides=settings), rdma=False) if f.check == "ports.prefill"
    )
    assert (found.status, "telemetry.metrics_host must be an address" in found.mend) == ("fail", True)


def test_a_host_with_no_way_to_nats_is_told_to_name_its_address() -> None:
    settings = {"transport.port": 9, "bus.url": "nats://no-such-host.invalid:4222", "gateway.port": 0}
    found = {f.check: f for f in check_listening(Host(), load_config(overrides=settings), rdma=False)}
    assert (found["ports.transport"].status, "transport.host" in found["ports.transport"].mend) == ("fail", True)
