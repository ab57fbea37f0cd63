"""The breaker's states, by a clock that the tests move."""

import itertools
from dataclasses import dataclass, replace
from typing import get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from distserve.config import BreakerConfig
from distserve.errors import Shed
from distserve.messages import Priority
from distserve_gateway.breaker import Breaker, Policy, State

LATE, IN_TIME = 0.8, 0.1
POLICY = Policy(limit_s=0.3, for_s=3, open_s=10.0, num_probes=2, has_fallback=True, active=True)
SHEDS = replace(POLICY, has_fallback=False)
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def opened(policy: Policy, clock: Clock) -> Breaker:
    breaker = Breaker(policy, clock)
    for _ in range(policy.for_s):
        breaker.second(LATE)
    assert breaker.state == "open"
    return breaker


def half_open(policy: Policy, clock: Clock) -> Breaker:
    breaker = opened(policy, clock)
    clock.now += policy.open_s
    assert breaker.state == "half_open"
    return breaker


def refuses(breaker: Breaker) -> set[Priority]:
    refused = set()
    for priority in PRIORITIES:
        try:
            assert breaker.place(priority) == "here"
        except Shed as e:
            refused.add(e.priority)
    return refused


# ------------------------------------------------------------ closed, open


def test_it_opens_after_so_many_late_seconds_in_a_row_and_says_why() -> None:
    breaker = Breaker(POLICY, Clock())
    for p99_s in (LATE, LATE, IN_TIME, LATE, LATE, None, LATE, LATE):
        breaker.second(p99_s)
        assert breaker.state == "closed"
        assert breaker.place("normal") == "here"
        assert breaker.describe() == ""
    breaker.second(LATE)
    assert breaker.state == "open"
    assert "800 ms, over 300 ms for 3 s" in breaker.describe()
    assert "new requests go to the fallback server" in breaker.describe()
    assert {breaker.place(priority) for priority in PRIORITIES} == {"fallback"}


def test_the_limit_itself_is_in_time() -> None:
    breaker = Breaker(POLICY, Clock())
    for _ in range(9):
        breaker.second(POLICY.limit_s)
    assert breaker.state == "closed"


@pytest.mark.parametrize(
    ("config", "active"),
    [
        (BreakerConfig(), False),
        (BreakerConfig(fallback_url="http://x"), True),
        (BreakerConfig(mode="on"), True),
        (BreakerConfig(mode="off", fallback_url="http://x"), False),
    ],
)
def test_auto_is_on_only_where_there_is_a_fallback(config: BreakerConfig, active: bool) -> None:
    breaker = Breaker(Policy.of(config), Clock())
    for _ in range(config.for_s):
        breaker.second(LATE)
    assert (breaker.state == "open") is active


def test_without_a_fallback_batch_is_refused_then_normal_and_never_vip() -> None:
    clock = Clock()
    breaker = opened(SHEDS, clock)
    assert refuses(breaker) == {"batch"}
    assert breaker.counted == {"normal", "vip"}, "batch that waits from before says nothing about who is served"
    for _ in range(SHEDS.for_s - 1):
        breaker.second(LATE)
    assert refuses(breaker) == {"batch"}
    breaker.second(LATE)
    assert refuses(breaker) == {"batch", "normal"}
    assert "batch and normal are refused" in breaker.describe()
    for _ in range(2 * SHEDS.for_s):
        breaker.second(LATE)
    assert refuses(breaker) == {"batch", "normal"}


def test_a_second_in_time_puts_off_the_next_class() -> None:
    breaker = opened(SHEDS, Clock())
    for p99_s in (LATE, LATE, IN_TIME, LATE, LATE):
        breaker.second(p99_s)
    assert refuses(breaker) == {"batch"}


def test_who_is_refused_is_told_when_it_will_be_tried_again() -> None:
    clock = Clock()
    breaker = opened(SHEDS, clock)
    clock.now += 4.0
    with pytest.raises(Shed, match="'batch'") as refused:
        breaker.place("batch")
    assert refused.value.priority == "batch"
    assert refused.value.retry_after_s == pytest.approx(6.0)
    clock.now += refused.value.retry_after_s
    assert breaker.place("batch") == "probe"


def test_what_must_stay_here_is_not_sent_away_but_refused_as_others_are() -> None:
    assert opened(POLICY, Clock()).place("batch", keep_here=True) == "here"
    breaker = opened(SHEDS, Clock())
    assert breaker.place("normal", keep_here=True) == "here"
    with pytest.raises(Shed):
        breaker.place("batch", keep_here=True)


# ------------------------------------------------------------ half-open


def test_probes_in_time_close_it() -> None:
    breaker = half_open(POLICY, Clock())
    assert [breaker.place("normal") for _ in range(4)] == ["probe", "probe", "fallback", "fallback"]
    breaker.probed(breaker.period, True)
    assert breaker.place("normal") == "fallback", "one good, one under way: no third is wanted"
    breaker.probed(breaker.period, True)
    assert breaker.state == "closed"
    assert breaker.place("normal") == "here"


def test_one_late_probe_opens_it_for_as_long_again() -> None:
    clock = Clock()
    breaker = half_open(POLICY, clock)
    breaker.place("vip")
    breaker.place("vip")
    breaker.probed(breaker.period, True)
    breaker.probed(breaker.period, False)
    assert breaker.state == "open"
    clock.now += POLICY.open_s - 0.01
    assert breaker.state == "open"
    clock.now += 0.02
    assert breaker.state == "half_open"
    assert [breaker.place("vip") for _ in range(3)] == ["probe", "probe", "fallback"], "the good one counts no more"


def test_a_probe_whose_client_left_gives_its_place_to_another() -> None:
    breaker = half_open(POLICY, Clock())
    assert [breaker.place("normal") for _ in range(3)] == ["probe", "probe", "fallback"]
    breaker.probed(breaker.period, None)
    assert [breaker.place("normal") for _ in range(2)] == ["probe", "fallback"]
    assert breaker.state == "half_open"


def test_a_verdict_from_an_earlier_time_is_none() -> None:
    clock = Clock()
    breaker = half_open(POLICY, clock)
    breaker.place("normal")
    breaker.place("normal")
    old = breaker.period
    breaker.probed(old, False)
    clock.now += POLICY.open_s
    assert breaker.state == "half_open"
    for in_time in (False, True, None):
        breaker.probed(old, in_time)
    assert breaker.state == "half_open"
    assert [breaker.place("normal") for _ in range(3)] == ["probe", "probe", "fallback"]


def test_half_open_without_a_fallback_refuses_the_same_classes_but_for_probes() -> None:
    breaker = half_open(SHEDS, Clock())
    assert [breaker.place("batch") for _ in range(2)] == ["probe", "probe"]
    assert refuses(breaker) == {"batch"}
    breaker.probed(breaker.period, True)
    breaker.probed(breaker.period, True)
    assert refuses(breaker) == set()


# ------------------------------------------------------------ all of it


class States(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    probes = Bundle("probes")

    @initialize(
        policy=st.builds(
            Policy,
            limit_s=st.just(0.3),
            for_s=st.integers(1, 3),
            open_s=st.sampled_from([0.5, 4.0]),
            num_probes=st.integers(1, 3),
            has_fallback=st.booleans(),
            active=st.sampled_from([True, True, False]),
        )
    )
    def begin(self, policy: Policy) -> None:
        self.clock = Clock()
        self.policy = policy
        self.changes: list[tuple[State, State]] = []
        self.opened_at = 0.0
        self.num_late = 0  # in a row
        self.num_late_since_open = 0
        self.num_good = self.num_out = 0  # of the current half-open time
        self.breaker = Breaker(policy, self.clock, self.changed)

    def changed(self, old: State, new: State, reason: str) -> None:
        assert reason
        if old == new:
            assert (old, self.policy.has_fallback) in (("open", False), ("half_open", False))
            assert self.num_late_since_open >= self.policy.for_s
            return
        self.changes.append((old, new))
        if new == "open":
            self.opened_at = self.clock.now
            if old == "closed":
                assert self.policy.active
                assert self.num_late >= self.policy.for_s
                self.num_late_since_open = 0
        elif new == "half_open":
            assert self.clock.now - self.opened_at >= self.policy.open_s
            self.num_good = self.num_out = 0

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(p99_s=st.sampled_from([LATE, LATE, LATE, IN_TIME, None]))
    def second(self, p99_s: float | None) -> None:
        late = p99_s == LATE
        self.num_late = self.num_late + 1 if late else 0
        self.num_late_since_open += late
        self.breaker.second(p99_s)

    @rule(target=probes, priority=st.sampled_from(PRIORITIES), keep_here=st.booleans())
    def ask(self, priority: Priority, keep_here: bool) -> int | None:
        state = self.breaker.state
        try:
            place = self.breaker.place(priority, keep_here=keep_here)
        except Shed:
            assert state != "closed"
            assert not self.policy.has_fallback
            assert priority != "vip"
            if priority == "normal":
                assert self.num_late_since_open >= self.policy.for_s
            return None
        if place == "probe":
            assert state == "half_open"
            self.num_out += 1
            return self.breaker.period
        if place == "fallback":
            assert self.policy.has_fallback
            assert not keep_here
            assert state != "closed"
        elif state != "closed":
            assert keep_here or not self.policy.has_fallback
        return None

    @rule(period=consumes(probes), in_time=st.sampled_from([True, True, False, None]))
    def judge(self, period: int | None, in_time: bool | None) -> None:
        if period is None:
            return
        counts = self.breaker.state == "half_open" and period == self.breaker.period
        self.num_out -= counts
        self.num_good += counts and in_time is True
        self.breaker.probed(period, in_time)
        if counts and in_time is False:
            assert self.breaker.state == "open"
        elif counts and self.num_good == self.policy.num_probes:
            assert self.breaker.state == "closed"
        elif counts:
            assert self.breaker.state == "half_open"

    @invariant()
    def states_follow_each_other_as_drawn(self) -> None:
        if not hasattr(self, "breaker"):
            return
        state = self.breaker.state
        allowed = {("closed", "open"), ("open", "half_open"), ("half_open", "open"), ("half_open", "closed")}
        assert set(self.changes) <= allowed
        assert all(one[1] == other[0] for one, other in itertools.pairwise(self.changes))
        assert state == (self.changes[-1][1] if self.changes else "closed")
        assert bool(self.breaker.describe()) is (state != "closed")
        assert "vip" not in self.breaker.shed
        if state == "open":
            assert self.clock.now - self.opened_at < self.policy.open_s
        assert self.breaker.falls_back is (self.policy.has_fallback and state != "closed")
        if state == "half_open":
            assert self.num_out >= 0
            assert self.num_out + self.num_good <= self.policy.num_probes


TestStates = States.TestCase
