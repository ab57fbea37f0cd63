"""The transports' one contract suite, over rdma, on hosts that have an RDMA device: half of it on each."""

import pytest

from tests.roce.guest_tests import GuestRuns, assert_all_passed

pytestmark = [pytest.mark.roce, pytest.mark.timeout(900)]
# What only made-up devices can show: several of them, unequal ones, failing ones.
MAY_SKIP = ("for devices that this process makes up",)


def test_the_contract_suite_passes_over_rdma(guest_runs: GuestRuns) -> None:
    assert_all_passed(guest_runs.of("tests.contracts.transport"), at_least=40, may_skip=MAY_SKIP)
