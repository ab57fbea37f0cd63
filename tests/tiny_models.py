"""Tiny random models in Hugging Face format, one per architecture that the engine promises to serve.

The weights are random but not small: activations keep unit size, attention is peaked enough that the distant past
matters, and the logits spread over several units. So greedy answers wander instead of repeating one token, and the
two best logits are rarely within 1e-3 of each other. The output rows of the special tokens are zero: under greedy
decoding they never win, and answers have length.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

Kind = Literal["llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
VOCAB_SIZE = 384
MAX_MODEL_LEN = 2048

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Merges are learnt from this: common English pieces, so that ordinary text gives tokens of one to five bytes.
CORPUS = (
    "The quick brown fox jumps over the lazy dog while the other animals are watching from the edge of the forest.",
    "In the beginning there was nothing but the sound of water, and then the people came and built their houses.",
    "What is the capital of France? The capital of France is Paris, and the answer is in the question itself.",
    "One two three four five six seven eight nine ten, and so on until there are no more numbers to be counted.",
)


def make_tiny(kind: Kind, folder: str | Path, seed: int = 0) -> Path:
    """Build the tiny model `kind` with weights drawn from `seed`, save it and its tokenizer in `folder`.

    float32, vocabulary of 384 (all 256 bytes, three special tokens, merges), 2048 positions, eos `<|im_end|>`.
    Returns the folder. Takes well under a second.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_config(_config(kind), dtype=torch.float32)
    _draw_weights(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=0, do_sample=False)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder, save_jinja_files=False)  # the template inside tokenizer_config.json
    return folder


def _config(kind: Kind) -> Any:
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }
    match kind:
        case "llama":
            return LlamaConfig(**common)
        case "qwen2":
            return Qwen2Config(**common, use_sliding_window=False)
        case "qwen3":
            return Qwen3Config(**common, head_dim=32)
        case "mistral":
            return MistralConfig(**common, sliding_window=48)
        case "gemma3":
            return Gemma3TextConfig(
                **common,
                head_dim=32,
                query_pre_attn_scalar=32,
                sliding_window=32,
                layer_types=["sliding_attention", "full_attention"] * 2,
            )
        case "phi3":
            return Phi3Config(**common, sliding_window=64, original_max_position_embeddings=MAX_MODEL_LEN)
    raise ValueError(f"kind is {kind!r}, must be one of {', '.join(KINDS)}")


def _draw_weights(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2:  # norms and biases: off their trivial values, so that forgetting one shows
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
                continue
            gain = 1.0
            if "q_proj" in name or "k_proj" in name or "qkv_proj" in name:
                gain = 1.5  # peaked attention
            elif "lm_head" in name:
                gain = 4.0
            fan_in = 1 if "embed" in name else weight.shape[1]
            weight.copy_(torch.randn(weight.shape, generator=generator) * (gain / math.sqrt(fan_in)))
        model.get_output_embeddings().weight[: len(SPECIAL_TOKENS)] = 0.0


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=MAX_MODEL_LEN,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
