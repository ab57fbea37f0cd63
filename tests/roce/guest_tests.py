"""pytest in a guest, and what it found, test by test."""

from __future__ import annotations

import shlex
import signal
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from roce_lab.errors import LabTimeout
from roce_lab.host import SHARED, Host
from roce_lab.lab import PROJECT, Lab
from roce_lab.serving import interpreter

END_S = 90.0  # for pytest to write its report once it is interrupted


@dataclass(frozen=True, slots=True)
class Outcome:
    """A test that ran in a guest. verdict: passed, failed, error, skipped, or expected: it failed as marked."""

    name: str
    verdict: str
    seconds: float
    text: str


def run_tests(host: Host, arguments: str, timeout_s: float, *, env: Mapping[str, str] | None = None) -> list[Outcome]:
    """Run pytest in a guest and read its report. Past timeout_s it is interrupted, which is an outcome of its own after
    those of the tests that have run."""
    report = f"report-{host.node}-{abs(hash(arguments)):x}.xml"
    command = f"{shlex.quote(str(interpreter()))} -m pytest -vv -m 'roce or not roce' "
    command += "-p no:cacheprovider -p no:xdist -p no:anyio "  # importing what is not used takes seconds here
    command += f"--junitxml={SHARED / report} {arguments}"
    process = host.start(command, cwd=PROJECT, name=f"pytest {arguments}", env=env)
    late = []
    try:
        process.wait(timeout_s)
    except LabTimeout as e:
        process.signal(signal.SIGINT)  # so that what has run is reported
        process.wait(END_S)
        late = [Outcome(process.what, "error", timeout_s, str(e))]
    path = host.shared / report
    assert path.exists(), f"{process.what} ended with status {process.status}:\n{process.tail(5000)}"
    return read_report(path) + late


CONTRACT = "tests/contracts/transport"
HALF = [f"{CONTRACT}/test_transport_{what}.py" for what in ("faults", "peers")]  # of the time, about
# The soak is in test_soak.py, between two hosts and much longer.
CHOSEN = "-k '(rdma or test_verbs) and not two_hundred' --timeout 240"
# Ten thousand memory windows take an emulated host half a minute.
LEFT_OUT = f"--deselect '{CONTRACT}/test_transport_transfers.py::test_ten_thousand_blocks[rdma-True]'"
TIMEOUT_S = 600.0


class GuestRuns:
    """Both hosts run tests from the start on, each its half, side by side. For the whole session."""

    def __init__(self, lab: Lab, nats_url: str) -> None:
        env = {"DISTSERVE_TEST_NATS": nats_url, "DISTSERVE_TEST_SLOWNESS": "4"}
        self._threads = ThreadPoolExecutor(2)
        self._halves = [
            self._threads.submit(run_tests, host, f"{which} {CHOSEN}", TIMEOUT_S, env=env)
            for host, which in (
                (lab.host1, " ".join(HALF)),
                (lab.host2, f"tests/roce/verbs {CONTRACT} {' '.join(f'--ignore {path}' for path in HALF)} {LEFT_OUT}"),
            )
        ]

    def of(self, module: str) -> list[Outcome]:
        """What became of the tests of a package. Waits until both hosts are through. A half that was cut off is an
        outcome of every package."""
        outcomes = [outcome for half in self._halves for outcome in half.result()]
        return [o for o in outcomes if o.name.startswith(module) or "::" not in o.name.partition(" ")[0]]

    def close(self) -> None:
        self._threads.shutdown()


def read_report(path: Path) -> list[Outcome]:
    """A junit.xml."""
    outcomes = []
    for case in ET.parse(path).getroot().iter("testcase"):
        verdict, text = "passed", ""
        for kind in ("failure", "error", "skipped"):
            if (found := case.find(kind)) is not None:
                verdict = {"failure": "failed"}.get(kind, kind)
                if found.get("type") == "pytest.xfail":
                    verdict = "expected"
                text = "\n".join(filter(None, (found.get("message"), found.text)))
                break
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes.append(Outcome(name, verdict, float(case.get("time") or 0), text))
    return outcomes


def assert_all_passed(outcomes: list[Outcome], at_least: int, *, may_skip: Sequence[str] = ()) -> None:
    """None failed, none was skipped but for one of these reasons, and so many passed; else says what became of each,
    and why."""

    def good(o: Outcome) -> bool:
        allowed = o.verdict == "skipped" and any(reason in o.text for reason in may_skip)
        return allowed or o.verdict in ("passed", "expected")

    bad = [o for o in outcomes if not good(o)]
    summary = "\n".join(f"{o.verdict:8} {o.seconds:6.1f} s  {o.name}" for o in outcomes)
    details = "\n".join(f"----- {o.verdict}: {o.name}\n{o.text[-4000:]}" for o in bad)
    assert not bad, f"{len(bad)} of {len(outcomes)} tests in the guest did not pass\n{details}\n{summary}"
    num_passed = sum(o.verdict == "passed" for o in outcomes)
    assert num_passed >= at_least, f"only {num_passed} tests passed in the guest, expected {at_least}:\n{summary}"
