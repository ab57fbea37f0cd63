"""The tests that need a device, run where there is one: on rxe0 of a host of the lab."""

import pytest

from tests.roce.guest_tests import GuestRuns, assert_all_passed

pytestmark = [pytest.mark.roce, pytest.mark.timeout(900)]


def test_the_verbs_layer_keeps_its_contract_on_a_soft_roce_device(guest_runs: GuestRuns) -> None:
    assert_all_passed(guest_runs.of("tests.roce.verbs"), at_least=8)
