"""When a worker would have a prompt's first token, as far as can be told from here: pure arithmetic over its last
heartbeat and over what this gateway has sent there since.

    first token = wait + own
    own         what it computes of the prompt itself, by the speed of its passes, and what it has to fetch first
    wait        the part of its queue that goes before the prompt, and those of the prompts sent there since the beat
                that do, less the time that it had for them

A beat holds what was sent before it was heard, but for what was on its way meanwhile: prompts are counted once or, for
a moment, not at all; never twice. The worker itself knows better: this serves to choose one, and to say no without
asking where it is plain. What it says when it takes a promised prompt is believed of those due after that one.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from distserve.messages import Backlog, Load, PassSpeed, Priority, Slo
from distserve.worker.due import due_at

EXACT_S = 0.001  # so well is told when to try again


@dataclass(frozen=True, slots=True)
class Standing:
    """A prompt's place among others. `due`: when its first token is, time.monotonic(); inf: it was promised nothing."""

    priority: Priority = "normal"
    due: float = math.inf


UNPROMISED = Standing()


@dataclass(frozen=True, slots=True)
class Need:
    """What a worker has to do for a prompt: so many tokens to compute, behind so many that it has; of those it fetches
    some first, which costs as much as computing `fetch_tokens`."""

    num_new: int
    num_cached: int = 0
    fetch_tokens: float = 0.0

    def seconds(self, speed: PassSpeed, pass_tokens: int) -> float:
        computing = speed.prefill_s(self.num_new, self.num_cached, pass_tokens or max(1, self.num_new))
        return computing + speed.token_s * self.fetch_tokens


@dataclass(slots=True, eq=False)
class Sent:
    """A prompt that this gateway has sent to a worker at `at`. work_s: what it takes there to compute; `due`: where it
    stands in the queue; ready_at: if it was promised, when its first token comes as the worker says, which knows what
    others sent. Times are time.monotonic()."""

    at: float
    work_s: float
    due: float
    done: bool = False  # its first token has come
    ready_at: float = -math.inf  # not told


def sent_to(load: Load, need: Need, standing: Standing, now: float) -> Sent:
    """By what the worker told last: with its next beat it is forgotten."""
    work_s = need.seconds(load.speed, load.pass_tokens)
    due = standing.due
    if math.isinf(due):
        due = due_at(Slo(priority=standing.priority), now, work_s)
    return Sent(now, work_s, due)


class Heard:
    """Of one worker: when its last beat came, time.monotonic(), and what was sent there since.

    `sent`, in that order: of each the work that is left, had the worker nothing else to do and always took the one due
    first, as it was when the last one was sent.
    """

    __slots__ = ("_at", "_by_due", "_pending", "_sums", "at", "sent")

    def __init__(self, at: float, sent: Iterable[Sent] = ()) -> None:
        self.at = at
        self.sent: dict[Sent, float] = {}
        self._at = at  # `sent` is of then
        self._by_due: list[Sent] = []
        self._pending: list[Sent] = []  # of these something is left; by due, too
        self._sums: tuple[list[float], list[float], list[float]] | None = None  # as Ahead has them; None: not known
        for one in sent:
            self.add(one)

    def add(self, sent: Sent) -> None:
        """Later than those before it."""
        self._sums = None
        spare_s = sent.at - self._at
        self._at = sent.at
        while self._pending and spare_s > 0:
            first = self._pending[0]
            spare_s -= (did_s := min(self.sent[first], spare_s))
            self.sent[first] -= did_s
            if self.sent[first] <= 0:
                del self._pending[0]
        self.sent[sent] = sent.work_s
        insort(self._by_due, sent, key=_due)
        insort(self._pending, sent, key=_due)

    def withdraw(self, sent: Sent) -> None:
        """It will not be computed. Idempotent; also of one that another beat has taken over."""
        if self.sent.pop(sent, None) is not None:
            self._sums = None
            self._by_due.remove(sent)
            if sent in self._pending:
                self._pending.remove(sent)

    def ahead(self, now: float) -> "Ahead":
        """As it is at `now`."""
        if self._sums is None:
            self._sums = (
                [sent.due for sent in self._by_due],
                _totals(sent.work_s for sent in self._by_due),
                _totals(self.sent[sent] for sent in self._by_due),
            )
        dues, work_s, left_s = self._sums
        undone_s = _totals([0.0 if sent.done else sent.work_s for sent in self._by_due])
        ready_at = [-math.inf if sent.done else sent.ready_at for sent in self._by_due]
        return Ahead(
            self.at,
            max(0.0, now - self.at),
            max(0.0, now - self._at),
            dues,
            work_s,
            undone_s,
            left_s,
            [at - now for at in accumulate(ready_at, max, initial=-math.inf)],
        )


def _due(sent: Sent) -> float:
    return sent.due


def _totals(values: Iterable[float]) -> list[float]:
    return list(accumulate(values, initial=0.0))


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was sent to a worker since its beat, at one moment: made in one look at each, then asked for any due time.
    Sums over those due first, of work_s, of that without what is done, and of what is left; and until when the last of
    them is ready by the worker's word, of those that are not done."""

    beat_at: float
    since_beat_s: float
    since_last_s: float
    dues: list[float]
    work_s: list[float]
    undone_s: list[float]
    left_s: list[float]
    ready_s: list[float]

    def wait_s(self, due: float, queued_s: float) -> float:
        """With so much that was queued at the beat, of all that goes before what is due then.

        It works all the time that there is something to do: either there always was, or since some moment there was
        only what was sent. What has its first token is done, also where that went faster than was thought. By its own
        word it may take longer.
        """
        i = bisect_right(self.dues, due)
        busy_s = queued_s + self.work_s[i] - self.since_beat_s
        thought_s = min(max(0.0, busy_s, self.left_s[i] - self.since_last_s), queued_s + self.undone_s[i])
        return max(thought_s, self.ready_s[i])


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds from now."""

    wait_s: float
    own_s: float

    @property
    def first_token_s(self) -> float:
        return self.wait_s + self.own_s


def predict(load: Load, ahead: Ahead, need: Need, standing: Standing) -> Prediction | None:
    """None while the worker doesn't know its own speed."""
    if not load.speed.known:
        return None
    wait_s = ahead.wait_s(standing.due, _queued(load, standing, ahead.beat_at))
    return Prediction(wait_s, need.seconds(load.speed, load.pass_tokens))


def retry_after(
    load: Load, ahead: Ahead, need: Need, standing: Standing, now: float, most_s: float = math.inf
) -> float | None:
    """Seconds after which the same prompt, promised the same from then on, would be in time, if nothing else came.
    None: never, or not within most_s, or the worker doesn't know its own speed. `ahead`: at `now`.

    What waits now and is due after this prompt goes before that later one. So it is looked for, by halves, between now
    and when all that waits is done: a time at which it is in time, and just before which it is not.
    """
    within_s = standing.due - now

    def late_s(after_s: float) -> float | None:
        prediction = predict(load, ahead, need, Standing(standing.priority, standing.due + after_s))
        return None if prediction is None else prediction.first_token_s - after_s - within_s

    everything = predict(load, ahead, need, Standing(standing.priority))
    if everything is None or everything.own_s > within_s:
        return None
    too_soon_s, after_s = 0.0, min(most_s, max(0.0, everything.first_token_s - within_s))
    if (late_s(0.0) or 0.0) <= 0:
        return 0.0
    if after_s == most_s and (late_s(most_s) or 0.0) > 0:
        return None
    while after_s - too_soon_s > EXACT_S:
        middle_s = (too_soon_s + after_s) / 2
        if (late_s(middle_s) or 0.0) > 0:
            too_soon_s = middle_s
        else:
            after_s = middle_s
    return after_s


def _queued(load: Load, standing: Standing, beat_at: float) -> float:
    """Seconds of work, of the queue as it was at the beat, that go before."""
    steps = [step for step in load.backlog if step.priority == standing.priority]
    return _until(steps, standing.due - beat_at)


def _until(steps: Sequence[Backlog], due_s: float) -> float:
    """Between two steps in proportion: nothing tells how it lies there."""
    before_due_s = before_work_s = 0.0
    for step in steps:
        if step.due_s > due_s:
            if due_s <= before_due_s:
                return before_work_s
            share = (due_s - before_due_s) / (step.due_s - before_due_s)
            return before_work_s + share * (step.work_s - before_work_s)
        before_due_s, before_work_s = step.due_s, step.work_s
    return before_work_s
