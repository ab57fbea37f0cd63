"""What breaks between two hosts and what becomes of it. That a lease, a key or a link goes bad on one host is in the
contract suite (tests/contracts/transport), which test_contract runs on a device of the lab."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from roce_lab.host import Process
from roce_lab.lab import Lab

from tests.roce.capture import read
from tests.roce.conftest import StartModule

pytestmark = [pytest.mark.roce, pytest.mark.timeout(700)]
START_S = 300.0  # an emulated host imports numpy and pyverbs for half a minute
RUN_S = 240.0


def outcome_of(process: Process, timeout_s: float) -> dict[str, Any]:
    """The last line that prefill_side prints."""
    assert process.wait(timeout_s) == 0, process.tail()
    last: dict[str, Any] = json.loads(process.text().strip().splitlines()[-1])
    return last


def all_accounted_for(report: dict[str, Any]) -> bool:
    return bool(report["free"] == report["total"] and not report["open"] and not report["wrong"])


@pytest.fixture(scope="module")
def decode(lab: Lab, nats_in_lab: str, start_module: StartModule) -> Process:
    process = start_module(lab.host2, "tests.roce.decode_side", nats_in_lab)
    process.wait_for("ready", START_S)
    return process


StartSender = Callable[..., Process]


@pytest.fixture
def start_sender(lab: Lab, nats_in_lab: str, start_module: StartModule) -> Iterator[StartSender]:
    """`start_sender("stream", "16") -> Process`: a prefill side on host 1. One that its test leaves running, because it
    failed, is killed: it would write to the next test's decode side."""
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        started.append(start_module(lab.host1, "tests.roce.prefill_side", nats_in_lab, *arguments))
        return started[-1]

    yield start
    for process in started:
        if process.status is None:
            process.kill()


def test_a_link_that_is_down_for_two_seconds_costs_time_and_nothing_else(
    lab: Lab, decode: Process, start_sender: StartSender
) -> None:
    sending = start_sender("stream", "16")
    sending.wait_for(r'"done": \d', START_S)  # the first eight are through: the others are being written
    lab.host2.run("ip link set eth0 down; sleep 2; ip link set eth0 up", 30)
    outcome = outcome_of(sending, RUN_S)
    assert outcome["outcomes"] == ["committed"] * 16, outcome
    assert outcome["epochs"][0] > 1, "two seconds are more than the device's patience: the link was built anew"
    assert outcome["report"]["right"] == 16
    assert all_accounted_for(outcome["report"])
    assert outcome["objects"]["pairs"] == outcome["report"]["objects"]["pairs"] == 3


def test_a_sender_that_is_killed_gives_its_blocks_back(lab: Lab, decode: Process, start_sender: StartSender) -> None:
    victim = start_sender("victim")
    lease_id = victim.wait_for(r'"writing": (\d+)', START_S)[1]
    victim.kill()
    lost = json.loads(decode.wait_for(r'\{"lost": ' + lease_id + r",.*\}", 90).group())
    assert "PeerLost" in lost["why"]
    assert lost["free"] == 1023  # all there are; block 0 is never given out


def test_a_receiver_that_is_killed_is_noticed_by_a_completion_and_the_sender_serves_the_next(
    lab: Lab, nats_in_lab: str, decode: Process, start_module: StartModule, start_sender: StartSender
) -> None:
    sending = start_sender("stream", "24")
    sending.wait_for(r'"done": [0-7],', START_S)
    time_on_host1 = float(lab.host1.run("date +%s.%N", 30).output)
    decode.kill()
    broken = sending.wait_for(r'"outcome": "(PeerLost[^"]*)", "at": ([\d.]+)', 60)
    # Which one depends on what the dying process's kernel took down first: its memory or its queue pairs.
    ends = "transport retries exceeded|flushed|remote access error|remote operation error"
    assert re.search(rf"a queue pair of \S+ broke: [^;]*({ends})", broken[1]), broken[1]
    assert "nobody takes its set-up requests" in broken[1]
    noticed_s = float(broken[2]) - time_on_host1
    print(f"a killed receiver was noticed and given up after {noticed_s:.2f} s")
    assert noticed_s < 30
    again = start_module(lab.host2, "tests.roce.decode_side", nats_in_lab)
    again.wait_for("ready", START_S)
    outcome = outcome_of(sending, START_S)
    assert outcome["outcomes"][:8] == ["committed"] * 8
    assert outcome["outcomes"][-8:] == ["committed"] * 8, outcome["outcomes"]
    again.kill()
    assert all_accounted_for(outcome["report"])


def test_ends_of_unequal_mtu_use_the_smaller_one(
    lab: Lab, nats_in_lab: str, start_module: StartModule, start_sender: StartSender
) -> None:
    try:
        lab.host2.run("ip link set eth0 mtu 1500", 30)
        decode = start_module(lab.host2, "tests.roce.decode_side", nats_in_lab)
        decode.wait_for("ready", START_S)
        with lab.capture("unequal") as capture:
            outcome = outcome_of(start_sender("stream", "8"), START_S)
        assert outcome["outcomes"] == ["committed"] * 8, outcome
        assert outcome["report"]["right"] == 8
        sizes = {len(p.roce.data) for p in read(capture.path) if p.roce is not None and p.roce.is_write}
        assert max(sizes) == 1024, "the largest RDMA MTU below an interface's 1500"
    finally:
        lab.host2.run("ip link set eth0 mtu 4200", 30)
