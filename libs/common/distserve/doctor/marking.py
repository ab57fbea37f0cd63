"""Checks of what happens to DistServe's marks on this host: trust, mapping, PFC, ECN, and overrides."""

from __future__ import annotations

import re

from distserve.doctor.finding import Finding, bad, ok, skip
from distserve.doctor.host import Host
from distserve.doctor.qos import NUM_PRIORITIES, Qos, read_qos
from distserve.doctor.wanted import Wanted
from distserve.transport.rdma.ports import Port, traffic_class_override


def check_marks(host: Host, netdev: str, wanted: Wanted) -> list[Finding]:
    """Of one network device with an RDMA device on it."""
    qos = read_qos(host, netdev)
    if isinstance(qos, str):
        return [skip(f"network.{name}", qos, netdev) for name in ("trust", "pfc")] + [
            check_ecn(host, netdev, Qos("dcb"), wanted)
        ]
    return [
        check_trust(qos, netdev, wanted),
        check_pfc(qos, netdev, wanted),
        check_ecn(host, netdev, qos, wanted),
    ]


def check_trust(qos: Qos, netdev: str, wanted: Wanted) -> Finding:
    """The device must sort packets by DSCP, and decode's must not share a queue with bulk."""
    dscp = wanted.dscp
    if qos.trust is None:
        return skip("network.trust", f"{qos.tool} does not say what {netdev} trusts", netdev)
    entries = " ".join(f"{mark}:{mark >> 3}" for mark in sorted(set(dscp.values()), reverse=True))
    if qos.trust != "dscp":
        mend = f"mlnx_qos -i {netdev} --trust dscp"
        if qos.tool == "dcb":
            mend = f"dcb app add dev {netdev} dscp-prio {entries}"
        return bad(
            "network.trust",
            "warn",
            f"trusts {qos.trust}, not dscp: all classes share one queue",
            mend,
            netdev,
            trust=qos.trust,
        )
    where = {name: qos.priority(mark) for name, mark in dscp.items()}
    words = ", ".join(f"DSCP {mark} goes to priority {where[name]}" for name, mark in dscp.items())
    if where["decode"] in (where["prefill"], where["background"]):
        mark, priority = dscp["decode"], 6
        mend = f"mlnx_qos -i {netdev} --dscp2prio set,{mark},{priority}"
        if qos.tool == "dcb":
            mend = f"dcb app replace dev {netdev} dscp-prio {entries}"
        return bad("network.trust", "warn", f"{words}: what decode waits for queues behind bulk", mend, netdev, **where)
    return ok("network.trust", f"dscp; {words}", netdev, **where)


def check_pfc(qos: Qos, netdev: str, wanted: Wanted) -> Finding:
    """PFC on the priorities of KV in bulk and on no other: a pause of the control priority stops what decode waits
    for."""
    if qos.pfc is None:
        return skip("network.pfc", f"{qos.tool} does not say where {netdev} has PFC", netdev)
    lossless = {qos.priority(mark) for mark in wanted.lossless_dscp}
    flags = ["1" if p in lossless else "0" for p in range(NUM_PRIORITIES)]
    mend = {
        "mlnx_qos": f"mlnx_qos -i {netdev} --pfc {','.join(flags)}",
        "dcb": f"dcb pfc set dev {netdev} prio-pfc all:off " + " ".join(f"{p}:on" for p in sorted(lossless)),
        "lldptool": f"lldptool -T -i {netdev} -V PFC enabled={','.join(map(str, sorted(lossless)))}",
    }[qos.tool]
    figures = {"lossless": _list(qos.pfc), "wanted": _list(lossless)}
    if qos.pfc == lossless:
        return ok("network.pfc", f"on priority {_list(lossless)} (KV in bulk) only", netdev, **figures)
    if not qos.pfc:
        found = f"off: a full queue drops KV, and RDMA sends again from there; wanted on {_list(lossless)}"
    elif missing := lossless - qos.pfc:
        found = f"on {_list(qos.pfc)}, not on {_list(missing)}, where KV in bulk goes"
    else:
        found = f"on {_list(qos.pfc)}: more than KV in bulk ({_list(lossless)}) can be paused"
    return bad("network.pfc", "warn", found, mend, netdev, **figures)


def check_ecn(host: Host, netdev: str, qos: Qos, wanted: Wanted) -> Finding:
    """RoCE's congestion control (DCQCN): notification and reaction point, by sysfs of the mlx5 driver as MLNX_OFED has
    it (its documentation, "Explicit Congestion Notification")."""
    folder = f"/sys/class/net/{netdev}/ecn"
    if not host.has(folder):
        return skip("network.ecn", f"the driver of {netdev} shows no ECN settings in /sys", netdev)
    priorities = sorted({qos.priority(mark) for mark in wanted.lossless_dscp})
    off = [
        f"{folder}/{point}/enable/{priority}"
        for priority in priorities
        for point in ("roce_np", "roce_rp")
        if host.text(f"{folder}/{point}/enable/{priority}") != "1"
    ]
    if off:
        points = ", ".join(f"{o.split('/')[-3]} of priority {o.split('/')[-1]}" for o in off)
        return bad(
            "network.ecn",
            "warn",
            f"off: {points}: queues fill until PFC pauses or packets drop",
            "\n".join(f"echo 1 > {o}" for o in off),
            netdev,
        )
    cnp = host.number(f"{folder}/roce_np/cnp_dscp")
    if cnp is not None and qos.priority(cnp) in priorities:
        return bad(
            "network.ecn",
            "warn",
            f"on, but congestion notices (DSCP {cnp}) queue with the KV that caused them",
            f"echo 48 > {folder}/roce_np/cnp_dscp",
            netdev,
            cnp_dscp=cnp,
        )
    shared = "" if cnp is None else f"; notices have DSCP {cnp}"
    if cnp is not None and qos.priority(cnp) == qos.priority(wanted.dscp["decode"]):
        shared += ", the queue of what decode waits for"
    return ok("network.ecn", f"on for priority {_list(priorities)}{shared}", netdev, cnp_dscp=cnp)


def check_override(host: Host, port: Port, wanted: Wanted) -> Finding:
    """A traffic class that the host puts on every packet, whatever its queue pair says."""
    path = f"/sys/class/infiniband/{port.device}/tc/{port.port}/traffic_class"
    octet = traffic_class_override(port, host.root / "sys")
    if octet is not None:
        found = f"every packet gets traffic class {octet} (DSCP {octet >> 2}): the classes are one"
    elif rules := host.text(path):
        found = f"rules rewrite traffic classes: {'; '.join(rules.splitlines())}"
    else:
        return ok("network.override", "no host-wide traffic class", port.name)
    return bad("network.override", wanted.severity, found, f"echo -1 > {path}", port.name, traffic_class=octet)


def check_cma_tos(host: Host, port: Port) -> Finding:
    """The mark that rdma_cm puts on connections that set none, by configfs (Documentation/ABI/testing/configfs-rdma_cm)
    or cma_roce_tos. DistServe sets its pairs up itself, so it does not matter here; other programs may share the
    queues."""
    subject = port.name
    text = host.text(f"/sys/kernel/config/rdma_cm/{port.device}/ports/{port.port}/default_roce_tos")
    if not text:
        output = host.run(["cma_roce_tos", "-d", port.device, "-p", str(port.port)])
        if output.problem:
            return skip("network.cma_tos", output.problem, subject)
        text = output.text.strip()
    found = re.search(r"\d+", text)
    if found is None:
        return skip("network.cma_tos", f"cma_roce_tos answers {text[:60]!r}", subject)
    octet = int(found[0])
    return ok(
        "network.cma_tos",
        f"rdma_cm's default is {octet} (DSCP {octet >> 2}); DistServe does not use it",
        subject,
        tos=octet,
    )


def _list(priorities: frozenset[int] | set[int] | list[int]) -> str:
    return ", ".join(map(str, sorted(priorities))) or "none"
