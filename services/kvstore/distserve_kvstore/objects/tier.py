"""The object tier as the node sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from distserve.errors import BlockDamaged, BlocksMissing, DistServeError, KVError
from distserve.kv.layout import block_bytes, fingerprint
from distserve.messages import KVLayout
from distserve_kvstore.objects.format import HEADER_BYTES, Kind, NotServed, encode, parse_header, take_blocks
from distserve_kvstore.objects.link import Link, connect
from distserve_kvstore.objects.listing import listed
from distserve_kvstore.objects.runs import ObjectHeader, ObjectOptions, ObjectRun

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

T = TypeVar("T")

_TRIES = 2  # an object may be written anew between the reads of its header and of its blocks


class ObjectTier:
    """Runs on the event loop; bytes are copied and checked on threads. A call that the store doesn't answer within
    options.timeout_s, or refuses, ends with ObjectStoreDown. After that, calls fail at once until a pause is over, then
    one goes through as a trial."""

    @classmethod
    def open(cls, url: str, layout: KVLayout, options: ObjectOptions = ObjectOptions()) -> ObjectTier:
        """Asks nobody yet. Credentials come from the environment, as each provider's own tools have them.

        `file:///path` (made if need be), `s3://bucket/prefix`, `gs://…`, `az://…`. Raises ConfigError."""
        link = Link(connect(url, options.timeout_s), url, options)
        kind = Kind(fingerprint(layout), block_bytes(layout))
        return cls(link, kind, options.max_concurrent, is_sorted=not url.startswith("file:"))

    def __init__(self, link: Link, kind: Kind, max_concurrent: int, *, is_sorted: bool) -> None:
        """By open(). is_sorted: the store lists in order of names."""
        self._link = link
        self._kind = kind
        self._max_concurrent = max_concurrent
        self._is_sorted = is_sorted

    @property
    def state(self) -> str:
        """ "ok", or why it isn't used at the moment."""
        return self._link.state

    @property
    def down_for_s(self) -> float:
        """How long calls will go on to fail at once; 0: they may be tried."""
        return self._link.down_for_s

    async def put(self, run: ObjectRun) -> str:
        """Whole or not at all; the object's name. Raises ObjectStoreDown, KVError (what can't be an object)."""
        name, raw = await _on_thread(lambda: encode(run, self._kind))
        await self._link.call("a put", lambda store: store.put_async(name, raw, use_multipart=False))
        return name

    async def head(self, name: str) -> ObjectHeader:
        """Raises BlocksMissing (no such object), BlockDamaged (foreign or damaged, never served), ObjectStoreDown."""
        (raw,) = await self._ranges(name, [(0, HEADER_BYTES)])
        return self._parsed(name, raw)

    async def get(
        self, name: str, hashes: Sequence[bytes], first: int, into: Sequence[memoryview]
    ) -> list[DistServeError | None]:
        """Blocks [first, first + len(into)) of an object, which must be `hashes`; each into its buffer (uint8
        [block_bytes]), verified. None where that went well, else BlockDamaged, or BlocksMissing where the object has
        another one there. Raises as head().

        Buffers are written only before it returns, or raises: cancelled, it returns once nothing writes to them."""
        buffers = [memoryview(b).cast("B") for b in into]
        if len(hashes) != len(buffers) or any(len(b) != self._kind.block_bytes for b in buffers):
            raise KVError(f"{len(hashes)} hashes need as many buffers of {self._kind.block_bytes} bytes")
        if not buffers:
            return []
        for tries_left in reversed(range(_TRIES)):
            try:
                result = await self._get(name, hashes, first, buffers)
            except BlockDamaged:
                if not tries_left:
                    raise
                continue
            if not tries_left or not any(isinstance(error, BlockDamaged) for error in result):
                break
        return result

    async def _get(
        self, name: str, hashes: Sequence[bytes], first: int, into: Sequence[memoryview]
    ) -> list[DistServeError | None]:
        blocks = (self._kind.offset(first), self._kind.offset(first + len(into)))
        if first == 0:  # they follow the header: one range, one answer of one object
            (raw,) = await self._ranges(name, [(0, blocks[1])])
            header_bytes, body = raw[:HEADER_BYTES], raw[HEADER_BYTES:]
        else:
            header_bytes, body = await self._ranges(name, [(0, HEADER_BYTES), blocks])
        header = self._parsed(name, header_bytes)
        num_right = sum(a == b for a, b in zip(hashes, header.hashes[first:], strict=False))
        if num_right < len(hashes):
            missing: DistServeError = BlocksMissing(
                f"object {name} has other blocks there", num_present=0, tier="object"
            )
            return [missing] * len(hashes)
        wrong = await _on_thread(lambda: take_blocks(header, body, first, into, self._kind))
        return [None if reason is None else self._damaged(name, reason, first + i) for i, reason in enumerate(wrong)]

    async def _ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """[start, stop) each; less where the object ends. Raises BlocksMissing, ObjectStoreDown."""
        try:
            got = await self._link.call("a get", lambda store: _get_ranges(store, name, ranges))
        except FileNotFoundError as e:
            raise BlocksMissing(f"there is no object {name}", num_present=0, tier="object") from e
        return [memoryview(part) for part in got]

    def _parsed(self, name: str, raw: memoryview) -> ObjectHeader:
        try:
            return parse_header(name, raw, self._kind)
        except NotServed as e:
            raise self._damaged(name, str(e)) from e

    def _damaged(self, name: str, reason: str, block: int | None = None) -> BlockDamaged:
        where = f"object {name}" + ("" if block is None else f", block {block}")
        log.error("%s is not served: %s", where, reason)
        return BlockDamaged(f"{where} is not served: {reason}", where=where, reason=reason)

    async def names(self, *, after: str = "", limit: int = 1000) -> list[str]:
        """Objects of this layout, in order of their names; the last one is the next page's `after`. Raises
        ObjectStoreDown."""
        found: list[str] = []
        async for some in listed(self._link, self._kind, after=after, is_sorted=self._is_sorted):
            found += some[: limit - len(found)]
            if len(found) >= limit:
                break
        return found

    async def headers(self, *, after: str = "") -> AsyncIterator[ObjectHeader]:
        """Of every object of this layout, in order of their names: what the index is made of again. Foreign and damaged
        objects are left out, with a message. Raises ObjectStoreDown: go on later, after the last one's name."""
        async for names in listed(self._link, self._kind, after=after, is_sorted=self._is_sorted):
            for i in range(0, len(names), self._max_concurrent):
                some = names[i : i + self._max_concurrent]
                for header in await asyncio.gather(*(self.head(n) for n in some), return_exceptions=True):
                    if isinstance(header, BlocksMissing | BlockDamaged):
                        continue  # deleted meanwhile, or said already
                    if isinstance(header, BaseException):
                        raise header
                    yield header

    async def delete(self, names: Sequence[str]) -> None:
        """For good; those that aren't there are none of its business. Raises ObjectStoreDown."""
        for i in range(0, len(names), self._max_concurrent):
            await asyncio.gather(*(self._delete(name) for name in names[i : i + self._max_concurrent]))

    async def _delete(self, name: str) -> None:
        try:
            await self._link.call("a delete", lambda store: store.delete_async(name))
        except FileNotFoundError:
            pass

    async def close(self) -> None:
        """Nothing to wait for: connections go with the last reference. Idempotent."""


async def _get_ranges(store: ObjectStore, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Buffer]:
    starts, ends = [a for a, _ in ranges], [b for _, b in ranges]
    try:
        parts: Sequence[Buffer] = await store.get_ranges_async(name, starts=starts, ends=ends)
        return parts
    except FileNotFoundError:
        raise
    except Exception:  # the library has no type for it: was it asked for more than there is?
        if (await store.head_async(name))["size"] > max(starts):
            raise
        return [b""] * len(ranges)  # an object cut short is no fault of the store's


async def _on_thread(call: Callable[[], T]) -> T:
    """Cancelled, it still waits until the call is over, for what it writes to."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
