"""How long a pass is, and how long a prompt that has begun may pause."""

import pytest

from distserve.messages import PassSpeed, Slo
from distserve.worker.pass_model import PassModel
from tests.unit.prefill.clockwork import BLOCK, Clockwork, known

FEW = PassSpeed(pass_s=0.05, token_s=0.001)  # the longest passes are the best
VIP = Slo(priority="vip", ttft_s=1.0)


def test_a_pass_is_as_long_as_it_may_be_until_the_model_has_seen_enough() -> None:
    w = Clockwork(model=PassModel())
    w.add(16, "promised", VIP)
    for num in range(7):
        w.model.note(16 * (num + 1), 0, 0.002 + 0.001 * 16 * (num + 1))
        assert w.scheduler.pass_tokens == 256
    w.model.note(128, 0, 0.002 + 0.128)
    assert w.scheduler.pass_tokens == 48, "38 tokens get 95 %, in whole blocks"


def test_it_is_never_less_than_a_block_nor_more_than_is_allowed() -> None:
    for pass_s, pass_tokens in ((1e-6, BLOCK), (1.0, 256)):
        w = Clockwork(model=known(PassSpeed(pass_s=pass_s, token_s=0.001)))
        w.add(16, "promised", VIP)
        assert w.scheduler.pass_tokens == pass_tokens


def test_passes_that_cost_nothing_by_the_token_are_as_long_as_they_may_be() -> None:
    w = Clockwork(model=known(PassSpeed(pass_s=0.01)))
    w.add(16, "promised", VIP)
    assert w.scheduler.pass_tokens == 256


def test_first_come_first_served_has_passes_of_one_length() -> None:
    w = Clockwork(policy="fcfs", model=known(PassSpeed(pass_s=0.002, token_s=0.001)))
    w.add(16, "promised", VIP)
    assert w.scheduler.pass_tokens == 256


@pytest.mark.parametrize(
    ("slo", "pass_tokens"), [(Slo(), 256), (Slo(priority="batch"), 256), (Slo(priority="vip"), 48), (Slo(ttft_s=9), 48)]
)
def test_passes_are_short_for_those_that_are_in_a_hurry(slo: Slo, pass_tokens: int) -> None:
    w = Clockwork(model=known(PassSpeed(pass_s=0.002, token_s=0.001)))
    w.add(16, "one", slo)
    assert w.scheduler.pass_tokens == pass_tokens


def test_passes_are_short_only_where_somebody_is_promised_something_or_was_lately() -> None:
    w = Clockwork(model=known(PassSpeed(pass_s=0.002, token_s=0.001)), num_blocks=40)
    w.add(640, "unpromised")
    assert w.run() == [("unpromised", 0, 64)]
    assert w.scheduler.pass_tokens == 256
    w.scheduler.place_of(w.job(16, "refused", Slo(ttft_s=0.001)))
    assert w.scheduler.pass_tokens == 48, "the next one may be in time"
    w.now += 61.0
    assert w.scheduler.pass_tokens == 256
    waits = w.add(640, "promised, and there is no room yet", Slo(ttft_s=600.0))
    w.now += 61.0
    w.run()
    assert w.scheduler.pass_tokens == 48
    w.scheduler.remove(waits)
    w.now += 61.0
    assert w.scheduler.pass_tokens == 256


# ---------------------------------------------------------------- how long a started prompt pauses


def test_one_that_has_begun_gets_a_block_before_its_lease_is_thought_dead() -> None:
    """Beside others that take all there is. Its hand-over sends what is computed, and decode waits only so long."""
    w = Clockwork(max_batch_tokens=64, chunk_tokens=64, model=known(FEW), longest_pause_s=1.0)
    w.add(640, "begun", Slo(priority="batch"))
    w.run()
    at, longest, num_others = w.now, 0.0, 0
    while "begun" not in w.ended:
        w.add(64, str(num_others), Slo(priority="vip", ttft_s=0.9))
        began_at = w.now
        rows = {name for name, _, _ in w.run()}
        if "begun" in rows:
            at, longest = began_at, max(longest, began_at - at)
        num_others += len(rows - {"begun"})
    assert 0.9 < longest < 1.0 + FEW.seconds(64)
    assert num_others > 10 * 5, "they were hardly held up"


def test_more_than_that_it_does_not_get() -> None:
    w = Clockwork(max_batch_tokens=64, chunk_tokens=64, model=known(FEW), longest_pause_s=1.0)
    w.add(640, "begun", Slo(priority="batch"))
    w.run()
    w.now += 1.0
    w.add(640, "vip", Slo(priority="vip", ttft_s=5.0))
    assert w.run() == [("begun", 64, 16), ("vip", 0, 48)]
    assert w.run() == [("vip", 48, 64)]
