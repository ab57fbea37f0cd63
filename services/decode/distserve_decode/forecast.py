"""When a prompt that is computed here would have its first token, and whom it would make late: the promise is kept, or
refused at once.

Prompts are computed by when they are due. Pure arithmetic over what is to be computed, in seconds; times are of one
monotonic clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distserve.errors import SloUnattainable
from distserve.messages import Backlog, Priority, Slo
from distserve.worker.due import RANKS

BACKLOG_S = (0.1, 0.3, 1.0, 3.0, 10.0, math.inf)

# Looks at a queue that drains, until a prompt would be in time; then it is empty, and that is surely so.
_LOOKS = 8

_NONE_S = 1e-6  # no lateness: what floats leave


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, or the rest of one: what it takes to compute, and until when."""

    due_at: float
    work_s: float
    slo: Slo


@dataclass(frozen=True, slots=True)
class Queue:
    """`tasks`: all that are accepted. busy_s: what is left of the pass under way, whose part of them is not in theirs.
    seat_s: until a newcomer may begin, even if there is nothing to compute."""

    tasks: Sequence[Task]
    busy_s: float = 0.0
    seat_s: float = 0.0

    def work_s(self, due_at: float = math.inf) -> float:
        """Until all that are due by then are computed, if nothing else comes."""
        return self.busy_s + sum(t.work_s for t in self.tasks if t.due_at <= due_at)

    def after(self, seconds: float) -> "Queue":
        """What is left of it, if nothing comes."""
        left_s = max(0.0, seconds - self.busy_s)
        tasks = []
        for task in sorted(self.tasks, key=lambda t: t.due_at):
            done_s = min(left_s, task.work_s)
            left_s -= done_s
            if done_s < task.work_s:
                tasks.append(replace(task, work_s=task.work_s - done_s))
        return Queue(tasks, max(0.0, self.busy_s - seconds), max(0.0, self.seat_s - seconds))

    def backlog(self, now: float) -> list[Backlog]:
        """For each class of newcomers: by due alone, they are all served alike."""
        steps = [(s, self.work_s(now + s)) for s in BACKLOG_S]
        return [Backlog(s, priority, work_s) for priority in RANKS for s, work_s in steps if work_s > 0]


def first_token_s(queue: Queue, new: Task) -> float:
    """From now, if it is taken."""
    return max(queue.work_s(new.due_at), queue.seat_s) + new.work_s


def admit(queue: Queue, new: Task, now: float) -> float:
    """As first_token_s(). Raises SloUnattainable if it was promised one that would be late, or that would make late
    one of the same or a higher class that was promised and would be in time."""
    predicted_s = first_token_s(queue, new)
    if new.slo.ttft_s is None:
        return predicted_s
    if new.work_s > new.slo.ttft_s:
        raise SloUnattainable(
            f"the first token is due in {new.slo.ttft_s:.3f} s, and computing the prompt takes {new.work_s:.3f} s here",
            ttft_s=predicted_s,
            slo_s=new.slo.ttft_s,
        )
    retry_after_s = _in_time_after_s(queue, new, now)
    if not retry_after_s:
        return predicted_s
    why = "would come" if predicted_s > new.slo.ttft_s else "would make others late that were promised theirs, and come"
    raise SloUnattainable(
        f"the first token is due in {new.slo.ttft_s:.3f} s and {why} in {predicted_s:.3f} s: try again in "
        f"{retry_after_s:.3f} s",
        ttft_s=predicted_s,
        slo_s=new.slo.ttft_s,
        retry_after_s=retry_after_s,
    )


def _in_time_after_s(queue: Queue, new: Task, now: float) -> float:
    """0: now. Else so long from now, if nothing else comes, it would be in time and make nobody late."""
    waited_s = 0.0
    for _ in range(_LOOKS):
        later = replace(new, due_at=new.due_at + waited_s)
        more_s = _lateness_s(queue.after(waited_s), later, now + waited_s)
        if more_s < _NONE_S:
            return waited_s
        waited_s += more_s
    return max(queue.work_s(), queue.seat_s)


def _lateness_s(queue: Queue, new: Task, now: float) -> float:
    """So long it, or those that it would make late, must wait to be done in time."""
    late_s = max(0.0, now + first_token_s(queue, new) - new.due_at)
    end_at = now + queue.work_s(new.due_at)
    for task in sorted((t for t in queue.tasks if t.due_at > new.due_at), key=lambda t: t.due_at):
        end_at += task.work_s
        promised = task.slo.ttft_s is not None and _goes_before(task.slo.priority, new.slo.priority)
        if promised and end_at <= task.due_at < end_at + new.work_s:
            late_s = max(late_s, end_at - now)
    return late_s


def _goes_before(one: Priority, other: Priority) -> bool:
    """Or is of the same class."""
    return RANKS[one] <= RANKS[other]
