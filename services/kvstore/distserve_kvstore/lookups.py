"""Lookups: how much of each run is here, pinned for who asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import accumulate, islice

import numpy as np

from distserve.kv.hashing import HASH_BYTES
from distserve.kv.placement import SEGMENT_BLOCKS
from distserve.messages import TIERS, PrefixReply, PrefixRequest, Tier
from distserve.worker.histogram import Histogram
from distserve_kvstore.columns import Entries
from distserve_kvstore.heat import Heat
from distserve_kvstore.holdings import Holdings
from distserve_kvstore.tier_state import LATENCY_S, TierState


class Lookups:
    """Nothing here waits: no lookup is held up by what a tier does."""

    def __init__(
        self,
        holdings: Holdings,
        states: Mapping[Tier, TierState],
        fingerprint: str,
        heat: Heat,
        on_hot: Callable[[bytes, Entries], None],
    ) -> None:
        """on_hot(hash of the segment's first block, entries of it that were found)."""
        self._holdings = holdings
        self._states = states
        self._fingerprint = fingerprint
        self._heat = heat
        self._on_hot = on_hot
        self.num_lookups = 0
        self.num_blocks = 0  # asked for
        self.num_hits = 0  # found, pinned lookups only
        self.latency = Histogram(LATENCY_S)

    @property
    def hit_rate(self) -> float | None:
        """Of the blocks asked for, the share that was found and pinned; None before there were any."""
        return self.num_hits / self.num_blocks if self.num_blocks else None

    def answer(self, request: PrefixRequest, now: float) -> PrefixReply:
        """A tier that can't be read at the moment is a miss: what it holds would keep a prefill waiting."""
        began = time.perf_counter()
        try:
            return self._answer(request, now)
        finally:
            self.latency.observe(time.perf_counter() - began)

    def _answer(self, request: PrefixRequest, now: float) -> PrefixReply:
        self.num_lookups += 1
        if request.layout != self._fingerprint:
            return PrefixReply(num_found=[0] * len(request.runs))
        readable = [tier for tier, state in self._states.items() if not state.trouble("read")]
        found = self._holdings.prefixes([run.hashes for run in request.runs], readable)
        self.num_blocks += sum(len(run.hashes) // HASH_BYTES for run in request.runs)
        if not any(map(len, found)):
            return PrefixReply(num_found=[0] * len(found), tiers=[b""] * len(found))
        entries = np.concatenate(found)
        tiers = self._holdings.fastest(entries)
        pin_id = 0
        if request.pin_s > 0:
            pin_id = self._pin(request, entries, now)
            for part in found:
                if len(part):
                    self._warm(part, now)
            for place, num in enumerate(np.bincount(tiers).tolist()):
                if num:
                    self._states[TIERS[place]].num_hits += num
        lengths = [len(part) for part in found]
        stops = list(accumulate(lengths))
        raw = tiers.tobytes()
        return PrefixReply(
            num_found=lengths,
            tiers=[raw[stop - n : stop] for n, stop in zip(lengths, stops, strict=True)],
            pin_id=pin_id,
        )

    def _pin(self, request: PrefixRequest, entries: Entries, now: float) -> int:
        """Counts as used."""
        self.num_hits += len(entries)
        self._holdings.policy.used(entries)
        return self._holdings.pins.pin(request.asker, entries, request.pin_s, now)

    def _warm(self, entries: Entries, now: float) -> None:
        """Count a lookup for each segment that the run is in, mostly one."""
        depth = self._holdings.index.depth
        first = int(depth[entries[0]])
        start = 0
        while start < len(entries):
            stop = start + SEGMENT_BLOCKS - (first + start) % SEGMENT_BLOCKS
            part = entries[start:stop]
            key = self._key(int(part[0]), first + start)
            if self._heat.asked(key, now):
                self._on_hot(key, part)
            start = stop

    def _key(self, entry: int, depth: int) -> bytes:
        """The hash of the first block of its segment, or of the first that is here."""
        index = self._holdings.index
        if depth % SEGMENT_BLOCKS:
            for one in islice(index.ancestors(entry), depth % SEGMENT_BLOCKS + 1):
                entry = one
        return index.hash_of(entry)
