"""The catalogue's real model: its answers and its tokenizer."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from distserve.models import fetch
from tests.unit.models.tiny_gguf import byte_alphabet

pytestmark = pytest.mark.smollm2

# SmolLM's splitting as its authors give it: digits one by one, then GPT-2's rule.
DIGIT = regex.compile(r"\p{N}|\P{N}+")
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

TEXTS = [
    "What is the capital of France?",
    "In 2024, 12345 people paid 1,000.50 €; 3½² of them twice.",
    "  leading, trailing  \n\n\t tabs\r\n",
    "it's they'll WE'RE don't",
    "héllo wörld, naïve café: ein Straßenkäse",
    "日本語とعربية и русский",
    "🙂👩‍👩‍👧‍👦 \u200b zero width",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # 0x1F",
    "\x00\x07\x1b[0m control",
    "a" * 300,
    " ",
    "",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch("smollm2")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class PlainBpe:
    """Byte-level BPE written out: join the pair whose merge comes first until none is left."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.vocab: dict[str, int] = data["vocab"]
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in data["merges"]]
        self.rank = {pair: i for i, pair in enumerate(merges)}
        self.alphabet = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        words = [word for part in DIGIT.findall(text) for word in GPT2.findall(part)]
        return [self.vocab[piece] for word in words for piece in self._pieces(word)]

    def _pieces(self, word: str) -> list[str]:
        pieces = [self.alphabet[b] for b in word.encode()]
        while len(pieces) > 1:
            pairs = list(pairwise(pieces))
            best = min(pairs, key=lambda pair: self.rank.get(pair, 1 << 30))
            if best not in self.rank:
                break
            i = pairs.index(best)
            pieces[i : i + 2] = ["".join(best)]
        return pieces


@pytest.mark.parametrize("text", TEXTS)
def test_text_becomes_the_ids_that_the_rules_give_and_comes_back(text: str, folder: Path, tokenizer: Tokenizer) -> None:
    plain = PlainBpe(json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"])
    ids = tokenizer.encode(text).ids
    assert ids == plain.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 49152
    for token_id, text in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]):
        assert tokenizer.encode(text).ids == [token_id]
        assert tokenizer.decode([token_id]) == ""


def test_ends_are_what_the_chat_template_uses(folder: Path) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    assert generation["eos_token_id"] == 2
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "<|im_end|>" in config["chat_template"]
    fast = AutoTokenizer.from_pretrained(folder)
    assert fast("hello")["input_ids"] == [28120]  # no bos before a plain prompt
    ids = fast.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False)
    assert ids[0] == 1
    assert ids.count(1) == 3
    assert ids.count(2) == 2


@pytest.mark.parametrize(
    ("question", "answer"),
    [("What is the capital of France?", "Paris"), ("What is the capital of Japan?", "Tokyo")],
)
def test_it_answers(question: str, answer: str, folder: Path) -> None:
    fast = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": question}]
    prompt = fast.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer in fast.decode(output)
    assert output[-1] == 2  # it ends by itself
