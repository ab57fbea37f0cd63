"""Whether there is an MPS daemon, told by who listens at its pipe."""

import os
import socket
from pathlib import Path

import pytest

from distserve.worker import mps


def env(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}


def test_a_folder_without_a_daemon_is_told_and_how_to_start_one(tmp_path: Path) -> None:
    said = mps.problem(env(tmp_path))
    assert f"{tmp_path}/control is not there" in said
    assert "nvidia-cuda-mps-control -d" in said


def test_a_pipe_that_a_daemon_left_is_told_from_one_that_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "control")
    assert "the MPS daemon has ended" in mps.problem(env(tmp_path))
    reader = os.open(tmp_path / "control", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert mps.problem(env(tmp_path)) == ""
    finally:
        os.close(reader)


def test_a_socket_is_asked_without_a_connection(tmp_path: Path) -> None:
    """The daemon's is of packets that keep their order (release 13)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
        daemon.bind(str(tmp_path / "control"))
        daemon.listen()
        daemon.setblocking(False)
        assert mps.problem(env(tmp_path)) == ""
        with pytest.raises(BlockingIOError):
            daemon.accept()
    assert "the MPS daemon has ended" in mps.problem(env(tmp_path))


def test_no_part_leaves_the_environment_alone() -> None:
    given = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}
    mps.ask(given, 0)
    assert given == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}
    mps.ask(given, 55)
    assert given == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "55"}


def test_prefill_gives_way_unless_the_environment_says_otherwise() -> None:
    given: dict[str, str] = {}
    mps.ask(given, 70, can_wait=True)
    assert given == {mps.PERCENTAGE: "70", mps.PRIORITY: "1"}
    given = {mps.PRIORITY: "0"}
    mps.ask(given, 70, can_wait=True)
    assert given[mps.PRIORITY] == "0"
    given = {}
    mps.ask(given, 0, can_wait=True)
    assert given == {}
