"""`docker compose up`, for real: images built from the Dockerfile, containers, networks, and what happens when one of
them goes."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compose.answers import Answers, broken
from tests.compose.engine import TARGETS, Engine
from tests.compose.stack import METRICS_PORTS, SERVICES, Stack
from tests.otlp import Receiver

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

PROJECT = Path(__file__).parents[2]
GATEWAY_BYTES = 250_000_000
NUM_TOKENS = 150  # of an answer that something happens in the middle of
ERROR_S = 3.0  # from a worker's end to the error event in its streams
WHOLE = {"gateway", "prefill", "decode", "kvstore"}
SPANS = {  # of a prompt that is long enough for the store, some of them by each service
    *("text_completion smollm2", "admission", "send prefill", "process prefill", "queue", "prefill chunk"),
    *("kvstore lookup", "process lookup", "kvstore offer", "process offer"),
    *("handoff", "lease", "process decode", "first step", "decode"),
}


# ---------------------------------------------------------------- images


def test_the_gateways_image_is_small_and_has_no_torch(images: Engine) -> None:
    size = images.inspect("distserve/gateway:local")[0]["Size"]
    print(f"gateway: {size / 1e6:.0f} MB")
    assert size < GATEWAY_BYTES
    found = images.docker(
        *("run", "--rm", "--network", "none", "--entrypoint", "python", "distserve/gateway:local"),
        *("-c", "import importlib.util as u; print([n for n in ('torch', 'transformers', 'numpy') if u.find_spec(n)])"),
    )
    assert found.strip() == "[]"


@pytest.mark.parametrize("target", TARGETS)
def test_nobody_is_root_in_an_image(images: Engine, target: str) -> None:
    config = images.inspect(f"distserve/{target}:local")[0]["Config"]
    assert config["User"] == "10001:10001"
    assert not [line for line in config["Env"] if line.startswith("PIP_")], "an image keeps where packages came from"
    assert config.get("Healthcheck", {}).get("Test"), "an image does not say how it is"


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode", "kvstore"])
def test_a_service_without_a_server_says_so_and_ends_with_78(images: Engine, role: str) -> None:
    done = images.try_docker("run", "--rm", "--network", "none", "--read-only", f"distserve/{role}:local")
    assert done.returncode == 78
    assert "bus.url is empty" in done.stderr


# ---------------------------------------------------------------- the cluster


def test_every_container_is_healthy(stack: Stack) -> None:
    containers = stack.containers()
    running = [c["Service"] for c in containers if c["State"] == "running" and c["Health"] == "healthy"]
    assert sorted(running) == sorted(name for name, num in SERVICES.items() for _ in range(num))
    model = next(c for c in containers if c["Service"] == "model")
    assert (model["State"], model["ExitCode"]) == ("exited", 0)


def test_containers_have_no_rights_they_do_not_need(stack: Stack) -> None:
    for found in stack.engine.inspect(*(name for service in SERVICES for name in stack.names(service))):
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"], found["Name"]
        assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], None), found["Name"]
        assert "no-new-privileges:true" in host["SecurityOpt"], found["Name"]
        assert found["Config"]["StopTimeout"] > 10 + 5, "less than the grace time of a service"


def test_the_first_command_of_the_readme_is_answered(stack: Stack) -> None:
    command = re.search(r"(?s)```sh\n(curl http://127\.0\.0\.1:8000.*?)```", (PROJECT / "README.md").read_text())
    assert command is not None
    arguments = shlex.split(command[1].replace("127.0.0.1:8000", f"127.0.0.1:{stack.port}"))
    # Drawn at random, an answer may be as long as the context: its beginning will do.
    with subprocess.Popen([*arguments, "--silent", "--show-error", "--no-buffer"], stdout=subprocess.PIPE) as curl:
        watchdog = threading.Timer(120, curl.kill)
        watchdog.start()
        try:
            text = ""
            assert curl.stdout is not None
            for line in curl.stdout:
                event = line.decode().removeprefix("data: ").strip()
                if event == "[DONE]" or len(text) > 20:
                    break
                choices = json.loads(event)["choices"] if event else []
                text += "".join(choice["delta"].get("content") or "" for choice in choices)
        finally:
            watchdog.cancel()
            curl.kill()
    assert text.strip()


def complete(stack: Stack, prompt: str, max_tokens: int = 8) -> dict[str, object]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "timings": True, "temperature": 0}
    done = subprocess.run(
        ["curl", "--silent", f"{stack.url}/v1/completions", "--json", json.dumps(body)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_kv_goes_from_container_to_container_by_tcp(stack: Stack) -> None:
    answer = complete(stack, "The capital of France is")
    assert "Paris" in str(answer), answer
    assert "'transport': 'tcp'" in str(answer), answer


def test_a_trace_is_one_tree_through_every_service(stack: Stack, traces: Receiver) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    # Long enough for several blocks, so that the store is asked and offered to.
    prompt = "The quick brown fox jumps over the lazy dog. " * 40
    command = ["curl", "--silent", "--fail", f"{stack.url}/v1/completions"]
    command += ["--header", f"traceparent: 00-{trace_id}-b7ad6b7169203331-01"]
    command += ["--json", json.dumps({"prompt": prompt, "max_tokens": 12})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout

    def whole(receiver: Receiver) -> bool:
        """Services export what they have every few seconds, each at its own time."""
        names = {span.name for span in receiver.spans(trace_id)}
        return names >= SPANS and len(receiver.trees(trace_id)) == 1

    traces.wait_for(whole, timeout_s=60.0)
    tree = traces.tree(trace_id)
    print(tree.picture())
    assert tree.span.parent_id == "b7ad6b7169203331"
    assert {node.span.service for node in tree} == WHOLE
    assert len({node.span.resource["service.instance.id"] for node in tree}) == len(WHOLE)


def test_nobody_was_refused_anything_on_the_bus(stack: Stack) -> None:
    complete(stack, "So that there is traffic of every kind. " * 20)
    for service in METRICS_PORTS:
        for name in stack.names(service):
            assert stack.metrics(name, service)["distserve_bus_permission_denials_total"] == 0, name


# ---------------------------------------------------------------- what goes


Cut = Callable[[Stack, str], None]


def kill(stack: Stack, name: str) -> None:
    stack.engine.docker("kill", name)


def disconnect(stack: Stack, name: str) -> None:
    stack.engine.docker("network", "disconnect", "--force", "distserve", name)


@pytest.mark.parametrize("cut", [kill, disconnect])
async def test_answers_of_a_decode_container_that_goes_end_in_time(stack: Stack, cut: Cut) -> None:
    """Killed, or cut off from the network, in mid-answer."""
    await asyncio.to_thread(stack.up)
    names = stack.names("decode")
    async with Answers(stack.url, num=4, max_tokens=NUM_TOKENS) as answers:
        running = {n: stack.metrics(n, "decode")["distserve_worker_running_sequences"] for n in names}
        victim = max(running, key=lambda name: running[name])
        assert running[victim] > 0, running
        at = time.monotonic()
        await asyncio.to_thread(cut, stack, victim)
        assert not any(answer.complete for answer in answers), "too short: it was not in mid-answer"
        fresh = await asyncio.to_thread(complete, stack, "The rest serves on.")
        assert fresh["choices"], fresh
        try:
            await answers.all_ended()
        finally:
            seen = [(a.num_events, a.error, round(a.ended_at - at, 2)) for a in answers]
            print(f"{running}; {victim} went; {seen}")
    assert len(broken(answers)) <= running[victim]
    for answer in broken(answers):
        assert answer.error, "a stream ended without a word"
        assert answer.ended_at - at < ERROR_S
    for answer in answers:
        assert answer.complete != bool(answer.error)
    # And it can be had again: `docker compose up` puts right what is missing.
    stack.engine.docker("rm", "--force", victim)
    await asyncio.to_thread(stack.up)
    assert len(stack.names("decode")) == 2


# ---------------------------------------------------------------- its end


def test_nothing_is_left_after_down(stack: Stack, engine: Engine) -> None:
    """Last of this file: the others need it up."""
    stack.down()
    assert engine.left() == {"containers": [], "volumes": [], "networks": []}
