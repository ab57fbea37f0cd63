"""What a gateway did second by second, and in the last minute: for GET /status and for telemetry.audit_file.

Each second the counts of metrics.py are looked at, and the difference to what they were is what happened in between; a
token and a request cost nothing here. Quantiles of a second's first tokens are exact; all others are read from the
difference of fine histograms (spread.py), off by less than 1/20 of themselves.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Self

import msgspec
from prometheus_client.metrics_core import Metric

from distserve.messages import Priority
from distserve.status import ClassStatus, GatewayStatus, Quantiles, Second, Trouble
from distserve_gateway.metrics import ClassCounts, Metrics
from distserve_gateway.route import Kind
from distserve_gateway.spread import nearest_rank, quantile_of

WINDOW_S = 60
HISTORY_S = 120

_QUANTILES = {"0.5": "ttft_p50_s", "0.9": "ttft_p90_s", "0.99": "ttft_p99_s", "1": "ttft_max_s"}


@dataclass(frozen=True, slots=True)
class _Counts:
    """All that there had been by some moment."""

    num_started: int
    num_ended: int
    num_failed: int
    num_tokens: int
    spreads: dict[str, list[int]]  # Spread.counts(), by a field of GatewayStatus
    classes: dict[Priority, ClassCounts]
    routes: dict[Kind, int]

    @classmethod
    def of(cls, metrics: Metrics) -> Self:
        spreads = {"ttft": metrics.ttft, "itl": metrics.itl, "tpot": metrics.tpot, "e2e": metrics.e2e, **metrics.stages}
        return cls(
            metrics.num_started,
            metrics.num_ended,
            metrics.num_failed,
            metrics.num_tokens,
            {name: spread.counts() for name, spread in spreads.items()},
            {priority: copy(counts) for priority, counts in metrics.classes.items()},
            dict(metrics.routes),
        )

    def spread_since(self, before: "_Counts", name: str) -> list[int]:
        return [now - then for now, then in zip(self.spreads[name], before.spreads[name], strict=True)]


class Windows:
    """`Gateway.windows`. Belongs to the event loop; run() ends the seconds, each at a full second of the wall clock.
    `clock` and `wall` give seconds; on_second gets each."""

    def __init__(
        self,
        metrics: Metrics,
        on_second: Callable[[Second], None] = lambda second: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._on_second = on_second
        self._clock = clock
        self._wall = wall
        self._since = clock()
        self._due, self._at_unix_s = self._next()  # end of the second that runs
        self._history: deque[Second] = deque(maxlen=HISTORY_S)
        self._counts = deque([_Counts.of(metrics)], maxlen=WINDOW_S + 1)

    def figures(self, base: GatewayStatus) -> GatewayStatus:
        """`base` (id, status, reasons, breaker, bus_*) with all the rest filled in: window_s, num_live, uptime_s,
        rates, quantiles, classes and routes of the last WINDOW_S full seconds, or of as many as there were."""
        then, now, num_s = self._counts[0], self._counts[-1], len(self._counts) - 1
        per_s = max(1, num_s)
        classes = {
            str(priority): ClassStatus(
                num_requests=counts.num - before.num,
                num_promised=counts.yes + counts.no - before.yes - before.no,
                num_attained=counts.yes - before.yes,
                num_refused=counts.refused - before.refused,
            )
            for priority, counts in now.classes.items()
            for before in (then.classes[priority],)
        }
        num_good = sum(counts.good - then.classes[priority].good for priority, counts in now.classes.items())
        routes = {str(kind): (times - then.routes[kind]) / per_s for kind, times in now.routes.items() if times}
        quantiles = {name: _quantiles(now.spread_since(then, name)) for name in now.spreads}
        return msgspec.structs.replace(
            base,
            uptime_s=self._clock() - self._since,
            window_s=float(num_s),
            num_live=self._metrics.num_live(),
            requests_per_s=(now.num_started - then.num_started) / per_s,
            tokens_per_s=(now.num_tokens - then.num_tokens) / per_s,
            good_requests_per_s=num_good / per_s,
            failed_per_s=(now.num_failed - then.num_failed) / per_s,
            classes=classes,
            routes_per_s=routes,
            **quantiles,
        )

    def history(self) -> list[Second]:
        """The last HISTORY_S seconds, the oldest first."""
        return list(self._history)

    def troubles(self) -> list[Trouble]:
        """The last 20, the newest first."""
        return list(self._metrics.troubles)

    def families(self) -> Iterator[Metric]:
        """A summary: quantiles of the last full second, sum and count of all first tokens."""
        name, model = "distserve_gateway_second_ttft_seconds", {"model": self._metrics.model}
        summary = Metric(
            name,
            "Quantiles of the times to first token of those that came in the last full second. NaN: none came.",
            "summary",
        )
        last = self._history[-1] if self._history else Second(at_unix_s=0.0)
        for share, field in _QUANTILES.items():
            value = getattr(last, field)
            summary.add_sample(name, model | {"quantile": share}, math.nan if value is None else value)
        summary.add_sample(f"{name}_sum", model, self._metrics.ttft.total)
        summary.add_sample(f"{name}_count", model, self._metrics.ttft.num)
        yield summary

    # ------------------------------------------------------------ the seconds

    def second(self, at_unix_s: float) -> None:
        """One has ended then."""
        metrics = self._metrics
        before, now = self._counts[-1], _Counts.of(metrics)
        self._counts.append(now)
        ttfts = sorted(metrics.recent_ttfts)
        metrics.recent_ttfts.clear()
        itl = now.spread_since(before, "itl")
        second = Second(
            at_unix_s=at_unix_s,
            num_started=now.num_started - before.num_started,
            num_ended=now.num_ended - before.num_ended,
            num_failed=now.num_failed - before.num_failed,
            num_first_tokens=sum(now.spread_since(before, "ttft")),
            num_tokens=now.num_tokens - before.num_tokens,
            ttft_p50_s=nearest_rank(ttfts, 0.5),
            ttft_p90_s=nearest_rank(ttfts, 0.9),
            ttft_p99_s=nearest_rank(ttfts, 0.99),
            ttft_max_s=ttfts[-1] if ttfts else None,
            itl_p50_s=quantile_of(itl, 0.5),
            itl_p99_s=quantile_of(itl, 0.99),
            num_live=metrics.num_live(),
        )
        self._history.append(second)
        self._on_second(second)

    def close(self) -> None:
        """Tell what there was of the second that runs: it is the last one."""
        self.second(self._at_unix_s)

    async def run(self) -> None:
        """Until cancelled."""
        left_s = self.catch_up()
        while True:
            await asyncio.sleep(left_s)
            left_s = self.catch_up()

    def catch_up(self) -> float:
        """End the seconds that are over, and say how long the next one still takes, s. Of several that the event loop
        slept through the first has what had happened by then, the others nothing."""
        for _ in range(HISTORY_S):
            if (left_s := self._due - self._clock()) > 0:
                break
            self.second(self._at_unix_s)
            self._due, self._at_unix_s = self._due + 1.0, self._at_unix_s + 1.0
        else:
            left_s = 0.0
        if self._clock() >= self._due + HISTORY_S or abs(self._wall() - self._at_unix_s) > 2.0:
            self._due, self._at_unix_s = self._next()  # it slept very long, or the wall clock was set
            left_s = self._due - self._clock()
        return left_s

    def _next(self) -> tuple[float, float]:
        """The next full second: by the clock, and by the wall clock."""
        clock, wall = self._clock(), self._wall()
        at_unix_s = float(int(wall) + 1)
        return clock + at_unix_s - wall, at_unix_s


def _quantiles(counts: list[int]) -> Quantiles:
    return Quantiles(
        count=sum(counts), p50=quantile_of(counts, 0.5), p90=quantile_of(counts, 0.9), p99=quantile_of(counts, 0.99)
    )
