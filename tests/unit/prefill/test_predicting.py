"""What the worker foresees is what happens if nothing else comes, and what it says no to."""

import contextlib
from typing import Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distserve.errors import SloUnattainable
from distserve.messages import PassSpeed, Priority, Slo
from distserve.worker.pass_model import PROBE_S, PassModel
from distserve_prefill.course import Course
from distserve_prefill.order import PRIORITIES, Rules
from distserve_prefill.predicting import STEPS_S, _surely_in_time, backlog, check
from tests.unit.prefill.clockwork import Clockwork, known

SPEED = PassSpeed(pass_s=0.02, token_s=0.001, pair_s=1e-6)


def world(policy: Literal["slo", "fcfs"] = "slo", chunk_tokens: int = 64, max_batch_tokens: int = 128) -> Clockwork:
    return Clockwork(policy=policy, chunk_tokens=chunk_tokens, max_batch_tokens=max_batch_tokens, model=known(SPEED))


def promised(ttft_s: float, priority: Priority = "normal") -> Slo:
    return Slo(priority=priority, ttft_s=ttft_s)


def ask(w: Clockwork, num_tokens: int, slo: Slo, spare: float = 0.0) -> float | None:
    return check(w.scheduler.course(), w.scheduler.place_of(w.job(num_tokens, "asked", slo)), spare=spare)


def test_on_an_idle_worker_it_is_what_the_prompt_takes_alone() -> None:
    w = world()
    assert ask(w, 64, Slo()) == pytest.approx(0.02 + 0.064 + 64 * 32 * 1e-6)


def test_the_pass_under_way_is_waited_for() -> None:
    w = world()
    w.add(64, "first")
    w.begin()
    w.now += 0.03
    own = 0.02 + 0.064 + 64 * 32 * 1e-6
    assert ask(w, 64, promised(1.0)) == pytest.approx(2 * own - 0.03)


def test_while_nobody_knows_how_long_passes_take_everything_is_accepted() -> None:
    w = Clockwork(model=PassModel())
    assert ask(w, 100_000, promised(0.001)) is None
    assert ask(w, 100_000, Slo()) is None


def test_what_few_short_prompts_took_is_no_reason_to_refuse_a_long_one() -> None:
    w = Clockwork(model=PassModel())
    for i in range(20):
        w.model.note(18 + i % 12, 0, 0.014)  # by the token; a long pass takes a small part of that
        assert ask(w, 2000, promised(0.3)) is None


def test_an_idle_worker_whose_speed_has_changed_takes_one_at_a_time_until_it_knows() -> None:
    w, own_s = world(), SPEED.seconds(64, 64 * 32)
    for _ in range(100):  # others have the cores
        w.model.note(64, 64 * 32, 3 * own_s)
    slo = promised(2 * own_s)
    with pytest.raises(SloUnattainable):
        ask(w, 64, slo)
    for i in range(100):  # and now they don't
        w.now += PROBE_S
        assert ask(w, 64, slo) is None, "nothing was computed for so long: this one will tell"
        w.add(64, str(i), slo)
        with pytest.raises(SloUnattainable):
            ask(w, 64, promised(own_s))  # beside it
        batch, (job,) = w.scheduler.next_batch()
        w.now += own_s
        w.scheduler.computed(job, 64)
        w.scheduler.note_pass(batch, own_s)
        with contextlib.suppress(SloUnattainable):
            ask(w, 64, slo)
            return
    pytest.fail("it never learns")


def test_one_that_would_be_late_is_refused_with_the_time_that_must_go_by() -> None:
    w = world()
    for i in range(10):
        w.add(64, str(i), promised(2.0))
    with pytest.raises(SloUnattainable, match=r"would come after .* was to come within 0\.100 s: try again in") as e:
        ask(w, 64, promised(0.1))
    assert e.value.slo_s == pytest.approx(0.1)
    assert e.value.ttft_s > 0.1


def test_for_what_even_an_idle_worker_is_too_slow_there_is_no_later() -> None:
    w = world()
    with pytest.raises(SloUnattainable, match=r"takes 1\.\d+ s here even if nothing else is to be done") as e:
        ask(w, 640, promised(0.5))
    assert "retry_after_s" not in e.value.fields
    assert e.value.ttft_s > 0.5
    with pytest.raises(SloUnattainable) as e:
        ask(w, 1, promised(-1.0))
    assert "retry_after_s" not in e.value.fields


def test_an_urgent_one_passes_those_that_can_wait() -> None:
    w = world()
    for i in range(50):
        w.add(200, str(i), Slo(priority="batch"))
    taken = ask(w, 64, promised(0.3))
    assert taken is not None
    assert taken < 0.3


@pytest.mark.parametrize(
    ("newcomer", "accepted", "refused"),
    [("normal", "normal", True), ("normal", "vip", True), ("vip", "normal", False), ("batch", "normal", True)],
)
def test_it_must_not_make_another_late_of_the_same_or_a_higher_class(
    newcomer: Priority, accepted: Priority, refused: bool
) -> None:
    w = world(max_batch_tokens=64)
    w.add(640, "accepted", promised(1.2, accepted))  # takes 1.05 s
    slo = promised(0.3, newcomer)
    if refused:
        with pytest.raises(SloUnattainable, match=r"make another .* late that was promised"):
            ask(w, 128, slo)
    else:
        assert ask(w, 128, slo) is not None


def test_one_that_is_late_anyhow_is_no_reason_to_refuse() -> None:
    w = world(max_batch_tokens=64)
    w.add(640, "late", promised(0.5))
    assert ask(w, 128, promised(0.4)) is not None


def test_who_was_promised_nothing_is_never_refused() -> None:
    w = world()
    w.add(640, "accepted", promised(1.2))
    assert ask(w, 10_000, Slo(priority="batch")) is not None


def test_a_promise_leaves_room_for_passes_that_are_off() -> None:
    w = world()
    taken = ask(w, 64, promised(1.0), spare=0.1)
    assert taken is not None
    assert ask(w, 64, promised(1.1 * taken + 1e-3), spare=0.1) == pytest.approx(taken)
    with pytest.raises(SloUnattainable):
        ask(w, 64, promised(1.1 * taken - 1e-3), spare=0.1)


SLOS = st.builds(
    Slo, priority=st.sampled_from(PRIORITIES), ttft_s=st.sampled_from([None, None, 0.1, 0.3, 0.7, 1.5, 4.0])
)
QUEUES = st.lists(st.tuples(st.integers(1, 300), SLOS, st.floats(0, 0.3)), max_size=14)
SETTINGS = {
    "queue": QUEUES,
    "num": st.integers(1, 300),
    "ttft_s": st.floats(0.02, 3.0),
    "priority": st.sampled_from(PRIORITIES),
    "chunk": st.sampled_from([0, 16, 48, 256]),
    "budget": st.sampled_from([48, 64, 128]),
    "policy": st.sampled_from(["slo", "fcfs"]),
    "spare": st.sampled_from([0.0, 0.1]),
}


def filled(queue: list[tuple[int, Slo, float]], policy: Literal["slo", "fcfs"], chunk: int, budget: int) -> Clockwork:
    """Some of them may be computed already, and a pass be under way."""
    w = world(policy, chunk, budget)
    for i, (num, slo, after_s) in enumerate(queue):
        w.add(num, str(i), slo)
        w.play(w.now + after_s)
    return w


@settings(deadline=None, max_examples=100)
@given(**SETTINGS)
def test_what_is_accepted_has_its_first_token_when_it_was_foreseen_and_makes_nobody_late(
    queue: list[tuple[int, Slo, float]],
    num: int,
    ttft_s: float,
    priority: Priority,
    chunk: int,
    budget: int,
    policy: Literal["slo", "fcfs"],
    spare: float,
) -> None:
    without = filled(queue, policy, chunk, budget)
    w = filled(queue, policy, chunk, budget)
    slo = promised(ttft_s, priority)
    try:
        taken = ask(w, num, slo, spare)
    except SloUnattainable:
        assume(False)
    assert taken is not None
    at = w.now
    w.add(num, "asked", slo)
    w.play()
    assert w.ended["asked"] == pytest.approx(at + taken, abs=1e-6)
    assert taken <= ttft_s + 1e-5
    without.play()
    rank = PRIORITIES.index(priority)
    received = 100.0
    for i, (_, other, after_s) in enumerate(queue):
        if other.ttft_s is not None and PRIORITIES.index(other.priority) <= rank:
            due = received + other.ttft_s
            if without.ended[str(i)] <= due:
                assert w.ended[str(i)] <= due + 1e-5, f"{i} was in time"
        received += after_s


@settings(deadline=None, max_examples=150)
@given(**SETTINGS)
def test_who_waits_as_long_as_it_is_told_is_accepted(
    queue: list[tuple[int, Slo, float]],
    num: int,
    ttft_s: float,
    priority: Priority,
    chunk: int,
    budget: int,
    policy: Literal["slo", "fcfs"],
    spare: float,
) -> None:
    w = filled(queue, policy, chunk, budget)
    slo = promised(ttft_s, priority)
    with_error: SloUnattainable | None = None
    try:
        ask(w, num, slo, spare)
    except SloUnattainable as e:
        with_error = e
    assume(with_error is not None)
    assert with_error is not None
    if "retry_after_s" not in with_error.fields:
        with pytest.raises(SloUnattainable):
            ask(world(policy, chunk, budget), num, slo, spare)
        return
    assert with_error.retry_after_s > 0
    w.play(w.now + with_error.retry_after_s)
    ask(w, num, slo, spare)


def test_a_backlog_counts_what_is_due_before_by_steps() -> None:
    w = world()
    assert backlog(w.scheduler.course()) == []
    w.add(64, "soon", promised(0.2))
    w.add(64, "later", promised(2.0))
    w.add(64, "whenever", Slo(priority="batch"))
    one_s = 0.02 / 2 + 0.064 + 64 * 32 * 1e-6  # half a pass of 128 tokens
    steps = backlog(w.scheduler.course())
    assert [s.priority for s in steps] == [p for p in PRIORITIES for _ in STEPS_S]
    assert [s.due_s for s in steps[:6]] == list(STEPS_S)
    for first in (0, 6, 12):
        assert [s.work_s for s in steps[first : first + 6]] == pytest.approx(
            [0, one_s, one_s, 2 * one_s, 2 * one_s, 3 * one_s]
        )


def test_with_first_come_first_served_all_of_it_is_before_a_newcomer() -> None:
    w = world("fcfs")
    w.add(64, "whenever", Slo(priority="batch"))
    one_s = 0.02 / 2 + 0.064 + 64 * 32 * 1e-6
    assert [s.work_s for s in backlog(w.scheduler.course())] == pytest.approx([one_s] * 18)


def test_the_rest_of_the_pass_under_way_is_before_everybody() -> None:
    w = world()
    w.add(64, "one")
    w.begin()
    w.now += 0.03
    rest_s = 0.02 + 0.064 + 64 * 32 * 1e-6 - 0.03
    assert [s.work_s for s in backlog(w.scheduler.course())] == pytest.approx([rest_s] * 18)


@pytest.mark.parametrize("slo", [Slo(), promised(60.0)])
def test_a_very_long_queue_is_foreseen_roughly(slo: Slo) -> None:
    w = world(max_batch_tokens=64)
    for i in range(100):
        w.add(640, str(i))
    taken = ask(w, 64, slo)
    w.add(64, "asked", slo)
    at = w.now
    w.play()
    assert taken is not None
    assert w.ended["asked"] - at == pytest.approx(taken, rel=0.2)


# ---------------------------------------------------------------- how much of the loop's time it takes


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Course]:
    """A course for each pass that is played through."""
    played: list[Course] = []
    next_pass = Course._next_pass

    def noted(course: Course) -> bool:
        played.append(course)
        return next_pass(course)

    monkeypatch.setattr(Course, "_next_pass", noted)
    return played


def crowded() -> Clockwork:
    w = world()
    for i in range(200):
        w.add(640, str(i), promised(1000.0, PRIORITIES[i % 3]))
    return w


def test_for_one_that_is_surely_in_time_no_pass_is_played_through(played: list[Course]) -> None:
    assert ask(crowded(), 64, promised(900.0)) is not None
    assert not played


def test_for_one_that_is_too_slow_alone_neither(played: list[Course]) -> None:
    with pytest.raises(SloUnattainable, match="even if nothing else"):
        ask(crowded(), 640, promised(0.5))
    assert not played


@pytest.mark.parametrize(
    ("num", "num_tokens", "passes"), [(8, 16_000, 6 * 128), (14, 640, 400), (64, 640, 6 * 32), (256, 640, 6 * 16)]
)
def test_the_more_wait_the_fewer_passes_are_played_through_near_the_promise(
    num: int, num_tokens: int, passes: int, played: list[Course]
) -> None:
    w = world()
    own_s = SPEED.prefill_s(num_tokens, 0, 64)
    for i in range(num):
        w.add(num_tokens, str(i), promised(num * own_s / 2, PRIORITIES[i % 3]))
    for ttft_s in (1.2 * own_s, num * own_s / 4, num * own_s / 2):
        played.clear()
        with contextlib.suppress(SloUnattainable):
            ask(w, num_tokens, promised(ttft_s, "vip"))
        assert 0 < len(played) <= passes


@settings(deadline=None, max_examples=50)
@given(
    queue=st.lists(st.tuples(st.integers(1, 300), SLOS), min_size=17, max_size=40),
    num=st.integers(1, 300),
    factor=st.floats(1.0, 2.0),
    chunk=st.sampled_from([0, 16, 48, 256]),
    policy=st.sampled_from(["slo", "fcfs"]),
)
def test_what_is_surely_in_time_is(
    queue: list[tuple[int, Slo]], num: int, factor: float, chunk: int, policy: Literal["slo", "fcfs"]
) -> None:
    """Promised just what is certain, or somewhat more, among others to which that happened too."""
    w = world(policy, chunk, 64)
    alone_s = Rules(policy == "slo", 64, chunk, 16).alone_s
    certain_s = sum(alone_s(w.model.speed, length, 0) for length in (num, *(length for length, _ in queue))) + 1e-6
    due = {}
    for i, (length, slo) in enumerate(queue):
        if slo.ttft_s is not None:
            slo = promised(certain_s * (1 + slo.ttft_s), slo.priority)
            due[str(i)] = w.now + certain_s * (1 + slo.ttft_s)
        w.add(length, str(i), slo)
    due["asked"] = w.now + factor * certain_s
    asked = promised(factor * certain_s, "batch")
    assert _surely_in_time(w.scheduler.course(), w.scheduler.place_of(w.job(num, "asked", asked)), 0.0)
    w.add(num, "asked", asked)
    w.play()
    assert {name: w.ended[name] <= at for name, at in due.items()} == dict.fromkeys(due, True)
