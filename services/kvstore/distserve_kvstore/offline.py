"""A folder of blocks without a node: what is in it, whether it is whole, and making it smaller.

Blocking. Each takes the folder for as long as it looks: ConfigError, which names the node, if one is running on it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from distserve.errors import ConfigError
from distserve.kv.hashing import unpack
from distserve.kv.layout import block_bytes, fingerprint
from distserve.messages import KVLayout
from distserve_kvstore.disk import DiskOptions, DiskTier, RecoveredRun
from distserve_kvstore.disk.files import can_direct
from distserve_kvstore.disk.folder import FolderLock
from distserve_kvstore.disk.records import Verified
from distserve_kvstore.disk.recovery import Recovery, recover
from distserve_kvstore.disk.set_aside import files_set_aside, remove_set_aside

NAME = "distserve kv"  # in the lock, while it looks
_SLICE_BYTES = 256 << 20
_OPTIONS = DiskOptions(node=NAME, min_free_fraction=0.0)


@dataclass(frozen=True, slots=True)
class FolderStats:
    layout: KVLayout
    fingerprint: str
    block_bytes: int
    num_blocks: int
    num_bytes: int  # of blocks
    file_bytes: int  # of their files: dead blocks, headers and space held for further blocks too
    num_segments: int
    num_set_aside: int
    set_aside_bytes: int
    num_conversations: int


@dataclass(frozen=True, slots=True)
class FolderConversation:
    tenant: str
    conversation: str
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Pruned:
    num_removed: int  # blocks
    num_left: int
    num_files_removed: int  # of those that were set aside
    freed_bytes: int


def stat(folder: Path) -> FolderStats:
    """Raises ConfigError, DiskFailed. Changes nothing."""
    with _looked_at(folder) as (layout, found):
        aside = files_set_aside(folder)
        num_blocks = len(found.slots)
        return FolderStats(
            layout,
            fingerprint(layout),
            block_bytes(layout),
            num_blocks,
            num_blocks * block_bytes(layout),
            sum(s.file_bytes for s in found.segments),
            len(found.segments),
            len(aside),
            sum(path.stat().st_size for path in aside),
            len({(run.tenant, run.conversation) for run in found.runs}),
        )


def ls(folder: Path) -> list[FolderConversation]:
    """In order of their names. Raises ConfigError, DiskFailed. Changes nothing."""
    with _looked_at(folder) as (layout, found):
        blocks: Counter[tuple[str, str]] = Counter()
        for run in found.runs:
            blocks[run.tenant, run.conversation] += len(run.places)
        return [FolderConversation(*names, n, n * block_bytes(layout)) for names, n in sorted(blocks.items())]


def verify(folder: Path) -> Verified:
    """Reads every block; the damaged are set aside. Raises ConfigError, DiskFailed, DiskFull."""
    tier, _ = DiskTier.open(folder, _layout(folder), _OPTIONS)
    with closing(tier):
        return tier.verify()


def prune(folder: Path, keep_blocks: int) -> Pruned:
    """Removes blocks until at most so many are left, and what was set aside, and gives the space back. Conversations
    that were written longest ago go first, each from its end. Raises ConfigError, DiskFailed, DiskFull."""
    tier, runs = DiskTier.open(folder, _layout(folder), _OPTIONS)
    with closing(tier):
        before = _num_bytes(folder)
        num_aside = remove_set_aside(folder)
        num_blocks = sum(len(run.places) for run in runs)
        victims = _victims(runs, num_blocks - keep_blocks)
        tier.forget(victims)
        while tier.compact(_SLICE_BYTES).more:
            pass
    return Pruned(len(victims), num_blocks - len(victims), num_aside, max(0, before - _num_bytes(folder)))


def _victims(runs: Sequence[RecoveredRun], num: int) -> list[int]:
    """Places of blocks that no block left goes on from. Runs are in the order they were written in."""
    written = {(run.tenant, run.conversation): i for i, run in enumerate(runs)}  # the last of each conversation
    parents: dict[bytes, bytes] = {}
    order: dict[bytes, tuple[int, int, int]] = {}  # when its conversation was last written, deepest first, place
    for run in runs:
        age, parent = written[run.tenant, run.conversation], run.parent
        for i, (hash_, place) in enumerate(zip(unpack(run.hashes), run.places, strict=True)):
            order[hash_] = (age, -(run.start + i), place)
            parents[hash_] = parent
            parent = hash_
    num_children = Counter(parents.values())
    ends = [(order[h], h) for h in order if not num_children[h]]
    heapq.heapify(ends)
    victims: list[int] = []
    while ends and len(victims) < num:
        (_, _, place), hash_ = heapq.heappop(ends)
        victims.append(place)
        parent = parents[hash_]
        num_children[parent] -= 1
        if parent in order and not num_children[parent]:
            heapq.heappush(ends, (order[parent], parent))
    return victims


@contextmanager
def _looked_at(folder: Path) -> Iterator[tuple[KVLayout, Recovery]]:
    layout = _layout(folder)
    with closing(FolderLock(folder, NAME)):
        yield layout, recover(folder, layout, direct=can_direct(folder), sync_bytes=_OPTIONS.sync_bytes, repair=False)


def _layout(folder: Path) -> KVLayout:
    layout = DiskTier.layout_of(folder) if folder.is_dir() else None
    if layout is None:
        raise ConfigError(
            f"{folder} holds no blocks: it has neither a manifest nor a segment that can be read",
            key="folder",
            value=str(folder),
            expected="kvstore.folder of a node",
        )
    return layout


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
