"""telemetry.audit_file: a line for each second, whatever becomes of the file."""

import logging
import os
import time
from pathlib import Path

import msgspec
import pytest

from distserve.errors import ConfigError
from distserve.status import Second
from distserve_gateway.audit import MAX_WAITING, Audit, AuditLine
from tests.waiting import until


def lines(path: Path) -> list[AuditLine]:
    return [msgspec.json.decode(line, type=AuditLine) for line in path.read_bytes().splitlines()]


def second(number: int) -> Second:
    return Second(at_unix_s=float(number), num_started=number, ttft_p99_s=0.25)


async def test_each_second_is_a_line_and_an_old_file_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for run in range(2):
        async with Audit(str(path), f"gateway-{run}") as audit:
            for number in range(3):
                audit.write(second(number))
    found = lines(path)
    assert [(line.gateway, line.at_unix_s) for line in found] == [
        (f"gateway-{run}", float(number)) for run in range(2) for number in range(3)
    ]
    assert msgspec.json.decode(path.read_bytes().splitlines()[1], type=Second) == second(1), "its fields are Second's"


async def test_a_file_that_was_rotated_away_or_removed_is_opened_anew(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    async with Audit(str(path), "gw") as audit:
        audit.write(second(1))
        await until(lambda: len(lines(path)) == 1)
        path.rename(old)
        path.touch()  # as logrotate's `create` does
        audit.write(second(2))
        await until(lambda: len(lines(path)) == 1)
        path.unlink()
        audit.write(second(3))
        await until(lambda: path.exists() and len(lines(path)) == 1)
    assert [line.at_unix_s for line in lines(old)] == [1.0]
    assert [line.at_unix_s for line in lines(path)] == [3.0]


@pytest.mark.parametrize("name", ["missing/audit.jsonl", "."])
async def test_a_file_that_cant_be_written_is_refused_at_start(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"telemetry\.audit_file") as refused:
        await Audit(path, "gw").__aenter__()
    assert (refused.value.fields["key"], refused.value.fields["value"]) == ("telemetry.audit_file", path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
async def test_a_full_disk_is_said_once_and_the_first_line_after_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        async with Audit(str(path), "gw") as audit:
            for number in range(3):
                audit.write(second(number))
            await until(lambda: audit.num_lost == 3)
            assert len(caplog.records) == 1
            assert "No space left on device" in caplog.text
            path.unlink()
            audit.write(second(4))
            await until(lambda: path.exists() and len(lines(path)) == 1)
    assert [line.at_unix_s for line in lines(path)] == [4.0]
    assert "can be written again, 3 lines were lost" in caplog.text


async def test_a_line_cut_short_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    write, sizes = os.write, iter([10, None, None])

    def short(fd: int, data: bytes) -> int:
        return write(fd, data[: next(sizes)])

    async with Audit(str(path), "gw") as audit:
        with monkeypatch.context() as patched:
            patched.setattr("distserve_gateway.audit.os.write", short)
            for number in range(3):
                audit.write(second(number))
            await until(lambda: path.read_bytes().count(b"\n") == 3)
    cut, *rest = path.read_bytes().splitlines()
    assert len(cut) == 10
    assert [msgspec.json.decode(line, type=Second).at_unix_s for line in rest] == [1.0, 2.0]


async def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # who does not read

    def taken() -> bool:
        try:
            os.read(reader, 1 << 20)
        except BlockingIOError:
            return not audit._lines
        return False

    try:
        async with Audit(str(path), "gw") as audit:
            began, num = time.monotonic(), MAX_WAITING + 65_536 // 100
            for number in range(num):
                audit.write(second(number))
            assert time.monotonic() - began < 1.0
            assert audit.num_lost > 0, "what waits is bounded"
            await until(taken)  # it goes on
    finally:
        os.close(reader)
