"""A whole service with its model on a GPU: what `generate` answers comes over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distserve.engine.model import load_model
from tests.cluster import Cluster
from tests.tiny_models import make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(200),
]

NUM_NEW = 20


def wanted_of(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    stock = load_model(folder, dtype="float32", device="cuda", probe=False).model
    stock.set_attn_implementation("eager")
    wanted = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt], device="cuda")
            out = stock.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None
            )
            wanted.append(out[0, len(prompt) :].tolist())
    return wanted


def test_prefill_and_decode_share_one_gpu_and_hand_over_past_the_host(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama")
    prompts = [[5 + (7 * i * n + n) % 350 for i in range(n)] for n in (3, 40, 300, 700)]
    wanted = wanted_of(folder, prompts)
    settings = {
        "model.device": "cuda",
        "model.dtype": "float32",
        "decode.max_num_seqs": 8,
        "prefill.chunk_tokens": 128,
        "kv.num_blocks": 512,
    }
    with Cluster(folder, tmp_path / "cluster", settings=settings) as c:
        body = {"max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "timings": True}
        status, answer = c.post("/v1/completions", body | {"prompt": prompts})
        assert status == 200, answer
        assert [choice["token_ids"] for choice in answer["choices"]] == wanted
        assert answer["timings"]["transport"] == "cuda_ipc"
        for prompt, tokens in zip(prompts, wanted, strict=True):  # again, each alone, its prefix cached
            _, answer = c.post("/v1/completions", body | {"prompt": prompt})
            assert answer["choices"][0]["token_ids"] == tokens
        c.wait_until_idle()


@pytest.mark.parametrize("num_blocks", [2048, 0])
def test_a_colocated_worker_on_a_gpu_answers_as_generate_does(tmp_path: Path, num_blocks: int) -> None:
    folder = make_tiny("llama", tmp_path / "llama")
    prompts = [[5 + (7 * i * n + n) % 350 for i in range(n)] for n in (3, 40, 300, 700)]
    wanted = wanted_of(folder, prompts)
    settings = {
        "model.device": "cuda",
        "model.dtype": "float32",
        "decode.colocated": True,
        "decode.max_num_seqs": 8,
        "decode.chunk_tokens": 128,
        "kv.num_blocks": num_blocks,
        "kv.memory_fraction": 0.05,
    }
    with Cluster(folder, tmp_path / "cluster", prefill=[], decode=[settings], settings=settings) as c:
        log = c["decode-0"].log.read_text()
        assert "attention by triton" in log
        assert "run fused" in log
        assert "decode steps recorded" in log
        body = {"max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, answer = c.post("/v1/completions", body | {"prompt": prompts})
        assert status == 200, answer
        assert [choice["token_ids"] for choice in answer["choices"]] == wanted
        for prompt, tokens in zip(prompts, wanted, strict=True):  # again, each alone, its prefix cached
            _, answer = c.post("/v1/completions", body | {"prompt": prompt})
            assert answer["choices"][0]["token_ids"] == tokens
        c.wait_until_idle()
