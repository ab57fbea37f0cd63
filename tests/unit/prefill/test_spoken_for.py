"""Room that a fetch for one prompt must leave to those whose turn is next."""

from distserve.messages import Slo
from distserve.worker.pass_model import PassModel
from tests.unit.prefill.clockwork import Clockwork


def world(num_blocks: int, max_batch_tokens: int, chunk_tokens: int) -> Clockwork:
    return Clockwork(
        num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, chunk_tokens=chunk_tokens, model=PassModel()
    )


def test_what_the_next_pass_can_admit_is_spoken_for_and_the_queue_behind_it_is_not() -> None:
    w = world(num_blocks=100, max_batch_tokens=128, chunk_tokens=64)
    assert w.scheduler.num_spoken_for == 0
    for i in range(20):
        w.add(160, str(i))  # ten blocks each
    assert w.scheduler.num_spoken_for == 20, "a pass takes chunks of two"
    w.run()
    assert len(w.scheduler.started) == 2
    assert w.scheduler.num_spoken_for == 0, "they fill the next one"


def test_one_that_is_due_before_those_that_have_begun_is_spoken_for() -> None:
    w = world(num_blocks=100, max_batch_tokens=64, chunk_tokens=64)
    w.add(160, "long")
    w.run()
    w.add(160, "behind it")
    assert w.scheduler.num_spoken_for == 0
    w.add(48, "urgent", Slo(priority="vip", ttft_s=0.5))
    assert w.scheduler.num_spoken_for == 3


def test_one_that_does_not_fit_now_is_not_spoken_for() -> None:
    w = world(num_blocks=16, max_batch_tokens=256, chunk_tokens=64)
    w.add(160, "first")
    w.add(160, "second")
    w.add(16, "third")
    assert w.scheduler.num_spoken_for == 10, "nor are those behind it"


def test_without_chunks_a_prompt_fills_the_pass() -> None:
    w = world(num_blocks=100, max_batch_tokens=64, chunk_tokens=0)
    w.add(160, "long")
    w.add(16, "short")
    assert w.scheduler.num_spoken_for == 10
