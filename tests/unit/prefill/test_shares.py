"""The guard: no flow is short of its share by more than is stated, whatever comes and however urgent it is."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.messages import PassSpeed, Priority, Slo
from distserve_prefill.order import PRIORITIES, Flow
from distserve_prefill.shares import LAG_PASSES, Shares
from tests.unit.prefill.clockwork import BLOCK, WEIGHTS, Clockwork, known

VIP, NORMAL, BATCH = Flow("vip", 0), Flow("normal", 0), Flow("batch", 0)
MOST = {VIP: 1000, NORMAL: 1000, BATCH: 1000}


def shares(*flows: Flow) -> Shares:
    made = Shares(WEIGHTS)
    for flow in flows:
        made.join(flow)
    return made


def test_a_flow_lags_by_what_it_was_short_of_its_share() -> None:
    s = shares(VIP, NORMAL, BATCH)
    s.serve({VIP: 130}, MOST)
    assert [s.lag(f) for f in (VIP, NORMAL, BATCH)] == pytest.approx([0, 40, 10])
    s.serve({NORMAL: 13}, MOST)
    assert [s.lag(f) for f in (VIP, NORMAL, BATCH)] == pytest.approx([8, 31, 11])


def test_what_it_had_beyond_its_share_is_not_held_against_it() -> None:
    s = shares(VIP, NORMAL)
    s.serve({VIP: 1200}, MOST)
    s.serve({NORMAL: 12}, MOST)
    assert s.lag(VIP) == pytest.approx(8)


def test_one_that_comes_back_begins_anew() -> None:
    s = shares(VIP, BATCH)
    s.serve({VIP: 900}, MOST)
    assert s.lag(BATCH) == pytest.approx(100)
    s.join(BATCH)
    s.leave(BATCH)
    assert s.lag(BATCH) == pytest.approx(100), "it has another prompt"
    s.leave(BATCH)
    s.join(BATCH)
    assert s.lag(BATCH) == 0


def test_a_flow_that_had_all_that_a_pass_takes_of_it_lacks_nothing() -> None:
    s = shares(VIP, BATCH)
    s.serve({VIP: 64, BATCH: 836}, {VIP: 64, BATCH: 1000})
    assert s.lag(VIP) == 0
    s.serve({VIP: 32, BATCH: 868}, {VIP: 64, BATCH: 1000})
    assert s.lag(VIP) == pytest.approx(32)


def test_who_lags_too_much_is_owed_its_share_of_a_pass_and_the_one_that_lags_most_comes_first() -> None:
    s = shares(VIP, NORMAL, BATCH)
    assert s.owed(100) == []
    s.serve({VIP: 1300}, MOST)
    assert s.owed(100) == []  # 400 is not more than four passes
    s.serve({VIP: 13}, MOST)
    assert s.owed(100) == [(NORMAL, pytest.approx(100 * 4 / 13))]
    s.serve({VIP: 13000}, MOST)
    assert [flow for flow, _ in s.owed(100)] == [NORMAL, BATCH]


def test_a_copy_goes_its_own_way() -> None:
    s = shares(VIP, BATCH)
    other = s.copy()
    other.serve({VIP: 900}, MOST)
    other.leave(VIP)
    assert (s.lag(VIP), s.lag(BATCH)) == (0, 0)


PROMISES = st.sampled_from([None, 0.05, 0.5, 3.0, 60.0])
ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 5, 30]),  # passes that go by before it comes
        st.sampled_from(PRIORITIES),
        st.sampled_from([5, 16, 40, 200, 520, 700, 2100]),
        PROMISES,
    ),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(
    arrivals=ARRIVALS,
    pass_tokens=st.sampled_from([16, 48, 64, 100, 256]),
    chunk=st.sampled_from([16, 32, 64, 256]),
    even=st.booleans(),
)
def test_no_flow_is_short_of_its_share_by_more_than_the_bound_over_any_stretch(
    arrivals: list[tuple[int, Priority, int, float | None]], pass_tokens: int, chunk: int, even: bool
) -> None:
    """Counted beside the scheduler, from what passes took: over any passes while a flow had something to compute, its
    share is the part of its weight in those of all that had, and no more than a pass can take of its prompts."""
    weights: dict[Priority, int] = {"vip": 1, "normal": 1, "batch": 1} if even else WEIGHTS
    model = known(PassSpeed(pass_s=0.05, token_s=0.001))  # passes are as long as they may be
    w = Clockwork(max_batch_tokens=pass_tokens, chunk_tokens=chunk, weights=weights, model=model)
    assert w.scheduler.pass_tokens == pass_tokens
    left: dict[str, int] = {}
    flows: dict[str, Flow] = {}
    short: dict[Flow, float] = {}
    least: dict[Flow, float] = {}
    pending = list(enumerate(arrivals))
    num_passes = 0
    while pending or left:
        while pending and (pending[0][1][0] <= 0 or not left):
            i, (_, priority, num, ttft_s) = pending.pop(0)
            job = w.add(num, str(i), Slo(priority=priority, ttft_s=ttft_s))
            assert job.place is not None
            left[str(i)], flows[str(i)] = num, job.place.flow
        if pending:
            i, (gap, *rest) = pending[0]
            pending[0] = (i, (gap - 1, *rest))  # type: ignore[assignment]
        backlogged = {flows[name] for name in left}
        could: dict[Flow, int] = defaultdict(int)
        for name, num in left.items():
            could[flows[name]] += min(num, chunk, pass_tokens)
        had: dict[Flow, int] = defaultdict(int)
        rows = w.run()
        for name, _, num in rows:
            had[flows[name]] += num
            left[name] -= num
            if not left[name]:
                del left[name]
        total, weight = sum(had.values()), sum(weights[f.priority] for f in backlogged)
        assert 0 < total <= pass_tokens
        for flow in backlogged:
            share = min(total * weights[flow.priority] / weight, could[flow])
            short[flow] = short.get(flow, 0.0) + share - had[flow]
            bound = (LAG_PASSES + 1) * pass_tokens + BLOCK * len(PRIORITIES) * 4
            assert short[flow] - min(0.0, least.get(flow, 0.0)) <= bound
            least[flow] = min(least.get(flow, 0.0), short[flow])
        for flow in set(short) - {flows[name] for name in left}:  # it has nothing to compute for now
            del short[flow], least[flow]
        num_passes += 1
        assert num_passes < 10_000
