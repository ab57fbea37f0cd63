"""A model folder for the null engine and its peers: a tokenizer and what names a model, without weights."""

import json
import os
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from distserve.messages import KVLayout

VOCAB_SIZE = 16_000
MAX_MODEL_LEN = 32_768
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
FIRST_TOKEN, NUM_TOKENS = 300, 2_000  # ids that are drawn: early merges, each a whole piece of ASCII text

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# As little KV as a layout can name: its bytes are never read.
LAYOUT = KVLayout(
    weights="null",
    dtype="float32",
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    block_size=16,
    rope='{"rope_type":"none"}',
)

# Peers ask for the shape of a known architecture, though they load nothing of it.
_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": EOS,
}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": MAX_MODEL_LEN,
    "bos_token": None,
    "eos_token": SPECIAL[EOS],
    "pad_token": SPECIAL[0],
    "chat_template": CHAT_TEMPLATE,
}


def make_model(folder: Path) -> Path:
    """Write the folder, if it is not there, and return it. The tokenizer is byte-level BPE, trained on the standard
    library's sources. Raises ValueError if a drawn id were no text of its own."""
    if (folder / "tokenizer_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _train()
    for token_id in range(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS):
        if not tokenizer.decode([token_id]).isascii():
            raise ValueError(f"token {token_id} is not ASCII text: a step with it might bring no event")
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": _CONFIG,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": [EOS, 0], "do_sample": False},
        "tokenizer_config.json": _TOKENIZER,  # last: its presence says that the folder is whole
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(sorted(map(str, Path(os.__file__).parent.glob("*.py"))), trainer)
    return tokenizer
