"""Groups the layers that a pass reports into spans worth a transfer, one feed for each pass."""

from collections.abc import Sequence
from typing import Protocol

from distserve.engine.batching import Batch
from distserve.engine.sequence import Sequence as EngineSequence
from distserve.kv.layout import layer_block_bytes
from distserve.messages import KVLayout, num_blocks_for
from distserve.transport.base import Span


class TakesLayers(Protocol):
    """A hand-over, or an offer to the store."""

    def layers_ready(self, span: Span, *, awaited: bool = False) -> None: ...


def prefix_span(sequence: EngineSequence, layout: KVLayout) -> Span | None:
    """All layers of the blocks that hold what is computed of it, of which none is begun: before its first pass, its
    prefix hits. None if there is none."""
    blocks = tuple(sequence.block_table[: sequence.num_computed_tokens // layout.block_size])
    return Span(0, layout.num_layers, blocks, tuple(range(len(blocks)))) if blocks else None


class LayerFeed:
    """Call it from the engine's thread as `on_layers(layer_start, layer_stop)`, in order.

    A span has as many consecutive layers as make up `span_bytes`: few enough to start early, large enough that
    the cost of a span doesn't count. The pass's last layers always go out at once; where they end the prompt, decode
    waits for them.
    """

    def __init__(
        self, batch: Batch, takers: Sequence[Sequence[TakesLayers]], layout: KVLayout, *, span_bytes: int
    ) -> None:
        """takers: of each work, those that are told of its layers."""
        self._num_layers = layout.num_layers
        self._rows: list[_Row] = []
        for work, told in zip(batch.work, takers, strict=True):
            if not told:
                continue
            first = work.start // layout.block_size
            stop = num_blocks_for(work.start + work.num_tokens, layout.block_size)
            blocks = tuple(work.sequence.block_table[first:stop])
            stride = max(1, span_bytes // (layer_block_bytes(layout) * len(blocks)))
            self._rows.append(_Row(told, blocks, tuple(range(first, stop)), stride, ends_prompt=work.samples))

    def __call__(self, layer_start: int, layer_stop: int) -> None:
        for row in self._rows:
            if layer_stop - row.sent >= row.stride or layer_stop == self._num_layers:
                awaited = row.ends_prompt and layer_stop == self._num_layers
                span = Span(row.sent, layer_stop, row.blocks, row.targets)
                for taker in row.takers:
                    taker.layers_ready(span, awaited=awaited)
                row.sent = layer_stop


class _Row:
    __slots__ = ("blocks", "ends_prompt", "sent", "stride", "takers", "targets")

    def __init__(
        self,
        takers: Sequence[TakesLayers],
        blocks: tuple[int, ...],
        targets: tuple[int, ...],
        stride: int,
        *,
        ends_prompt: bool,
    ) -> None:
        self.takers = takers
        self.blocks = blocks
        self.targets = targets
        self.stride = stride
        self.ends_prompt = ends_prompt  # it is the prompt's last chunk
        self.sent = 0  # layers [0, sent) are out
