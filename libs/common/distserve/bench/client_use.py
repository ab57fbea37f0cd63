"""What the client itself needed: a client that is short of time measures itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from distserve.bench.quantiles import percentile

TICK_S = 0.02
MAX_CORES = 0.8  # of the one that the client's event loop has
MAX_LATE_S = 0.005


class ClientUse(msgspec.Struct, frozen=True, kw_only=True):
    """Over the measured window. `cores`: of the event loop's thread. `loop_late_*`: how late the loop woke when it was
    to. `send_late_*`: how long after it was due a request was sent; None in a closed loop."""

    cores: float
    loop_late_p99_s: float
    loop_late_max_s: float
    send_late_p50_s: float | None = None
    send_late_p99_s: float | None = None

    def warnings(self) -> list[str]:
        found = []
        if self.cores > MAX_CORES:
            found.append(f"the client used {self.cores:.0%} of its core: the figures may be its own, not the server's")
        if (self.send_late_p99_s or 0) > MAX_LATE_S:
            found.append(
                f"requests were sent up to {1e3 * (self.send_late_p99_s or 0):.1f} ms late (P99): latencies count from "
                "when they were due, and hold that"
            )
        if self.loop_late_p99_s > MAX_LATE_S:
            found.append(
                f"the client woke up to {1e3 * self.loop_late_p99_s:.1f} ms late (P99): its core is busy or shared, "
                "and times of tokens are as uncertain"
            )
        return found


class ClientWatch:
    """`async with` it around the measurement; `use` then says of any window what the client needed in it."""

    def __init__(self) -> None:
        self._ticks: list[tuple[float, float, float]] = []  # when, CPU seconds so far, how late
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self._ticks.append((now, time.thread_time(), now - due_s))

    def use(self, windows: Sequence[tuple[float, float]], send_late_s: Sequence[float] = ()) -> ClientUse:
        """`windows`: on the clock of perf_counter."""
        wall_s = cpu_s = 0.0
        late: list[float] = []
        for began_s, ended_s in windows:
            ticks = [t for t in self._ticks if began_s <= t[0] <= ended_s]
            late += [t[2] for t in ticks]
            if len(ticks) > 1:
                wall_s += ticks[-1][0] - ticks[0][0]
                cpu_s += ticks[-1][1] - ticks[0][1]
        return ClientUse(
            cores=cpu_s / wall_s if wall_s else 0.0,
            loop_late_p99_s=percentile(late, 99) if late else 0.0,
            loop_late_max_s=max(late, default=0.0),
            send_late_p50_s=percentile(send_late_s, 50) if send_late_s else None,
            send_late_p99_s=percentile(send_late_s, 99) if send_late_s else None,
        )
