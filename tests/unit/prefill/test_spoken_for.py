"""Room that a fetch for one prompt must leave to those whose turn is next."""

from tests.unit.prefill.test_scheduler import job, run, scheduler


def test_what_the_next_pass_can_admit_is_spoken_for_and_the_queue_behind_it_is_not() -> None:
    s = scheduler(num_blocks=100, max_batch_tokens=128, chunk_tokens=64)
    assert s.num_spoken_for == 0
    for i in range(20):
        s.add(job(160, str(i)))  # ten blocks each
    assert s.num_spoken_for == 20, "a pass takes chunks of two"
    run(s)
    assert len(s.started) == 2
    assert s.num_spoken_for == 0, "they fill the next one"


def test_one_that_does_not_fit_now_is_not_spoken_for() -> None:
    s = scheduler(num_blocks=16, max_batch_tokens=256, chunk_tokens=64)
    s.add(job(160, "first"))
    s.add(job(160, "second"))
    s.add(job(16, "third"))
    assert s.num_spoken_for == 10, "nor are those behind it"


def test_without_chunks_a_prompt_fills_the_pass() -> None:
    s = scheduler(num_blocks=100, max_batch_tokens=64, chunk_tokens=0)
    s.add(job(160, "long"))
    s.add(job(16, "short"))
    assert s.num_spoken_for == 10
