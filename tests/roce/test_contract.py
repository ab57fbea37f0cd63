"""The transports' one contract suite, over rdma, on a host that has an RDMA device."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from roce_lab.lab import Lab

from tests.roce.guest_tests import assert_all_passed, run_tests

pytestmark = pytest.mark.roce
TIMEOUT_S = 600.0
# What only made-up devices can show (several of them, unequal ones), and what has nothing to do with devices.
MAY_SKIP = ("for devices that this process makes up", "is no other on uvloop")


FOLDER = "tests/contracts/transport"
FAULTS = f"{FOLDER}/test_transport_faults.py"  # about half of the time


@pytest.mark.timeout(TIMEOUT_S + 150)
def test_the_contract_suite_passes_over_rdma(lab: Lab, nats_in_lab: str) -> None:
    """Half on each host."""
    env = {"DISTSERVE_TEST_NATS": nats_in_lab, "DISTSERVE_TEST_SLOWNESS": "4"}
    common = "-k rdma --timeout 240"
    with ThreadPoolExecutor(2) as threads:
        halves = [
            threads.submit(run_tests, host, f"{which} {common}", TIMEOUT_S, env=env)
            for host, which in ((lab.host1, FAULTS), (lab.host2, f"{FOLDER} --ignore {FAULTS}"))
        ]
        outcomes = [outcome for half in halves for outcome in half.result()]
    assert_all_passed(outcomes, at_least=40, may_skip=MAY_SKIP)
