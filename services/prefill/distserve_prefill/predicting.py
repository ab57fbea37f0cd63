"""When prompts will have their first token, and what follows from that: the worker's own yes or no to a promise.

A prompt is refused if it would be late, or if it would make one late that was promised something, has the same or a
higher priority and was in time without it. `spare`: the part by which passes are usually off: a promise is given if it
is kept though they take so much longer.

Whoever is asked holds up the event loop. So passes are played through only where the answer hangs on them: not for a
prompt that takes longer alone than it may, nor, with more than a few in the queue, for one that is in time and harms
nobody whatever the order.
"""

import math

from distserve.errors import SloUnattainable
from distserve.messages import Backlog, pairs
from distserve_prefill.course import Course
from distserve_prefill.order import PRIORITIES, Place

STEPS_S = (0.1, 0.3, 1.0, 3.0, 10.0, math.inf)  # of a backlog
_EXACT_S = 1e-6
_LEAST_STEP_S = 1e-3
_FEW = 16  # prompts in a queue that is played through in any case
_TRIES = 2  # with so few


def check(course: Course, newcomer: Place, *, spare: float) -> float | None:
    """Seconds from now to its first token, roughly if it was promised nothing or surely is in time; None if nobody
    knows how long passes take. Raises SloUnattainable. The newcomer is not part of the course."""
    if not course.speed.known:
        return None
    if newcomer.promised == math.inf:
        return _roughly(course, newcomer)
    slo_s = newcomer.due - course.at
    own_s = (1 + spare) * course.rules.alone_s(course.speed, newcomer.left, newcomer.done)
    if own_s > slo_s + _EXACT_S:
        raise SloUnattainable(
            f"the first token takes {own_s:.3f} s here even if nothing else is to be done, it was to come within "
            f"{slo_s:.3f} s",
            ttft_s=own_s,
            slo_s=slo_s,
        )
    if len(course.places) > _FEW and _surely_in_time(course, newcomer, spare):
        return _roughly(course, newcomer)
    first_token_s, late_s = _foresee(course, newcomer, spare)
    if late_s <= _EXACT_S:
        return first_token_s
    safe_s, retry_after_s = (1 + spare) * first_token_s, _retry_after(course, newcomer, spare)
    why = f"the first token would come after {safe_s:.3f} s, it was to come within {slo_s:.3f} s"
    if safe_s <= slo_s:
        why = f"it would make another {late_s:.3f} s late that was promised its first token before"
    raise SloUnattainable(
        f"{why}: try again in {retry_after_s:.3f} s", ttft_s=safe_s, slo_s=slo_s, retry_after_s=retry_after_s
    )


def backlog(course: Course) -> list[Backlog]:
    """What is done before newcomers, by when they are due. (At the same due time no class goes before another.)"""
    fair, at = course.rules.fair, course.at
    work = [(place.due - at if fair else -math.inf, _work_s(course, place)) for place in course.places]
    busy_s = course.busy_until - at
    if not work and busy_s <= 0:
        return []
    steps = [(step, busy_s + sum(seconds for due_s, seconds in work if due_s <= step)) for step in STEPS_S]
    return [Backlog(step, priority, work_s) for priority in PRIORITIES for step, work_s in steps]


def _work_s(course: Course, place: Place) -> float:
    """Its part of the passes that it is in, if those are full."""
    speed, left = course.speed, place.left
    own_s = speed.token_s * left + speed.pair_s * pairs(left, place.done)
    return own_s + speed.pass_s * left / course.rules.pass_tokens


def _roughly(course: Course, newcomer: Place) -> float:
    """Seconds to its first token, without going through the passes, which takes time where there are many: nothing
    hangs on it."""
    rules = course.rules
    before = [place for place in course.places if rules.key(place) < rules.key(newcomer)]
    own_s = rules.alone_s(course.speed, newcomer.left, newcomer.done)
    return course.busy_until - course.at + sum(_work_s(course, place) for place in before) + own_s


def _guarded(course: Course, newcomer: Place) -> list[Place]:
    """Those whose promises it must not break."""
    rank = PRIORITIES.index(newcomer.flow.priority)
    return [p for p in course.places if p.keeps and PRIORITIES.index(p.flow.priority) <= rank]


def _surely_in_time(course: Course, newcomer: Place, spare: float) -> bool:
    """Everything is computed, one prompt after the other, before any promise that hangs on it is due."""
    rules, speed = course.rules, course.speed
    everybody = (*course.places, newcomer)
    drained_s = course.busy_until - course.at + sum(rules.alone_s(speed, p.left, p.done) for p in everybody)
    first_due = min(p.due for p in (*_guarded(course, newcomer), newcomer))
    return (1 + spare) * drained_s <= first_due - course.at


def _foresee(course: Course, newcomer: Place, spare: float) -> tuple[float, float]:
    """Seconds to its first token; and by how much it, or one that it harms, would be late: 0 or less if neither."""
    at, guarded = course.at, _guarded(course, newcomer)
    with_it = course.copy()
    with_it.add(newcomer)
    with_it.run([newcomer.arrived, *(p.arrived for p in guarded)])

    def late_s(place: Place) -> float:
        return at + (1 + spare) * (with_it.ends[place.arrived] - at) - place.due

    worst = late_s(newcomer)
    at_risk = [p for p in guarded if late_s(p) > _EXACT_S]
    if at_risk:
        without = course.copy()
        without.run([p.arrived for p in at_risk])
        for place in at_risk:
            end = without.ends[place.arrived]
            if end <= place.due and with_it.ends[place.arrived] > end + _EXACT_S:
                worst = max(worst, late_s(place))
    return with_it.ends[newcomer.arrived] - at, worst


def _retry_after(course: Course, newcomer: Place, spare: float) -> float:
    """Seconds after which the same prompt would be accepted, if nothing else came. It would be due later then. So each
    prompt that goes before that one keeps it waiting until its own end; and one that it would make late is in its way
    until it has ended, or goes before. What comes of that is tried out; at last, when the queue is empty, it is
    accepted."""
    at, slo_s, fair = course.at, newcomer.due - course.at, course.rules.fair
    own_s = course.rules.alone_s(course.speed, newcomer.left, newcomer.done)
    may_wait_s = slo_s / (1 + spare) - own_s
    undisturbed = course.copy()
    undisturbed.run()
    drained_s = undisturbed.busy_until - at
    guarded = set(_guarded(course, newcomer))
    after_s = 0.0
    for place in course.places:
        ends_s, due_s = undisturbed.ends[place.arrived] - at, place.due - at
        if not fair or due_s - slo_s < ends_s - may_wait_s:
            after_s = max(after_s, ends_s - may_wait_s)
        if fair and place in guarded and ends_s <= due_s < (1 + spare) * (ends_s + own_s):
            after_s = max(after_s, min(ends_s, due_s - slo_s))
    for _ in range(_TRIES if len(course.places) <= _FEW else 1):
        if after_s >= drained_s:
            break
        late_s = _late_after(course, newcomer, spare, after_s)
        if late_s <= 0:
            return after_s
        after_s += max(late_s, _LEAST_STEP_S)
    return drained_s


def _late_after(course: Course, newcomer: Place, spare: float, after_s: float) -> float:
    """As _foresee() has it, if it came so much later; or a little after that, just when the next pass has begun without
    it: who is told to wait waits a little longer. inf: that can't be foreseen."""
    then, worst = course.copy(), -math.inf
    if not then.run_to(course.at + after_s):
        return math.inf
    for _ in range(2):
        later = newcomer.copy()
        later.due = later.promised = newcomer.due + then.at - course.at
        later.arrived = (newcomer.arrived[0] + then.at - course.at, newcomer.arrived[1])
        worst = max(worst, _foresee(then, later, spare)[1])
        then.run_to(then.busy_until)
    return worst
