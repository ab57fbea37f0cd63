"""When a worker would have a prompt's first token, as far as can be told from here: pure arithmetic over its last
heartbeat and over what this gateway has sent there since.

    first token = wait + own
    own         what it computes of the prompt itself, by the speed of its passes, and what it has to fetch first
    wait        the part of its queue that goes before the prompt, and those of the prompts sent there since the beat
                that do, less the time that it had for them

A beat holds what was sent before it was heard, but for what was on its way meanwhile: prompts are counted once or, for
a moment, not at all; never twice. The worker itself knows better: this serves to choose one, and to say no without
asking where it is plain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    stands in the queue. Times are time.monotonic()."""

    at: float
    work_s: float
    due: float
    done: bool = False  # its first token has come


def sent_to(load: Load, need: Need, standing: Standing, now: float) -> Sent:
    """By what the worker told last: with its next beat it is forgotten."""
    work_s = need.seconds(load.speed, load.pass_tokens)
    due = standing.due
    if math.isinf(due):
        due = due_at(Slo(priority=standing.priority), now, work_s)
    return Sent(now, work_s, due)


@dataclass(slots=True)
class Heard:
    """Of one worker: when its last beat came, time.monotonic(), and what was sent there since, in that order."""

    at: float
    sent: dict[Sent, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds from now."""

    wait_s: float
    own_s: float

    @property
    def first_token_s(self) -> float:
        return self.wait_s + self.own_s


def predict(load: Load, heard: Heard, need: Need, standing: Standing, now: float) -> Prediction | None:
    """None while the worker doesn't know its own speed."""
    if not load.speed.known:
        return None
    left_s = undone_s = _queued(load, standing, heard.at)
    at = heard.at
    for sent in heard.sent:  # it works all the time that there is something to do
        if sent.due <= standing.due:
            left_s, at = max(0.0, left_s - (sent.at - at)) + sent.work_s, sent.at
            undone_s += 0.0 if sent.done else sent.work_s
    left_s = max(0.0, left_s - max(0.0, now - at))
    # What has its first token is done, also where that went faster than was thought.
    return Prediction(min(left_s, undone_s), need.seconds(load.speed, load.pass_tokens))


def retry_after(
    load: Load, heard: Heard, need: Need, standing: Standing, now: float, most_s: float = math.inf
) -> float | None:
    """Seconds after which the same prompt, promised the same from then on, would be in time, if nothing else came.
    None: never, or not within most_s, or the worker doesn't know its own speed.

    What waits now and is due after this prompt goes before that later one. So it is looked for, by halves, between now
    and when all that waits is done: a time at which it is in time, and just before which it is not.
    """
    within_s = standing.due - now

    def late_s(after_s: float) -> float | None:
        prediction = predict(load, heard, need, Standing(standing.priority, standing.due + after_s), now)
        return None if prediction is None else prediction.first_token_s - after_s - within_s

    everything = predict(load, heard, need, Standing(standing.priority), now)
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
