"""Prompts that a decode worker computes itself: by when they are due, waiting or begun, and none for ever behind
others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.engine.sequence import Sequence
from distserve.errors import SloUnattainable
from distserve.kv.block_pool import BlockPool
from distserve.messages import PassSpeed, Priority, SamplingParams, SequenceKey, Slo, pairs
from distserve.worker.pass_model import PROBE_S
from distserve.worker.prefixes import Prefixes
from distserve_decode.prospects import Prospects
from distserve_decode.scheduler import Scheduler
from tests.unit.decode.test_scheduler import BLOCK
from tests.unit.worker.fakes import LAYOUT

SPEED = PassSpeed(pass_s=0.005, token_s=0.0005, pair_s=1e-7)


class Machine:
    """Passes take what SPEED says, `slower` times, on a clock of their own."""

    def __init__(self, *, policy: str = "slo", chunk_tokens: int = 256, max_num_seqs: int = 8) -> None:
        self.now = 50.0
        self.slower = 1.0
        self.pool = BlockPool(2001)
        self.prefixes = Prefixes(self.pool, LAYOUT, keep=True)
        self.scheduler = Scheduler(
            self.pool,
            self.prefixes,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            chunk_tokens=chunk_tokens,
            policy=policy,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )
        self.prospects = Prospects(self.scheduler, self.prefixes)
        self.first_token_at: dict[str, float] = {}

    def submit(self, name: str, num_tokens: int, slo: Slo) -> float | None:
        """As a worker does; when its first token is promised to come."""
        new = sequence(name, num_tokens)
        ttft_s = self.prospects.first_token_s(new, slo)
        self.scheduler.submit(new, slo)
        return ttft_s

    def step(self) -> dict[str, int]:
        """One pass; what has its first token is done. {name: tokens computed}"""
        batch = self.scheduler.next_batch()
        seconds = self.slower * SPEED.seconds(batch.num_tokens, sum(pairs(w.num_tokens, w.start) for w in batch.work))
        self.now += seconds
        for w in batch.work:
            w.sequence.num_computed_tokens += w.num_tokens
        self.scheduler.note_pass(batch, seconds)
        for w in batch.work:
            if w.samples:
                self.first_token_at[w.sequence.key.request_id] = self.now
                self.scheduler.remove(w.sequence)
        return {w.sequence.key.request_id: w.num_tokens for w in batch.work}

    def know(self) -> None:
        """What passes take is known from some."""
        for num_tokens in (30, 700, 256, 100, 1500, 16, 400, 256, 2000):
            self.scheduler.submit(sequence("before", num_tokens))
            while self.scheduler.prompts:
                self.step()


def sequence(name: str, num_tokens: int) -> Sequence:
    return Sequence(SequenceKey(name), [1] * num_tokens, num_tokens, SamplingParams(max_tokens=1))


def test_an_urgent_prompt_enters_between_two_chunks_of_a_long_one_which_then_goes_on() -> None:
    m = Machine()
    m.submit("long", 1000, Slo(priority="batch"))
    assert m.step() == {"long": 256}
    m.submit("urgent", 300, Slo(priority="vip", ttft_s=0.5))
    assert [m.step() for _ in range(2)] == [{"urgent": 256}, {"urgent": 44, "long": 208}]
    assert m.step() == {"long": 256}


def test_first_come_first_served_is_by_arrival() -> None:
    m = Machine(policy="fcfs")
    m.know()
    m.submit("long", 600, Slo(priority="batch"))
    m.submit("urgent", 300, Slo(priority="vip", ttft_s=0.5))
    assert [m.step() for _ in range(3)] == [{"long": 256}, {"long": 256}, {"long": 88, "urgent": 160}]
    before_s = SPEED.seconds(44)
    assert m.prospects.first_token_s(sequence("x", 16), Slo(priority="vip", ttft_s=60)) >= before_s, "also for a vip"


def test_of_those_that_were_promised_nothing_the_higher_class_goes_first_and_the_short_before_the_long() -> None:
    m = Machine(chunk_tokens=64)
    m.know()
    for name, num_tokens, priority in (
        ("batch", 64, "batch"),
        ("long", 1600, "normal"),
        ("short", 64, "normal"),
        ("vip", 64, "vip"),
    ):
        m.submit(name, num_tokens, Slo(priority=priority))  # type: ignore[arg-type]
    while m.scheduler.prompts:
        m.step()
    assert list(m.first_token_at)[1:] == ["vip", "short", "long", "batch"]


def test_batch_is_overtaken_by_newcomers_only_for_so_long() -> None:
    """Half a minute, while there is always a normal prompt to compute."""
    m = Machine(chunk_tokens=64)
    m.know()
    m.submit("batch", 640, Slo(priority="batch"))
    came_at, num = m.now, 0
    while "batch" not in m.first_token_at:
        if len(m.scheduler.prompts) < 3:
            num += 1
            m.submit(f"n{num}", 640, Slo(priority="normal"))
        m.step()
        assert m.now - came_at < 45
    assert m.first_token_at["batch"] - came_at > 20, "but then it goes"


def test_what_is_promised_comes_true() -> None:
    m = Machine()
    m.know()
    promised: dict[str, float] = {}
    for i in range(6):
        at = m.now
        ttft_s = m.submit(str(i), 700, Slo(ttft_s=60))
        assert ttft_s is not None
        promised[str(i)] = at + ttft_s
        m.step()
    while m.scheduler.prompts:
        m.step()
    for name, at in promised.items():
        assert m.first_token_at[name] == pytest.approx(at, abs=0.1 * (at - 50.0))


def test_what_waits_is_told_by_when_it_is_due() -> None:
    m = Machine()
    m.know()
    assert m.prospects.backlog() == []
    m.submit("soon", 1000, Slo(ttft_s=0.9))
    m.submit("late", 2000, Slo(priority="batch"))
    steps = {step.due_s: step.work_s for step in m.prospects.backlog() if step.priority == "normal"}
    assert list(steps) == [1.0, 3.0, 10.0, float("inf")]
    assert steps[1.0] == steps[10.0] == pytest.approx(SPEED.prefill_s(1000, 0, 256), rel=0.1)
    assert steps[float("inf")] - steps[10.0] == pytest.approx(SPEED.prefill_s(2000, 0, 256), rel=0.1)


def test_until_a_prompt_was_computed_nothing_is_foretold_and_nobody_refused() -> None:
    m = Machine()
    assert m.submit("first", 700, Slo(ttft_s=1e-6)) is None


def test_nor_until_passes_of_different_lengths_have_told_what_a_long_prompt_takes() -> None:
    """A short one takes ten times as long for each of its tokens as a long one does."""
    m = Machine()
    for i in range(3):
        m.submit(f"chat {i}", 2, Slo())
        m.step()
    true_s = SPEED.prefill_s(1500, 0, 256)
    assert m.submit("long", 1500, Slo(ttft_s=1.5 * true_s)) is None
    assert m.prospects.speed() == PassSpeed(), "and the gateway is told nothing to refuse by"
    while m.scheduler.prompts:
        m.step()
    assert m.prospects.speed().known
    with pytest.raises(SloUnattainable):
        m.submit("too long", 1500, Slo(ttft_s=0.5 * true_s))


def test_what_was_slow_when_it_last_computed_is_found_out_anew() -> None:
    """What is refused runs no pass, so that a slow hour would else be believed for ever."""
    m = Machine()
    m.slower = 4.0
    m.know()
    m.slower = 1.0
    slo = Slo(ttft_s=2 * SPEED.prefill_s(700, 0, 256))
    with pytest.raises(SloUnattainable):
        m.submit("at once", 700, slo)
    taken, refused, in_time = 0, 0, 0
    for i in range(20):
        m.now += PROBE_S
        assert m.prospects.speed() == PassSpeed()
        came_at = m.now
        m.submit(f"probe {i}", 700, slo)
        assert m.prospects.speed().known, "one at a time"
        try:
            m.submit(f"beside {i}", 700, Slo(ttft_s=4 * SPEED.prefill_s(700, 0, 256)))
            taken += 1
        except SloUnattainable:
            refused += 1
        while m.scheduler.prompts:
            m.step()
        in_time += m.first_token_at[f"probe {i}"] <= came_at + 2 * SPEED.prefill_s(700, 0, 256)
    assert in_time == 20
    assert 0 < refused < taken


def test_a_worker_that_steps_is_asked_for_prompts_when_it_had_none_for_a_while() -> None:
    m = Machine()
    m.know()
    m.scheduler.submit(Sequence(SequenceKey("runs"), [1] * 64, 64, SamplingParams(max_tokens=1000)))
    batch = m.scheduler.next_batch()
    known = []
    for seconds in (0.1, 0.6 * PROBE_S, 0.6 * PROBE_S):
        m.now += seconds
        for w in batch.work:
            w.sequence.num_computed_tokens += w.num_tokens
            w.sequence.token_ids.append(7)
        m.scheduler.note_pass(batch, 0.1)
        known.append(m.prospects.speed().known)
        batch = m.scheduler.next_batch()
    assert known == [True, True, False]


def test_where_all_seats_are_taken_a_prompt_waits_until_somebody_is_done() -> None:
    m = Machine(max_num_seqs=1)
    m.know()
    m.scheduler.submit(Sequence(SequenceKey("runs"), [1] * 64, 64, SamplingParams(max_tokens=1000)))
    assert m.scheduler.next_batch().work
    (running,) = m.scheduler.running
    for _ in range(16):
        m.scheduler.lengths.note(200)
    running.num_computed_tokens = 64
    running.token_ids.append(7)
    for _ in range(4):
        batch = m.scheduler.next_batch()
        m.now += 0.02
        m.scheduler.note_pass(batch, 0.02)
    with pytest.raises(SloUnattainable):
        m.prospects.first_token_s(sequence("x", 64), Slo(ttft_s=0.5))


comers = st.lists(
    st.tuples(
        st.integers(1, 900),
        st.sampled_from(["vip", "normal", "batch"]),
        st.floats(0.01, 3.0),
        st.integers(0, 4),  # passes before the next one comes
    ),
    min_size=1,
    max_size=15,
)


@given(comers)
def test_who_is_taken_in_is_in_time_and_every_prompt_ends(
    arrivals: list[tuple[int, Priority, float, int]],
) -> None:
    m = Machine()
    m.know()
    due: dict[str, float] = {}
    taken: set[str] = set()
    for i, (num_tokens, priority, ttft_s, num_passes) in enumerate(arrivals):
        try:
            m.submit(str(i), num_tokens, Slo(priority=priority, ttft_s=ttft_s))
        except SloUnattainable:
            pass
        else:
            taken.add(str(i))
            due[str(i)] = m.now + ttft_s
        for _ in range(num_passes):
            m.step()
    for _ in range(2000):
        if not (m.scheduler.prompts or m.scheduler.running):
            break
        assert m.step(), "every pass takes somebody further"
    assert taken <= set(m.first_token_at)
    top = [name for name in due if arrivals[int(name)][1] == "vip"]
    for name in top:  # others of lower classes may be made late by those
        assert m.first_token_at[name] <= due[name] + 0.3, "a pass more or two, by what the model can't know"
