"""Commands through the real agent, which runs here on a thread instead of in a guest."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from roce_lab.agent import Agent
from roce_lab.errors import LabError, LabTimeout
from roce_lab.host import Host


class Guest:
    """The channel of a guest, and the agent at its other end."""

    def __init__(self, folder: Path) -> None:
        self.host = Host(1, folder, seen_as=folder)
        self._ours, self._theirs = socket.socketpair()
        self.host.attach(self._send)
        self._threads = [
            threading.Thread(target=Agent(self._theirs.fileno()).serve),
            threading.Thread(target=self._hear),
        ]
        for thread in self._threads:
            thread.start()

    def _send(self, **order: Any) -> None:
        self._ours.sendall(json.dumps(order).encode() + b"\n")

    def _hear(self) -> None:
        for line in self._ours.makefile():
            self.host.hear(json.loads(line))
        self.host.hear({"event": "gone"})

    def hang_up(self) -> None:
        self._ours.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._ours.close()
        self._theirs.close()


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    guest = Guest(tmp_path)
    assert guest.host.ready.wait(10)
    yield guest
    if not guest.host.gone:
        guest.hang_up()


@pytest.fixture
def host(guest: Guest) -> Host:
    return guest.host


def test_a_command_gives_its_output_and_status(host: Host, tmp_path: Path) -> None:
    done = host.run(
        "echo out; echo err >&2; echo $NODE $MORE; pwd; exit 3", check=False, env={"MORE": "x"}, cwd=tmp_path
    )
    assert done.status == 3
    assert done.output == f"out\nerr\n1 x\n{tmp_path}\n"
    with pytest.raises(LabError, match=r"(?s)status 3.*why"):
        host.run("echo why; exit 3", cwd=tmp_path)


def test_arguments_reach_a_command_unchanged(host: Host, tmp_path: Path) -> None:
    assert host.run(["printf", "%s|", "a b", "$HOME", "'"], cwd=tmp_path).output == "a b|$HOME|'|"


def test_several_run_at_once_and_keep_their_outputs_apart(host: Host, tmp_path: Path) -> None:
    processes = [host.start(["cat"], cwd=tmp_path, stdin=True) for _ in range(8)]
    for i, process in enumerate(processes):
        process.write(f"line {i}\n")
    for i, process in enumerate(processes):
        process.wait_for(rf"^line {i}\n$", 10)
        assert process.status is None
    for process in processes:
        process.close_input()
    assert [p.wait(10) for p in processes] == [0] * 8


def test_output_comes_piece_by_piece(host: Host, tmp_path: Path) -> None:
    pieces: list[str] = []
    go = tmp_path / "go"

    def take(text: str) -> None:
        pieces.append(text)
        go.touch()  # the command goes on only when its first line has come here

    command = f"echo one; until [ -e {go} ]; do sleep 0.01; done; echo two"
    assert host.run(command, 30, cwd=tmp_path, on_output=take).status == 0
    assert "".join(pieces) == "one\ntwo\n"
    assert len(pieces) > 1


def test_a_command_that_takes_too_long_is_killed_with_its_children(host: Host, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(LabTimeout, match=r"(?s)within 0.5 s.*started"):
        host.run("sleep 1000 & echo started $!; wait", 0.5, cwd=tmp_path)
    assert time.monotonic() - began < 15
    child = int(next(tmp_path.glob(".output/*")).read_text().split()[1])
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the child outlived its parent's kill"
        time.sleep(0.01)


def test_a_killed_command_has_a_shells_status(host: Host, tmp_path: Path) -> None:
    process = host.start("sleep 1000", cwd=tmp_path)
    process.signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    process.signal(signal.SIGTERM)  # nothing is there any more, which is no error
    assert host.start("sleep 1000", cwd=tmp_path).kill() == 128 + signal.SIGKILL


def test_waiting_for_words_fails_as_soon_as_they_cannot_come(host: Host, tmp_path: Path) -> None:
    process = host.start("echo something else", cwd=tmp_path)
    with pytest.raises(LabError, match=r"status 0 before 'ready'"):
        process.wait_for("ready", 60)
    slow = host.start("sleep 1000", cwd=tmp_path)
    with pytest.raises(LabTimeout, match="has not said 'ready'"):
        slow.wait_for("ready", 0.2)
    slow.kill()


def test_what_cannot_start_says_why(host: Host, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no-such-command"):
        host.start(["no-such-command"], cwd=tmp_path)
    with pytest.raises(LabError, match="No such file"):
        host.start("true", cwd=tmp_path / "missing")


def test_a_guest_that_goes_away_ends_what_waits(guest: Guest, tmp_path: Path) -> None:
    process = guest.host.start(["cat"], cwd=tmp_path, stdin=True)
    guest.hang_up()
    assert process.wait(10) == 255
    with pytest.raises(LabError, match="does not run"):
        guest.host.run("true", cwd=tmp_path)
