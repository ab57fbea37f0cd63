"""A batch as tensors: worked out once, used in every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from distserve.engine.attention.base import AttentionBackend, AttentionPlan
from distserve.engine.batching import Batch, Work
from distserve.engine.paged_cache import PagedCache
from distserve.errors import DistServeError
from distserve.messages import num_blocks_for

OnLayers = Callable[[int, int], None]


@dataclass(slots=True, eq=False)
class Row:
    """One Work's place in the ragged input: tokens [start, stop) of its sequence are rows [first, first + num)."""

    work: Work
    first: int
    block_table: list[int]

    @property
    def start(self) -> int:
        return self.work.start

    @property
    def num(self) -> int:
        return self.work.num_tokens

    @property
    def stop(self) -> int:
        return self.work.start + self.work.num_tokens


@dataclass(slots=True, eq=False)
class BatchContext:
    """The ragged input of one forward pass, and what attention needs to know of it.

    rows: decode steps first, longest context first, then prefill chunks; `batch` keeps the caller's order.
    token_ids, positions: int64 [1, T]. slot_blocks, slot_offsets: int64 [T], where each token's KV goes.
    layers_written: how many layers have the whole batch's KV in the cache.
    """

    batch: Batch
    cache: PagedCache
    rows: list[Row]
    num_decode: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    one_slot: tuple[int, int] | None  # (block, offset) if T is 1
    on_layers: OnLayers | None = None
    layers_written: int = 0
    plan: AttentionPlan = field(init=False)

    @classmethod
    def build(
        cls, batch: Batch, cache: PagedCache, backend: AttentionBackend, on_layers: OnLayers | None = None
    ) -> BatchContext:
        """Also zeroes the blocks that this pass starts but doesn't fill, for a backend that reads behind a sequence's
        end (see `_fresh_partial_blocks`)."""
        for work in batch.work:
            check_work(work, cache.block_size)
        decode = sorted((w for w in batch.work if w.num_tokens == 1), key=lambda w: -w.start)
        rows: list[Row] = []
        token_ids: list[int] = []
        positions: list[int] = []
        slot_blocks: list[int] = []
        slot_offsets: list[int] = []
        size = cache.block_size
        for work in decode + [w for w in batch.work if w.num_tokens != 1]:
            stop = work.start + work.num_tokens
            table = work.sequence.block_table[: num_blocks_for(stop, size)]
            rows.append(Row(work, len(token_ids), table))
            token_ids += work.sequence.token_ids[work.start : stop]
            span = range(work.start, stop)
            positions += span
            slot_blocks += [table[p // size] for p in span]
            slot_offsets += [p % size for p in span]
        if backend.reads_whole_blocks:
            cache.clear(_fresh_partial_blocks(rows, size))
        integers = torch.tensor([token_ids, positions, slot_blocks, slot_offsets], device=cache.device)
        context = cls(
            batch=batch,
            cache=cache,
            rows=rows,
            num_decode=len(decode),
            token_ids=integers[0:1],
            positions=integers[1:2],
            slot_blocks=integers[2],
            slot_offsets=integers[3],
            one_slot=(slot_blocks[0], slot_offsets[0]) if len(token_ids) == 1 else None,
            on_layers=on_layers,
        )
        context.plan = backend.plan(context)
        return context

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the batch's keys and values, each [T, num_kv_heads, head_dim], into their slots; tell on_layers."""
        keys, values = self.cache.layer(layer)
        if self.one_slot is not None:  # plain copies cost half of an indexed write
            keys[self.one_slot].copy_(key[0])
            values[self.one_slot].copy_(value[0])
        else:
            where = (self.slot_blocks, self.slot_offsets)
            keys[where] = key
            values[where] = value
        self.note_written(layer, layer + 1)

    @property
    def flat_ids(self) -> torch.Tensor:
        return self.token_ids[0]

    @property
    def flat_positions(self) -> torch.Tensor:
        return self.positions[0]

    @property
    def slots(self) -> torch.Tensor:
        """int64 [T]: block * block_size + offset of each token's KV."""
        return self.slot_blocks * self.cache.block_size + self.slot_offsets

    def note_written(self, first: int, stop: int) -> None:
        """Layers [first, stop) have the whole batch's KV in the cache; tell on_layers."""
        self.layers_written = stop
        if self.on_layers is not None:
            self.on_layers(first, stop)

    def first_rows(self) -> dict[int, int]:
        """id(work) -> its first row."""
        return {id(row.work): row.first for row in self.rows}


def check_work(work: Work, block_size: int) -> None:
    """Raises DistServeError for work that its sequence's tokens or blocks don't cover."""
    stop = work.start + work.num_tokens
    sequence = work.sequence
    if work.num_tokens < 1 or work.start < 0 or stop > len(sequence.token_ids):
        raise DistServeError(
            f"work on {sequence.key} covers tokens [{work.start}, {stop}), must be a part of its "
            f"{len(sequence.token_ids)} tokens and not empty"
        )
    if len(sequence.block_table) < num_blocks_for(stop, block_size):
        raise DistServeError(
            f"the block table of {sequence.key} has {len(sequence.block_table)} blocks, "
            f"{stop} tokens need {num_blocks_for(stop, block_size)}"
        )


def _fresh_partial_blocks(rows: list[Row], block_size: int) -> list[int]:
    """Blocks whose first token is written in this pass and whose last isn't.

    Attention reads whole blocks and masks what lies behind a sequence's end. A mask does not stop a NaN that an
    earlier owner left there (0 * NaN is NaN), so what is unwritten must be zero.
    """
    fresh = []
    for row in rows:
        last = (row.stop - 1) // block_size
        if row.stop % block_size and row.start <= last * block_size:
            fresh.append(row.block_table[last])
    return fresh
