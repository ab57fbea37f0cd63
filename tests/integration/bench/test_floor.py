"""What the client costs itself."""

from distserve.bench.floor import TOKENS, answer, measure_floor
from distserve.bench.sse import read_events
from distserve.bench.wire import Reading


def test_the_ready_answer_is_one_that_the_client_understands() -> None:
    reading = Reading()
    done = [reading.feed(0.0, piece) for piece in answer(TOKENS)]
    assert done.index(True) == len(done) - 1
    found = read_events(reading.body)
    assert (len(found.events), found.done) == (TOKENS, True)


async def test_the_floor_is_far_below_what_servers_take() -> None:
    floor = await measure_floor(4)
    assert floor is not None
    assert floor.concurrency == 4
    assert 0 < floor.ttft_p50_s <= floor.ttft_p99_s < 0.2
    assert floor.events_per_s > 5_000
    assert 0.1 < floor.cpu_us_per_event < 100
