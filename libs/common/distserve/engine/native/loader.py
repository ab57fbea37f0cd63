"""From a model that runs to one that runs compiled, nobody waiting: compile in the background, agree once, serve."""

from __future__ import annotations

import ctypes
import logging
import threading
import time

import torch

from distserve.engine.context import BatchContext
from distserve.engine.loaded import LoadedModel
from distserve.engine.native.build import NativeUnavailable, library
from distserve.engine.native.model import NativeModel

log = logging.getLogger(__name__)

# Largest |compiled - model's own| / |model's own| of a row of hidden states. Rounding stays far below (float32 1e-6,
# bfloat16 0.02); a wrong sum is of the order of 1.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}

# A trial is on a pass of at most so many tokens (it costs little more than the pass itself), one of which looks back
# on at least so many others (else the order and the positions of tokens would hardly show).
TRIAL_ROWS = 256
TRIAL_CONTEXT = 32
TRIALS = 2


class Compiling:
    """A library on its way, compiled or found in a thread of its own."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self._library: ctypes.CDLL | None = None
        self._failed: NativeUnavailable | None = None
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done by then."""
        self._thread.join(timeout_s)
        return self.done

    def result(self) -> ctypes.CDLL:
        """When done. Raises NativeUnavailable."""
        assert self.done
        if self._failed is not None:
            raise self._failed
        assert self._library is not None
        return self._library

    def _run(self) -> None:
        try:
            self._library = library(self.dtype)
        except NativeUnavailable as e:
            self._failed = e
        except Exception as e:
            self._failed = NativeUnavailable(f"compiling failed: {type(e).__name__}: {e}")
        else:
            log.debug("compiled code for %s is there after %.1f s", self.dtype, time.monotonic() - self._started)


class Candidate:
    """Decides, on the first passes it can take, whether a model's passes go compiled from then on.

    `outcome` says what became of it, in words: empty while it is not decided. One thread at a time.
    """

    def __init__(self, loaded: LoadedModel, compiling: Compiling, threads: int) -> None:
        self._loaded = loaded
        self._compiling = compiling
        self._threads = threads
        self._native: NativeModel | None = None
        self._agreed = 0  # trials
        self.outcome = ""

    def prepare(self) -> bool:
        """Whether it is ready to be tried. Never waits."""
        if self._native is None and not self.outcome and self._compiling.done:
            try:
                self._native = NativeModel(self._loaded, self._compiling.result(), self._threads)
            except NativeUnavailable as e:
                self._decide(f"as the model's own code: {e}")
        return self._native is not None

    def try_pass(self, context: BatchContext) -> tuple[torch.Tensor, ...]:
        """Hidden states of the pass computed compiled, in each way that it might go later; nothing if it can't be tried
        on this one. What it writes to the cache must be overwritten."""
        rows, longest = len(context.slot_blocks), max(row.stop for row in context.rows)
        if not self.prepare() or rows > TRIAL_ROWS or longest < TRIAL_CONTEXT:
            return ()
        assert self._native is not None
        found = []
        if self._native.in_one(context):
            found.append(self._native.hidden_of_few(context, tell=False))
        if not self._native.takes_chunks:
            found.append(self._native.hidden_of_many(context, tell=False))
        return tuple(found)

    def compare(
        self, context: BatchContext, ours: tuple[torch.Tensor, ...], theirs: torch.Tensor
    ) -> NativeModel | None:
        """The model to use from now on, when hidden states `ours`, from try_pass, were `theirs` up to rounding often
        enough."""
        native = self._native
        assert native is not None
        head = self._loaded.model.get_output_embeddings().weight
        last = theirs[-1:]
        errors = [worst_difference(one, theirs) for one in ours]
        errors.append(worst_difference(native.logits(last), last @ head.T))
        if max(errors) <= TOLERANCE[self._loaded.dtype]:
            self._agreed += 1
            if self._agreed < TRIALS:
                return None
            self._decide(f"compiled, {self._threads} thread{'s' * (self._threads > 1)}")
            return native
        self._decide(f"as the model's own code: the compiled pass is off by {max(errors):.1e}")
        log.warning("a pass of %s on %d tokens: %s", self._loaded.name, len(context.slot_blocks), self.outcome)
        return None

    def give_up(self, error: Exception) -> None:
        """A trial failed by itself: the model's own code goes on."""
        self._decide(f"as the model's own code: the compiled pass failed ({type(error).__name__}: {error})")
        log.warning("a trial of compiled passes of %s failed", self._loaded.name, exc_info=error)

    def _decide(self, outcome: str) -> None:
        self.outcome, self._native = outcome, None
        log.info("passes of %s run %s", self._loaded.name, outcome)


def worst_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest |ours - theirs| / |theirs| of a row; inf if anything of ours is not a number."""
    errors = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1)
    return float(torch.nan_to_num(errors, nan=float("inf")).max())
