"""Shares of service, reckoned by hand."""

import pytest

from benchmarks.sim.fairness import Flow, Shares, bucket_of, jain

VIP: Flow = ("vip", 0)
BATCH: Flow = ("batch", 3)
MANY = 10_000


def test_buckets_end_with_the_lengths_that_name_them() -> None:
    assert [bucket_of(n) for n in (1, 512, 513, 2048, 2049, 8192, 8193)] == [0, 0, 1, 1, 2, 2, 3]


def test_jains_index_is_1_for_equals_and_1_in_n_for_one_that_has_all() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([]) == 1.0


def test_shares_go_by_weight_among_those_that_are_backlogged() -> None:
    shares = Shares({"vip": 8, "normal": 4, "batch": 1})
    shares.note({VIP: 900}, dict.fromkeys((VIP, BATCH), MANY))  # batch was due 100 of 900
    shares.note({BATCH: 50}, {BATCH: MANY})  # alone: all of it was due
    assert shares.had == {VIP: 900, BATCH: 50}
    assert shares.due == pytest.approx({VIP: 800, BATCH: 150})
    assert shares.worst_lag == pytest.approx(100)


def test_the_worst_lag_is_over_the_worst_stretch_not_from_the_beginning() -> None:
    """First batch has more than its share, then less: what it had before does not make up for that."""
    shares = Shares({"vip": 1, "normal": 1, "batch": 1})
    both = dict.fromkeys((VIP, BATCH), MANY)
    shares.note({BATCH: 1000}, both)  # 500 ahead, and vip 500 behind
    shares.note({VIP: 400}, both)
    assert shares.worst_lag == pytest.approx(500)
    shares.note({VIP: 1000}, both)
    assert shares.worst_lag == pytest.approx(700)  # of batch over the last two; 200 from the beginning


def test_who_had_nothing_to_compute_is_behind_with_nothing() -> None:
    shares = Shares({"vip": 1, "normal": 1, "batch": 1})
    both = dict.fromkeys((VIP, BATCH), MANY)
    shares.note({VIP: 300}, both)  # batch 150 behind
    shares.note({VIP: 5000}, {VIP: MANY})
    shares.note({VIP: 300}, both)  # begins anew
    assert shares.worst_lag == pytest.approx(150)


def test_what_a_pass_cant_take_of_a_flow_is_not_due_to_it() -> None:
    """One chunk of 64 is all there is of batch; its share would be 500."""
    shares = Shares({"vip": 1, "normal": 1, "batch": 1})
    shares.note({VIP: 936, BATCH: 64}, {VIP: MANY, BATCH: 64})
    assert shares.worst_lag == 0
    shares.note({VIP: 1000}, {VIP: MANY, BATCH: 64})
    assert shares.worst_lag == pytest.approx(64)
