"""Trust, PFC, ECN and overrides, by the reports of the real tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distserve.doctor import marking
from distserve.doctor.host import Output
from distserve.doctor.qos import Qos, parse_dcb, parse_lldptool, parse_mlnx_qos, read_qos
from distserve.doctor.wanted import Wanted
from distserve.transport.rdma.ports import Port, discover
from tests.unit.doctor.trees import Tools, host, mlnx_qos, rdma_files

AUTO, FORCED = Wanted(), Wanted(kind="rdma")

LLDPTOOL = """IEEE 8021QAZ PFC TLV
\t Willing: yes
\t MACsec Bypass Capable: no
\t PFC capable traffic classes: 8
\t PFC enabled: {enabled}
End of LLDPDU TLV
"""


def dcb(dscp: dict[int, int], lossless: set[int]) -> tuple[str, str]:
    app: dict[str, object] = {"default_prio": [0]}
    if dscp:
        app["dscp_prio"] = [list(entry) for entry in dscp.items()]
    pfc = {"pfc_cap": 8, "macsec_bypass": False, "delay": 0, "prio_pfc": [p in lossless for p in range(8)]}
    return json.dumps(app), json.dumps(pfc)


def test_mlnx_qos_is_read() -> None:
    qos = parse_mlnx_qos(mlnx_qos(pfc="00011000"))
    assert qos is not None
    assert (qos.trust, qos.pfc) == ("dscp", frozenset({3, 4}))
    assert qos.priorities == {dscp: dscp >> 3 for dscp in range(64)}
    assert parse_mlnx_qos("Usage: mlnx_qos -i <interface> [options]") is None


def test_dcb_is_read() -> None:
    qos = parse_dcb(*dcb({48: 6, 34: 3}, {3}))
    assert (qos.trust, qos.priority(34), qos.priority(48), qos.priority(0), qos.pfc) == (
        "dscp",
        3,
        6,
        0,
        frozenset({3}),
    )
    assert parse_dcb(*dcb({}, set())).trust == "pcp"
    assert parse_dcb("", "").trust is None
    with pytest.raises(ValueError, match="prio_pfc has 2 entries"):
        parse_dcb("", '{"prio_pfc": [true, false]}')


@pytest.mark.parametrize(("text", "enabled"), [("none", set()), ("1 2 5 7", {1, 2, 5, 7}), ("4", {4})])
def test_lldptool_is_read(text: str, enabled: set[int]) -> None:
    assert parse_lldptool(LLDPTOOL.format(enabled=text)) == enabled
    assert parse_lldptool("Device not capable") is None


def test_the_first_tool_that_answers_is_believed(tmp_path: Path) -> None:
    app, pfc = dcb({48: 6}, {4})
    everything = {
        "mlnx_qos -i eth2": mlnx_qos(),
        "dcb -j -N app show dev eth2": app,
        "dcb -j -N pfc show dev eth2": pfc,
        "lldptool -t -i eth2 -V PFC": LLDPTOOL.format(enabled="4"),
    }
    seen = []
    while everything:
        qos = read_qos(host(tmp_path, {}, dict(everything)), "eth2")
        assert isinstance(qos, Qos)
        seen.append(qos.tool)
        everything = {k: v for k, v in everything.items() if not k.startswith(qos.tool)}
    assert seen == ["mlnx_qos", "dcb", "lldptool"]


def test_what_keeps_the_tools_from_answering_is_said(tmp_path: Path) -> None:
    assert read_qos(host(tmp_path), "eth2") == "none of mlnx_qos, dcb (iproute2) and lldptool is installed"
    refused = Output(problem="dcb: Attribute read: Operation not supported")
    said = read_qos(host(tmp_path, {}, {"dcb": refused}), "eth2")
    assert said == "eth2 can't be asked: dcb: Attribute read: Operation not supported"
    garbage = read_qos(host(tmp_path, {}, {"dcb": "what is this"}), "eth2")
    assert isinstance(garbage, str)


@pytest.mark.parametrize(
    ("report", "status", "mend"),
    [
        (mlnx_qos(), "ok", ""),
        (mlnx_qos(trust="pcp"), "warn", "mlnx_qos -i eth2 --trust dscp"),
        (mlnx_qos(urgent="34", bulk="48"), "ok", ""),  # swapped, still apart
        (mlnx_qos(bulk="34,48", urgent="49"), "warn", "mlnx_qos -i eth2 --dscp2prio set,48,6"),
    ],
)
def test_trust(report: str, status: str, mend: str) -> None:
    qos = parse_mlnx_qos(report)
    assert qos is not None
    found = marking.check_trust(qos, "eth2", FORCED)
    assert (found.status, found.mend) == (status, mend)


def test_trust_is_mended_by_the_tool_that_is_there() -> None:
    found = marking.check_trust(parse_dcb(*dcb({}, set())), "eth2", AUTO)
    assert (found.status, found.mend) == ("warn", "dcb app add dev eth2 dscp-prio 48:6 34:4 0:0")
    assert marking.check_trust(Qos("lldptool", pfc=frozenset()), "eth2", AUTO).status == "skip"


@pytest.mark.parametrize(
    ("pfc", "status", "words"),
    [
        ({4}, "ok", "priority 4"),
        (set(), "warn", "off"),
        ({3}, "warn", "not on 4"),
        ({4, 6}, "warn", "more than KV in bulk (4) can be paused"),
        (set(range(8)), "warn", "more than KV in bulk"),
    ],
)
def test_pfc_on_the_priority_of_bulk_kv_alone(pfc: set[int], status: str, words: str) -> None:
    found = marking.check_pfc(Qos("mlnx_qos", "dscp", {}, frozenset(pfc)), "eth2", AUTO)
    assert found.status == status
    assert words in found.found
    assert found.mend == ("" if status == "ok" else "mlnx_qos -i eth2 --pfc 0,0,0,0,1,0,0,0")


def test_pfc_follows_the_configured_marks_and_the_tool() -> None:
    wanted = Wanted(dscp={"decode": 46, "prefill": 26, "background": 8})
    found = marking.check_pfc(Qos("dcb", "dscp", {26: 2}, frozenset({3})), "eth2", wanted)
    assert found.mend == "dcb pfc set dev eth2 prio-pfc all:off 2:on"
    found = marking.check_pfc(Qos("lldptool", pfc=frozenset()), "eth2", wanted)
    assert found.mend == "lldptool -T -i eth2 -V PFC enabled=3"
    assert marking.check_pfc(Qos("dcb"), "eth2", wanted).status == "skip"


def ecn(np: str = "1", rp: str = "1", cnp: str = "48") -> dict[str, str]:
    folder = "sys/class/net/eth2/ecn"
    return {
        f"{folder}/roce_np/enable/4": np,
        f"{folder}/roce_rp/enable/4": rp,
        f"{folder}/roce_np/cnp_dscp": cnp,
    }


def test_ecn(tmp_path: Path) -> None:
    qos = Qos("mlnx_qos", "dscp")
    assert marking.check_ecn(host(tmp_path / "a"), "eth2", qos, AUTO).status == "skip"
    on = marking.check_ecn(host(tmp_path / "b", ecn()), "eth2", qos, AUTO)
    assert (on.status, "the queue of what decode waits for" in on.found) == ("ok", True)
    half = marking.check_ecn(host(tmp_path / "c", ecn(rp="0")), "eth2", qos, AUTO)
    assert (half.status, half.mend) == ("warn", "echo 1 > /sys/class/net/eth2/ecn/roce_rp/enable/4")
    late = marking.check_ecn(host(tmp_path / "d", ecn(cnp="34")), "eth2", qos, AUTO)
    assert (late.status, late.mend) == ("warn", "echo 48 > /sys/class/net/eth2/ecn/roce_np/cnp_dscp")


def the_port(root: Path) -> Port:
    return discover(root / "sys", prefixes={})[0]


@pytest.mark.parametrize(
    ("text", "status", "octet"),
    [
        (None, "ok", None),
        ("", "ok", None),
        ("Global tclass=106", "fail", 106),
        ("tclass=10 src_ip=1.2.3.4", "fail", None),
    ],
)
def test_a_host_wide_traffic_class_undoes_the_classes(
    tmp_path: Path, text: str | None, status: str, octet: int | None
) -> None:
    files = rdma_files()
    if text is not None:
        files["sys/class/infiniband/mlx5_0/tc/1/traffic_class"] = text
    found = marking.check_override(host(tmp_path, files), the_port(tmp_path), FORCED)
    assert (found.status, found.measures.get("traffic_class")) == (status, octet)
    if status != "ok":
        assert found.mend == "echo -1 > /sys/class/infiniband/mlx5_0/tc/1/traffic_class"


def test_rdma_cms_default_is_shown_only(tmp_path: Path) -> None:
    tree = host(tmp_path, rdma_files())
    port = the_port(tmp_path)
    assert marking.check_cma_tos(tree, port).status == "skip"
    asked = host(tmp_path, {}, {"cma_roce_tos -d mlx5_0 -p 1": "106\n"})
    found = marking.check_cma_tos(asked, port)
    assert (found.status, found.measures["tos"]) == ("ok", 106)
    tree = host(tmp_path, {"sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos": "0"})
    assert marking.check_cma_tos(tree, port).measures["tos"] == 0


def test_all_of_a_device_are_asked_by_reading_only(tmp_path: Path) -> None:
    tree = host(tmp_path, ecn(), {"mlnx_qos": mlnx_qos()})
    found = marking.check_marks(tree, "eth2", AUTO)
    assert [(f.name, f.status) for f in found] == [("trust", "ok"), ("pfc", "ok"), ("ecn", "ok")]
    assert isinstance(tree.run, Tools)
    assert tree.run.asked == ["mlnx_qos -i eth2"]
