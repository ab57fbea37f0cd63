"""Promises of a worker that computes prompts itself: kept, or refused at once with a time that is true."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distserve.errors import SloUnattainable
from distserve.messages import Backlog, Priority, Slo
from distserve_decode.forecast import Queue, Task, admit, first_token_s

NOW = 1000.0


def task(due_s: float, work_s: float, priority: Priority = "normal", *, promised: bool = True) -> Task:
    """Due so long from NOW."""
    return Task(NOW + due_s, work_s, Slo(priority=priority, ttft_s=due_s if promised else None))


def refused(queue: Queue, new: Task, now: float = NOW) -> SloUnattainable | None:
    try:
        admit(queue, new, now)
    except SloUnattainable as e:
        return e
    return None


def test_behind_what_is_due_before_it_and_before_the_rest() -> None:
    queue = Queue([task(1, 0.5), task(2, 0.3), task(9, 7, promised=False)], busy_s=0.1)
    assert admit(queue, task(3, 0.2), NOW) == pytest.approx(0.1 + 0.5 + 0.3 + 0.2)


def test_one_that_would_be_late_is_refused_with_the_time_that_must_pass() -> None:
    error = refused(Queue([task(1, 0.9)]), task(1, 0.4))
    assert error is not None
    assert (error.ttft_s, error.slo_s) == (pytest.approx(1.3), 1)
    assert error.retry_after_s == pytest.approx(0.3)


def test_one_that_even_an_idle_worker_could_not_serve_is_not_told_to_come_again() -> None:
    error = refused(Queue([]), task(0.3, 0.4))
    assert error is not None
    assert "retry_after_s" not in error.fields
    assert "takes 0.400 s" in str(error)


def test_what_was_promised_to_others_of_its_class_is_kept() -> None:
    other = task(2.0, 1.8)
    error = refused(Queue([other]), task(1.0, 0.5))
    assert error is not None
    assert "make others late" in str(error)
    assert error.retry_after_s == pytest.approx(1.8), "then the other is done"
    assert refused(Queue([other]), task(1.0, 0.2)) is None


@pytest.mark.parametrize(("theirs", "refuses"), [("vip", True), ("normal", True), ("batch", False)])
def test_of_a_lower_class_nobody_stands_in_its_way(theirs: Priority, refuses: bool) -> None:
    assert (refused(Queue([task(2.0, 1.8, theirs)]), task(1.0, 0.5)) is not None) == refuses


def test_what_is_late_already_or_was_promised_nothing_stops_nobody() -> None:
    assert refused(Queue([task(2.0, 2.5), task(2.1, 1.8, promised=False)]), task(1.0, 0.5)) is None


def test_one_that_was_promised_nothing_is_always_taken() -> None:
    assert admit(Queue([task(1, 5)]), task(2, 10, promised=False), NOW) == pytest.approx(15)


def test_without_a_seat_it_waits_for_one() -> None:
    error = refused(Queue([], seat_s=2.0), task(1.0, 0.5))
    assert error is not None
    assert error.retry_after_s == pytest.approx(1.5)


def test_a_backlog_is_in_steps_by_due_for_each_class_of_newcomers() -> None:
    steps = Queue([task(0.2, 1.0), task(5, 2.0), task(60, 4.0, promised=False)], busy_s=0.5).backlog(NOW)
    vip = [step for step in steps if step.priority == "vip"]
    assert vip == [
        Backlog(0.1, "vip", 0.5),
        Backlog(0.3, "vip", 1.5),
        Backlog(1.0, "vip", 1.5),
        Backlog(3.0, "vip", 1.5),
        Backlog(10.0, "vip", 3.5),
        Backlog(math.inf, "vip", 7.5),
    ]
    assert len(steps) == 18
    assert Queue([]).backlog(NOW) == []


tasks = st.builds(
    task,
    st.floats(-1, 20),
    st.floats(0.001, 3),
    st.sampled_from(["vip", "normal", "batch"]),
    promised=st.booleans(),
)


@given(st.lists(tasks, max_size=12), st.floats(0, 2), st.floats(0.01, 10), st.floats(0.001, 5))
def test_who_comes_again_when_it_is_told_to_is_taken(
    others: list[Task], busy_s: float, ttft_s: float, work_s: float
) -> None:
    queue = Queue(others, busy_s)
    error = refused(queue, task(ttft_s, work_s))
    assume(error is not None)
    assert error is not None
    if work_s > ttft_s:
        assert "retry_after_s" not in error.fields
        return
    after_s = error.retry_after_s
    assert 0 < after_s <= queue.work_s() + 1e-9
    later = Task(NOW + after_s + ttft_s, work_s, Slo(ttft_s=ttft_s))
    assert refused(queue.after(after_s), later, NOW + after_s) is None


@given(st.lists(tasks, max_size=12), st.floats(0, 2), st.floats(0.01, 10), st.floats(0.001, 5))
def test_who_is_taken_is_in_time_and_makes_nobody_late(
    others: list[Task], busy_s: float, ttft_s: float, work_s: float
) -> None:
    """By the order in which they are computed."""
    queue, new = Queue(others, busy_s), task(ttft_s, work_s)
    assume(refused(queue, new) is None)
    assert first_token_s(queue, new) <= ttft_s + 1e-6
    assert not late(queue, [new]) - late(queue, [])


def late(queue: Queue, more: list[Task]) -> set[Task]:
    """Of those that were promised theirs, of a normal prompt's class or a higher one."""
    end_at, found = NOW + queue.busy_s, set()
    for each in sorted([*queue.tasks, *more], key=lambda t: t.due_at):
        end_at += each.work_s
        if each.slo.ttft_s is not None and each.slo.priority != "batch" and end_at > each.due_at + 1e-6:
            found.add(each)
    return found
