"""A thousand leases between two hosts with faults drawn at random: what is committed is right to the byte, and every
block is accounted for. $ROCE_SOAK_LEASES: another number, e.g. 10000 by hand."""

from __future__ import annotations

import os

import pytest
from roce_lab.lab import Lab

from tests.roce.conftest import StartModule
from tests.roce.test_faults import START_S, all_accounted_for, outcome_of

NUM_LEASES = int(os.environ.get("ROCE_SOAK_LEASES", "1000"))
TIMEOUT_S = 120 + 0.6 * NUM_LEASES

pytestmark = [pytest.mark.roce, pytest.mark.timeout(2 * START_S + TIMEOUT_S)]


def test_a_thousand_leases_with_random_faults(lab: Lab, nats_in_lab: str, start_module: StartModule) -> None:
    decode = start_module(lab.host2, "tests.roce.decode_side", nats_in_lab)
    sending = start_module(lab.host1, "tests.roce.prefill_side", nats_in_lab, "soak", str(NUM_LEASES), "1")
    decode.wait_for("ready", START_S)
    outcome = outcome_of(sending, START_S + TIMEOUT_S)
    report, counts = outcome["report"], outcome["counts"]
    print(f"{NUM_LEASES} leases in {outcome['seconds']:.0f} s: {counts}")
    assert counts["committed"] + counts["failed"] == NUM_LEASES
    assert counts["committed"] > NUM_LEASES / 2
    assert counts["failed"] > NUM_LEASES / 20
    assert not report["wrong"]
    assert report["right"] >= counts["committed"]  # more, where the answer to a commit came too late
    assert all_accounted_for(report), report
    assert outcome["own_free"] == outcome["own_total"]
    assert outcome["objects"]["windows"] == report["objects"]["windows"] == 0
    assert outcome["objects"]["pairs"] == report["objects"]["pairs"] == 3
