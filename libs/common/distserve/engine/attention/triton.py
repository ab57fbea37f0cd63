"""Attention on a GPU by Triton kernels that read the pool where it lies (kernels.py): no block is gathered."""

from __future__ import annotations

import torch

from distserve.engine.attention import kernels
from distserve.engine.context import BatchContext, Row


class TritonBackend:
    name = "triton"
    reads_whole_blocks = False

    def plan(self, context: BatchContext) -> TritonPlan:
        return TritonPlan(context)


class TritonPlan:
    def __init__(self, context: BatchContext) -> None:
        self._context = context
        self._cache = context.cache
        device, rows = context.cache.device, context.rows
        width = max(len(row.block_table) for row in rows)
        tables = [row.block_table + [0] * (width - len(row.block_table)) for row in rows]
        self._table = torch.tensor(tables, dtype=torch.int32, device=device)
        decode = rows[: context.num_decode]
        if decode:
            numbers = [list(range(len(decode))), [row.stop - 1 for row in decode]]
            self._rows, self._positions = torch.tensor(numbers, dtype=torch.int32, device=device)
            cores = torch.cuda.get_device_properties(device).multi_processor_count
            self._splits = kernels.num_splits(len(decode), self._cache.layout.num_kv_heads, cores)
        size = kernels.tile_queries(self._cache.layout.head_dim, self._cache.pool.dtype)
        tiles = [
            tile
            for number, row in enumerate(rows[context.num_decode :], context.num_decode)
            for tile in _tiles(number, row, size, context.num_decode)
        ]
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=device) if tiles else None

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
        parts: list[torch.Tensor] = []
        num_decode, sides = self._context.num_decode, self._cache.layer(layer)
        if num_decode and not skip_decode:
            parts.append(
                kernels.decode(
                    query[:num_decode],
                    sides,
                    self._table,
                    self._rows,
                    self._positions,
                    scale=scale,
                    splits=self._splits,
                    window=window,
                    softcap=softcap,
                )
            )
        if self._tiles is not None:
            parts.append(
                kernels.prefill(
                    query[num_decode:], sides, self._table, self._tiles, scale=scale, window=window, softcap=softcap
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _tiles(number: int, row: Row, size: int, before: int) -> list[tuple[int, int, int, int]]:
    """As kernels.prefill() takes them. number: of its block table; before: rows of the batch that are not its."""
    return [
        (number, row.first - before + at, row.start + at, min(size, row.num - at)) for at in range(0, row.num, size)
    ]
