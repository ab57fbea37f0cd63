"""The small real model: 20 prompts, token for token what transformers generates in float32, and a sensible answer."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from distserve.models import fetch
from tests.cluster import Cluster
from tests.reference import Reference

pytestmark = [pytest.mark.e2e, pytest.mark.smollm2, pytest.mark.timeout(400)]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a land far away,",
    "2, 4, 6, 8,",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The three primary colours are",
    "To be, or not to be:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox",
    "In 1969, the first people",
    "An ingredient of bread is",
    "Q: What is photosynthesis?\nA:",
    "SELECT name FROM users WHERE",
    "The opposite of hot is",
    "Mount Everest is",
    "<html>\n<body>\n",
    "My favourite season is autumn, because",
    "E = mc",
    "List of planets: Mercury, Venus,",
    "Naïve café – 東京 –",
]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetch("smollm2")


def test_twenty_prompts_equal_generate(smollm2: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    reference = Reference(smollm2)
    ids = [tokenizer(p)["input_ids"] for p in PROMPTS]
    expected = [reference.greedy(i, NUM_TOKENS, stop_at_eos=True) for i in ids]
    with Cluster(smollm2, tmp_path, settings={"model.dtype": "float32", "kv.num_blocks": 600}) as c:
        body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": NUM_TOKENS, "temperature": 0}
        status, answer = c.post("/v1/completions", body | {"return_token_ids": True}, timeout_s=200)
        assert status == 200, answer
        for prompt, want, choice in zip(ids, expected, answer["choices"], strict=True):
            assert choice["prompt_token_ids"] == prompt
            assert choice["token_ids"] == want, reference.explain(prompt, want, choice["token_ids"])
        chat = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 20,
            "temperature": 0,
        }
        status, answer = c.post("/v1/chat/completions", chat)
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
        assert "Paris" in answer["choices"][0]["message"]["content"]
        c.wait_until_idle()
