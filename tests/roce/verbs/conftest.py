"""verbs.py on a device: a port, what is opened on it and two pairs that are connected. A host of the lab runs the files
test_verbs_*.py of this folder: guest_tests.CHOSEN knows them by their names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distserve.transport.rdma import device, ports, verbs
from tests.roce.verbs.loopback import BLOCK, TARGET, Memory, wired


@pytest.fixture(scope="session")
def memory() -> Memory:
    return Memory()


@pytest.fixture
def port() -> ports.Port:
    return ports.choose_ports(ports.discover())[0]


@pytest.fixture
def nic(port: ports.Port, memory: Memory) -> Iterator[verbs.Nic]:
    memory.bytes[TARGET * BLOCK :] = 0
    nic = verbs.open_nic(port)
    yield nic
    nic.close()
    assert nic.counts() == {"pairs": 0, "regions": 0, "windows": 0}


@pytest.fixture
def region(nic: verbs.Nic, memory: Memory) -> device.Region:
    return nic.register(memory.address, memory.length, remote_write=True)


@pytest.fixture
def closed_region(nic: verbs.Nic, memory: Memory) -> device.Region:
    return nic.register(memory.address, memory.length, remote_write=False)


@pytest.fixture
def pair(nic: verbs.Nic, region: device.Region, memory: Memory) -> tuple[device.Pair, device.Pair]:
    """Connected, with 8 receives of 64 bytes posted on the second, wr_id 100 .. 107."""
    return wired(nic, region, memory)
