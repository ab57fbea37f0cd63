"""Who is there: the registry over any bucket."""

import re

from distserve.bus.base import Registry, Watch
from distserve.bus.bucket import Bucket
from distserve.bus.watch import LiveWatch
from distserve.errors import BusError
from distserve.messages import WorkerInfo, encode

_TOKEN = re.compile(r"[A-Za-z0-9_-]+")


def entry_key(info: WorkerInfo) -> str:
    """`<role>.<worker_id>`. Raises BusError for an id that is not one subject token."""
    if not _TOKEN.fullmatch(info.worker_id):
        raise BusError(
            f"worker_id is {info.worker_id!r}, must be letters, digits, '-' and '_'",
            param="worker_id",
            value=info.worker_id,
            expected=_TOKEN.pattern,
        )
    return f"{info.role}.{info.worker_id}"


class BucketRegistry(Registry):
    """Entries are encoded WorkerInfo messages under `<role>.<worker_id>`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.ttl_s = bucket.ttl_s

    async def put(self, info: WorkerInfo) -> None:
        await self._bucket.put(entry_key(info), encode(info))

    async def delete(self, info: WorkerInfo) -> None:
        await self._bucket.delete(entry_key(info))

    def watch(self) -> Watch:
        return LiveWatch(self._bucket)
