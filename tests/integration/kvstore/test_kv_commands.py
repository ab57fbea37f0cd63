"""`distserve kv` on several nodes: those that can't answer don't hide the others; deletion and pins reach all."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from distserve.bus.embedded import EmbeddedNats
from distserve.bus.nats import NatsBus
from distserve.kv.hashing import tenant_of
from distserve.lifecycle import Shutdown
from distserve.messages import WorkerInfo
from distserve.worker.membership import Membership
from distserve_kvstore.main import Service, serve
from tests.integration.kvstore.bare_client import MODEL, bare_client, chain_of, run_of
from tests.integration.kvstore.nodes import config_of, running
from tests.integration.kvstore.test_node_tools import kv
from tests.waiting import until


async def test_a_node_that_knows_no_layout_and_one_that_is_silent_hide_no_other(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    services: list[Service] = []
    shutdown = Shutdown(2.0)
    async with (
        await NatsBus.connect(nats_server.url, name="mute", registry_ttl_s=1.0) as bus,
        bare_client(nats_server.url),
        running(config_of(nats_server.url, tmp_path / "a"), "kvstore-a"),
    ):
        mute = WorkerInfo(worker_id="kvstore-mute", role="kvstore", model=MODEL, status="ok")
        async with Membership(bus.registry(), lambda: mute, beat_s=0.2):
            rows = {row["node"]: row for row in await kv("stat", url=nats_server.url, rc=1)}
            assert rows["kvstore-a"]["tiers"]["dram"]["state"] == "ok"
            assert rows["kvstore-mute"]["error"]
            listed = await kv("ls", url=nats_server.url, rc=1)
            assert [row["node"] for row in listed] == ["kvstore-mute"]
    # Without any worker of the model no layout can be learnt.
    task = asyncio.create_task(
        serve(config_of(nats_server.url, tmp_path / "b"), "kvstore-b", shutdown, started=services.append)
    )
    await until(lambda: bool(services), what="the node's registering")
    rows = {row["node"]: row for row in await kv("stat", url=nats_server.url)}
    assert (rows["kvstore-b"]["status"], rows["kvstore-b"]["layout"]) == ("warming", "")
    shutdown.request()
    await asyncio.wait_for(task, 10)


async def test_a_conversation_is_pinned_unpinned_and_deleted_on_every_node_by_the_salt_that_no_list_of_processes_shows(
    nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    salt = "secret"
    configs = [config_of(nats_server.url, tmp_path / name, replicas=1) for name in "xy"]
    async with (
        bare_client(nats_server.url) as client,
        running(configs[0], "kvstore-x") as x,
        running(configs[1], "kvstore-y") as y,
    ):
        for node, seed in ((x, 0), (y, 1)):
            await client.offer(
                node.node_id,
                [run_of(chain_of(10, seed, salt=salt))],
                range(10),
                tenant=tenant_of(salt),
                conversation="talk",
            )

        async def say(*words: str) -> str:
            command = [sys.executable, "-m", "distserve.cli", "kv", *words, "--salt-from-stdin", "--json"]
            env = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_")}
            env |= {"DISTSERVE_BUS_TTL_S": "1.0", "DISTSERVE_BUS_BEAT_S": "0.2"}
            command += ["--nats-url", nats_server.url]
            done = await asyncio.to_thread(
                subprocess.run, command, input=salt + "\n", capture_output=True, text=True, timeout=60, env=env
            )
            assert done.returncode == 0, done.stderr
            out: str = done.stdout
            return out

        def pinned() -> list[int]:
            return [node.holdings.index.conversations.num_vip_blocks for node in (x, y)]

        assert (await say("pin", "--conversation", "talk")).count('"num_pinned":10') == 2
        assert pinned() == [10, 10]
        assert (await say("unpin", "--conversation", "talk")).count('"num_unpinned":10') == 2
        assert pinned() == [0, 0]
        assert (await say("delete", "--conversation", "talk")).count('"num_deleted":10') == 2
        assert len(x.holdings.index) == len(y.holdings.index) == 0
        await kv("delete", url=nats_server.url, rc=2)  # neither a conversation nor --all
        await kv("prune", url=nats_server.url, rc=2)  # not without saying how much
        await kv("prune", "--set-aside", url=nats_server.url, rc=2)  # no node's


async def test_a_folder_is_rid_of_files_set_aside_alone(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    async with bare_client(nats_server.url) as client, running(config_of(nats_server.url, tmp_path)) as node:
        await client.offer(node.node_id, [run_of(chain_of(20))], range(20))
        await until(lambda: node.num_dirty() == 0)
    damaged = tmp_path / "00000099.seg.damaged"
    damaged.write_bytes(b"no segment")
    await kv("prune", str(tmp_path), rc=2)  # not without saying how much
    assert damaged.exists()
    (row,) = await kv("prune", str(tmp_path), "--set-aside")
    assert row["num_left"] == 20
    assert not damaged.exists()
    assert (await kv("stat", str(tmp_path)))[0]["num_blocks"] == 20
