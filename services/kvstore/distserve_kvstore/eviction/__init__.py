"""What leaves a tier when it is full: by use (lru.py) or by frequency (lfu.py), within the same bounds (base.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from distserve.messages.store import Tier
from distserve_kvstore.columns import Columns
from distserve_kvstore.eviction.base import Policy
from distserve_kvstore.eviction.lfu import WTinyLFU
from distserve_kvstore.eviction.lru import LRU

__all__ = ["Policy", "make_policy"]


def make_policy(
    kind: Literal["lru", "lfu"], index: Columns, capacities: Mapping[Tier, int], vip_quota: float = 0.0
) -> Policy:
    """kind: kvstore.eviction. capacities: blocks that each tier holds after an eviction, i.e. at its low watermark; a
    tier that isn't named is not bounded. The index tells the policy from now on what it must know."""
    policy = LRU if kind == "lru" else WTinyLFU
    return policy(index, capacities, vip_quota)
