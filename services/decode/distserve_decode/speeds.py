"""What passes take on this worker: steps alone, and those with prompts beside them."""

import math
from collections.abc import Sequence

from distserve.engine.batching import Batch
from distserve.engine.sequence import Sequence as Running
from distserve.messages import PassSpeed, pairs
from distserve.worker.pass_model import PassModel

# Of passes with equally many steps only each so manieth is noted, once there were some: they tell little more, and to
# note one takes a hundredth of a millisecond or more.
_EVERY = 8
_FIRST = 32


class Speeds:
    def __init__(self) -> None:
        self.steps = PassModel()
        self.prompts = PassModel()
        self.under_way: Batch | None = None
        self._began_at = 0.0
        self._prompts_until = -math.inf  # the end of the last pass over prompts
        self.most_steps = 0  # in a pass that was noted: what more of them take nobody knows
        self._num_like = 0  # passes in a row with as many steps as the last
        self._num_steps = 0

    def begin(self, batch: Batch, now: float) -> None:
        """It is the next pass."""
        self.under_way, self._began_at = batch, now

    def busy_s(self, now: float) -> float:
        """What is left of the pass under way, as far as is known."""
        if self.under_way is None:
            return 0.0
        work = self.under_way.work
        model = self.steps if all(w.num_tokens == 1 for w in work) else self.prompts
        num_pairs = sum(pairs(w.num_tokens, w.start) for w in work)
        return max(0.0, self._began_at + model.speed.seconds(self.under_way.num_tokens, num_pairs) - now)

    def note(self, batch: Batch, num_steps: int, seconds: float) -> None:
        """A pass has taken so long, num_steps of it were of one token."""
        self.under_way = None
        if batch.num_tokens > num_steps:
            num_pairs = sum(pairs(w.num_tokens, w.start) for w in batch.work)
            self.prompts.note(batch.num_tokens, num_pairs, seconds)
            self._prompts_until = self._began_at + seconds
            return
        if num_steps != self._num_steps:
            self._num_steps, self._num_like = num_steps, 0
        self._num_like += 1
        if self._num_like <= _FIRST or self._num_like % _EVERY == 0:
            self.most_steps = max(self.most_steps, num_steps)
            self.steps.note(num_steps, sum(w.start for w in batch.work), seconds)

    def step_s(self, running: Sequence[Running]) -> float:
        """A step of all of these; of one if there are none. 0: not known."""
        return self.steps.speed.seconds(max(1, len(running)), sum(s.num_computed_tokens for s in running))

    def idle_s(self, now: float) -> float:
        """Since the last pass over prompts, if there is none to compute: steps tell nothing of what those take."""
        return now - self._prompts_until

    def beside(self, speed: PassSpeed, stepping: Sequence[Running]) -> PassSpeed:
        """Of passes over prompts that take so long alone, and in which all of these step, too; all 0: not known."""
        if not speed.known:
            return speed
        steps_s = speed.token_s * len(stepping) + speed.pair_s * sum(s.num_computed_tokens for s in stepping)
        return PassSpeed(pass_s=speed.pass_s + steps_s, token_s=speed.token_s, pair_s=speed.pair_s)
