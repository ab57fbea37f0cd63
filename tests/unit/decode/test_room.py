"""Who begins where others grow: blocks that are free now may be needed soon."""

from distserve.engine.sequence import Sequence
from distserve.kv.block_pool import BlockPool
from distserve.messages import LeaseRequest, Priority, SamplingParams, SequenceKey, Slo, num_blocks_for
from distserve.worker.prefixes import Prefixes
from distserve_decode.room import Bound
from distserve_decode.scheduler import Scheduler
from distserve_decode.turns import MAX_PASSED, Turns
from tests.unit.decode.test_reservations import ask
from tests.unit.decode.test_scheduler import BLOCK, step
from tests.unit.worker.fakes import LAYOUT


def make(num_blocks: int, *, policy: str = "slo", max_num_seqs: int = 8) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks + 1)
    scheduler = Scheduler(
        pool,
        Prefixes(pool, LAYOUT, keep=True),
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        chunk_tokens=256,
        policy=policy,  # type: ignore[arg-type]
    )
    return scheduler, pool


def sequence(name: str, num_tokens: int, max_tokens: int) -> Sequence:
    return Sequence(SequenceKey(name), [1] * num_tokens, num_tokens, SamplingParams(max_tokens=max_tokens))


def adopted(pool: BlockPool, name: str, num_tokens: int, max_tokens: int) -> Sequence:
    s = sequence(name, num_tokens, max_tokens)
    s.token_ids.append(7)
    s.num_computed_tokens = num_tokens
    s.block_table = pool.allocate(num_blocks_for(num_tokens, BLOCK))
    return s


def long(s: Scheduler) -> Scheduler:
    """Whose outputs have all been long, so that each is thought to become as long as it may."""
    for _ in range(16):
        s.lengths.note(100_000)
    return s


def begun(s: Scheduler) -> list[str]:
    return [q.key.request_id for q in s.running]


def test_it_begins_once_there_is_room_for_what_it_and_the_others_will_take() -> None:
    s, pool = make(20)
    long(s)
    first = adopted(pool, "first", 48, 80)  # 3 blocks, and 5 more to come
    s.adopt(first)
    s.submit(sequence("second", 96, 64))  # 6, and 4 more: of the 17 that are free 5 are the first one's
    s.next_batch()
    assert begun(s) == ["first", "second"]
    s.remove(s.running[1])
    s.submit(sequence("third", 96, 112))  # 6, and 7 more
    s.next_batch()
    assert begun(s) == ["first"]
    s.remove(first)
    s.next_batch()
    assert begun(s) == ["third"]


def test_first_come_first_served_looks_no_further_than_the_next_block() -> None:
    s, pool = make(20, policy="fcfs")
    s.adopt(adopted(pool, "first", 48, 80))
    s.submit(sequence("second", 96, 112))
    s.next_batch()
    assert begun(s) == ["first", "second"]


def test_alone_whatever_fits_begins() -> None:
    s, _ = make(7)
    s.submit(sequence("only", 96, 10_000))
    s.next_batch()
    assert begun(s) == ["only"]


def test_outputs_that_have_ended_short_let_more_begin() -> None:
    s, pool = make(20)
    long(s)
    s.adopt(adopted(pool, "first", 48, 160))
    s.submit(sequence("second", 96, 160))
    s.next_batch()
    assert begun(s) == ["first"]
    for _ in range(32):
        s.lengths.note(12)
    s.next_batch()
    assert begun(s) == ["first", "second"]


def test_what_nobody_knows_keeps_no_more_of_a_pool_than_a_part() -> None:
    """Chats that name no limit, of which nothing has ended yet: else they would go one after the other."""
    s, _ = make(128)
    for i in range(40):
        s.submit(sequence(str(i), 60, 1900))
    for _ in range(60):
        step(s)
    assert len(s.running) == 128 // (4 + 128 // 8)


def test_one_that_gets_longer_than_any_shuts_out_nobody() -> None:
    s, pool = make(600, max_num_seqs=64)
    for _ in range(64):
        s.lengths.note(100)
    s.adopt(adopted(pool, "endless", 16, 9000))
    while len(s.running[0].token_ids) < 5000:
        step(s)
    for i in range(16):
        s.submit(sequence(str(i), 100, 200))  # 13 blocks each; it has 313, and is to have 64 more
    for _ in range(20):
        step(s)
    assert len(s.running) == 17


def test_hand_overs_under_way_have_seats_and_will_grow() -> None:
    s, _ = make(20, max_num_seqs=2)
    s.room.bound = lambda: Bound(num_seats=2)
    s.submit(sequence("own", 16, 8))
    s.next_batch()
    assert begun(s) == []
    s.room.bound = lambda: Bound(num_seats=1, num_blocks=19)
    s.next_batch()
    assert begun(s) == [], "its block and the one that it will take are spoken for"
    s.room.bound = lambda: Bound(num_seats=1, num_blocks=18)
    s.next_batch()
    assert begun(s) == ["own"]


# ------------------------------------------------------------ whose turn it is


def lease(priority: Priority = "normal", **more: int) -> LeaseRequest:
    request = ask("lease", 1)
    fields = {f: getattr(request, f) for f in request.__struct_fields__}
    return LeaseRequest(**fields | {"slo": Slo(priority=priority)} | more)


def preempted(s: Scheduler, pool: BlockPool, priority: Priority) -> Sequence:
    """One that waits for its blocks again."""
    s.adopt(adopted(pool, "old", 31, 100), Slo(priority="vip"))
    young = adopted(pool, "young", 31, 100)
    s.adopt(young, Slo(priority=priority))
    while not young.num_preemptions:
        step(s)
    return young


def test_a_preempted_sequence_goes_before_a_hand_over_of_its_class_and_after_one_of_a_higher() -> None:
    s, pool = make(4)
    turns = Turns(s, by_class=True)
    preempted(s, pool, "normal")
    assert turns.spare(lease("normal"), 0) is None
    assert turns.spare(lease("batch"), 0) is None
    assert turns.spare(lease("vip"), 0) is not None


def test_how_many_it_has_let_pass_counts_on_when_another_is_the_first_meanwhile() -> None:
    s, _ = make(4, max_num_seqs=1)
    turns = Turns(s, by_class=True)
    s.submit(sequence("first", 16, 8), Slo(priority="batch", ttft_s=60))
    for _ in range(MAX_PASSED - 1):
        assert turns.spare(lease("vip"), 0) is not None
        turns.granted()
    urgent = sequence("urgent", 16, 8)
    s.submit(urgent, Slo(priority="batch", ttft_s=1))
    assert turns.spare(lease("vip"), 0) is not None
    turns.granted()
    s.remove(urgent)
    assert turns.spare(lease("vip"), 0) is not None
    turns.granted()
    assert turns.spare(lease("vip"), 0) is None


def test_it_lets_only_so_many_pass() -> None:
    s, pool = make(4)
    turns = Turns(s, by_class=True)
    young = preempted(s, pool, "batch")
    for _ in range(MAX_PASSED):
        assert turns.spare(lease("vip"), 0) is not None
        turns.granted()
    assert turns.spare(lease("vip"), 0) is None
    turns.first_lease = lambda: lease("vip")
    assert turns.may_begin(young)


def test_a_prompt_of_our_own_waits_for_hand_overs_of_its_class_and_they_for_one_of_a_higher() -> None:
    s, _ = make(20)
    turns = Turns(s, by_class=True)
    own = sequence("own", 16, 8)
    s.submit(own, Slo(priority="normal"))
    s.may_begin = turns.may_begin
    turns.first_lease = lease
    assert turns.spare(lease("normal"), 0) is not None
    assert turns.spare(lease("batch"), 0) is None
    s.next_batch()
    assert begun(s) == []
    turns.first_lease = lambda: lease("batch")
    s.next_batch()
    assert begun(s) == ["own"]


def test_first_come_first_served_lets_who_was_preempted_go_before_any_hand_over() -> None:
    s, pool = make(4, policy="fcfs")
    turns = Turns(s, by_class=False)
    assert turns.spare(lease(), 5) == 0, "and nobody's growth counts"
    preempted(s, pool, "batch")
    assert turns.spare(lease("vip"), 0) is None


def test_how_far_a_hand_over_will_grow_is_by_what_it_may_say_and_what_others_said() -> None:
    s, _ = make(100)
    turns = Turns(s, by_class=True)
    assert turns.growth(lease(num_tokens=16)) == 0, "nothing is known"
    assert turns.growth(lease(num_tokens=16, max_new_tokens=33)) == 3
    for _ in range(16):
        s.lengths.note(20)
    assert turns.growth(lease(num_tokens=16)) == 2
    assert turns.growth(lease(num_tokens=16, max_new_tokens=16)) == 1
