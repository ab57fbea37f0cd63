"""The tests that need a device, run where there is one: on rxe0 of a host of the lab."""

import pytest
from roce_lab.lab import Lab

from tests.roce.guest_tests import assert_all_passed, run_tests

pytestmark = pytest.mark.roce
TIMEOUT_S = 300.0


@pytest.mark.timeout(TIMEOUT_S + 150)
def test_the_verbs_layer_keeps_its_contract_on_a_soft_roce_device(lab: Lab) -> None:
    assert_all_passed(run_tests(lab.host2, "tests/roce/verbs", TIMEOUT_S), at_least=8)
