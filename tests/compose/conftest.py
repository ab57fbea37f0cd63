"""The engine, its images and the cluster, made once for the whole run, and only if a test asks for them."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import prepare
import pytest

from tests.compose.engine import Engine
from tests.compose.stack import Stack
from tests.otlp import Receiver


def on_this_host() -> dict[str, list[str]]:
    """What engines make that outlives them if it goes wrong: network devices, mounts, rules, processes."""
    rules = subprocess.run([prepare.find("iptables"), "--list-rules"], capture_output=True, text=True, timeout=30)
    names = [_program(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return {
        "devices": sorted(os.listdir("/sys/class/net")),
        "mounts": [
            line for line in Path("/proc/mounts").read_text().splitlines() if re.search("docker|distserve-engine", line)
        ],
        "rules": rules.stdout.splitlines(),
        "processes": sorted(
            name for name in names if name.startswith(("dockerd", "docker-proxy", "containerd", "runc"))
        ),
    }


def _program(command_line: Path) -> str:
    """Of one that has ended and that nobody has asked after, nothing."""
    try:
        return os.path.basename(command_line.read_text(errors="replace").partition("\0")[0])
    except OSError:
        return ""


@pytest.fixture(scope="session")
def prepared() -> prepare.Prepared:
    """Packages, tools, wheels and base image. As root it installs what is missing; without, tests that need it are
    skipped."""
    if os.geteuid() != 0:
        pytest.skip("not root: deploy/compose/prepare.py could not prepare this machine")
    return prepare.prepare(prepare.default_folder())


@pytest.fixture(scope="session")
def engine(prepared: prepare.Prepared) -> Iterator[Engine]:
    before = on_this_host()
    with Engine(prepared) as engine:
        yield engine
    deadline = time.monotonic() + 10.0
    while (after := on_this_host()) != before and time.monotonic() < deadline:
        time.sleep(0.2)  # containerd's own processes end a little after it
    assert after == before, "the engine has left something"


@pytest.fixture(scope="session")
def images(engine: Engine) -> Engine:
    """The engine, with an image of each service."""
    began = time.monotonic()
    engine.build()
    print(f"images: {time.monotonic() - began:.0f} s")
    return engine


@pytest.fixture(scope="session")
def traces() -> Iterator[Receiver]:
    with Receiver(host="0.0.0.0") as receiver:
        yield receiver


@pytest.fixture(scope="session")
def stack(images: Engine, traces: Receiver) -> Iterator[Stack]:
    """The cluster of compose.yaml, healthy: what `docker compose up` starts, without the profile `observe`."""
    stack = Stack(images, otlp_port=traces.port)
    try:
        began = time.monotonic()
        stack.up()
        print(f"cluster: healthy in {time.monotonic() - began:.0f} s")
        yield stack
    except BaseException:
        print(stack.logs())
        raise
    finally:
        stack.down()
