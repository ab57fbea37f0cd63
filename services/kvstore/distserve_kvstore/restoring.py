"""What a folder has, into the index: blocks that were written in turn with others' are put together again."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from distserve.errors import DistServeError
from distserve.kv.hashing import HASH_BYTES
from distserve_kvstore.disk import RecoveredRun
from distserve_kvstore.disk_io import DiskIo
from distserve_kvstore.holdings import Holdings

log = logging.getLogger(__name__)

MAX_BLOCKS = 4096  # in one run that is put together: a few milliseconds of the loop
_BLOCKS_AT_ONCE = 1024  # before the loop serves others


async def restore(holdings: Holdings, disk: DiskIo, recovered: Sequence[RecoveredRun]) -> None:
    """Blocks that contradict others, or are there twice, are freed."""
    num = num_done = 0
    for parts in joined(recovered):
        try:
            num += _enter(holdings, disk, parts)
        except DistServeError:
            for run in parts:  # one of them contradicts what is known: only that is left out
                try:
                    num += _enter(holdings, disk, [run])
                except DistServeError as e:
                    log.warning("%d blocks on disk are left out: %s", len(run.places), e)
                    disk.free(run.places)
        num_done += sum(len(run.places) for run in parts)
        if num_done >= _BLOCKS_AT_ONCE:
            num_done = 0
            await asyncio.sleep(0)
    if num:
        log.info("%d blocks found on disk", num)


def _enter(holdings: Holdings, disk: DiskIo, parts: Sequence[RecoveredRun]) -> int:
    """Runs that follow one another; how many blocks were new. Raises KVError, and nothing has changed."""
    first = parts[0]
    hashes = b"".join(run.hashes for run in parts)
    entries = holdings.index.insert(hashes, first.parent, first.start, first.tenant, first.conversation)
    places = np.fromiter(itertools.chain.from_iterable(run.places for run in parts), np.int64, len(entries))
    fresh = holdings.index.disk[entries] < 0
    holdings.enter(entries[fresh], "disk", places[fresh])
    disk.free(places[~fresh].tolist())
    return int(fresh.sum())


def joined(runs: Sequence[RecoveredRun]) -> Iterator[list[RecoveredRun]]:
    """The same runs, those together that follow one another in a chain of one conversation; parents before children.
    Where a chain branches, one branch goes on and the others begin anew."""
    ordered = sorted(runs, key=lambda run: run.start)
    following: dict[tuple[bytes, int, str, str], list[RecoveredRun]] = {}
    for run in ordered:
        following.setdefault((run.parent, run.start, run.tenant, run.conversation), []).append(run)
    taken: set[int] = set()
    for run in ordered:
        if id(run) in taken:
            continue
        taken.add(id(run))
        parts, num = [run], len(run.places)
        while num < MAX_BLOCKS:
            last = parts[-1]
            key = (last.hashes[-HASH_BYTES:], last.start + len(last.places), last.tenant, last.conversation)
            follower = next((one for one in following.get(key, ()) if id(one) not in taken), None)
            if follower is None:
                break
            parts.append(follower)
            num += len(follower.places)
            taken.add(id(follower))
        yield parts
