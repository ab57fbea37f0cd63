"""Predictions of first tokens: pure arithmetic, and what the gateway keeps of beats and of what it has sent."""

import math
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.bus.base import RegistryEvent, Watch
from distserve.messages import Backlog, Load, PassSpeed, Priority, WorkerInfo
from distserve_gateway import predicting
from distserve_gateway.predicting import EXACT_S, Heard, Need, Prediction, Sent, Standing, sent_to
from distserve_gateway.workers import Workers

SPEED = PassSpeed(pass_s=0.01, token_s=0.001)
DUE_S = (0.1, 0.3, 1.0, 3.0, 10.0, math.inf)
NEED = Need(100)
OWN_S = 0.11


def steps(*work_s: float, priority: Priority = "normal") -> list[Backlog]:
    return [Backlog(due_s, priority, s) for due_s, s in zip(DUE_S, work_s, strict=True)]


def load(*work_s: float) -> Load:
    return Load(speed=SPEED, pass_tokens=1000, backlog=steps(*work_s))


backlogs = st.lists(st.floats(0, 5), min_size=6, max_size=6).map(sorted)
dues = st.one_of(st.just(math.inf), st.floats(0.01, 20))
ages = st.floats(0, 2)
sends = st.lists(st.tuples(st.floats(0, 1), st.floats(0.001, 2), dues, st.booleans()), max_size=8).map(
    lambda drawn: [Sent(*fields) for fields in sorted(drawn)]
)


def heard(sent: list[Sent], at: float = 0.0) -> Heard:
    return Heard(at, sent)


def predict(queue: Load, view: Heard, need: Need, standing: Standing, now: float) -> Prediction | None:
    return predicting.predict(queue, view.ahead(now), need, standing)


def retry_after(
    queue: Load, view: Heard, need: Need, standing: Standing, now: float, most_s: float = math.inf
) -> float | None:
    return predicting.retry_after(queue, view.ahead(now), need, standing, now, most_s)


def found(prediction: Prediction | None) -> Prediction:
    assert prediction is not None
    return prediction


def test_a_worker_that_does_not_know_its_speed_is_not_predicted() -> None:
    assert predict(Load(backlog=steps(*[9.0] * 6)), Heard(0.0), NEED, Standing(), 0.0) is None
    assert retry_after(Load(), Heard(0.0), NEED, Standing("normal", 1.0), 0.0) is None


def test_an_idle_worker_takes_what_its_passes_take() -> None:
    assert found(predict(load(*[0.0] * 6), Heard(0.0), NEED, Standing(), 0.0)).first_token_s == pytest.approx(OWN_S)
    long = found(predict(load(*[0.0] * 6), Heard(0.0), Need(2500), Standing(), 0.0))
    assert long.first_token_s == pytest.approx(2.5 + 3 * 0.01)  # three passes
    fetched = found(predict(load(*[0.0] * 6), Heard(0.0), Need(100, 1000, 100.0), Standing(), 0.0))
    assert fetched.first_token_s == pytest.approx(OWN_S + 0.1)


def test_what_is_due_later_is_not_waited_for() -> None:
    queue = load(0.0, 0.0, 2.0, 2.0, 2.0, 7.0)
    for due, wait_s in ((0.2, 0.0), (0.3, 0.0), (1.0, 2.0), (5.0, 2.0), (math.inf, 7.0)):
        assert found(predict(queue, Heard(0.0), NEED, Standing("normal", due), 0.0)).wait_s == wait_s
    assert found(predict(queue, Heard(0.0), NEED, Standing("normal", 0.65), 0.0)).wait_s == pytest.approx(1.0)


def test_the_steps_are_those_of_ones_own_class() -> None:
    both = Load(speed=SPEED, pass_tokens=1000, backlog=steps(*[1.0] * 6, priority="vip") + steps(*[2.0] * 6))
    for priority, wait_s in (("vip", 1.0), ("normal", 2.0), ("batch", 0.0)):
        standing = Standing(priority, 0.5)  # type: ignore[arg-type]
        assert found(predict(both, Heard(0.0), NEED, standing, 0.0)).wait_s == wait_s


def test_what_was_sent_since_the_beat_is_waited_for_until_it_is_done() -> None:
    idle = load(*[0.0] * 6)
    first, second = (sent_to(idle, NEED, Standing("normal", 1.0), 0.0) for _ in range(2))
    ours = Standing("normal", 2.0)
    assert found(predict(idle, heard([first, second]), NEED, ours, 0.0)).wait_s == pytest.approx(2 * OWN_S)
    assert found(predict(idle, heard([first, second]), NEED, ours, 0.1)).wait_s == pytest.approx(2 * OWN_S - 0.1)
    first.done = True
    assert found(predict(idle, heard([first, second]), NEED, ours, OWN_S)).wait_s == pytest.approx(OWN_S)
    second.done = True  # both, in half the time
    assert found(predict(idle, heard([first, second]), NEED, ours, OWN_S)).wait_s == 0
    later = sent_to(idle, NEED, Standing("normal", 3.0), 0.0)
    assert found(predict(idle, heard([later]), NEED, ours, 0.0)).wait_s == 0


def test_a_workers_own_word_counts_for_what_is_due_after_until_it_is_done() -> None:
    idle = load(*[0.0] * 6)
    told = sent_to(idle, NEED, Standing("normal", 2.0), 0.0)
    told.ready_at = 1.5
    view = heard([told, sent_to(idle, NEED, Standing("normal", 2.5), 0.0)])
    for due, wait_s in ((1.9, 0.0), (2.0, 1.3), (2.5, 1.3), (math.inf, 1.3)):
        assert found(predict(idle, view, NEED, Standing("normal", due), 0.2)).wait_s == pytest.approx(wait_s)
    assert found(predict(idle, view, NEED, Standing("normal", 2.0), 1.6)).wait_s == 0
    assert retry_after(idle, view, NEED, Standing("normal", 2.5), 2.0) == 0
    told.done = True
    assert found(predict(idle, view, NEED, Standing("normal", 2.0), 0.2)).wait_s == 0


@pytest.mark.parametrize(("priority", "goes_before"), [("vip", True), ("normal", False), ("batch", False)])
def test_what_was_promised_nothing_stands_back_by_its_class(priority: Priority, goes_before: bool) -> None:
    idle = load(*[0.0] * 6)
    unpromised = sent_to(idle, NEED, Standing(priority), 0.0)
    wait_s = found(predict(idle, heard([unpromised]), NEED, Standing("normal", 2.0), 0.0)).wait_s
    assert (wait_s > 0) is goes_before


@given(backlogs, backlogs, sends, dues, ages)
def test_a_longer_queue_is_never_a_shorter_wait(
    one: list[float], other: list[float], sent: list[Sent], due: float, age: float
) -> None:
    both = [a + b for a, b in zip(one, other, strict=True)]
    shorter = found(predict(load(*one), heard(sent), NEED, Standing("normal", due), 1 + age))
    assert found(predict(load(*both), heard(sent), NEED, Standing("normal", due), 1 + age)).wait_s >= shorter.wait_s


@given(backlogs, sends, dues, ages, ages)
def test_waiting_shortens_a_wait_by_no_more_than_the_time_that_passed(
    work_s: list[float], sent: list[Sent], due: float, age: float, more: float
) -> None:
    before = found(predict(load(*work_s), heard(sent), NEED, Standing("normal", due), 1 + age)).wait_s
    after = found(predict(load(*work_s), heard(sent), NEED, Standing("normal", due), 1 + age + more)).wait_s
    assert before - more - 1e-9 <= after <= before + 1e-9


@given(backlogs, sends, dues, ages)
def test_what_was_sent_counts_once_at_most(work_s: list[float], sent: list[Sent], due: float, age: float) -> None:
    standing, now = Standing("normal", due), 1 + age
    with_them = found(predict(load(*work_s), heard(sent), NEED, standing, now)).wait_s
    without = found(predict(load(*work_s), heard([]), NEED, standing, now)).wait_s
    work = sum(s.work_s for s in sent)
    assert with_them <= without + work + 1e-9


@given(backlogs, sends, dues, ages)
def test_it_is_what_following_the_queue_from_prompt_to_prompt_tells(
    work_s: list[float], sent: list[Sent], due: float, age: float
) -> None:
    now, before = 1 + age, [s for s in sent if s.due <= due]
    left_s = undone_s = found(predict(load(*work_s), heard([]), NEED, Standing("normal", due), 0.0)).wait_s
    at = 0.0
    for one in before:
        left_s, at = max(0.0, left_s - (one.at - at)) + one.work_s, one.at
        undone_s += 0.0 if one.done else one.work_s
    followed_s = min(max(0.0, left_s - (now - at)), undone_s)
    wait_s = found(predict(load(*work_s), heard(sent), NEED, Standing("normal", due), now)).wait_s
    assert wait_s == pytest.approx(followed_s, abs=1e-9)


@given(backlogs, sends, st.integers(0, 7), dues, ages)
def test_what_is_withdrawn_last_is_as_if_it_had_not_been_sent(
    work_s: list[float], sent: list[Sent], kept: int, due: float, age: float
) -> None:
    """Those before it: whatever it took, or held back, the worker had time for until the last one was sent."""
    together = [Sent(0.0, one.work_s, one.due, one.done) for one in sent]
    view = heard(together)
    for one in together[kept:]:
        view.withdraw(one)
        view.withdraw(one)
    standing, now = Standing("normal", due), 1 + age
    wait_s = found(predict(load(*work_s), view, NEED, standing, now)).wait_s
    assert wait_s == pytest.approx(found(predict(load(*work_s), heard(together[:kept]), NEED, standing, now)).wait_s)


@given(backlogs, sends, st.floats(0.12, 2), ages)
def test_after_the_time_told_the_same_prompt_is_in_time_and_not_much_before(
    work_s: list[float], sent: list[Sent], within_s: float, age: float
) -> None:
    """Nothing else comes: what waits is worked off, and what is due later goes before a prompt that comes later."""
    now = 1 + age
    queue, view = load(*work_s), heard(sent)
    after_s = retry_after(queue, view, NEED, Standing("normal", now + within_s), now)
    assert after_s is not None

    def first_token_s(later_s: float) -> float:
        standing = Standing("normal", now + later_s + within_s)
        there = found(predict(queue, view, NEED, standing, now))
        return max(0.0, there.wait_s - later_s) + there.own_s

    assert first_token_s(after_s) <= within_s + 1e-9
    just_before = [after_s - i * EXACT_S / 10 for i in range(1, 20)]
    assert after_s < 2 * EXACT_S or max(map(first_token_s, just_before)) > within_s


def test_a_worker_that_would_be_in_time_no_sooner_than_another_tells_nothing() -> None:
    queue, standing = load(*[2.0] * 6), Standing("normal", 1.0)
    after_s = retry_after(queue, Heard(0.0), NEED, standing, 0.0)
    assert after_s == pytest.approx(1.0 + OWN_S, abs=EXACT_S)
    assert retry_after(queue, Heard(0.0), NEED, standing, 0.0, most_s=1.1) is None
    assert retry_after(queue, Heard(0.0), NEED, standing, 0.0, most_s=1.2) == pytest.approx(after_s, abs=EXACT_S)


def test_a_prompt_that_takes_longer_than_is_promised_need_not_try_again() -> None:
    assert retry_after(load(*[5.0] * 6), Heard(0.0), NEED, Standing("normal", OWN_S - 0.01), 0.0) is None


# ------------------------------------------------------------ what the gateway keeps


class ToldWatch:
    """The events that a test makes."""

    def __init__(self) -> None:
        self.snapshot: dict[str, WorkerInfo] = {}

    def on_event(self, callback: object) -> None:
        self.tell = callback

    def beat(self, number: int, queue: Load, pid: int = 1) -> None:
        info = WorkerInfo(worker_id="p", role="prefill", model="tiny", load=queue, beat=number, pid=pid)
        self.snapshot["p"] = info
        self.tell(RegistryEvent("put", "p", info))  # type: ignore[operator]


def workers() -> tuple[Workers, ToldWatch]:
    watch = ToldWatch()
    return Workers(cast(Watch, watch), "tiny"), watch


def wait_s(of: Workers, now: float) -> float:
    return found(predict(of.snapshot["p"].load, of.beats["p"], NEED, Standing(), now)).wait_s


def test_a_beat_takes_over_what_was_sent_before_it() -> None:
    """The queue that it tells of holds those prompts: with them it is as long as for a gateway that sent nothing."""
    kept, watch = workers()
    watch.beat(1, load(*[0.0] * 6))
    at = kept.beats["p"].at
    sent = [kept.prompt_sent("p", NEED, Standing()) for _ in range(3)]
    assert wait_s(kept, at) == pytest.approx(3 * OWN_S, abs=0.01)
    watch.beat(2, load(*[3 * OWN_S] * 6))
    assert wait_s(kept, kept.beats["p"].at) == pytest.approx(3 * OWN_S)
    assert sent[0] is not None
    kept.prompt_withdrawn("p", sent[0])  # of the old beat: nothing is taken off
    assert wait_s(kept, kept.beats["p"].at) == pytest.approx(3 * OWN_S)


def test_a_beat_that_is_told_again_changes_nothing() -> None:
    kept, watch = workers()
    watch.beat(1, load(*[0.0] * 6))
    before = kept.beats["p"]
    kept.prompt_sent("p", NEED, Standing())
    watch.beat(1, load(*[0.0] * 6))
    assert kept.beats["p"] is before
    assert len(before.sent) == 1
    watch.beat(1, load(*[0.0] * 6), pid=2)  # another life of the same name
    assert kept.beats["p"].sent == {}


def test_what_a_worker_has_not_taken_does_not_count() -> None:
    kept, watch = workers()
    watch.beat(1, load(*[0.0] * 6))
    sent = kept.prompt_sent("p", NEED, Standing())
    assert sent is not None
    kept.prompt_withdrawn("p", sent)
    assert wait_s(kept, kept.beats["p"].at) == 0
    kept.prompt_withdrawn("p", sent)
    watch.tell(RegistryEvent("gone", "p", None, "left"))  # type: ignore[operator]
    assert kept.beats == {}
    assert kept.prompt_sent("p", NEED, Standing()) is None
    assert kept.beats == {}
