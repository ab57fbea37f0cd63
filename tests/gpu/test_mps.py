"""`distserve up` with both roles on one GPU, each within its share: the daemon is started, used and stopped by it."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from distserve.own_mps import PROGRAM
from tests.e2e.test_up import Command
from tests.tiny_models import make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not shutil.which(PROGRAM), reason=f"no {PROGRAM}"),
    pytest.mark.timeout(240),
]


def fetched(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_up_starts_mps_gives_each_worker_its_share_and_stops_it(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama")
    sets = {"model.device": "cuda", "model.dtype": "float32", "kv.num_blocks": 512, "decode.max_num_seqs": 8}
    flags = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    command = Command("up", "--model", str(folder), "--port", "0", "--mps-prefill", "70", "--mps-decode", "50", *flags)
    try:
        daemon = int(command.wait_for(rf"MPS: {PROGRAM} runs, process (\d+)", 30)[1])
        url = command.wait_for(r"(http://[\d.]+:\d+)/", 150)[1]
        body = {"model": "llama", "prompt": list(range(5, 300)), "max_tokens": 8, "ignore_eos": True, "timings": True}
        answer = fetched(f"{url}/v1/completions", body)
        assert answer["timings"]["transport"] == "cuda_ipc"
        shares = {}
        for details in fetched(f"{url}/health")["details"].values():
            health = fetched(f"{details['url']}/health")
            assert not [r for r in health["reasons"] if "MPS" in r], health
            shares[details["role"]] = health["isolation"]
        assert "70" in json.dumps(shares["prefill"])
        assert "50" in json.dumps(shares["decode"])
        command.process.terminate()
        assert command.end(60) == 0, "\n".join(command.lines)
        assert not psutil.pid_exists(daemon)
    finally:
        if command.process.poll() is None:
            command.process.kill()
