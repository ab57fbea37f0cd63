"""Copies between a KV pool in a GPU's memory and pinned host memory, with checksums summed on the GPU, through torch.

The only place of the transports that uses torch, and it imports it only when a CudaCopier is made or device_sums is
called: a process without a GPU can import this.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from distserve.errors import ConfigError, TransportError
from distserve.kv.checksum import WORD_BYTES, Words, weights
from distserve.kv.layout import block_bytes, layer_block_bytes
from distserve.messages import KVLayout
from distserve.transport.base import Span
from distserve.transport.device_pool import Attached
from distserve.transport.ipc_memory import IpcDriver, IpcMemory
from distserve.transport.spans import Ids, as_ids, paired_runs
from distserve.transport.staging_ring import Bytes, Copy

if TYPE_CHECKING:
    import torch

SUM_BYTES = 16 << 20  # of blocks summed at a time: bounds the temporaries, twice this much device memory


@lru_cache(maxsize=8)
def _device_weights(num_words: int, device: str) -> torch.Tensor:
    import torch

    # Once in a block's size and device, and waited for: any stream may read it from then on.
    return torch.from_numpy(weights(num_words).view(np.int64).copy()).to(device)


def device_sums(rows: torch.Tensor, first_word: int, num_words: int) -> torch.Tensor:
    """kv/checksum.partial_sums where the bytes lie: what words [first_word, first_word + k) of blocks of `num_words`
    words add to each block's checksum. rows: int64 [n, k], the words' bits; returns int64 [n], the sums' bits.

    Sums mod 2^64 have the same bits signed and unsigned, and torch's int64 wraps round on CPU and GPU. There is no
    integer matrix product on a GPU, so it multiplies and adds: one temporary of the size of rows.
    """
    import torch

    part = _device_weights(num_words, str(rows.device))[first_word : first_word + rows.shape[1]]
    return torch.sum(rows * part, dim=1)


class _Notes:
    """A little pinned memory and the events for one copy at a time: made once, since pinning costs more than a copy.

    ids: block ids on their way to the GPU; sums: checksums on their way back; int64 [capacity] each.
    """

    def __init__(self, capacity: int) -> None:
        import torch

        event: Any = torch.cuda.Event  # its constructor carries no types
        self.capacity = capacity
        self.ids = torch.empty(capacity, dtype=torch.int64, pin_memory=True)
        self.sums = torch.empty(capacity, dtype=torch.int64, pin_memory=True)
        self.ready: torch.cuda.Event = event()  # gathered and summed
        self.event: torch.cuda.Event = event(blocking=True)  # over


class _CudaCopy:
    """Keeps what the copy uses, and gives the notes back when it is over."""

    def __init__(self, notes: _Notes, count: int, give_back: Callable[[_Notes], None], keep: object) -> None:
        self._notes = notes
        self._count = count
        self._give_back = give_back
        self._keep = keep

    def wait(self) -> Words:
        try:
            self._notes.event.synchronize()  # sleeps (the event is a blocking one), without the GIL
        except RuntimeError as e:
            raise TransportError(f"a copy between GPU and host failed: {e}") from e
        sums: Words = self._notes.sums[: self._count].numpy().view(np.uint64).copy()
        self._give_back(self._notes)
        return sums


class AttachedPool:
    """device_pool.Attached: the words of another process's pool, int64 [num_blocks, num_layers, layer_words]."""

    def __init__(self, memory: IpcMemory, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        """device: of our own pool, whose copies read it. Raises TransportUnavailable, TransportError."""
        import torch

        if memory.num_bytes != num_blocks * block_bytes(layout):
            raise TransportError(
                f"a sender's pool of {num_blocks} blocks has {memory.num_bytes} bytes of GPU memory, must have "
                f"{num_blocks * block_bytes(layout)}",
                value=memory.num_bytes,
                expected=num_blocks * block_bytes(layout),
            )
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        address, self._close = IpcDriver().open(memory, ordinal)
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.num_layers, layer_block_bytes(layout) // WORD_BYTES)
        self.words: torch.Tensor | None = torch.as_tensor(_Words(address, shape))

    def close(self) -> None:
        if self.words is not None:
            self.words = None
            self._close()


class _Words:
    """Device memory as torch takes it over, without a copy."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<i8", "data": (address, False), "version": 3}


class CudaCopier:
    """A staging_ring.Copier for a pool in a GPU's memory, on streams of its own.

    Out: the blocks' rows are gathered on the GPU, summed, and cross the bus in one copy, so scattered blocks cost no
    more than neighbours; the next piece is gathered meanwhile. In: each run of neighbours is a copy, straight to its
    place, and is summed there. Besides the pool it takes device memory from torch's allocator: two pieces for each
    slot that is being filled (out), twice SUM_BYTES (in), and for scattered blocks of another pool once what is taken.
    """

    def __init__(self, pool: torch.Tensor, layout: KVLayout) -> None:
        """pool: contiguous, of any dtype, [num_blocks, *block_shape(layout)]. Raises ConfigError."""
        import torch

        num_blocks = pool.shape[0]
        if pool.device.type != "cuda" or not pool.is_contiguous():
            raise ConfigError(
                f"the pool is on {pool.device}{'' if pool.is_contiguous() else ', not contiguous'}, must be contiguous "
                "and on a CUDA device",
                key="pool",
                value=str(pool.device),
                expected="contiguous, on a CUDA device",
            )
        if pool.numel() * pool.element_size() != num_blocks * block_bytes(layout):
            raise ConfigError(
                f"the pool has {pool.numel() * pool.element_size()} bytes, must have {num_blocks} blocks of "
                f"{block_bytes(layout)}",
                key="pool",
                value=pool.numel() * pool.element_size(),
                expected=str(num_blocks * block_bytes(layout)),
            )
        if layer_block_bytes(layout) % WORD_BYTES:
            raise ConfigError(
                f"a layer block has {layer_block_bytes(layout)} bytes, must be a multiple of {WORD_BYTES}",
                key="block_size",
                value=layout.block_size,
                expected="larger",
            )
        self._torch = torch
        self._cuda: Any = torch.cuda  # its constructors carry no types
        self._device = pool.device
        self._num_layers = layout.num_layers
        self._layer_words = layer_block_bytes(layout) // WORD_BYTES
        self._num_words = self._num_layers * self._layer_words
        self._words = pool.view(torch.uint8).reshape(-1).view(torch.int64).view(num_blocks, self._num_layers, -1)
        self._gather: torch.cuda.Stream = self._cuda.Stream(self._device)
        self._out: torch.cuda.Stream = self._cuda.Stream(self._device)
        self._in: torch.cuda.Stream = self._cuda.Stream(self._device)
        self._sum: torch.cuda.Stream = self._cuda.Stream(self._device)
        self._notes: deque[_Notes] = deque()
        _device_weights(self._num_words, str(self._device))
        torch.cuda.synchronize(self._device)

    # -- Copier

    def pin(self, memory: Bytes) -> None:
        with self._cuda.device(self._device):
            runtime = self._cuda.cudart()
            if code := int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)):
                raise ConfigError(
                    f"can't pin {memory.nbytes} bytes of host memory (CUDA error {code}): fewer or smaller slots or "
                    "blocks would do",
                    key="slot_bytes",
                    value=memory.nbytes,
                    expected="less, or a higher limit on locked memory",
                )

    def unpin(self, memory: Bytes) -> None:
        with self._cuda.device(self._device):
            self._cuda.cudart().cudaHostUnregister(memory.ctypes.data)

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._cuda.Event(blocking=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def fetch(self, piece: Span, rows: Bytes, after: object) -> Copy:
        torch, count = self._torch, len(piece.source_blocks)
        assert isinstance(after, torch.cuda.Event)
        try:
            with torch.cuda.stream(self._gather):
                self._gather.wait_event(after)
                notes = self._take_notes(count)
                ids = self._ids(notes, piece.source_blocks)
                gathered = self._words[:, piece.layer_start : piece.layer_stop].index_select(0, ids).view(count, -1)
                sums = device_sums(gathered, piece.layer_start * self._layer_words, self._num_words)
                notes.ready.record(self._gather)
            with torch.cuda.stream(self._out):
                self._out.wait_event(notes.ready)
                self._host(rows).view(gathered.shape).copy_(gathered, non_blocking=True)
                for used in (gathered, sums):
                    used.record_stream(self._out)  # else torch might hand their memory out while it is being read
                return self._begun(self._out, notes, sums, rows)
        except RuntimeError as e:
            raise TransportError(f"a copy from GPU to host could not be begun: {e}") from e

    def store(self, blocks: Bytes, landed: Sequence[int], block_ids: Sequence[int]) -> Copy:
        torch = self._torch
        try:
            with torch.cuda.stream(self._in):
                host = self._host(blocks).view(blocks.shape[0], self._num_layers, -1)
                sources, targets = as_ids(landed), as_ids(block_ids)
                for i, length in paired_runs(sources, targets):
                    source, target = int(sources[i]), int(targets[i])
                    self._words[target : target + length].copy_(host[source : source + length], non_blocking=True)
                notes = self._take_notes(len(block_ids))
                sums = self._sums(self._ids(notes, block_ids), 0, self._num_layers)
                return self._begun(self._in, notes, sums, blocks)
        except RuntimeError as e:
            self._await_begun()
            raise TransportError(f"a copy from host to GPU could not be begun: {e}") from e

    def await_mark(self, mark: object) -> None:
        assert isinstance(mark, self._torch.cuda.Event)
        try:
            mark.synchronize()
        except RuntimeError as e:
            raise TransportError(f"the GPU failed: {e}") from e

    def take(self, source: Attached, sources: Ids, targets: Ids, layer_start: int, layer_stop: int) -> Copy:
        torch = self._torch
        assert isinstance(source, AttachedPool)
        assert source.words is not None
        try:
            with torch.cuda.stream(self._in):
                from_there, here = source.words[:, layer_start:layer_stop], self._words[:, layer_start:layer_stop]
                runs = list(paired_runs(sources, targets))
                elsewhere = source.words.device != self._device  # whose rows our kernels do not gather
                if elsewhere or len(runs) <= max(1, len(targets) // 8):
                    for i, length in runs:
                        first, target = int(sources[i]), int(targets[i])
                        here[target : target + length].copy_(from_there[first : first + length], non_blocking=True)
                else:
                    ids = torch.from_numpy(np.stack((sources, targets))).to(self._device)
                    here.index_copy_(0, ids[1], from_there.index_select(0, ids[0]))
                notes = self._take_notes(len(targets))
                sums = self._sums(self._ids(notes, targets), layer_start, layer_stop)
                return self._begun(self._in, notes, sums, source)
        except RuntimeError as e:
            self._await_begun()
            raise TransportError(f"a copy from GPU to GPU could not be begun: {e}") from e

    def sums(self, block_ids: Ids, layer_start: int, layer_stop: int, after: object) -> Copy:
        torch = self._torch
        assert isinstance(after, torch.cuda.Event)
        try:
            with torch.cuda.stream(self._sum):
                self._sum.wait_event(after)
                notes = self._take_notes(len(block_ids))
                ids = self._ids(notes, block_ids)
                return self._begun(self._sum, notes, self._sums(ids, layer_start, layer_stop), None)
        except RuntimeError as e:
            raise TransportError(f"sums of the pool could not be begun: {e}") from e

    # -- inside

    def _await_begun(self) -> None:
        """What was queued before something failed still writes to the pool: the caller leaves its fence when told."""
        with contextlib.suppress(RuntimeError):  # of a device that is gone: nothing writes any more
            self._in.synchronize()

    def _sums(self, ids: torch.Tensor, layer_start: int, layer_stop: int) -> torch.Tensor:
        """int64 [n], of these layers of blocks of the pool."""
        words, height = self._words[:, layer_start:layer_stop], (layer_stop - layer_start) * self._layer_words
        first = layer_start * self._layer_words
        step = max(1, SUM_BYTES // (height * WORD_BYTES))
        parts = [
            device_sums(words.index_select(0, ids[i : i + step]).view(-1, height), first, self._num_words)
            for i in range(0, len(ids), step)
        ]
        return self._torch.cat(parts) if parts else ids

    def _take_notes(self, count: int) -> _Notes:
        """Some that are large enough, or new ones. Those that are too small are dropped."""
        while self._notes:
            try:
                notes = self._notes.popleft()
            except IndexError:  # another thread took the last
                break
            if notes.capacity >= count:
                return notes
        return _Notes(max(64, 1 << max(0, count - 1).bit_length()))

    def _ids(self, notes: _Notes, block_ids: Sequence[int] | Ids) -> torch.Tensor:
        notes.ids.numpy()[: len(block_ids)] = block_ids
        return notes.ids[: len(block_ids)].to(self._device, non_blocking=True)

    def _host(self, memory: Bytes) -> torch.Tensor:
        return self._torch.from_numpy(memory.reshape(-1)).view(self._torch.int64)

    def _begun(self, stream: torch.cuda.Stream, notes: _Notes, sums: torch.Tensor, keep: object) -> _CudaCopy:
        notes.sums[: len(sums)].copy_(sums, non_blocking=True)
        notes.event.record(stream)
        return _CudaCopy(notes, len(sums), self._notes.append, keep)
