"""Which segments are asked for so often that one node is not enough for them. Plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 10.0  # a rate is a mean over about so long
QUIET_S = 60.0  # a segment that was called hot is not called so again for so long
MAX_SEGMENTS = 65_536


@dataclass(slots=True)
class _Rate:
    per_s: float
    at: float
    called_hot_at: float = -math.inf


class Heat:
    """Lookups a second of each segment, by the hash of its first block: an exponentially weighted mean, so that a
    burst of a second or two makes nothing hot that was cold. Times are seconds of one monotonic clock."""

    def __init__(self, hot_per_s: float) -> None:
        self._hot_per_s = hot_per_s
        self._rates: dict[bytes, _Rate] = {}

    def __len__(self) -> int:
        return len(self._rates)

    def asked(self, segment: bytes, now: float) -> bool:
        """Count a lookup. True when that makes it hot: once, and again after QUIET_S if it stays so."""
        rate = self._rates.get(segment)
        if rate is None:
            if len(self._rates) >= MAX_SEGMENTS:
                self.forget_cold(now)
            rate = self._rates[segment] = _Rate(0.0, now)
        rate.per_s = self._now(rate, now) + 1.0 / MEMORY_S
        rate.at = now
        if rate.per_s <= self._hot_per_s or now - rate.called_hot_at < QUIET_S:
            return False
        rate.called_hot_at = now
        return True

    def per_s(self, segment: bytes, now: float) -> float:
        rate = self._rates.get(segment)
        return 0.0 if rate is None else self._now(rate, now)

    def forget_cold(self, now: float) -> None:
        """Let go of those that are far from hot; all the rest too, where that leaves over half of MAX_SEGMENTS."""
        floor = min(1.0, self._hot_per_s) / 10
        self._rates = {
            k: r for k, r in self._rates.items() if self._now(r, now) > floor or now - r.called_hot_at < QUIET_S
        }
        if len(self._rates) > MAX_SEGMENTS // 2:
            kept = sorted(self._rates.items(), key=lambda item: -self._now(item[1], now))
            self._rates = dict(kept[: MAX_SEGMENTS // 2])

    @staticmethod
    def _now(rate: _Rate, now: float) -> float:
        return rate.per_s * math.exp((rate.at - now) / MEMORY_S)
