"""`python -m distserve.models.synthesize SHAPE SEED FOLDER`: random weights in Hugging Face format, a shard at a time.

Run by synth.py. SHAPE is JSON of a ModelShape. The last line of stdout is JSON: {"versions": ...}, or {"error": [code,
message, fields]} with exit status 1.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from distserve.errors import to_wire

SHARD_BYTES = 4_000_000_000
STD = 0.02


def config_of(shape: dict[str, Any]) -> Any:
    """transformers' configuration of a ModelShape."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        shape["model_type"],
        num_hidden_layers=shape["num_layers"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["max_model_len"],
        rope_theta=shape["rope_theta"],
        tie_word_embeddings=shape["tied"],
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )


def synthesize(shape: dict[str, Any], seed: int, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tied = set(model.all_tied_weights_keys or ()) if shape["tied"] else set()
    wanted = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False) if name not in tied}
    places: dict[str, str] = {}
    shard: dict[str, Any] = {}
    num_shards = total = filled = 0

    def write() -> None:
        nonlocal num_shards, filled
        num_shards, filled = num_shards + 1, 0
        name = f"model-{num_shards:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, size in wanted.items():
        if len(size) == 1:  # norms, and biases where a model has them
            tensor = (torch.zeros if name.endswith("bias") else torch.ones)(size, dtype=torch.bfloat16)
        else:
            tensor = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, STD, generator=generator).cpu()
        shard[name] = tensor
        num_bytes = tensor.numel() * tensor.element_size()
        total, filled = total + num_bytes, filled + num_bytes
        if filled >= SHARD_BYTES:
            write()
    if shard:
        write()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def main() -> None:
    shape, seed, folder = json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    try:
        synthesize(shape, seed, folder)
        print(json.dumps({"versions": {name: version(name) for name in ("torch", "transformers")}}))
    except Exception as e:
        print(json.dumps({"error": to_wire(e)}))
        raise SystemExit(1) from e


if __name__ == "__main__":
    main()
