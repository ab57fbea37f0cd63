"""How much of the prompts a pass may hold, so that it keeps those who decode waiting only so long.

A pass that holds only steps is what the others' tokens cost anyway; one with prompts beside them may take `stretch`
times as long. What a step and a prompt's token take is measured on the passes that were, whatever the model and the
device: on a GPU, where a few hundred tokens hide behind the reading of the weights, that bounds nothing.

Where somebody who steps was promised the time between its tokens, the pass takes no longer than that, too. If not even
a block fits then, one rides with every few passes all the same: the promise is of the mean, and prompts go on.

Pure arithmetic: the same passes give the same answers.
"""

import math
import statistics
from collections import deque

# A pass with prompts, of one without. Less is kinder to the gaps between tokens, more to the first tokens and to
# throughput (benchmarks/RESULTS.md, "Prompts beside steps").
STRETCH = 5.0

# Medians of so many passes: one that the machine disturbed counts for nothing.
_WINDOW = 9

# Passes with prompts in a row before one goes without, to measure again what that takes.
_RENEW = 32

# Passes without prompts between two with a block that is more than a promise leaves room for.
_PAUSE = 3


class Pace:
    def __init__(self, *, chunk_tokens: int, block_size: int, stretch: float = STRETCH) -> None:
        """`chunk_tokens`: the most, and what a pass takes in which nobody decodes; at least a block."""
        self._chunk_tokens = chunk_tokens
        self._block_size = block_size
        self._stretch = stretch
        self._steps: deque[tuple[float, int]] = deque(maxlen=_WINDOW)  # seconds of passes without prompts, their steps
        self._token_s: deque[float] = deque(maxlen=_WINDOW)  # what each token more has added, by passes with prompts
        self._num_since_step = 0
        self._num_without = 0  # passes in a row without prompts

    def note(self, num_steps: int, num_prompt_tokens: int, seconds: float) -> None:
        """A pass of so many steps and tokens of prompts has taken so long."""
        if not num_prompt_tokens:
            self._steps.append((seconds, num_steps))
            self._num_since_step = 0
            self._num_without += 1
            return
        self._num_without = 0
        self._num_since_step += num_steps > 0
        step_s, known_steps = self._step()
        more = num_steps + num_prompt_tokens - known_steps  # a step is a token of the pass like another
        if more >= self._block_size:
            self._token_s.append(max(0.0, seconds - step_s) / more)

    def prompt_tokens(self, num_steps: int, limit_s: float = math.inf) -> int:
        """Tokens of prompts that may ride with so many steps in a pass of limit_s at most: whole blocks, or 0 when a
        pass without is due."""
        if num_steps and (self._steps or self._token_s) and (not self._steps or self._num_since_step >= _RENEW):
            return 0
        num = self._fitting(num_steps, limit_s)
        return num or (self._block_size if self._num_without >= _PAUSE else 0)

    def usual_tokens(self, num_steps: int, limit_s: float = math.inf) -> int:
        """The same, of such passes in the mean; a token at least."""
        return self._fitting(num_steps, limit_s) or max(1, self._block_size // (_PAUSE + 1))

    def _fitting(self, num_steps: int, limit_s: float) -> int:
        """Whole blocks; 0 if a promise leaves no room for one."""
        if not num_steps or not (self._steps or self._token_s):
            return self._chunk_tokens
        if not self._token_s:
            return self._block_size
        token_s = statistics.median(self._token_s)
        step_s, known_steps = self._step()
        step_s = max(step_s + token_s * (num_steps - known_steps), token_s * num_steps)
        by_stretch_s, by_limit_s = (self._stretch - 1) * step_s, limit_s - step_s
        spare_s = min(by_stretch_s, by_limit_s)
        if token_s * self._chunk_tokens <= spare_s:
            return self._chunk_tokens
        if by_stretch_s <= by_limit_s:
            return max(1, round(spare_s / token_s / self._block_size)) * self._block_size
        num_blocks = math.floor(spare_s / token_s / self._block_size) if token_s else 0
        return max(0, num_blocks) * self._block_size

    def _step(self) -> tuple[float, int]:
        """The median pass without prompts, and how many steps it had; nothing if none was."""
        return statistics.median_low(self._steps) if self._steps else (0.0, 0)
