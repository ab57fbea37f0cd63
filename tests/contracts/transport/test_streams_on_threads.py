"""The contract once more for shm and tcp, with event loops that move no byte of KV: what is small in the tests goes the
way of what is large in service."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.contracts.transport import test_transport_faults, test_transport_peers, test_transport_transfers
from tests.contracts.transport.conftest import FAST, Rig

_MODULES = (test_transport_faults, test_transport_peers, test_transport_transfers)
_TESTS = {name: test for module in _MODULES for name, test in vars(module).items() if name.startswith("test_")}
_TESTS.pop("test_it_works_on_uvloop")  # makes its rig itself
globals().update(_TESTS)


@pytest.fixture(params=("shm", "tcp"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def rig(bare_rig: Rig) -> Rig:
    return await bare_rig.start(options=replace(FAST, loop_bytes=0))
