"""What a forward pass takes, learnt from those that were.

seconds = pass_s + token_s * tokens + pair_s * pairs is fitted by least squares with exponential forgetting, all three
held at 0 or above. With three unknowns the best of all solutions in which some are 0 is soon found (Lawson and Hanson,
"Solving Least Squares Problems", 1974, chapter 23). What counts is by what part it is off, so that short passes tell as
much as long ones. One that is further off than passes usually are counts for less (Huber's weights): the machine may
have held it up.

Pure arithmetic, some hundredths of a millisecond a pass: the same passes give the same answers.
"""

import math

from distserve.messages import PassSpeed

MOST_SPARE = 0.5
LEAST_PASSES = 8  # of differing size, before promises are given or refused by it
MANY_PASSES = 64  # of one size: others are hardly to be expected
PROBE_S = 5.0  # so long after its last pass an idle worker's speed may have changed
_DIFFER = 4.0  # times as many tokens
_FORGET = 0.95  # of what was known, by each pass
_TOKENS, _PAIRS = 256.0, 256.0 * 1024.0  # the units it is solved in, so that the three are of a size
_PRIOR = 1e-3  # weight of what was fitted before, where the passes alone don't tell
_FREE = ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,))  # those of the three that need not be 0
_HUBER = 2.0  # mean deviations
_LONGEST = 1e9  # tokens in a pass
_LEAST_S = 1e-6  # a pass takes longer


class PassModel:
    def __init__(self) -> None:
        self._gram = [[0.0] * 3 for _ in range(3)]  # of features by features, forgotten exponentially
        self._moment = [0.0] * 3  # of features by the seconds, which are 1 of themselves
        self._weights = [0.0] * 3
        self._deviation = 0.0  # usual part by which a pass is off
        self._num = 0
        self._fewest, self._most = math.inf, 0.0  # tokens in a pass

    @property
    def num_passes(self) -> int:
        """That were noted."""
        return self._num

    @property
    def steady(self) -> bool:
        """It has seen enough to tell of passes that are unlike the last one, too."""
        differ = self._most >= _DIFFER * self._fewest
        return self._num >= (LEAST_PASSES if differ else MANY_PASSES)

    def advertised(self, idle_s: float) -> PassSpeed:
        """What promises are given and refused by; all 0: by nothing, who asks is taken, and what becomes of that tells
        more. idle_s: since the end of the last pass, of a worker that has nothing to do, else 0. (What is refused runs
        no pass. So a speed that is wrong, since it was learnt from few passes or while others had the cores, would
        else be wrong for ever.)"""
        return self.speed if self.steady and idle_s < PROBE_S else PassSpeed()

    @property
    def spare(self) -> float:
        """Part by which a pass is usually off, MOST_SPARE at most: so much longer it may take than is told."""
        return min(MOST_SPARE, self._deviation)

    @property
    def speed(self) -> PassSpeed:
        """All 0 until a pass was noted."""
        pass_s, tokens_s, pairs_s = self._weights
        return PassSpeed(pass_s=pass_s, token_s=tokens_s / _TOKENS, pair_s=pairs_s / _PAIRS)

    def note(self, num_tokens: int, num_pairs: float, seconds: float) -> None:
        """A pass over so many tokens, and pairs of one and another that it attends to, has taken so long."""
        seconds = max(seconds, _LEAST_S)
        features = 1.0 / seconds, num_tokens / _TOKENS / seconds, num_pairs / _PAIRS / seconds
        deviation = abs(1 - self.speed.seconds(num_tokens, num_pairs) / seconds)
        weight = 1.0
        if self._num >= 8 and deviation > _HUBER * self._deviation:
            weight = _HUBER * self._deviation / deviation
        self._num += 1
        self._fewest, self._most = min(self._fewest, num_tokens), max(self._most, num_tokens)
        # A real change of speed becomes usual within some passes.
        share = max(0.1, 1 / self._num)
        self._deviation += share * (min(deviation, 10 * self._deviation or deviation) - self._deviation)
        for i in range(3):
            for j in range(3):
                self._gram[i][j] = _FORGET * self._gram[i][j] + weight * features[i] * features[j]
            self._moment[i] = _FORGET * self._moment[i] + weight * features[i]
        self._solve(features)

    def efficient_tokens(self, share: float) -> int:
        """The smallest pass that gets this part (below 1) of the tokens a second of the longest; 0 if it is not known,
        or if passes cost nothing of their own."""
        speed = self.speed
        if not speed.token_s:
            return 0
        return math.ceil(min(_LONGEST, speed.pass_s / speed.token_s * share / (1 - share)))

    def _solve(self, features: tuple[float, float, float]) -> None:
        weights = self._weights
        if self._num == 1:  # all by the token, until passes of other lengths tell more
            weights[1] = 1 / features[1] if features[1] else 0.0
            return
        gram, moment = [list(row) for row in self._gram], list(self._moment)
        for i in range(3):
            ridge = _PRIOR * (gram[i][i] + 1e-12)
            gram[i][i] += ridge
            moment[i] += ridge * weights[i]
        best = 0.0
        for free in _FREE:
            found = _stationary(gram, moment, free)
            gain = sum(moment[i] * found[i] for i in free)
            if gain > best and min(found) >= 0:
                best, self._weights = gain, found
                if len(free) == 3:
                    return


def _stationary(gram: list[list[float]], moment: list[float], free: tuple[int, ...]) -> list[float]:
    """The least squares of those that are free, the others being 0: by Gauss, the matrix being positive definite."""
    rows = [[*(gram[i][j] for j in free), moment[i]] for i in free]
    num = len(free)
    for k in range(num):
        for row in rows[k + 1 :]:
            times = row[k] / rows[k][k]
            for j in range(k, num + 1):
                row[j] -= times * rows[k][j]
    found = [0.0] * 3
    for k in reversed(range(num)):
        rest = sum(rows[k][j] * found[free[j]] for j in range(k + 1, num))
        found[free[k]] = (rows[k][num] - rest) / rows[k][k]
    return found
