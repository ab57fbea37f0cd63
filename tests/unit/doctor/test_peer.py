"""How bad it is that a transport to a peer does not work: as bad as the configuration makes it."""

from __future__ import annotations

from typing import Any

import pytest

from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.config import load_config
from distserve.doctor import peer
from distserve.errors import TransportUnavailable
from distserve.messages import ProbeHost
from distserve.transport.select import host_key

HOST = ProbeHost(
    serve_id="s",
    host="node2",
    host_key=host_key(),
    version="1",
    kinds=["shm", "rdma", "tcp"],
    unusable={},
    pools={"small": 9, "large": 9},
)
AUTO: dict[str, Any] = {}
RDMA, TCP = {"kind": "rdma"}, {"kind": "tcp"}
RDMA_OR_ELSE = {"kind": "rdma", "allow_fallback": True}


@pytest.mark.parametrize(
    ("given", "kind", "broken", "missing"),
    [
        (AUTO, "rdma", "warn", "skip"),
        (AUTO, "shm", "fail", "skip"),
        (AUTO, "tcp", "fail", "skip"),
        (RDMA, "rdma", "fail", "fail"),
        (RDMA, "tcp", "warn", "skip"),  # nobody would use it
        (TCP, "shm", "warn", "skip"),
        (TCP, "tcp", "fail", "fail"),
        (RDMA_OR_ELSE, "rdma", "warn", "warn"),
        (RDMA_OR_ELSE, "tcp", "warn", "skip"),
    ],
)
async def test_as_bad_as_the_configuration_makes_it(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], kind: str, broken: str, missing: str
) -> None:
    async def fails(*_: object) -> peer.Figures:
        raise TransportUnavailable("nothing comes back")

    monkeypatch.setattr(peer, "_measure", fails)
    config = load_config(overrides={f"transport.{key}": value for key, value in given.items()})
    bus = MemoryBus(MemoryHub())
    found = await peer._check_kind(bus, config, HOST, {}, "asker", kind, "")
    assert (found.status, found.found) == (broken, "nothing comes back")
    found = await peer._check_kind(bus, config, HOST, {}, "asker", kind, "no such device")
    assert (found.status, "no such device" in found.found) == (missing, True)
