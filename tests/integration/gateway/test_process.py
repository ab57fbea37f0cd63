"""The gateway as its own process: starts, serves, answers over NATS to the example script, drains, leaves."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from distserve.bus.embedded import EmbeddedNats
from distserve.bus.nats import NatsBus
from tests.unit.gateway import vocabularies
from tests.unit.gateway.scripted import MODEL, Cluster, says

ROOT = Path(__file__).parents[3]
TEXT = "The capital of France is Paris."
CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True}

PROGRAM = """
import sys
from pathlib import Path
from distserve.config import load_config
from distserve_gateway.main import main
main(load_config(Path(sys.argv[1]), {}))
assert not {"torch", "transformers"} & sys.modules.keys()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    vocabularies.byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": vocabularies.CHATML}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 128, "model_type": "llama"}))
    return folder


@asynccontextmanager
async def gateway_process(nats_url: str, folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    port = free_port()
    settings = {
        "model": {"path": str(model_folder(folder / "model")), "name": MODEL},
        "gateway": {"port": port, "id": "gw", "drain_s": 5.0},
        "bus": {"url": nats_url},
    }
    config = folder / "distserve.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(config), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        _, log = await asyncio.wait_for(process.communicate(), 10)
        print(log.decode())


@asynccontextmanager
async def workers(nats_url: str) -> AsyncIterator[Cluster]:
    async def connect(name: str) -> NatsBus:
        return await NatsBus.connect(nats_url, name=name)

    cluster = Cluster(connect)
    try:
        await cluster.add("decode", "d0", says(TEXT))
        await cluster.add("prefill", "p0", says(TEXT))
        yield cluster
    finally:
        await cluster.close()


async def ready(url: str) -> None:
    async with asyncio.timeout(20), httpx.AsyncClient() as client:
        while True:
            try:
                if (await client.get(f"{url}/health/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)


async def run_example(nats_url: str, *arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "examples" / "ask_over_nats.py"),
        nats_url,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()


async def test_it_serves_http_and_nats_then_drains_on_sigterm(nats_server: EmbeddedNats, tmp_path: Path) -> None:
    url_of_nats = nats_server.url
    async with workers(url_of_nats) as cluster, gateway_process(url_of_nats, tmp_path) as (process, url):
        await ready(url)
        assert await run_example(url_of_nats, MODEL, "What is the capital of France?") == (0, TEXT + "\n", "")
        said = await run_example(url_of_nats, MODEL.upper(), "What is the capital of France?")
        assert said == (0, TEXT + "\n", ""), "a subject has the model's name in lower case"
        status, said_nothing, problem = await run_example(url_of_nats, "no.such/Model-1.5", "Anybody there?")
        assert (status, said_nothing) == (1, "")
        assert "nobody serves 'no.such/Model-1.5'" in problem
        status, _, problem = await run_example(url_of_nats, MODEL, "word " * 500)
        assert status == 1
        assert "the limit of 'tiny' is 256 tokens" in problem

        cluster.workers["d0"].gate_at = 3
        async with httpx.AsyncClient(timeout=20) as client:
            async with client.stream("POST", f"{url}/v1/chat/completions", json=CHAT) as response:
                lines = (line async for line in response.aiter_lines() if line)
                await anext(lines)
                process.send_signal(signal.SIGTERM)
                bus = await cluster._stack.enter_async_context(await NatsBus.connect(url_of_nats, name="watcher"))
                async with bus.registry().watch() as watch:
                    await watch.wait_for(lambda seen: "gw" in seen and seen["gw"].status == "draining", 5.0)
                    refused = await client.post(f"{url}/v1/chat/completions", json=CHAT)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
                    cluster.workers["d0"].gate.set()
                    rest = [line async for line in lines]
                    assert rest[-1] == "data: [DONE]"
                    await watch.wait_for(lambda seen: "gw" not in seen, 5.0)
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_port_that_is_taken_is_named(nats_url: str, tmp_path: Path) -> None:
    from distserve.errors import ConfigError
    from distserve_gateway.server import bind

    with bind("127.0.0.1", 0) as taken:  # another gateway, that does not serve yet
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)) as caught:
            bind("127.0.0.1", port)
        assert caught.value.key == "gateway.port"


def test_the_example_is_short_and_needs_nats_py_only() -> None:
    source = (ROOT / "examples" / "ask_over_nats.py").read_text()
    assert len(source.splitlines()) < 25
    assert "distserve" not in [
        line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith("import")
    ]
