"""The embedded nats-server: it starts, stops, and never outlives its parent."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from distserve.bus import embedded
from distserve.bus.embedded import EmbeddedNats, find_nats_server
from distserve.bus.server_folder import sweep
from distserve.errors import BusError


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def test_it_answers_from_start_to_stop_and_leaves_nothing() -> None:
    server = EmbeddedNats(monitor=True)
    with server:
        pid, folder = server.pid, server._dir
        assert server.url == f"nats://127.0.0.1:{server.port}"
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as s:
            assert b'"jetstream":true' in s.recv(4096)
        with urllib.request.urlopen(f"{server.monitor_url}/healthz?js-enabled-only=true", timeout=5) as answer:
            assert b"ok" in answer.read()
    assert not alive(pid)
    assert not folder.exists()
    server.stop()  # idempotent
    with pytest.raises(BusError, match="no nats port"):
        _ = server.url


async def test_it_starts_and_stops_without_blocking_the_event_loop() -> None:
    async with EmbeddedNats(jetstream=False) as server:
        pid = server.pid
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as s:
            assert b'"jetstream":true' not in s.recv(4096)
        with pytest.raises(BusError, match="no monitoring port"):
            _ = server.monitor_url
    assert not alive(pid)


def test_a_given_port_is_used_and_a_taken_one_is_explained_by_the_servers_log() -> None:
    with EmbeddedNats() as first:
        port = first.port
        with pytest.raises(BusError, match="address already in use"):
            EmbeddedNats(port=port).start()
    with EmbeddedNats(port=port) as second:
        assert second.port == port


def test_its_log_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    with EmbeddedNats(log=tmp_path / "nats.log"):
        pass
    assert "Server is ready" in (tmp_path / "nats.log").read_text()
    lines: list[str] = []
    with EmbeddedNats(log=lines.append):
        pass
    assert any("Server is ready" in line for line in lines)
    assert any("Server Exiting" in line for line in lines)  # read to the end


def test_without_a_binary_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BusError, match=r"distserve\[nats\]"):
        find_nats_server()
    on_path = tmp_path / "nats-server"
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    assert find_nats_server() == on_path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the test's own: nobody else's servers are in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_it_dies_with_a_parent_that_was_killed(temporary: Path) -> None:
    code = """
import sys, time
from distserve.bus.embedded import EmbeddedNats
server = EmbeddedNats()
server.start()
print(server.pid, server._dir, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(temporary)}
    )
    try:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        assert alive(int(pid))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
        wait_until(lambda: not alive(int(pid)))
    finally:
        parent.kill()
        parent.wait(10)
    assert Path(folder).exists()

    def swept_by_the_next() -> bool:
        with EmbeddedNats() as next_one:
            return next_one._dir.exists() and not Path(folder).exists()

    wait_until(swept_by_the_next)  # once the kernel has let go of the lock


def test_a_sweep_takes_the_dead_and_leaves_the_living_and_the_unborn(temporary: Path) -> None:
    other = temporary / "distserve-nats-other"
    other.mkdir()
    link = temporary / "distserve-nats-link"
    link.symlink_to(temporary / "elsewhere")
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / "lock").touch()
    with EmbeddedNats() as server:
        dead = EmbeddedNats()
        dead.start()
        os.kill(dead.pid, signal.SIGSTOP)  # alive, though it does nothing
        assert sweep() == []
        os.kill(dead.pid, signal.SIGKILL)
        swept: list[Path] = []  # the kernel lets go of the lock when the last of its threads has ended
        wait_until(lambda: bool(swept.extend(sweep()) or swept))
        assert swept == [dead._dir]
        assert (server._dir / "lock").exists()
        dead.stop()
    assert sorted(p.name for p in temporary.iterdir()) == ["distserve-nats-link", "distserve-nats-other", "elsewhere"]
    assert (temporary / "elsewhere" / "lock").exists()


def test_a_server_that_cannot_be_started_leaves_no_folder(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_nats_server", lambda: Path("/bin/true"))
    with pytest.raises(BusError, match="ended with status 0"):
        EmbeddedNats().start()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        EmbeddedNats().start()
    assert list(temporary.iterdir()) == []


def test_ctrl_c_in_the_terminal_does_not_reach_it() -> None:
    with EmbeddedNats() as server:
        assert os.getpgid(server.pid) != os.getpgid(0)
        assert os.getsid(server.pid) == server.pid


def test_one_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_STOP_S", 0.2)
    server = EmbeddedNats()
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)  # a stopped process takes no SIGTERM
    server.stop()
    assert not alive(pid)


def threads_of(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.partition(b"=")[::2] for entry in environment)[b"GOMAXPROCS"].decode()


@pytest.mark.parametrize(("given", "wanted"), [(None, "1"), ("3", "3")])
def test_it_runs_on_one_core_unless_the_environment_says_otherwise(
    given: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    if given is not None:
        monkeypatch.setenv("GOMAXPROCS", given)
    with EmbeddedNats() as server:
        assert threads_of(server.pid or 0) == wanted
