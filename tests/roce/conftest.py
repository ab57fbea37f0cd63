"""The lab, booted once for the whole run, and what runs in it from the start.

A guest reads this file too when it runs tests of this folder: everything here is made only when a test asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from roce_lab.host import Host, Process
from roce_lab.lab import PROJECT, Lab
from roce_lab.machine import Hardware
from roce_lab.serving import NATS_URL, PORTS, Serving, interpreter, start_nats

from tests.roce.guest_tests import GuestRuns

# Services load while the first ones run; those that want the hosts for themselves come last.
ORDER = ("test_verbs", "test_contract", "test_served", "test_faults", "test_soak")
SETTINGS = ("prefill.chunk_tokens=128", "transport.span_bytes=65536")  # so that prompts go in several chunks and spans


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return ORDER.index(item.path.stem) if item.path.stem in ORDER else len(ORDER)

    items.sort(key=place)  # stable: the order within a file stays


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Both hosts, with the network and rxe0 up. $ROCE_LAB_MEMORY: of each, default 2G."""
    with Lab(hardware=Hardware(memory=os.environ.get("ROCE_LAB_MEMORY", "2G")), forwards=PORTS, install=True) as lab:
        print(f"lab: up in {lab.boot_s:.0f} s")
        yield lab


@pytest.fixture(scope="session")
def nats_process(lab: Lab) -> Process:
    return start_nats(lab.host1)


@pytest.fixture(scope="session")
def nats_in_lab(nats_process: Process) -> str:
    """URL, from both hosts, of a nats-server that runs on host 1."""
    return NATS_URL


@pytest.fixture(scope="session")
def serving(lab: Lab, nats_process: Process) -> Iterator[Serving]:
    """DistServe across the two with a tiny Llama, started but perhaps not ready yet: wait_ready()."""
    serving = Serving(lab, settings=SETTINGS, nats=nats_process)
    serving.start(politely=True)
    yield serving
    serving.close()


@pytest.fixture(scope="session", autouse=True)
def _start_early(request: pytest.FixtureRequest) -> None:
    """Importing torch takes the hosts minutes: they begin while other tests run, if any test will ask."""
    if any("serving" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("serving")


@pytest.fixture(scope="session")
def guest_runs(lab: Lab, nats_in_lab: str) -> Iterator[GuestRuns]:
    runs = GuestRuns(lab, nats_in_lab)
    yield runs
    runs.close()


StartModule = Callable[..., Process]


@pytest.fixture(scope="module")
def start_module() -> Iterator[StartModule]:
    """`start_module(host, "tests.roce.decode_side", *arguments) -> Process`: the project's Python runs a module in a
    guest, with an input that stays open. What still runs after the file's tests is killed."""
    started: list[Process] = []

    def start(host: Host, module: str, *arguments: str, env: dict[str, str] | None = None) -> Process:
        command = [str(interpreter()), "-m", module, *arguments]
        started.append(host.start(command, env=env, cwd=PROJECT, name=module, stdin=True))
        return started[-1]

    yield start
    for process in started:
        if process.status is None:
            process.kill()
