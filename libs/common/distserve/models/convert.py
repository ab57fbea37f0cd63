"""`python -m distserve.models.convert FILE.gguf FOLDER`: dequantise into Hugging Face format.

Run by gguf.py. The last line of stdout is JSON: {"versions": ...}, or {"error": [code, message, fields]} with exit
status 1.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from distserve.errors import ModelUnsupported, to_wire
from distserve.models.pretokenizers import pre_tokenizer

# general.file_type of files whose weights are not quantised.
_PLAIN_DTYPES = {0: "float32", 1: "float16"}


def convert(gguf: Path, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
    metadata = _metadata(gguf)
    folder.mkdir(parents=True)
    _convert_tokenizer(gguf, metadata, folder)
    _convert_weights(gguf, metadata, folder)


def _metadata(gguf: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    try:
        return {key: field.contents() for key, field in GGUFReader(gguf).fields.items()}
    except (ValueError, IndexError) as e:
        raise ModelUnsupported(f"{gguf.name} is not a whole GGUF file: {e}", model=gguf.name, feature="GGUF") from e


def _convert_weights(gguf: Path, metadata: dict[str, Any], folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, _PLAIN_DTYPES.get(metadata.get("general.file_type", -1), "bfloat16"))
    try:
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=dtype)
    except (ValueError, NotImplementedError) as e:
        architecture = metadata.get("general.architecture", "unknown")
        raise ModelUnsupported(
            f"{gguf.name} has the architecture {architecture!r}, which transformers does not read from GGUF: {e}",
            model=gguf.name,
            feature=f"architecture {architecture}",
        ) from e
    # Newer releases tie a loader of packed weights to the model and then refuse to save it; these are unpacked.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config._name_or_path = ""
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    if eos is not None:
        model.generation_config.eos_token_id = int(eos)
    model.generation_config.do_sample = False
    model.save_pretrained(folder, max_shard_size="5GB")


def _convert_tokenizer(gguf: Path, metadata: dict[str, Any], folder: Path) -> None:
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    backend = fast.backend_tokenizer
    tokens = metadata["tokenizer.ggml.tokens"]

    def token(kind: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return tokens[int(token_id)] if token_id is not None else None

    if metadata.get("tokenizer.ggml.model") == "gpt2":
        backend.pre_tokenizer = pre_tokenizer(metadata.get("tokenizer.ggml.pre", "gpt-2"), gguf.name)
        backend.post_processor = _post_processor(metadata, tokens)
    backend.no_padding()
    backend.no_truncation()
    backend.save(str(folder / "tokenizer.json"))

    architecture = metadata.get("general.architecture", "")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding") or token("eos"),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{architecture}.context_length"),
        "chat_template": metadata.get("tokenizer.chat_template"),
    }
    known = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _post_processor(metadata: dict[str, Any], tokens: list[str]) -> Any:
    """Puts the bos token first where the file says so, and else nothing."""
    from tokenizers.processors import ByteLevel, TemplateProcessing

    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return ByteLevel(trim_offsets=False)
    bos = int(metadata["tokenizer.ggml.bos_token_id"])
    name = tokens[bos]
    return TemplateProcessing(single=f"{name} $A", pair=f"{name} $A {name}:1 $B:1", special_tokens=[(name, bos)])


def versions() -> dict[str, str]:
    """Of what takes part in a conversion."""
    return {name: version(name) for name in ("distserve", "transformers", "torch", "gguf", "tokenizers")}


def main(arguments: list[str]) -> int:
    gguf, folder = (Path(a) for a in arguments)
    try:
        convert(gguf, folder)
    except Exception as e:
        print(json.dumps({"error": to_wire(e)}))
        return 1
    print(json.dumps({"versions": versions()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
