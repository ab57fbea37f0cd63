"""Room that a fetch for one prompt must leave to those that run and those whose turn is next."""

from tests.unit.decode.test_scheduler import adopted, make, sequence, step


def test_the_next_ones_are_spoken_for_and_the_queue_behind_them_is_not() -> None:
    s, pool = make(num_blocks=100, max_num_seqs=4)
    s.adopt(adopted(pool, "running", 20))
    assert s.num_spoken_for == 1, "its next block"
    for i in range(20):
        s.submit(sequence(str(i), 160))
    assert s.num_spoken_for == 1 + 3 * 10, "there are three seats"


def test_one_that_does_not_fit_now_is_not_spoken_for() -> None:
    s, _ = make(num_blocks=16)
    s.submit(sequence("first", 160))
    s.submit(sequence("second", 160))
    assert s.num_spoken_for == 10


def test_one_that_was_preempted_is_whatever_it_needs() -> None:
    s, pool = make(num_blocks=6)
    s.adopt(adopted(pool, "old", 48))
    s.adopt(adopted(pool, "young", 48))
    assert step(s) == {"old": 1}
    assert s.num_preemptions == 1
    assert pool.num_available == 2
    assert s.num_spoken_for == 1 + 4
