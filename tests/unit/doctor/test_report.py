"""The table as people see it, the document as machines do, and the exit status of both."""

from __future__ import annotations

import io

import pytest

from distserve.console import Console
from distserve.doctor.finding import Finding, bad, ok, skip
from distserve.doctor.report import as_document, exit_status, print_table

FINDINGS = [
    bad("rdma.devices", "warn", "DOWN, Ethernet, on eth2", "ip link set eth2 up  # and look at the cable", "mlx5_0:1"),
    skip("rdma.gid", "no usable port"),
    skip("rdma.mtu", "no usable port"),
    skip("rdma.memlock", "another reason"),
    ok("host.kernel", "6.1.0", version="6.1.0"),
    bad(
        "nats.server",
        "fail",
        "no NATS server answers " + "because of this and that " * 6,
        "nats-server -js " * 12,
        "h:1",
    ),
    ok("peer.tcp", "fast", "h", p50_s=0.0001),
]


def table(width: int, findings: list[Finding] = FINDINGS) -> list[str]:
    stream = io.StringIO()
    print_table(findings, Console(stream=stream), width)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_to_the_terminal_but_never_breaks_a_command(width: int) -> None:
    lines = table(width)
    assert all(len(line) <= width for line in lines if "nats-server" not in line)
    assert sum("nats-server -js " * 12 in line + " " for line in lines) == 1
    assert [line for line in lines if line and not line.startswith(" ")] == [
        "RDMA",
        "Host",
        "NATS",
        "Peer",
        "2 ok, 1 warn, 1 fail, 3 skip",
    ]


def test_what_was_left_out_for_one_reason_shares_a_line() -> None:
    lines = [line.strip() for line in table(80)]
    assert "skip  gid, mtu: no usable port" in lines
    assert "skip  memlock: another reason" in lines


def test_each_that_is_not_ok_is_followed_by_what_mends_it() -> None:
    lines = table(80)
    at = next(i for i, line in enumerate(lines) if "mlx5_0:1" in line)
    assert lines[at].startswith("  warn  devices mlx5_0:1: DOWN")
    assert lines[at + 1].strip() == "-> ip link set eth2 up  # and look at the cable"


@pytest.mark.parametrize(("keep", "status"), [(["ok", "skip", "warn"], 0), (["ok", "fail"], 1), ([], 0)])
def test_only_a_failure_fails(keep: list[str], status: int) -> None:
    assert exit_status([f for f in FINDINGS if f.status in keep]) == status


def test_the_document_has_every_finding() -> None:
    document = as_document(FINDINGS, host="h0", kind="auto", bus="", peer="", unix_s=1.0)
    assert document["summary"] == {"ok": 2, "warn": 1, "fail": 1, "skip": 3}
    assert [f["check"] for f in document["findings"]] == [f.check for f in FINDINGS]
    first = document["findings"][0]
    assert first == {
        "check": "rdma.devices",
        "subject": "mlx5_0:1",
        "status": "warn",
        "found": "DOWN, Ethernet, on eth2",
        "mend": ["ip link set eth2 up  # and look at the cable"],
        "measures": {},
    }
    assert document["peer"] is None
