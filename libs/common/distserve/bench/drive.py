"""Sending the traffic: an open loop that waits for nobody, or a closed one that waits for answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from distserve.bench.client import Exchange, Pool
from distserve.bench.traffic import Ask, Traffic


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is measured: `num_requests`, or what is due in `duration_s`, or both, whichever ends first; neither: all
    of a trace. Before that, `warm_requests` or `warm_s` of the same traffic that do not count."""

    num_requests: int | None = None
    duration_s: float | None = None
    warm_requests: int = 0
    warm_s: float = 0.0
    deadline_s: float = 120.0


@dataclass(slots=True)
class Course:
    """What was sent, on the clock of perf_counter: (ask, when it was due, what came), as answers ended. Those that were
    due before `began_s` are the warm-up. `ended_s`: of the window; math.inf if it ends with the last answer."""

    began_s: float
    ended_s: float = math.inf
    done: list[tuple[Ask, float, Exchange]] = field(default_factory=list)

    def window(self) -> tuple[float, float]:
        last = max((e.done_s for _, due, e in self.done if due >= self.began_s), default=self.began_s)
        return self.began_s, last if self.ended_s == math.inf else self.ended_s


class _Gate:
    """Says of each request, in their order, whether it is still to be sent."""

    def __init__(self, limits: Limits, start_s: float) -> None:
        self._limits = limits
        self._start_s = start_s
        self._num_measured = 0
        self.course = Course(math.inf)
        if not limits.warm_requests:
            self._begin(start_s + limits.warm_s)

    def admits(self, index: int, due_s: float) -> bool:
        course, limits = self.course, self._limits
        if index < limits.warm_requests:
            return True
        if course.began_s == math.inf:
            self._begin(due_s)
        if due_s < course.began_s:
            return True
        if due_s >= course.ended_s:
            return False
        if self._num_measured == limits.num_requests:
            self.no_more()
            return False
        self._num_measured += 1
        return True

    def no_more(self) -> None:
        """There is nothing left to send, however much of the duration is left: the window ends with the last answer."""
        self.course.ended_s = math.inf

    def _begin(self, at_s: float) -> None:
        self.course.began_s = at_s
        if self._limits.duration_s is not None:
            self.course.ended_s = at_s + self._limits.duration_s


async def drive(pool: Pool, traffic: Traffic, data_of: Callable[[Ask], bytes], limits: Limits) -> Course:
    """Returns when every request has its answer, or has been given up. `data_of`: the bytes of a request."""
    start_s = time.perf_counter()
    gate = _Gate(limits, start_s)
    course, asks = gate.course, traffic.asks()

    async def ask(ask: Ask, due_s: float, data: bytes) -> None:
        course.done.append((ask, due_s, await pool.ask(data, limits.deadline_s)))

    async with asyncio.TaskGroup() as group:
        if traffic.is_open:
            await _send_when_due(group, gate, asks, start_s, data_of, ask)
        else:
            for _ in range(traffic.concurrency):
                group.create_task(_send_when_free(gate, asks, data_of, ask))
    if course.began_s == math.inf:  # not even the warm-up was whole
        course.began_s = time.perf_counter()
    return course


async def _send_when_due(
    group: asyncio.TaskGroup,
    gate: _Gate,
    asks: Iterator[Ask],
    start_s: float,
    data_of: Callable[[Ask], bytes],
    send: Callable[[Ask, float, bytes], Coroutine[Any, Any, None]],
) -> None:
    for ask in asks:
        due_s = start_s + ask.at_s
        if not gate.admits(ask.index, due_s):
            return
        data = data_of(ask)  # before it is due
        await asyncio.sleep(due_s - time.perf_counter())
        group.create_task(send(ask, due_s, data))
    gate.no_more()


async def _send_when_free(
    gate: _Gate,
    asks: Iterator[Ask],
    data_of: Callable[[Ask], bytes],
    send: Callable[[Ask, float, bytes], Coroutine[Any, Any, None]],
) -> None:
    for ask in asks:
        data = data_of(ask)
        due_s = time.perf_counter()
        if not gate.admits(ask.index, due_s):
            return
        await send(ask, due_s, data)
