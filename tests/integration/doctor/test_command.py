"""`distserve doctor` as a user meets it: processes, a real nats-server, a real peer over tcp and shm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import msgspec
import pytest

from distserve import __version__
from distserve.bus.embedded import EmbeddedNats
from distserve.bus.nats import NatsBus
from distserve.bus.subjects import worker
from distserve.messages import WorkerInfo
from distserve.worker.clock import tell_time
from distserve.worker.membership import Membership

QUIET = ["--set", "gateway.port=0"]  # whatever else runs on this machine


class Row(msgspec.Struct, forbid_unknown_fields=True):
    check: Annotated[str, msgspec.Meta(pattern=r"^(rdma|network|host|ports|nats|clock|peer)\.[a-z_]+$")]
    subject: str | None
    status: Literal["ok", "warn", "fail", "skip"]
    found: Annotated[str, msgspec.Meta(min_length=1)]
    mend: list[str]
    measures: dict[str, str | int | float | bool | None]


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """What docs/doctor.md promises."""

    format: Literal[1]
    version: str
    host: str
    unix_s: float
    transport_kind: Literal["auto", "shm", "tcp", "rdma"]
    bus: str
    peer: str | None
    summary: dict[Literal["ok", "warn", "fail", "skip"], int]
    findings: list[Row]

    def row(self, check: str) -> Row:
        (row,) = (r for r in self.findings if r.check == check)
        return row


def doctor(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_")}
    return subprocess.run(
        [sys.executable, "-m", "distserve.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        env=clean | {"COLUMNS": str(columns), "NO_COLOR": "1"},
        check=False,
    )


def document(*arguments: str) -> tuple[Document, int]:
    done = doctor("--json", *QUIET, *arguments)
    assert done.stderr == ""
    found = msgspec.json.decode(done.stdout, type=Document)
    assert sum(found.summary.values()) == len(found.findings)
    return found, done.returncode


@contextmanager
def serving(url: str, *arguments: str) -> Iterator[list[str]]:
    """`doctor --serve` in a process of its own; yields its first lines."""
    command = [sys.executable, "-m", "distserve.cli", "doctor", "--serve", "--nats-url", url, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip())
                if "on the other host" in line:
                    break
            assert lines, process.stderr.read() if process.stderr else ""
            yield lines
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_without_nats_and_rdma_the_table_is_still_of_use() -> None:
    done = doctor(*QUIET)
    assert (done.returncode, done.stderr) == (0, "")
    assert "distserve doctor --nats-url nats://HOST:4222" in done.stdout
    found, status = document()
    assert (status, found.bus, found.version, found.summary["fail"]) == (0, "", __version__, 0)
    assert found.row("host.kernel").measures["version"] == os.uname().release
    assert found.row("nats.server").status == "skip"


def test_the_peer_is_measured_by_every_transport_of_one_host(nats_server: EmbeddedNats) -> None:
    with serving(nats_server.url, "--bind", "127.0.0.1") as lines:
        assert "127.0.0.1 by" in lines[0]
        found, status = document("--nats-url", nats_server.url, "--peer", "localhost")
    assert (status, found.peer) == (0, "localhost")
    for kind in ("shm", "tcp"):
        row = found.row(f"peer.{kind}")
        assert row.status == "ok", row.found
        figures = {name: value for name, value in row.measures.items() if isinstance(value, int | float)}
        assert 0 < figures["p50_s"] <= figures["p99_s"] < 10
        assert figures["bytes_per_s"] > 1e6
        assert figures["num_bytes"] % (256 * 1024) == 0
    assert found.row("peer.rdma").status in ("ok", "skip")
    clock = [r for r in found.findings if r.check == "clock.offset" and r.subject == "localhost"]
    assert [r.status for r in clock] == ["ok"]
    assert [found.row(c).status for c in ("nats.server", "nats.jetstream", "nats.registry")] == ["ok"] * 3


def test_a_peer_that_does_not_answer_fails_with_the_command_for_it(nats_server: EmbeddedNats) -> None:
    found, status = document("--nats-url", nats_server.url, "--peer", "192.0.2.1")
    row = found.row("peer.reach")
    assert (status, row.status) == (1, "fail")
    assert row.mend[0].startswith(f"distserve doctor --serve --nats-url {nats_server.url}")


def test_a_forced_transport_that_this_host_cannot_use_fails() -> None:
    found, status = document("--set", "transport.kind=rdma", "--set", "transport.rdma.devices=nosuch0")
    assert status == 1
    assert "fail" in (found.row("rdma.devices").status, found.row("rdma.chosen").status)


async def test_looking_makes_no_registry_and_services_are_found_with_their_clocks(nats_server: EmbeddedNats) -> None:
    import asyncio

    def info() -> WorkerInfo:
        return WorkerInfo(worker_id="d0", role="decode", version=__version__, host_key="boot-1")

    found, _ = await asyncio.to_thread(document, "--nats-url", nats_server.url)
    assert found.row("nats.registry").found == "nobody has registered yet"
    async with await NatsBus.connect(nats_server.url, name="d0", registry_ttl_s=7.0) as bus:  # another than the look's
        async with await bus.serve(worker("decode", "d0"), tell_time):
            async with Membership(bus.registry(), info, beat_s=1.0):
                same = ["--set", "bus.ttl_s=7"]
                found, _ = await asyncio.to_thread(document, "--nats-url", nats_server.url, *same)
                other, status = await asyncio.to_thread(document, "--nats-url", nats_server.url)
    assert found.row("nats.registry").measures["decode"] == 1
    clock = found.row("clock.offset")
    assert (clock.subject, clock.status) == ("d0", "ok")
    assert isinstance(clock.measures["uncertainty_s"], float)
    assert (status, other.row("nats.registry").status) == (1, "fail")
    assert "TTL" in other.row("nats.registry").found


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(nats_server: EmbeddedNats, columns: int) -> None:
    done = doctor(*QUIET, "--nats-url", nats_server.url, columns=columns)
    assert done.returncode == 0
    assert all(len(line) <= columns for line in done.stdout.splitlines() if "->" not in line)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--serve", "--json"], 2),
        (["--bind", "127.0.0.1"], 2),
        (["--serve"], 78),
        (["--serve", "--nats-url", "nats://127.0.0.1:1", "--bind", "h:port"], 78),
        (["--set", "transport.kind=pigeon"], 78),
    ],
)
def test_wrong_usage_and_refused_settings_have_a_status_of_their_own(arguments: list[str], status: int) -> None:
    done = doctor(*arguments)
    assert (done.returncode, done.stdout) == (status, "")


def test_json_is_one_document_and_nothing_else() -> None:
    assert json.loads(doctor("--json", *QUIET).stdout)["format"] == 1


def test_the_command_explains_itself() -> None:
    done = doctor("--help", columns=200)
    assert (done.returncode, done.stderr) == (0, "")
    for option in ("--peer", "--serve", "--bind", "--json", "--nats-url", "--config"):
        assert option in done.stdout


def test_a_host_without_an_engine_is_checked_too(nats_server: EmbeddedNats) -> None:
    """A gateway's image has neither torch nor numpy: only what moves bytes needs one of them."""
    code = (
        "import sys; sys.modules.update(numpy=None, torch=None, transformers=None);"
        "from distserve.config import load_config; from distserve.doctor.command import run_doctor;"
        f"config = load_config(overrides={{'bus.url': {nats_server.url!r}, 'gateway.port': 0}});"
        "sys.exit(run_doctor(config, peer='h', as_json=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = msgspec.json.decode(done.stdout, type=Document)
    row = found.row("peer.reach")
    assert (row.status, row.mend) == ("skip", ["pip install 'distserve[engine]'"])
    assert found.row("nats.server").status == "ok"
