"""What a trace shows of one sequence's stay on a decode worker. A sequence that is not traced has none.

    process decode    from adoption, or from receipt where it is computed here, to release
      queue           receipt -> first pass                       } of one that is
      prefill chunk   each pass that computes more than a token   } computed here
      first step      adoption, or the first token drawn here -> the next token
      decode          that token -> the last: how many were drawn here, and the gaps between them
      preempted       from the loss of its blocks until it runs again

Only the first is ever open. The rest is told when it is over.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

from distserve.engine.batching import Batch, Work
from distserve.telemetry import Attributes, Span, finish, stage
from distserve.worker.figures import Outcome
from distserve.worker.untold import Untold
from distserve_decode.live import Live

How = Literal["recompute", "offload"]


@dataclass(slots=True)
class _Preempted:
    since: float
    how: How
    was_brought: bool = False


class Stay:
    """Belongs to the event loop. Times are of the monotonic clock. What it tells waits in `untold`: between two passes
    nobody has time for it."""

    __slots__ = ("_begun", "_first", "_is_stepping", "_preempted", "_times", "_untold", "live", "span")

    def __init__(self, span: Span, live: Live, untold: Untold) -> None:
        self.span = span
        self.live = live
        self._untold = untold
        arrival = live.arrival
        self._first = live.sequence.num_output_tokens  # that were drawn elsewhere
        if arrival is not None and arrival.token_id is not None:
            self._first += 1
        self._is_stepping = self._begun = arrival is not None
        self._times: list[float] = []  # when tokens were drawn here
        self._preempted: _Preempted | None = None

    def passed(self, work: Work, batch: Batch, since: float, until: float) -> None:
        """A pass of which `work` was its part."""
        if self._is_stepping and work.num_tokens == 1:
            self._times.append(until)
        else:
            self._computed(work, batch, since, until)

    def drew(self, at: float) -> None:
        """Token 0, from what came with its KV."""
        self._times.append(at)

    def _computed(self, work: Work, batch: Batch, since: float, until: float) -> None:
        if self._preempted is not None:
            self._back(self._preempted, work.start, since)
        elif not self._begun:
            self._tell("queue", self.live.came_at, since)
            self._begun = True
        if work.num_tokens > 1 or not self._times:
            attributes = {
                "distserve.chunk.tokens": work.num_tokens,
                "distserve.chunk.start": work.start,
                "distserve.batch.sequences": len(batch.work),
                "distserve.batch.tokens": batch.num_tokens,
                "distserve.kv.cached_tokens": work.sequence.num_cached_tokens,
            }
            self._tell("prefill chunk", since, until, attributes)
        if work.samples:
            self._is_stepping = True
            self._times.append(until)

    def preempted(self, how: How, at: float) -> None:
        self._is_stepping = False
        self._preempted = _Preempted(at, how)

    def brought(self) -> None:
        """What was given away of it is being fetched."""
        if self._preempted is not None:
            self._preempted.was_brought = True

    def _back(self, preempted: _Preempted, num_found: int, at: float) -> None:
        """Tokens whose blocks were found again, or had; the rest is computed again."""
        back = "recomputed" if not num_found else "fetched" if preempted.was_brought else "found"
        attributes: dict[str, str | int] = {
            "distserve.preempted.how": preempted.how,
            "distserve.preempted.back": back,
            "distserve.kv.cached_tokens": num_found,
        }
        self._tell("preempted", preempted.since, at, attributes)
        self._preempted = None

    def end(self, outcome: Outcome, error: BaseException | None, at: float) -> None:
        """It holds nothing here any more."""
        num_drawn = self.live.sequence.num_output_tokens - self._first
        self._untold.add(partial(self._ended, outcome, error, at, num_drawn))

    def _ended(self, outcome: Outcome, error: BaseException | None, at: float, num_drawn: int) -> None:
        times = self._times[: max(0, num_drawn)]  # a pass that was its last may have drawn nothing
        if not self._begun:
            stage("queue", self.span, self.live.came_at, at)
        self._tell_steps(times, at)
        if (lost := self._preempted) is not None:
            attributes = {"distserve.preempted.how": lost.how, "distserve.preempted.back": "never"}
            stage("preempted", self.span, lost.since, at, attributes)
        finish(self.span, at=at, attributes={"distserve.outcome": outcome}, error=error)

    def _tell_steps(self, times: List[float], at: float) -> None:
        came_by_handover = bool(self.live.timings.transport)
        start = self.live.came_at if came_by_handover else times[0] if times else None
        steps = times if came_by_handover else times[1:]
        if start is None:  # its first token was never drawn
            return
        if not steps:
            if came_by_handover:
                stage("first step", self.span, start, at)
            return
        stage("first step", self.span, start, steps[0])
        attributes: dict[str, int | float] = {
            "distserve.decode.tokens": len(times),
            "distserve.decode.preemptions": self.live.sequence.num_preemptions,
        }
        stage("decode", self.span, steps[0], steps[-1], attributes | gap_quantiles(times))

    def _tell(self, name: str, since: float, until: float, attributes: Attributes | None = None) -> None:
        self._untold.add(partial(stage, name, self.span, since, until, attributes))


def gap_quantiles(times: List[float]) -> dict[str, float]:
    """Of the gaps between these, ascending: the smallest that so many of a hundred don't exceed. Empty without one."""
    gaps = sorted(after - before for before, after in pairwise(times))
    if not gaps:
        return {}
    return {f"distserve.decode.itl_p{p}_s": gaps[-(-len(gaps) * p // 100) - 1] for p in (50, 90, 99)}
