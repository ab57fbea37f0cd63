"""A loaded model as the compiled code sees it, and passes through it."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch

from distserve.engine.context import BatchContext
from distserve.engine.loaded import LoadedModel
from distserve.engine.native import structures
from distserve.engine.native.build import NativeUnavailable
from distserve.engine.native.recognize import require_known
from distserve.engine.native.wide import WideLayers
from distserve.engine.paged_cache import PagedCache

# Where compiled code has no product for many rows, torch's win above so many, and a pass goes layer by layer.
MAX_ROWS = 64

# Where someone waits for layers, a call computes as many as make up about so many rows of one layer.
ROWS_A_CALL = 512

ROPE_ROWS = 8192  # positions whose angles are computed at a time


class NativeModel:
    """Points into the weights of `loaded`, of which it keeps no copy. One thread at a time may use it."""

    def __init__(self, loaded: LoadedModel, library: ctypes.CDLL, threads: int) -> None:
        """threads: of one pass. Raises NativeUnavailable for a model that the compiled code doesn't compute."""
        require_known(loaded)
        self._loaded = loaded
        self._library = library
        self._threads = threads
        self._head = loaded.model.get_output_embeddings().weight
        self._num_embeddings = len(loaded.base.embed_tokens.weight)
        self._rope = rope_tables(loaded)
        self._layers = (structures.Layer * loaded.layout.num_layers)(*(_layer(loaded, x) for x in loaded.base.layers))
        self._model = self._describe()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._wide = WideLayers(loaded)
        # Whether one call takes prompts too, and so any number of rows.
        self.takes_chunks = bool(library.distserve_takes_chunks())
        for name in ("forward", "linear", "embed", "add_and_norm", "silu_and_multiply", "turn_and_write", "attend"):
            getattr(library, f"distserve_{name}").restype = None
        library.distserve_scratch_bytes.restype = ctypes.c_int64

    def hidden(self, context: BatchContext) -> torch.Tensor:
        """Compute and write KV of all layers; hidden states after the final norm, [T, hidden_size], in row order.

        The context's on_layers is told.
        """
        return self.hidden_of_few(context) if self.in_one(context) else self.hidden_of_many(context)

    def in_one(self, context: BatchContext) -> bool:
        """Whether hidden() takes hidden_of_few for this pass, not hidden_of_many."""
        return self.takes_chunks or len(context.slot_blocks) <= MAX_ROWS

    def hidden_of_few(self, context: BatchContext, tell: bool = True) -> torch.Tensor:
        """The whole pass in compiled code, in one call if nobody waits for layers. on_layers is told if `tell`.

        Any pass where takes_chunks; else one of few tokens, which attend one by one.
        """
        rows, layers = len(context.slot_blocks), self._loaded.layout.num_layers
        hidden: torch.Tensor = self._head.new_empty(rows, self._loaded.hidden_size)
        batch = _Batch(context, hidden, self._num_embeddings, self.takes_chunks)
        pool, scratch = _pool(context.cache), self._scratch_for(rows, batch.struct.alone)
        tell_often = tell and context.on_layers is not None
        step = max(1, ROWS_A_CALL // rows) if tell_often else layers
        for first in range(0, layers, step):
            stop = min(first + step, layers)
            self._call("forward", self._model, pool, batch.struct, scratch, first, stop)
            if tell:
                context.note_written(first, stop)
        return hidden

    def hidden_of_many(self, context: BatchContext, tell: bool = True) -> torch.Tensor:
        """Layer by layer: matrix products by torch, whose kernels are made for many rows; attention of prefill chunks
        by the context's plan; all that lies between in a few compiled calls."""
        rows, decode = len(context.slot_blocks), context.num_decode
        widths = self._wide.widths
        normed: torch.Tensor = self._head.new_empty(rows, self._loaded.hidden_size)
        x, y = torch.empty_like(normed), torch.empty_like(normed)
        q, k, v, attended = (self._head.new_empty(rows, n) for n in (widths.q, widths.kv, widths.kv, widths.q))
        gate, up = (self._head.new_empty(rows, widths.inner) for _ in range(2))
        pool, batch = _pool(context.cache), _Batch(context, normed, self._num_embeddings, False)
        scratch = self._scratch_for(decode, decode) if decode else 0
        heads, kv_heads, dim = self._model.num_heads, self._model.num_kv_heads, self._model.head_dim
        self._call("embed", self._model, batch.struct, x.data_ptr(), normed.data_ptr())
        for n, layer in enumerate(self._wide.layers):
            for linear, out in ((layer.q, q), (layer.k, k), (layer.v, v)):
                linear(normed, out)
            self._call(
                "turn_and_write", self._model, pool, batch.struct, n, q.data_ptr(), k.data_ptr(), v.data_ptr()
            )  # fmt: skip
            if tell:
                context.note_written(n, n + 1)
            if decode:
                self._call(
                    "attend", self._model, pool, batch.struct, decode, n, q.data_ptr(), attended.data_ptr(), scratch
                )  # fmt: skip
            if decode < len(context.rows):
                attended[decode:] = context.plan.attend(
                    n,
                    q.view(rows, heads, dim),
                    k.view(rows, kv_heads, dim),
                    v.view(rows, kv_heads, dim),
                    scale=self._model.scale,
                    window=self._layers[n].window or None,
                    softcap=None,
                    skip_decode=True,
                ).flatten(1)
            layer.o(attended, y)
            after = self._layers[n].post_norm
            self._call("add_and_norm", self._model, rows, x.data_ptr(), y.data_ptr(), after, normed.data_ptr())
            layer.gate(normed, gate)
            layer.up(normed, up)
            self._call("silu_and_multiply", gate.data_ptr(), up.data_ptr(), gate.numel())
            layer.down(gate, y)
            after = self._model.final_norm if n + 1 == len(self._wide.layers) else self._layers[n + 1].input_norm
            self._call("add_and_norm", self._model, rows, x.data_ptr(), y.data_ptr(), after, normed.data_ptr())
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size]."""
        hidden = hidden.contiguous()
        logits = hidden.new_empty(len(hidden), self._loaded.vocab_size)
        self._call(
            "linear", hidden.data_ptr(), len(hidden), self._head.data_ptr(), self._loaded.vocab_size,
            self._loaded.hidden_size, logits.data_ptr(),
        )  # fmt: skip
        return logits

    def _call(self, name: str, *arguments: ctypes.Structure | int) -> None:
        """distserve_<name> with structures by reference, numbers and addresses as 64 bits, and the threads last."""
        given = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else ctypes.c_int64(a) for a in arguments]
        getattr(self._library, f"distserve_{name}")(*given, ctypes.c_int64(self._threads))

    def _describe(self) -> structures.Model:
        loaded, base = self._loaded, self._loaded.base
        first = base.layers[0]
        config = loaded.model.config
        cos, sin = self._rope
        return structures.Model(
            num_layers=loaded.layout.num_layers,
            hidden_size=loaded.hidden_size,
            intermediate_size=first.mlp.gate_proj.out_features,
            num_heads=config.num_attention_heads,
            num_kv_heads=loaded.layout.num_kv_heads,
            head_dim=loaded.layout.head_dim,
            norm_eps=base.norm.variance_epsilon,
            scale=first.self_attn.scaling,
            layers=self._layers,
            embedding=base.embed_tokens.weight.data_ptr(),
            final_norm=base.norm.weight.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
        )

    def _scratch_for(self, rows: int, alone: int) -> int:
        needed = self._library.distserve_scratch_bytes(
            ctypes.byref(self._model), ctypes.c_int64(rows), ctypes.c_int64(alone), ctypes.c_int64(self._threads)
        )
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch.data_ptr()


class _Batch:
    """The batch as the compiled code reads it; keeps alive what it points to. hidden: where the outcome goes; chunks:
    whether rows of one sequence are told as such, or all rows as if each were alone.

    Raises IndexError for a token id that the embedding has no row for, as torch does: compiled code doesn't look.
    """

    def __init__(self, context: BatchContext, hidden: torch.Tensor, num_embeddings: int, chunks: bool) -> None:
        lowest, highest = (int(x) for x in context.token_ids.aminmax())
        if lowest < 0 or highest >= num_embeddings:
            raise IndexError(f"token ids are {lowest} to {highest}, must be 0 to {num_embeddings - 1}")
        self._tables, self._starts = _tables(context)
        self._chunk_sizes = array("q", [row.num for row in context.rows[context.num_decode :]] if chunks else [])
        self._tensors = (context.token_ids, context.positions, context.slot_blocks, context.slot_offsets, hidden)
        self.struct = structures.Batch(
            rows=len(context.slot_blocks),
            alone=len(context.slot_blocks) - sum(self._chunk_sizes),
            num_chunks=len(self._chunk_sizes),
            token_ids=context.token_ids.data_ptr(),
            positions=context.positions.data_ptr(),
            slot_blocks=context.slot_blocks.data_ptr(),
            slot_offsets=context.slot_offsets.data_ptr(),
            tables=self._tables.buffer_info()[0],
            table_starts=self._starts.buffer_info()[0],
            chunk_sizes=self._chunk_sizes.buffer_info()[0],
            hidden=hidden.data_ptr(),
        )


def _layer(loaded: LoadedModel, layer: Any) -> structures.Layer:
    attention, mlp = layer.self_attn, layer.mlp
    found = {
        "input_norm": layer.input_layernorm.weight,
        "q": attention.q_proj.weight,
        "k": attention.k_proj.weight,
        "v": attention.v_proj.weight,
        "q_bias": attention.q_proj.bias,
        "k_bias": attention.k_proj.bias,
        "v_bias": attention.v_proj.bias,
        "q_norm": attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        "k_norm": attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        "o": attention.o_proj.weight,
        "post_norm": layer.post_attention_layernorm.weight,
        "gate": mlp.gate_proj.weight,
        "up": mlp.up_proj.weight,
        "down": mlp.down_proj.weight,
    }
    pointers = {name: None if weight is None else weight.data_ptr() for name, weight in found.items()}
    return structures.Layer(**pointers, window=layer_window(loaded.model.config, attention) or 0)


def layer_window(config: Any, attention: Any) -> int | None:
    """Where layers differ they say so themselves; Mistral's all have the configuration's."""
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]
    return config.sliding_window if config.model_type == "mistral" else None


@torch.inference_mode()
def rope_tables(loaded: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines as the model itself computes them, each [max_model_len, head_dim / 2] in its dtype."""
    weight = loaded.base.embed_tokens.weight
    half = loaded.layout.head_dim // 2
    tables = (weight.new_empty(loaded.max_model_len, half), weight.new_empty(loaded.max_model_len, half))
    for begin in range(0, loaded.max_model_len, ROPE_ROWS):
        positions = torch.arange(begin, min(begin + ROPE_ROWS, loaded.max_model_len), device=weight.device)
        for table, part in zip(tables, loaded.base.rotary_emb(weight, positions[None]), strict=True):
            if part.shape[-1] != 2 * half or not torch.equal(part[..., :half], part[..., half:]):
                raise NativeUnavailable("rotary embedding of a part of each head")
            table[begin : begin + len(positions)] = part[0, :, :half]
    return tables


def _pool(cache: PagedCache) -> structures.Pool:
    block, layer, side = cache.pool.stride()[:3]
    return structures.Pool(
        data=cache.pool.data_ptr(),
        block_stride=block,
        layer_stride=layer,
        side_stride=side,
        block_size=cache.block_size,
    )


def _tables(context: BatchContext) -> tuple[array[int], array[int]]:
    """All block tables in a row (int32), and where each token's begins (int64)."""
    tables, starts = array("i"), array("q")
    for row in context.rows:
        starts.extend([len(tables)] * row.num)
        tables.extend(row.block_table)
    return tables, starts
