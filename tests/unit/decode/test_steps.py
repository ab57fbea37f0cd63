"""Who steps: all, unless a promise needs shorter passes; then who can wait is passed over, a few times at most."""

import math
from collections.abc import Sequence as Many

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.engine.batching import Batch
from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import PassSpeed, Priority, Slo
from distserve.worker.prefixes import Prefixes
from distserve_decode.scheduler import Scheduler
from distserve_decode.steps import MAX_SKIPS, SHARE, Step, attainable_s, chosen
from tests.unit.decode.test_scheduler import BLOCK, adopted, sequence
from tests.unit.worker.fakes import LAYOUT

SPEED = PassSpeed(pass_s=0.010, token_s=0.001)  # 10 ms for the weights, 1 ms for each that steps


class Machine:
    """A scheduler whose passes take what `speed` says, on a clock of their own."""

    def __init__(
        self, *, policy: str = "slo", num_blocks: int = 4000, chunk_tokens: int = 64, speed: PassSpeed = SPEED
    ) -> None:
        self.now = 100.0
        self.speed = speed
        self.pool = BlockPool(num_blocks + 1)
        self.scheduler = Scheduler(
            self.pool,
            Prefixes(self.pool, LAYOUT, keep=True),
            block_size=BLOCK,
            max_num_seqs=256,
            chunk_tokens=chunk_tokens,
            policy=policy,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )

    def adopt(
        self, name: str, tpot_s: float | None = None, priority: Priority = "normal", num_tokens: int = 10
    ) -> Sequence:
        new = adopted(self.pool, name, num_tokens)
        self.scheduler.adopt(new, Slo(priority=priority, tpot_s=tpot_s))
        return new

    def run(self, batch: Batch) -> float:
        """The pass takes its time; each that samples has one token more."""
        seconds = self.speed.seconds(batch.num_tokens)
        self.now += seconds
        for w in batch.work:
            w.sequence.num_computed_tokens += w.num_tokens
            if w.samples:
                w.sequence.token_ids.append(7)
        self.scheduler.note_pass(batch, seconds)
        return seconds

    def step(self) -> list[str]:
        batch = self.scheduler.next_batch()
        self.run(batch)
        return [w.sequence.key.request_id for w in batch.work]

    def know(self, *nums: int) -> None:
        """What passes of up to 60 steps (or as many as these) take is known from some, whose sequences are gone."""
        for num in nums or (1, 20, 60):
            some = [self.adopt(f"before {i}") for i in range(num)]
            for _ in range(3):
                self.step()
            for each in some:
                self.scheduler.remove(each)


def names(prefix: str, num: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(num)]


def test_all_step_where_nobody_was_promised_anything() -> None:
    m = Machine()
    m.know()
    for name in names("a", 60):
        m.adopt(name, priority="batch")
    assert [m.step() for _ in range(3)] == [names("a", 60)] * 3


def test_all_step_where_a_step_of_all_keeps_the_tightest_promise() -> None:
    m = Machine()
    m.know()
    m.adopt("tight", 0.050)
    for name in names("a", 30):
        m.adopt(name)
    assert [m.step() for _ in range(3)] == [["tight", *names("a", 30)]] * 3


def test_who_was_promised_nothing_waits_for_who_was() -> None:
    """61 steps take 71 ms; within 45 go 35: the promised one in each pass, the others in every second one or so."""
    m = Machine()
    m.know()
    tight = m.adopt("tight", 0.050)
    for name in names("a", 59):
        m.adopt(name)
    stepped: dict[str, int] = dict.fromkeys(["tight", *names("a", 59)], 0)
    for _ in range(40):
        before = m.now
        for name in m.step():
            stepped[name] += 1
        assert m.now - before <= SHARE * 0.050 + 1e-3
    assert stepped["tight"] == 40
    assert min(stepped.values()) >= 40 / 2 - 1, "and all that fits beside it goes"
    assert m.scheduler.num_passed_over == sum(40 - n for n in stepped.values())
    m.scheduler.remove(tight)
    assert m.step() == names("a", 59), "without the promise all step again"


def test_first_come_first_served_keeps_no_promise() -> None:
    m = Machine(policy="fcfs")
    m.know()
    m.adopt("tight", 0.050)
    for name in names("a", 60):
        m.adopt(name)
    assert m.step() == ["tight", *names("a", 60)]


def test_a_promise_that_cannot_be_kept_passes_nobody_over() -> None:
    m = Machine()
    m.know()
    m.adopt("impossible", 0.005)
    for name in names("a", 59):
        m.adopt(name)
    assert len(m.step()) == 60


def test_where_all_were_promised_what_not_all_can_have_throughput_counts() -> None:
    """To pass over half of them would make all later."""
    m = Machine()
    m.know()
    for name in names("a", 60):
        m.adopt(name, 0.050)
    assert len(m.step()) == 60


def test_the_impossible_promise_of_one_takes_nothing_from_anothers_that_can_be_kept() -> None:
    m = Machine()
    m.know()
    m.adopt("impossible", 0.005)
    m.adopt("tight", 0.050)
    for name in names("a", 58):
        m.adopt(name)
    for _ in range(10):
        stepped = m.step()
        assert {"impossible", "tight"} <= set(stepped)
        assert len(stepped) < 60


def test_what_more_steps_take_than_any_pass_had_is_found_out_and_not_guessed() -> None:
    m = Machine()
    m.adopt("tight", 0.050)
    for _ in range(3):
        m.step()  # alone it took 11 ms, so sixty might take a second
    for name in names("a", 59):
        m.adopt(name)
    assert len(m.step()) == 60
    assert len(m.step()) < 60


def test_a_newcomer_steps_at_once() -> None:
    m = Machine()
    m.know()
    m.adopt("tight", 0.050)
    for name in names("a", 58):
        m.adopt(name)
    for _ in range(5):
        m.step()
    m.adopt("new", priority="batch")
    assert "new" in m.step()


def test_batch_waits_longer_than_the_others() -> None:
    m = Machine()
    m.know()
    m.adopt("tight", 0.040)
    for name in names("b", 29):
        m.adopt(name, priority="batch")
    for name in names("n", 30):
        m.adopt(name)
    m.step()
    stepped: dict[str, int] = dict.fromkeys([*names("b", 29), *names("n", 30)], 0)
    for _ in range(40):
        for name in m.step():
            if name != "tight":
                stepped[name] += 1
    assert max(stepped[n] for n in names("b", 29)) <= min(stepped[n] for n in names("n", 30))


def test_of_those_that_are_due_alike_who_is_done_soonest_goes_first() -> None:
    steps = [step(num_left=n) for n in (9, 2, 5, 7)]
    assert chosen(steps, 0.0, 0.0025, 0.0) == [1, 2]


def step(
    cost_s: float = 0.001,
    period: float = 1.0,
    due_at: float = 1.0,
    num_left: int = 10,
    num_skips: int = 0,
    *,
    is_new: bool = False,
) -> Step:
    return Step(cost_s, period, due_at, num_left, num_skips, is_new)


def test_who_was_passed_over_goes_before_who_is_new_before_who_is_due() -> None:
    steps = [step(due_at=0.0), step(is_new=True), step(num_skips=MAX_SKIPS), step()]
    assert chosen(steps, 0.0, 0.0012 / SHARE, 0.0) == [2]
    assert chosen(steps, 0.0, 0.0022 / SHARE, 0.0) == [1, 2]
    assert chosen(steps, 0.0, 0.0032 / SHARE, 0.0) == [0, 1, 2]


def test_the_tightest_promise_that_can_be_kept_is_found() -> None:
    steps = [step() for _ in range(40)]  # once in four passes each: 10 ms and the pass's own
    assert attainable_s(steps, 0.010, [0.011, 0.021, 0.023, 0.050]) == 0.023
    assert attainable_s(steps, 0.010, [0.011]) is None
    assert attainable_s(steps, 0.010, []) is None


running = st.lists(
    st.tuples(
        st.sampled_from([None, None, 0.012, 0.02, 0.04, 0.08]),
        st.sampled_from(["vip", "normal", "batch"]),
        st.integers(1, 30),  # tokens until it ends
        st.integers(0, 20),  # the pass before which it comes
    ),
    min_size=1,
    max_size=70,
)


@given(running)
def test_nobody_is_passed_over_more_often_than_is_said_and_nobody_is_lost(
    comers: Many[tuple[float | None, Priority, int, int]],
) -> None:
    m = Machine()
    m.know()
    todo = sorted(enumerate(comers), key=lambda item: item[1][3])
    here: dict[str, Sequence] = {}
    left: dict[str, int] = {}
    waited: dict[str, int] = {}
    num_ended = 0
    for number in range(400):
        while todo and todo[0][1][3] <= number:
            i, (tpot_s, priority, num, _) = todo.pop(0)
            here[str(i)], left[str(i)], waited[str(i)] = m.adopt(str(i), tpot_s, priority), num, 0
        if not here:
            if not todo:
                break
            continue
        stepped = m.step()
        assert stepped, "every pass takes somebody further"
        assert len(set(stepped)) == len(stepped)
        assert set(stepped) <= set(here)
        for name in list(here):
            waited[name] = 0 if name in stepped else waited[name] + 1
            assert waited[name] <= MAX_SKIPS
            left[name] -= name in stepped
            assert here[name].num_output_tokens == 1 + comers[int(name)][2] - left[name]
            if not left[name]:
                m.scheduler.remove(here.pop(name))
                num_ended += 1
    assert num_ended == len(comers)
    assert m.pool.num_used == 0


def full(num_blocks: int, prompts: Many[int]) -> Machine:
    """Of few blocks, in which the first was promised a pace that leaves a pass room for one step. Outputs are thought
    to be short and end at 100 tokens."""
    m = Machine(num_blocks=num_blocks, speed=PassSpeed(pass_s=0.0005, token_s=0.010))
    m.know(1, 2, 3, 4)
    for _ in range(16):
        m.scheduler.lengths.note(20)
    for i, num_tokens in enumerate(prompts):
        m.adopt(str(i), None if i else 0.022, num_tokens=num_tokens)
    return m


def ended_after(m: Machine) -> int:
    """Passes until all have ended."""
    s = m.scheduler
    for number in range(4000):
        if not (s.running or s.waiting):
            return number
        assert m.step(), f"nobody steps, though {len(s.running)} run and {len(s.waiting)} wait"
        for each in list(s.running):
            if each.num_output_tokens >= 100:
                s.remove(each)
    raise AssertionError("it goes on for ever")


def test_where_all_that_were_chosen_lose_their_blocks_others_step() -> None:
    """The pass has room for one: the last of all, which was passed over often enough and finds the pool full."""
    m = full(8, [20, 20, 20, 20])  # two blocks each: all are taken
    s = m.scheduler
    while s.num_preemptions == 0:
        before = [q.key.request_id for q in s.running]
        stepped = m.step()
        assert stepped
    assert before == ["0", "1", "2", "3"]
    assert stepped != ["3"]
    assert ended_after(m) < 400


@given(st.integers(12, 24), st.lists(st.integers(20, 50), min_size=2, max_size=4))
def test_while_anybody_runs_every_pass_takes_somebody_further(num_blocks: int, prompts: list[int]) -> None:
    m = full(max(num_blocks, sum(-(-num // BLOCK) for num in prompts)), prompts)
    ended_after(m)
    assert m.pool.num_used == 0


def test_prompts_beside_steps_keep_a_promise_where_they_can() -> None:
    """A step of ten takes 20 ms, and with a stretch of five prompts might take four times that."""
    m = Machine()
    m.know()
    for name in names("a", 9):
        m.adopt(name)
    for _ in range(9):
        m.step()
    m.scheduler.submit(sequence("long", 3000))
    assert max(m.run(m.scheduler.next_batch()) for _ in range(5)) > 0.060
    m.adopt("tight", 0.050)
    lasted = [m.run(m.scheduler.next_batch()) for _ in range(5)]
    assert max(lasted) <= 0.050
    assert max(lasted) > 0.036, "and use what there is"


def test_prompts_go_on_where_a_promise_leaves_no_room_for_a_block() -> None:
    m = Machine()
    m.know()
    for name in names("a", 9):
        m.adopt(name)
    m.adopt("tight", 0.030)  # a step of all takes 20 ms, and a block of a prompt 16
    for _ in range(9):
        m.step()
    m.scheduler.submit(sequence("long", 160))
    taken = []
    for _ in range(20):
        batch = m.scheduler.next_batch()
        taken.append(sum(w.num_tokens for w in batch.work if w.num_tokens > 1))
        m.run(batch)
    assert set(taken) <= {0, BLOCK, 64}
    assert sum(taken[4:]) >= 4 * BLOCK
    assert sum(1 for num in taken[4:] if num) <= 4
    assert math.isfinite(m.now)


@pytest.mark.parametrize("policy", ["slo", "fcfs"])
def test_the_order_of_what_runs_is_by_class_or_by_arrival(policy: str) -> None:
    m = Machine(policy=policy)
    for name, priority in (("b", "batch"), ("n", "normal"), ("v", "vip"), ("w", "vip"), ("c", "batch")):
        m.adopt(name, priority=priority)  # type: ignore[arg-type]
    assert "".join(m.step()) == {"slo": "vwnbc", "fcfs": "bnvwc"}[policy]
