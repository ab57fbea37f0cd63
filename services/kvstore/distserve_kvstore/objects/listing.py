"""Names of objects, in order, some at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from distserve_kvstore.objects.format import Kind
from distserve_kvstore.objects.link import Link

if TYPE_CHECKING:
    from obstore.store import ListStream, ObjectMeta

_AT_ONCE = 256


async def listed(link: Link, kind: Kind, *, after: str, is_sorted: bool) -> AsyncIterator[list[str]]:
    """Some names at a time, those behind `after`. Files of other names in the same place are passed over.

    Providers list in order of names; a folder comes in any order, so it is listed whole and sorted (about 200 bytes of
    memory an object). Each answer has its time. Raises ObjectStoreDown.
    """
    unsorted: list[str] = []
    async for names in _answers(link, kind, after):
        if is_sorted:
            yield names
        else:
            unsorted += names
    unsorted.sort()
    for i in range(0, len(unsorted), _AT_ONCE):
        yield unsorted[i : i + _AT_ONCE]


async def _answers(link: Link, kind: Kind, after: str) -> AsyncIterator[list[str]]:
    stream = link.store.list(kind.prefix, offset=after or None, chunk_size=_AT_ONCE)
    while (objects := await link.call("a list", lambda _: _next(stream))) is not None:
        yield [o["path"] for o in objects if kind.is_name(o["path"])]


async def _next(stream: ListStream[list[ObjectMeta]]) -> list[ObjectMeta] | None:
    try:
        return await anext(stream)
    except (StopAsyncIteration, FileNotFoundError):  # the latter: a folder in which nothing was put yet
        return None
