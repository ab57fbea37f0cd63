"""Block tables on the device, kept from step to step: a step sends only the blocks that are new."""

from __future__ import annotations

import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from distserve.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class _Row:
    """blocks: the very list that was sent, so that another one (after a preemption) is told from it."""

    number: int
    blocks: list[int]
    num_sent: int


class DeviceTables:
    """table: int32 [num_rows + 1, num_blocks]; the last row is all 0, for padding. A sequence keeps its row for as long
    as it lives. One thread at a time may use it."""

    def __init__(self, num_rows: int, num_blocks: int, device: torch.device) -> None:
        """num_blocks: of the longest sequence."""
        self.table = torch.zeros(num_rows + 1, num_blocks, dtype=torch.int32, device=device)
        self.padding_row = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: weakref.WeakKeyDictionary[Sequence, _Row] = weakref.WeakKeyDictionary()

    def rows(self, sequences: Seq[Sequence]) -> list[int] | None:
        """The row of each, with all its blocks sent (in the current stream). None, and nothing is sent, if there are
        not rows enough: others live that hold them."""
        new = [s for s in sequences if s not in self._rows]
        if len(new) > len(self._free):
            return None
        for sequence in new:
            row = _Row(self._free.pop(), [], 0)
            self._rows[sequence] = row
            weakref.finalize(sequence, self._free.append, row.number).atexit = False
        found = [self._rows[s] for s in sequences]
        width = self.table.shape[1]
        places: list[int] = []
        blocks: list[int] = []
        for sequence, row in zip(sequences, found, strict=True):
            if row.blocks is not sequence.block_table:
                row.blocks, row.num_sent = sequence.block_table, 0
            if row.num_sent < len(row.blocks):
                first = row.number * width
                places += range(first + row.num_sent, first + len(row.blocks))
                blocks += row.blocks[row.num_sent :]
                row.num_sent = len(row.blocks)
        if places:
            sent = torch.tensor([places, blocks]).to(self.table.device, non_blocking=True)
            self.table.view(-1)[sent[0]] = sent[1].to(torch.int32)
        return [row.number for row in found]
