"""Trees of files as Linux shows them, and tools that answer as the real ones do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from distserve.doctor.host import Host, Output

MLNX_QOS = """DCBX mode: OS controlled
Priority trust state: {trust}
dscp2prio mapping:
        prio:0 dscp:07,06,05,04,03,02,01,00,
        prio:1 dscp:15,14,13,12,11,10,09,08,
        prio:2 dscp:23,22,21,20,19,18,17,16,
        prio:3 dscp:31,30,29,28,27,26,25,24,
        prio:4 dscp:39,38,37,36,35,{bulk},33,32,
        prio:5 dscp:47,46,45,44,43,42,41,40,
        prio:6 dscp:55,54,53,52,51,50,49,{urgent},
        prio:7 dscp:63,62,61,60,59,58,57,56,
default priority:
Receive buffer size (bytes): 20016,156096,0,0,0,0,0,0,max_buffer_size=262016
Cable len: 7
PFC configuration:
        priority    0   1   2   3   4   5   6   7
        enabled     {pfc}
        buffer      0   0   0   0   1   0   0   0
tc: 0 ratelimit: unlimited, tsa: vendor
         priority:  1
"""


def mlnx_qos(trust: str = "dscp", pfc: str = "00001000", bulk: str = "34", urgent: str = "48") -> str:
    return MLNX_QOS.format(trust=trust, pfc="   ".join(pfc), bulk=bulk, urgent=urgent)


def tools(answers: Mapping[str, str | Output]) -> Tools:
    return Tools(answers)


class Tools:
    """Answers by the command's beginning; any other tool is not installed. `asked` has every command."""

    def __init__(self, answers: Mapping[str, str | Output]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> Output:
        line = " ".join(command)
        self.asked.append(line)
        for beginning, answer in self._answers.items():
            if line.startswith(beginning):
                return answer if isinstance(answer, Output) else Output(answer)
        return Output(problem=f"{command[0]} is not installed", missing=True)


def host(root: Path, files: Mapping[str, str] | None = None, answers: Mapping[str, str | Output] | None = None) -> Host:
    """files: path from the root -> text."""
    for path, text in (files or {}).items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Host(root, tools(answers or {}))


def rdma_files(
    device: str = "mlx5_0",
    *,
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    netdev: str = "eth2",
    mtu: int = 9000,
    numa_node: int = 0,
    gids: Mapping[int, tuple[str, str]] | None = None,
) -> dict[str, str]:
    """A device with one port in sysfs. gids: index -> (GID, type)."""
    if gids is None:
        gids = {
            0: ("fe80:0000:0000:0000:0202:c9ff:fe00:0001", "IB/RoCE v1"),
            1: ("fe80:0000:0000:0000:0202:c9ff:fe00:0001", "RoCE v2"),
            2: ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2"),
        }
    port = f"sys/class/infiniband/{device}/ports/1"
    files = {
        f"{port}/state": state,
        f"{port}/link_layer": link_layer,
        f"sys/class/infiniband/{device}/device/numa_node": str(numa_node),
        f"sys/class/net/{netdev}/mtu": str(mtu),
    }
    for index, (gid, kind) in gids.items():
        files |= {
            f"{port}/gids/{index}": gid,
            f"{port}/gid_attrs/types/{index}": kind,
            f"{port}/gid_attrs/ndevs/{index}": netdev,
        }
    return files
