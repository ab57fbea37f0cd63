"""torch's scaled_dot_product_attention over gathered blocks: the backend for CPUs.

Decode rows of similar length share one call on their blocks, gathered and padded. A prefill chunk without a prefix
attends to its own keys and values with no mask at all; one with a prefix attends to its gathered blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from distserve.engine.context import BatchContext, Row

# Queries that share one mask. Smaller wastes calls, larger computes more scores that the mask then drops.
QUERY_TILE = 512


class SdpaBackend:
    name = "sdpa"
    reads_whole_blocks = True

    def plan(self, context: BatchContext) -> SdpaPlan:
        return SdpaPlan(context)


@dataclass(slots=True, eq=False)
class DecodeGroup:
    """Decode rows [first, stop). block_ids: int64 [num_rows * blocks a row].

    Keys and values of these blocks are gathered into `gathered`, layer after layer into the same memory, and looked at
    through `key` and `value`, each [num_rows, num_kv_heads, num_keys, head_dim]; mask [num_rows, 1, 1, num_keys] is
    added to the scores.
    """

    first: int
    stop: int
    block_ids: torch.Tensor
    gathered: tuple[torch.Tensor, torch.Tensor]
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None


class SdpaPlan:
    def __init__(self, context: BatchContext) -> None:
        self._context = context
        self._cache = context.cache
        self._dtype = context.cache.pool.dtype
        self._decode: dict[int | None, list[DecodeGroup]] = {}
        self._block_ids: dict[tuple[int, int], torch.Tensor] = {}
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        skip_decode: bool = False,
    ) -> torch.Tensor:
        context = self._context
        parts: list[torch.Tensor] = []
        if context.num_decode and not skip_decode:
            if window not in self._decode:
                self._decode[window] = self._group_decode(window)
            for group in self._decode[window]:
                parts.append(self._attend_decode(group, layer, query, scale, softcap))
        for row in context.rows[context.num_decode :]:
            rows = slice(row.first, row.first + row.num)
            parts += self._attend_prefill(row, layer, query[rows], key[rows], value[rows], scale, window, softcap)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # ---------------------------------------------------------------- decode

    def _group_decode(self, window: int | None) -> list[DecodeGroup]:
        """Rows come longest first; a group takes rows as long as padding them costs little."""
        size = self._cache.block_size
        groups: list[DecodeGroup] = []
        rows = self._context.rows[: self._context.num_decode]
        first_blocks = [max(0, row.stop - window) // size if window else 0 for row in rows]
        counts = [len(row.block_table) - first for row, first in zip(rows, first_blocks, strict=True)]
        begin = 0
        while begin < len(rows):
            end = begin + 1
            width = counts[begin]
            while end < len(rows) and (counts[end] * 4 >= width * 3 or width - counts[end] <= 4):
                width = max(width, counts[end])
                end += 1
            groups.append(self._group(rows[begin:end], first_blocks[begin:end], width, window, begin))
            begin = end
        return groups

    def _group(
        self, rows: list[Row], first_blocks: list[int], width: int, window: int | None, begin: int
    ) -> DecodeGroup:
        cache = self._cache
        tables = [r.block_table[f:] for r, f in zip(rows, first_blocks, strict=True)]
        block_ids = torch.tensor([t + [0] * (width - len(t)) for t in tables], device=cache.device).flatten()
        ends = [r.stop - f * cache.block_size for r, f in zip(rows, first_blocks, strict=True)]
        begins = [max(0, end - window) if window else 0 for end in ends]
        num_keys = max(ends)
        mask = None
        if min(ends) < num_keys or max(begins) > 0:
            bounds = torch.tensor([begins, ends], device=cache.device)[:, :, None]
            keys = torch.arange(num_keys, device=cache.device)
            hidden = (keys < bounds[0]) | (keys >= bounds[1])
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=cache.device)
            mask.masked_fill_(hidden, float("-inf"))
            mask = mask[:, None, None, :]
        shape = (len(block_ids), *cache.pool.shape[3:])
        gathered = (cache.pool.new_empty(shape), cache.pool.new_empty(shape))
        key, value = (x.view(len(rows), -1, *shape[2:])[:, :num_keys].transpose(1, 2) for x in gathered)
        return DecodeGroup(begin, begin + len(rows), block_ids, gathered, key, value, mask)

    def _attend_decode(
        self, group: DecodeGroup, layer: int, query: torch.Tensor, scale: float, softcap: float | None
    ) -> torch.Tensor:
        for side, gathered in zip(self._cache.layer(layer), group.gathered, strict=True):
            torch.index_select(side, 0, group.block_ids, out=gathered)
        rows = query[group.first : group.stop].unsqueeze(2)
        return _sdpa(rows, group.key, group.value, group.mask, False, scale, softcap).squeeze(2)

    # ---------------------------------------------------------------- prefill

    def _attend_prefill(
        self,
        row: Row,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> list[torch.Tensor]:
        """One tensor [num, num_heads, head_dim] for each tile of queries."""
        if window is not None and window >= row.stop:
            window = None  # nothing is out of its reach
        base = 0  # the position of key[0]
        if row.start > 0:
            size = self._cache.block_size
            first_block = 0 if window is None else max(0, row.start + 1 - window) // size
            base = first_block * size
            key, value = (x.flatten(0, 1) for x in self._gather(layer, self._blocks_from(row, first_block)))
        elif window is None:
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
            return [_sdpa(q, k, v, None, True, scale, softcap)[0].transpose(0, 1)]
        parts = []
        # The last tile has the most keys, so its mask is the widest and serves the others.
        tiles = [(at, min(at + QUERY_TILE, row.num)) for at in range(0, row.num, QUERY_TILE)]
        for begin, end in reversed(tiles):
            stop = row.start + end - base
            start = 0 if window is None else max(0, row.start + begin + 1 - window - base)
            q, k, v = (x.transpose(0, 1)[None] for x in (query[begin:end], key[start:stop], value[start:stop]))
            mask = self._mask(end - begin, stop - start, window)
            parts.append(_sdpa(q, k, v, mask, False, scale, softcap)[0].transpose(0, 1))
        parts.reverse()
        return parts

    def _blocks_from(self, row: Row, first_block: int) -> torch.Tensor:
        found = self._block_ids.get((row.first, first_block))
        if found is None:
            found = torch.tensor(row.block_table[first_block:], device=self._cache.device)
            self._block_ids[row.first, first_block] = found
        return found

    def _mask(self, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
        """[num_queries, num_keys], 0 or -inf, for queries that are the last of the keys.

        Seen from the right end it doesn't depend on num_keys, so the widest one serves all by slices.
        """
        found = self._masks.get((num_queries, window))
        if found is None or found.shape[1] < num_keys:
            device = self._cache.device
            ahead = torch.arange(num_keys, device=device) - torch.arange(
                num_keys - num_queries, num_keys, device=device
            ).unsqueeze(1)
            hidden = ahead > 0
            if window is not None:
                hidden |= ahead <= -window
            found = torch.zeros(hidden.shape, dtype=self._dtype, device=device)
            found.masked_fill_(hidden, float("-inf"))
            self._masks[num_queries, window] = found
        return found[:, found.shape[1] - num_keys :]

    # ---------------------------------------------------------------- both

    def _gather(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some blocks, copied: each [n, block_size, num_kv_heads, head_dim]."""
        keys, values = self._cache.layer(layer)
        return keys.index_select(0, block_ids), values.index_select(0, block_ids)


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """query [n, num_heads, q, head_dim], key and value [n, num_kv_heads, k, head_dim] -> like query."""
    if softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    # The kernels know no softcap: the same in steps, with the softmax in float32.
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype), value)
