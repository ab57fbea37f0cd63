"""What both simulated workers stand on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from benchmarks.sim.machines import BLOCK
from distserve.kv.block_pool import BlockPool
from distserve.messages import KVLayout
from distserve.worker.prefixes import Prefixes

LAYOUT = KVLayout(weights="", dtype="bfloat16", num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK, rope="{}")
NUM_BLOCKS = 1 << 17  # 2 million tokens: room is not what is looked at
JITTER = 0.05  # a pass is off by this part, one standard deviation

Policy = Literal["slo", "fcfs"]


@dataclass(frozen=True, slots=True)
class Side:
    """`admission`: prompts that would be late, or make others late, are refused."""

    name: str
    policy: Policy
    admission: bool = False


class Clock:
    """Stands until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Noise:
    """Passes are a little longer or shorter than reckoned; alike for equal seeds."""

    def __init__(self, seed: int, jitter: float) -> None:
        self._rng = random.Random(seed)
        self._jitter = jitter

    def on(self, seconds: float) -> float:
        return seconds * max(0.5, self._rng.gauss(1.0, self._jitter))


def pool() -> tuple[BlockPool, Prefixes]:
    """Nothing is shared in it."""
    blocks = BlockPool(NUM_BLOCKS)
    return blocks, Prefixes(blocks, LAYOUT, keep=False)
