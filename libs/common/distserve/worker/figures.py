"""What a worker has measured of its passes and of the sequences that were here, for its /metrics.

    figures = WorkerFigures("decode", "tiny", pool)
    figures.queue.observe(0.02)                                # seconds
    figures.steps.note(0.011, num_sequences=8, num_tokens=8)   # a pass
    figures.ended("error", error)                              # a sequence
    Report(..., also=figures.families() + ...)

Belongs to the event loop. A series is bound before it is counted in: a pass costs three observations, a token none.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from distserve.errors import DistServeError
from distserve.kv.block_pool import BlockPool
from distserve.worker.histogram import SECONDS, Histogram, Histograms, doublings

Outcome = Literal["finished", "handed_over", "cancelled", "error"]

_WORKER = ("role", "model")
_SEQUENCES = doublings(1, 256)
_TOKENS = doublings(1, 32768)


class PassFigures:
    """Passes of one phase."""

    __slots__ = ("_seconds", "_sequences", "_tokens")

    def __init__(self, seconds: Histogram, sequences: Histogram, tokens: Histogram) -> None:
        self._seconds = seconds
        self._sequences = sequences
        self._tokens = tokens

    def note(self, seconds: float, *, num_sequences: int, num_tokens: int) -> None:
        """One that has worked, and what was in it."""
        self._seconds.observe(seconds)
        self._sequences.observe(num_sequences)
        self._tokens.observe(num_tokens)


class WorkerFigures:
    """`queue`: receipt to first pass; `prefill`: first pass to first token; `decode`: from then, or from adoption, to
    the end; seconds, one observation a sequence. `prompts`: passes that compute prompts, also those in which others
    step beside them; `steps`: passes that do nothing else than step."""

    def __init__(self, role: str, model: str, pool: BlockPool) -> None:
        self._worker = (role, model)
        self._pool = pool
        self._num_ended = dict.fromkeys(get_args(Outcome), 0)
        self._num_faults: Counter[str] = Counter()
        self._histograms: list[Histograms] = []
        self.queue = self._stage("queue", "Seconds from a sequence's receipt to its first pass.")
        self.prefill = self._stage("prefill", "Seconds from a sequence's first pass to its first token.")
        self.decode = self._stage("decode", "Seconds for which sequences were decoded.")
        self._handoff = self._histogram(
            "handoff_seconds", "Seconds from a first token drawn to the sequence's adoption by decode.", ("transport",)
        )
        self._pass_seconds = self._histogram("pass_seconds", "Seconds of a pass.", ("phase",))
        self._sequences = self._histogram("batch_sequences", "Sequences in a pass.", ("phase",), _SEQUENCES)
        self._tokens = self._histogram("batch_tokens", "Tokens in a pass.", ("phase",), _TOKENS)
        self.prompts = self._passes("prefill")
        self.steps = self._passes("decode")

    def _stage(self, name: str, text: str) -> Histogram:
        return self._histogram(f"{name}_seconds", text).of(*self._worker)

    def _histogram(
        self, name: str, text: str, also: tuple[str, ...] = (), bounds: tuple[float, ...] = SECONDS
    ) -> Histograms:
        made = Histograms(f"distserve_worker_{name}", text, _WORKER + also, bounds)
        self._histograms.append(made)
        return made

    def _passes(self, phase: Literal["prefill", "decode"]) -> PassFigures:
        series = (*self._worker, phase)
        return PassFigures(self._pass_seconds.of(*series), self._sequences.of(*series), self._tokens.of(*series))

    def handed_over(self, transport: str, seconds: float) -> None:
        self._handoff.of(*self._worker, transport).observe(seconds)

    def ended(self, outcome: Outcome, error: DistServeError | None = None) -> None:
        """A sequence has left, with its error if that is why."""
        self._num_ended[outcome] += 1
        if error is not None:
            self.fault(error)

    def fault(self, error: DistServeError) -> None:
        """One that ended nothing: what failed was tried again, or done otherwise."""
        self._num_faults[error.code] += 1

    def families(self) -> tuple[Metric, ...]:
        """A picture of now."""
        blocks = GaugeMetricFamily(
            "distserve_worker_blocks",
            "KV blocks in the pool: free, cached (nobody's, but they may be found again) and used.",
            labels=(*_WORKER, "state"),
        )
        for state, num in (
            ("free", self._pool.num_free),
            ("cached", self._pool.num_cached),
            ("used", self._pool.num_used),
        ):
            blocks.add_metric((*self._worker, state), num)
        ended = CounterMetricFamily(
            "distserve_worker_sequences", "Sequences that have left, by how.", labels=(*_WORKER, "outcome")
        )
        for outcome, times in self._num_ended.items():
            ended.add_metric((*self._worker, outcome), times)
        faults = CounterMetricFamily(
            "distserve_worker_faults",
            "Errors by code: those that ended a sequence, and those after which something was tried again.",
            labels=(*_WORKER, "code"),
        )
        for code, times in self._num_faults.items():
            faults.add_metric((*self._worker, code), times)
        return (blocks, ended, faults, *(family for h in self._histograms for family in h.collect()))
