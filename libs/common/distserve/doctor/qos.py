"""How a network device treats marks: read off whichever tool is installed.

Formats: `mlnx_qos -i DEV` as NVIDIA's documentation of the tool shows it (MLNX_OFED, "Quality of Service");
`dcb -j app|pfc show dev DEV` as dcb/dcb_app.c and dcb/dcb.c of iproute2 print it; `lldptool -t -i DEV -V PFC`
as of open-lldp (IEEE 802.1Qaz).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distserve.doctor.host import Host, Output

NUM_PRIORITIES = 8


@dataclass(frozen=True, slots=True)
class Qos:
    """Of one network device. None: the tool does not say. pfc: the priorities that are lossless."""

    tool: Literal["mlnx_qos", "dcb", "lldptool"]
    trust: str | None = None  # "dscp" or "pcp"
    priorities: Mapping[int, int] = field(default_factory=dict)  # DSCP -> priority
    pfc: frozenset[int] | None = None

    def priority(self, dscp: int) -> int:
        """Where packets with this mark go; unless mapped, the DSCP's class selector (its three high bits), as every
        device's default is."""
        return self.priorities.get(dscp, dscp >> 3)


def read_qos(host: Host, netdev: str) -> Qos | str:
    """By mlnx_qos, else dcb, else lldptool. A text says why there is nothing to read."""
    problems = []
    output = host.run(["mlnx_qos", "-i", netdev])
    if not output.problem and (found := parse_mlnx_qos(output.text)) is not None:
        return found
    problems.append(output)
    app, pfc = (host.run(["dcb", "-j", "-N", what, "show", "dev", netdev]) for what in ("app", "pfc"))
    if not app.problem or not pfc.problem:
        try:
            return parse_dcb("" if app.problem else app.text, "" if pfc.problem else pfc.text)
        except ValueError as e:
            app = Output(problem=f"dcb: {e}")
    problems.append(app)
    output = host.run(["lldptool", "-t", "-i", netdev, "-V", "PFC"])
    if not output.problem and (enabled := parse_lldptool(output.text)) is not None:
        return Qos("lldptool", pfc=enabled)
    problems.append(output)
    said = [o.problem for o in problems if o.problem and not o.missing]
    if said:
        return f"{netdev} can't be asked: {'; '.join(said)}"
    return "none of mlnx_qos, dcb (iproute2) and lldptool is installed"


def parse_mlnx_qos(text: str) -> Qos | None:
    """None if it is not the tool's report."""
    trust = re.search(r"^Priority trust state:\s*(\w+)", text, re.MULTILINE)
    enabled = re.search(r"^PFC configuration:.*?^\s*enabled\s+((?:[01]\s+){7}[01])", text, re.MULTILINE | re.DOTALL)
    if trust is None and enabled is None:
        return None
    priorities = {
        int(dscp): int(row[1])
        for row in re.finditer(r"^\s*prio:(\d)\s+dscp:([\d,]+)", text, re.MULTILINE)
        for dscp in row[2].split(",")
        if dscp
    }
    pfc = None
    if enabled is not None:
        pfc = frozenset(i for i, flag in enumerate(enabled[1].split()) if flag == "1")
    return Qos("mlnx_qos", trust[1].lower() if trust else None, priorities, pfc)


def parse_dcb(app: str, pfc: str) -> Qos:
    """app: {"dscp_prio": [[48, 6], ...]} and more, pfc: {"prio_pfc": [false, ...]} and more; empty if not known. A
    device trusts DSCP as soon as it has an entry by DSCP. Raises ValueError if it is not the tool's report."""
    trust, priorities, lossless = None, {}, None
    if app:
        table = _object(app).get("dscp_prio", [])
        priorities = {int(dscp): int(priority) for dscp, priority in table}
        trust = "dscp" if priorities else "pcp"
    if pfc:
        flags = _object(pfc).get("prio_pfc", [])
        if len(flags) != NUM_PRIORITIES:
            raise ValueError(f"prio_pfc has {len(flags)} entries, must have {NUM_PRIORITIES}")
        lossless = frozenset(i for i, flag in enumerate(flags) if flag is True or flag == "on")
    return Qos("dcb", trust, priorities, lossless)


def parse_lldptool(text: str) -> frozenset[int] | None:
    """`PFC enabled: 1 2 5 7` or `none`; None if it is not the tool's report."""
    found = re.search(r"PFC enabled:\s*(none|[0-7 ,]+)", text)
    return None if found is None else frozenset(int(n) for n in re.findall(r"[0-7]", found[1]))


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
