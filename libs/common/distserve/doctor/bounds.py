"""Checks of what workers are to be kept to on this host: cores, real-time priority, their part of a GPU.

What can't be had fails where `prefill.isolation` or `decode.isolation` is `required`; else a worker starts without.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from distserve.config import Config, parse_cpus
from distserve.doctor.finding import Finding, Status, bad, ok, skip
from distserve.doctor.host import Host
from distserve.machine import online_cores
from distserve.transport.rdma.ports import numa_of
from distserve.worker import mps, numa, realtime
from distserve.worker.process import in_ranges, section_of
from distserve.worker.realtime import EngineRole


def check_cores(host: Host, config: Config) -> list[Finding]:
    """Whether each role's cores are there, on one NUMA node, and not the other role's too."""
    sets = {role: set(parse_cpus(section_of(role, config).cpus)) for role in realtime.ROLES}
    found = [_cores_of(host, role, cpus) for role, cpus in sets.items() if cpus]
    if not found:
        return [skip("host.cores", "neither prefill.cpus nor decode.cpus is set: workers float; `up` deals cores out")]
    if shared := sets["prefill"] & sets["decode"]:
        text = f"core {in_ranges(shared)} is in prefill.cpus and decode.cpus: on one host prefill takes decode's time"
        found.append(bad("host.cores", "warn", text, "# give each role cores of its own: prefill.cpus, decode.cpus"))
    return found


def _cores_of(host: Host, role: EngineRole, cpus: set[int]) -> Finding:
    sys_root, words = host.root / "sys", in_ranges(cpus)
    online = online_cores(host.root)
    if online and (gone := cpus.difference(online)):
        mend = f"# take cores that are there, {in_ranges(online)}: {role}.cpus"
        return bad("host.cores", "fail", f"{role}.cpus is {words}, but there is no core {in_ranges(gone)}", mend, role)
    nodes = numa.online_nodes(sys_root)
    node = numa_of(cpus, sys_root)
    if node is None and len(nodes) > 1:
        text = f"{role}.cpus is {words}, spread over NUMA nodes: half of its memory is far from half of its threads"
        mend = "\n".join(f"# node {n}: {host.text(f'/sys/devices/system/node/node{n}/cpulist')}" for n in nodes)
        return bad("host.cores", "warn", text, mend, role)
    return ok("host.cores", f"{words}" + (f", all on NUMA node {node}" if len(nodes) > 1 else ""), role)


def check_realtime(host: Host, config: Config) -> list[Finding]:
    """Whether processes started as this one may have the priorities that are configured."""
    asked = [role for role in realtime.ROLES if section_of(role, config).realtime != "off"]
    if not asked:
        return [skip("host.realtime", "neither prefill.realtime nor decode.realtime is set")]
    found = []
    for role in asked:
        priority = int(section_of(role, config).realtime)
        what = f"{realtime.policy_name(role)} {priority}"
        if why := realtime.refusal(role, priority, host.root / "proc"):
            text = f"{what} is not permitted: {why}"
            found.append(bad("host.realtime", _severity(role, config), text, f"ulimit -r {priority}", role))
        elif host.text("/proc/sys/kernel/sched_rt_runtime_us") == "-1":
            text = f"{what} is permitted, and nothing stops a thread that never waits: its core is lost to all others"
            mend = "sysctl -w kernel.sched_rt_runtime_us=950000"
            found.append(bad("host.realtime", "warn", text, mend, role))
        else:
            found.append(ok("host.realtime", f"{what} is permitted", role))
    return found


def check_mps(config: Config, env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Whether there is an MPS daemon where a part of a GPU is configured."""
    asked = [role for role in realtime.ROLES if section_of(role, config).mps_percentage]
    if not asked:
        return [skip("host.mps", "neither prefill.mps_percentage nor decode.mps_percentage is set")]
    if why := mps.problem(env):
        status: Status = "fail" if "fail" in {_severity(role, config) for role in asked} else "warn"
        return [bad("host.mps", status, why, "nvidia-cuda-mps-control -d")]
    parts = ", ".join(f"{role} {section_of(role, config).mps_percentage} %" for role in asked)
    return [ok("host.mps", f"the daemon listens; {parts}")]


def _severity(role: EngineRole, config: Config) -> Status:
    return "fail" if section_of(role, config).isolation == "required" else "warn"
